"""The coordinators that are alive: each has a key on a lease of its own, which it renews by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.errors import CodecError, KeyFormatError, LeaseNotFound, OutcomeUnknown, StorageError
from coordinator.etcd.change_feed import ChangeEvent, ChangeFeed, FeedConfig, WatchRange
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import FORMAT, decode_record
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.lease_keeper import LeaseKeeper
from coordinator.etcd.paging import pages
from coordinator.etcd.set_aside import SetAside
from coordinator.ports import Clock
from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue
from leasekeeper.internal.etcd.v1.watch_pb2 import Event
from leasekeeper.internal.storage.v1.records_pb2 import CoordinatorRecord

__all__ = ["EtcdMembership", "MembershipConfig"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Who this coordinator is. Times in seconds.

    Attributes:
        coordinator_id: unique among those that are alive.
        endpoint: where clients reach it; told to operators.
        version: of the software.
        dispatches: it hands out jobs; False: it only repairs.
        ttl: a dead coordinator is forgotten after it.
        timeout: deadline of each call.
    """

    coordinator_id: str
    endpoint: str = ""
    version: str = ""
    dispatches: bool = True
    ttl: int = 10
    timeout: float = 3.0


class EtcdMembership:
    """Implements ``ports.Membership``. It is advice: who prefers what, never who may what.

    Args:
        client: the etcd client.
        keeper: renews the lease.
        space: the keys.
        config: see ``MembershipConfig``.
        feed: times of the watch.
        set_aside: told of undecodable keys.
        clock: time.
        fraction: uniform in [0, 1), for jitter.
    """

    def __init__(
        self,
        client: EtcdClient,
        keeper: LeaseKeeper,
        space: KeySpace,
        config: MembershipConfig,
        *,
        feed: FeedConfig,
        set_aside: SetAside,
        clock: Clock,
        fraction: Callable[[], float],
    ) -> None:
        self._client = client
        self._keeper = keeper
        self._space = space
        self._config = config
        self._set_aside = set_aside
        self._clock = clock
        # Whether each of the others hands out jobs.
        self._others: dict[str, bool] = {}
        self._members: tuple[str, ...] = ()
        self._dispatchers: tuple[str, ...] = ()
        self._sort()
        self._lease = 0
        self._joined = asyncio.Event()
        span = space.all_coordinators()
        self._feed = ChangeFeed(
            client,
            [WatchRange("coordinator", span.start, span.end)],
            self,
            feed,
            clock,
            fraction=fraction,
        )

    @property
    def own_id(self) -> str:
        """This coordinator."""
        return self._config.coordinator_id

    @property
    def lease(self) -> int:
        """The lease that is kept alive, 0 while there is none; whoever uses it compares."""
        return self._lease

    def members(self) -> Sequence[str]:
        """Ids, sorted, this one included."""
        return self._members

    def dispatchers(self) -> Sequence[str]:
        """Those of them that hand out jobs."""
        return self._dispatchers

    async def joined(self) -> None:
        """Wait until this coordinator has its lease."""
        await self._joined.wait()

    async def run(self) -> None:
        """Stay a member and watch the others, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._feed.run(), name="membership-watch")
            tasks.create_task(self._stay(), name="membership-lease")

    async def leave(self) -> None:
        """Revoke the lease, so that the others know at once. Call it after ``run`` has ended; repeatable."""
        lease, self._lease = self._lease, 0
        if not lease:
            return
        try:
            await self._client.lease_revoke(lease, timeout=self._config.timeout)
        except StorageError as error:
            _log.warning("the membership lease ends by itself: %s", error)

    # --- own lease --------------------------------------------------------------------------------

    async def _stay(self) -> None:
        while True:  # until cancelled; each round sleeps
            try:
                if not self._lease:
                    self._lease = await self._join()
                    self._joined.set()
                else:
                    kept = await self._keeper.keep_alive(self._lease, timeout=self._config.timeout)
                    if not kept.ttl:
                        _log.warning("the membership lease has ended")
                        self._lease = 0
                        continue
            except (LeaseNotFound, OutcomeUnknown) as error:
                _log.warning("the membership lease: %s", error)
            except StorageError as error:
                _log.warning("no membership: %s", error)
            await self._clock.sleep(self._config.ttl / 3 if self._lease else 0.5)

    async def _join(self) -> int:
        timeout = self._config.timeout
        granted = await self._client.lease_grant(self._config.ttl, timeout=timeout)
        record = CoordinatorRecord(
            format=FORMAT,
            endpoint=self._config.endpoint,
            version=self._config.version,
            started_ms=self._clock.now_ms(),
            repairs_only=not self._config.dispatches,
        )
        key = self._space.coordinator(self.own_id)
        await self._client.put(key, record.SerializeToString(), lease=granted.id, timeout=timeout)
        return granted.id

    # --- the others -------------------------------------------------------------------------------

    async def relist(self, revision: int) -> None:
        """See ``FeedHandler.relist``."""
        deadline = self._clock.monotonic() + self._config.timeout
        found: dict[str, bool] = {}
        span = self._space.all_coordinators()
        async for kv in pages(self._client, span, clock=self._clock, deadline=deadline):
            coordinator = self._parse(kv.key)
            if coordinator is not None:
                found[coordinator] = self._hands_out(kv)
        self._others = found
        self._sort()

    def changes(self, range_name: str, revision: int, events: Sequence[ChangeEvent]) -> None:
        """See ``FeedHandler.changes``."""
        for event in events:
            coordinator = self._parse(event.kv.key)
            if coordinator is None:
                continue
            if event.type == Event.PUT:
                self._others[coordinator] = self._hands_out(event.kv)
            else:
                self._others.pop(coordinator, None)
        self._sort()

    def freshness(self, fresh: bool) -> None:
        """See ``FeedHandler.freshness``. Old news of members is better than none."""

    def _parse(self, key: bytes) -> str | None:
        try:
            return self._space.parse_coordinator(key)
        except KeyFormatError as error:
            self._set_aside.add("coordinator", key, error)
            return None

    def _hands_out(self, kv: KeyValue) -> bool:
        """Whether the record says so; one that cannot be read is that of a coordinator like any other."""
        try:
            record = decode_record(CoordinatorRecord.FromString, kv.value, "coordinator")
        except CodecError as error:
            self._set_aside.add("coordinator", kv.key, error)
            return True
        return not record.repairs_only

    def _sort(self) -> None:
        known = self._others | {self.own_id: self._config.dispatches}
        self._members = tuple(sorted(known))
        self._dispatchers = tuple(sorted(one for one, hands_out in known.items() if hands_out))
