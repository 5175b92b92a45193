"""Too many finished jobs, or too full a store: drop the oldest retention buckets before their time.

A bucket is a lease: revoking it deletes its jobs in one revision. At most 5,000 keys lie on one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.errors import CodecError, KeyFormatError, LeaseNotFound, StorageError
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_record
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.leader import EtcdLeadership
from coordinator.etcd.paging import pages
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.storage_gauge import EtcdStorageGauge
from coordinator.ports import Clock
from leasekeeper.internal.storage.v1.records_pb2 import BucketRecord

__all__ = ["PressureConfig", "RetentionCounts", "RetentionPressure", "StoredBucket"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureConfig:
    """Sizes and times in seconds.

    Attributes:
        max_finished: finished jobs kept of one namespace.
        pressure: share of the quota in use from which the oldest bucket of each namespace goes with each
            pass.
        min_age: a younger bucket may still be taking keys, and is left alone, unless it is full.
        full_keys: from so many keys on a bucket takes no more.
        full_age: a full bucket may still be named by operations under way for so long.
        every: between two passes.
        deadline: of one pass.
        timeout: of one call.
    """

    max_finished: int = 200_000
    pressure: float = 0.70
    min_age: float = 120.0
    full_keys: int = 5_000
    full_age: float = 15.0
    every: float = 30.0
    deadline: float = 30.0
    timeout: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBucket:
    """A bucket as its key tells, and how many keys lie on its lease."""

    namespace: str
    opened_ms: int
    lease: int
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionCounts:
    """What one pass saw and did."""

    buckets: int = 0
    keys: int = 0
    dropped_buckets: int = 0
    dropped_keys: int = 0


class RetentionPressure:
    """Run by the leader of the sweeps; two at once only drop the same buckets.

    Args:
        client: the etcd client.
        space: the keys.
        gauge: how full etcd is.
        set_aside: told of undecodable buckets.
        clock: time.
        config: see ``PressureConfig``.
    """

    def __init__(
        self,
        client: EtcdClient,
        space: KeySpace,
        gauge: EtcdStorageGauge,
        set_aside: SetAside,
        clock: Clock,
        config: PressureConfig | None = None,
    ) -> None:
        self._client = client
        self._space = space
        self._gauge = gauge
        self._set_aside = set_aside
        self._clock = clock
        self._config = config or PressureConfig()

    async def run(self, leadership: EtcdLeadership) -> None:
        """Make a pass every now and then while ``leadership`` is ours, until cancelled."""
        while True:
            await self._clock.sleep(self._config.every)
            if not leadership.is_leader:
                continue
            try:
                await self.enforce_retention_once()
            except StorageError as error:
                _log.warning("retention: %s", error)

    async def enforce_retention_once(self, *, dry_run: bool = False) -> RetentionCounts:
        """Look at every bucket; drop the oldest of a namespace that has too many jobs, or of all if etcd is
        full.

        Keys are counted, not jobs: a job with a large result counts twice.

        Raises:
            StorageError: etcd could not be asked, or a revoke's outcome is unknown; the next pass goes on.
        """
        deadline = self._clock.monotonic() + self._config.deadline
        by_namespace: dict[str, list[StoredBucket]] = defaultdict(list)
        for bucket in await self.list_buckets(deadline=deadline):
            by_namespace[bucket.namespace].append(bucket)
        pressed = self._gauge.levels.in_use_ratio >= self._config.pressure
        dropped: list[StoredBucket] = []
        for buckets in by_namespace.values():
            dropped.extend(self._too_many(buckets, pressed=pressed))
        for bucket in dropped:
            if not dry_run:
                await self._drop(bucket)
        every = [bucket for buckets in by_namespace.values() for bucket in buckets]
        return RetentionCounts(
            buckets=len(every),
            keys=sum(bucket.keys for bucket in every),
            dropped_buckets=len(dropped),
            dropped_keys=sum(bucket.keys for bucket in dropped),
        )

    async def list_buckets(self, *, deadline: float) -> list[StoredBucket]:
        """Every bucket, oldest first."""
        found: list[StoredBucket] = []
        span = self._space.all_buckets()
        async for kv in pages(self._client, span, clock=self._clock, deadline=deadline):
            try:
                opened_ms, lease = self._space.parse_bucket(kv.key)
                namespace = decode_record(BucketRecord.FromString, kv.value, "bucket").namespace
            except (CodecError, KeyFormatError) as error:
                self._set_aside.add("bucket", kv.key, error)
                continue
            answer = await self._client.lease_time_to_live(lease, keys=True, timeout=self._config.timeout)
            keys = max(0, len(answer.keys) - 1)  # the bucket's own key lies on it too
            found.append(StoredBucket(namespace=namespace, opened_ms=opened_ms, lease=lease, keys=keys))
        return found

    def _too_many(self, buckets: Sequence[StoredBucket], *, pressed: bool) -> list[StoredBucket]:
        now_ms = self._clock.now_ms()
        excess = sum(bucket.keys for bucket in buckets) - self._config.max_finished
        dropped: list[StoredBucket] = []
        for bucket in buckets:
            if excess <= 0 and not (pressed and not dropped):
                break
            # At full speed a minute's jobs are more than may be kept: a full bucket is as good as an old one.
            full = bucket.keys >= self._config.full_keys
            closed_after = self._config.full_age if full else self._config.min_age
            if bucket.opened_ms <= now_ms - round(closed_after * 1000):
                dropped.append(bucket)
                excess -= bucket.keys
        return dropped

    async def _drop(self, bucket: StoredBucket) -> None:
        _log.info("dropping %d finished keys of %s before their time", bucket.keys, bucket.namespace)
        try:
            await self._client.lease_revoke(bucket.lease, timeout=self._config.timeout)
        except LeaseNotFound:
            pass  # it ended by itself
