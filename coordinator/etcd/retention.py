"""Retention leases ("buckets"): finished jobs go with the lease that their last write was put on.

A lease per job would cost a raft write each and flood etcd's expiry; a bucket is shared by up to 5,000 keys
or a minute's worth of them, whichever is less; the next one is granted while it fills, off the hot path.
Its key ``_system/bucket/<ms>/<lease>`` lies on the lease itself and tells the sweeps which buckets exist.
It needs no witness compare: it is used within a minute of a grant for an hour. Should it have died all the
same, the committer builds the operation again with the next one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from coordinator.errors import DeadlinePassed, NotApplied, StorageError
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import FORMAT
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.time_left import write_timeout
from coordinator.ports import Clock
from leasekeeper.internal.storage.v1.records_pb2 import BucketRecord

__all__ = ["Bucket", "RetentionBuckets", "RetentionConfig"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """Times in seconds.

    Attributes:
        ttl: how long finished jobs are kept, at least; a new etcd leader starts it again.
        open_for: how long a bucket takes keys.
        max_keys: how many keys it takes: revoking a huge lease blocks every other write.
        timeout: deadline of each call.
    """

    ttl: int = 3600
    open_for: float = 60.0
    max_keys: int = 5_000
    timeout: float = 3.0


@dataclass(slots=True)
class Bucket:
    """A lease that takes keys until ``closes``, on the monotonic clock."""

    lease: int
    closes: float
    keys: int = 0


class _Line:
    """The buckets of one namespace: the one in use, and the next."""

    __slots__ = ("current", "failure", "granting", "next")

    def __init__(self) -> None:
        self.failure: StorageError | None = None
        self.current: Bucket | None = None
        self.next: Bucket | None = None
        self.granting: asyncio.Task[None] | None = None


class RetentionBuckets:
    """The open buckets of this coordinator, one line per namespace.

    Args:
        client: the etcd client.
        space: the keys.
        config: see ``RetentionConfig``.
        clock: time.
    """

    def __init__(self, client: EtcdClient, space: KeySpace, config: RetentionConfig, clock: Clock) -> None:
        self._client = client
        self._space = space
        self._config = config
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._wake = asyncio.Event()
        self.granted = 0

    def take(self, namespace: str, keys: int) -> int:
        """Lease of the open bucket for ``keys`` more keys; 0 if none is open yet (see ``ensure``)."""
        line = self._lines.get(namespace)
        if line is None:
            return 0
        now = self._clock.monotonic()
        bucket = line.current
        if bucket is None or bucket.keys >= self._config.max_keys or now >= bucket.closes:
            bucket, line.current, line.next = line.next, line.next, None
            if bucket is None or now >= bucket.closes:
                line.current = None
                return 0
        bucket.keys += keys
        if line.next is None and (
            bucket.keys >= self._config.max_keys // 2 or now >= bucket.closes - self._config.open_for / 4
        ):
            self._grant_ahead(namespace, line)
        return bucket.lease

    def dead(self, namespace: str, lease: int) -> None:
        """etcd has no such lease (any more): do not use it again."""
        line = self._lines.get(namespace)
        if line is None:
            return
        if line.current is not None and line.current.lease == lease:
            line.current = None
        if line.next is not None and line.next.lease == lease:
            line.next = None

    async def ensure(self, namespace: str, *, deadline: float) -> None:
        """Have an open bucket.

        Raises:
            NotApplied: there is none by the deadline.
        """
        while not self.take(namespace, 0):  # each round waits for a grant, by the deadline
            left = write_timeout(self._clock, deadline)
            line = self._lines.setdefault(namespace, _Line())
            granting = self._grant_ahead(namespace, line)
            if granting is None:
                raise NotApplied("the store is closed")
            done, _ = await asyncio.wait((granting,), timeout=left)
            if not done:
                raise DeadlinePassed("no retention lease could be granted in time")
            if line.failure is not None:
                raise NotApplied("no retention lease could be granted") from line.failure

    async def run(self) -> None:
        """Own the grants under way; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await asyncio.Future()
            finally:
                self._tasks = None

    def _grant_ahead(self, namespace: str, line: _Line) -> asyncio.Task[None] | None:
        if line.granting is None or line.granting.done():
            if self._tasks is None:
                return None
            line.granting = self._tasks.create_task(self._grant(namespace, line))
        return line.granting

    async def _grant(self, namespace: str, line: _Line) -> None:
        try:
            line.next = await self._open(namespace)
            line.failure = None
        except StorageError as error:
            line.failure = error
            _log.warning("no retention lease: %s", error)  # whoever needs one asks again

    async def _open(self, namespace: str) -> Bucket:
        granted = await self._client.lease_grant(self._config.ttl, timeout=self._config.timeout)
        opened = self._clock.monotonic()
        now_ms = self._clock.now_ms()
        record = BucketRecord(format=FORMAT, namespace=namespace, opened_ms=now_ms)
        key = self._space.bucket(now_ms, granted.id)
        # An unknown outcome leaves an empty lease behind, which ends by itself.
        await self._client.put(
            key, record.SerializeToString(), lease=granted.id, timeout=self._config.timeout
        )
        self.granted += 1
        return Bucket(lease=granted.id, closes=opened + self._config.open_for)
