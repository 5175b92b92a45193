"""The storage half of the ports, put together over one etcd client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

from coordinator.core.fencing import Position
from coordinator.errors import ConfigError
from coordinator.etcd.circuit_store import EtcdCircuitStore
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.codec import JobCodec
from coordinator.etcd.commit_config import CommitHooks, CommitterConfig
from coordinator.etcd.committer import Committer
from coordinator.etcd.compaction import CompactionConfig, Compactor
from coordinator.etcd.group_read import GroupReadConfig, GroupReader
from coordinator.etcd.job_store import EtcdJobStore
from coordinator.etcd.keys import DEFAULT_ROOT, KeySpace
from coordinator.etcd.leader import EtcdLeadership, LeadershipConfig
from coordinator.etcd.lease_keeper import LeaseKeeper, LeaseKeeperConfig
from coordinator.etcd.lock_store import EtcdLockStore
from coordinator.etcd.membership import EtcdMembership, MembershipConfig
from coordinator.etcd.namespace_feed import KINDS, NamespaceFeed
from coordinator.etcd.namespaces import EtcdNamespaceFeeds, NamespacesConfig
from coordinator.etcd.own_revisions import OwnRevisions
from coordinator.etcd.present import EtcdPresent, PresentConfig
from coordinator.etcd.queue_store import EtcdQueueStore
from coordinator.etcd.retention import RetentionBuckets, RetentionConfig
from coordinator.etcd.retention_pressure import PressureConfig, RetentionPressure
from coordinator.etcd.session_admin_store import EtcdSessionAdminStore
from coordinator.etcd.session_store import EtcdSessionStore, SessionStoreConfig
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.storage_gauge import EtcdStorageGauge, GaugeConfig
from coordinator.etcd.txn import TxnCodec
from coordinator.etcd.upkeep_store import EtcdUpkeep
from coordinator.ports import (
    Changes,
    CircuitChanges,
    Clock,
    CommitObserver,
    Entropy,
    LockChanges,
    Notices,
    QueueChanges,
)

__all__ = ["EtcdStore", "Index", "StoreConfig", "StoreListeners"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Everything that can be set of the store.

    Attributes:
        etcd: where it is.
        coordinator_id: unique among the coordinators that are alive.
        root: what every key begins with.
        endpoint: where clients reach this coordinator.
        version: of the software.
        dispatches: jobs are handed out here; False: it only repairs, and what waits is not watched.
        membership_ttl: seconds after which a dead coordinator is forgotten.
        committer, reads, leases, sessions, present, retention, namespaces, gauge, compaction, pressure,
        leadership:
            see the parts.
        start_timeout: seconds for the first answers of etcd.
    """

    etcd: EtcdConfig
    coordinator_id: str
    root: str = DEFAULT_ROOT
    endpoint: str = ""
    version: str = ""
    dispatches: bool = True
    membership_ttl: int = 10
    committer: CommitterConfig = field(default_factory=CommitterConfig)
    reads: GroupReadConfig = field(default_factory=GroupReadConfig)
    leases: LeaseKeeperConfig = field(default_factory=LeaseKeeperConfig)
    sessions: SessionStoreConfig = field(default_factory=SessionStoreConfig)
    present: PresentConfig = field(default_factory=PresentConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    namespaces: NamespacesConfig = field(default_factory=NamespacesConfig)
    gauge: GaugeConfig = field(default_factory=GaugeConfig)
    compaction: CompactionConfig = field(default_factory=CompactionConfig)
    pressure: PressureConfig = field(default_factory=PressureConfig)
    leadership: LeadershipConfig = field(default_factory=LeadershipConfig)
    start_timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.coordinator_id:
            raise ConfigError("a coordinator needs an id")


class Index(Changes, CommitObserver, Protocol):
    """Whoever keeps what waits and what is held: it hears of the watch and of own commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreListeners:
    """Whom the store tells.

    Attributes:
        changes: what the watches saw.
        commits: own wins.
        group_done: size and seconds of each committed Txn, for metrics.
        regression: the store's history went back, from where to where.
        recovery: its epoch was raised since, or it answers again; where it stands.
        notices: told how full the store is.
        circuits: told of circuits; None: they are not watched.
        locks: told of named locks; None: they are not watched.
        queues: told of settings and pauses of queues; None: they are not watched.
    """

    changes: Changes
    commits: CommitObserver
    group_done: Callable[[int, float], None] | None = None
    regression: Callable[[Position, Position], None] | None = None
    recovery: Callable[[Position], None] | None = None
    notices: Notices | None = None
    circuits: CircuitChanges | None = None
    locks: LockChanges | None = None
    queues: QueueChanges | None = None


class EtcdStore:
    """Builds and owns client, committer, stores and feeds; made inside the running event loop.

    Order: ``start`` once, then ``run`` in a task of the owner's (the stores answer only while it runs), then
    ``close``, which lets what was taken finish and ends ``run``. ``async with`` does all of it in a task of
    its own.
    """

    def __init__(
        self, config: StoreConfig, listeners: StoreListeners, *, clock: Clock, entropy: Entropy
    ) -> None:
        self.config = config
        self._clock = clock
        self._owned: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._stopped = asyncio.Event()
        self._running = False
        self.set_aside = SetAside()
        self.own = OwnRevisions(under_way=lambda: self.committer.outstanding > 0)
        self.space = KeySpace(config.root)
        self.client = EtcdClient(config.etcd, on_regression=self._went_back, monotonic=clock.monotonic)
        self.present = EtcdPresent(
            self.client,
            self.space,
            config.present,
            clock,
            probe=lambda: EtcdClient(config.etcd, monotonic=clock.monotonic),
            on_regression=listeners.regression,
            on_recovery=listeners.recovery,
        )
        self.committer = Committer(
            self.client,
            self.present.fence(),
            config.committer,
            hooks=CommitHooks(own_revision=self.own.add, group_done=listeners.group_done),
            clock=clock,
        )
        self.reader = GroupReader(self.client, clock, config.reads)
        self.keeper = LeaseKeeper(self.client, config.leases, monotonic=clock.monotonic)
        self.buckets = RetentionBuckets(self.client, self.space, config.retention, clock)
        self.codec = TxnCodec(
            self.space,
            JobCodec(),
            epoch=lambda: self.present.epoch,
            set_aside=self.set_aside,
            now_ms=clock.now_ms,
            leads=self._leads_sweeps,
        )
        self.jobs = EtcdJobStore(
            self.client,
            self.reader,
            self.space,
            self.codec,
            self.set_aside,
            clock,
            committer=self.committer,
            present=self.present,
            buckets=self.buckets,
            observer=listeners.commits,
        )
        self.sessions = EtcdSessionStore(
            self.client,
            self.reader,
            self.keeper,
            self.space,
            self.codec,
            self.present,
            self.set_aside,
            clock,
            config.sessions,
        )
        self.session_admin = EtcdSessionAdminStore(
            self.client, self.reader, self.space, self.codec, self.present, self.set_aside, clock
        )
        self.locks = EtcdLockStore(
            self.client, self.committer, self.reader, self.space, self.set_aside, clock
        )
        self.circuits = EtcdCircuitStore(self.client, self.space, self.present, self.set_aside, clock)
        self.queues = EtcdQueueStore(self.client, self.space, self.present, self.set_aside, clock)
        self.namespaces = EtcdNamespaceFeeds(
            self.client,
            self.space,
            lambda namespace: NamespaceFeed(
                self.client,
                self.space.namespace(namespace),
                listeners.changes,
                codec=self.codec,
                own=self.own,
                set_aside=self.set_aside,
                clock=clock,
                config=config.namespaces.feed,
                fraction=entropy.fraction,
                kinds=[kind for kind in KINDS if config.dispatches or kind != "ready"],
                circuits=listeners.circuits,
                locks=listeners.locks,
                queues=listeners.queues,
            ),
            set_aside=self.set_aside,
            clock=clock,
            config=config.namespaces,
            fraction=entropy.fraction,
        )
        self.membership = EtcdMembership(
            self.client,
            self.keeper,
            self.space,
            MembershipConfig(
                coordinator_id=config.coordinator_id,
                endpoint=config.endpoint,
                version=config.version,
                dispatches=config.dispatches,
                ttl=config.membership_ttl,
            ),
            feed=config.namespaces.feed,
            set_aside=self.set_aside,
            clock=clock,
            fraction=entropy.fraction,
        )
        self.gauge = EtcdStorageGauge(self.client, config.gauge, clock, listeners.notices)
        self.compactor = Compactor(self.client, self.space, self.gauge, clock, config.compaction)
        self.pressure = RetentionPressure(
            self.client, self.space, self.gauge, self.set_aside, clock, config.pressure
        )
        self._retention = self.leadership("retention")
        self.sweeps = self.leadership("sweep")
        self.upkeep = EtcdUpkeep(
            self.client,
            self.space,
            self.codec,
            self.present,
            self.set_aside,
            clock,
            leads=self._leads_sweeps,
        )

    def _leads_sweeps(self) -> bytes | None:
        """What the Txns of sweeps compare besides, None while another process leads them."""
        return self.sweeps.guard()

    def leadership(self, role: str) -> EtcdLeadership:
        """A candidacy for ``role``; whoever asks for it owns its ``run``."""
        return EtcdLeadership(
            self.client,
            self.space,
            self.membership,
            self.present,
            role,
            self._clock,
            self.config.leadership,
        )

    async def start(self) -> None:
        """Read the epoch; the first contact with etcd.

        Raises:
            StorageError: etcd does not answer within ``start_timeout``.
        """
        await self.present.start(deadline=self._clock.monotonic() + self.config.start_timeout)

    async def run(self) -> None:
        """All background work, until ``close`` or cancellation."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as outer:
                committing = outer.create_task(self.committer.run(), name="committer")
                background = [
                    outer.create_task(part.run(), name=type(part).__name__)
                    for part in (
                        self.reader,
                        self.buckets,
                        self.present,
                        self.membership,
                        self.namespaces,
                        self.gauge,
                        self.compactor,
                        self._retention,
                    )
                ]
                background.append(outer.create_task(self.pressure.run(self._retention), name="retention"))
                await self._stop.wait()
                await self.committer.close()
                await committing
                for task in background:
                    task.cancel()
        finally:
            self._running = False
            self._stopped.set()

    async def close(self) -> None:
        """Let operations taken finish, end ``run``, leave the membership, close all connections.
        Repeatable.
        """
        self._stop.set()
        if self._running:
            await self._stopped.wait()
        owned, self._owned = self._owned, None
        try:
            if owned is not None:
                await owned
        finally:
            await self.membership.leave()
            await self.keeper.close()
            await self.client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        self._owned = asyncio.get_running_loop().create_task(self.run(), name="etcd-store")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _went_back(self, seen: int, got: int) -> None:
        self.own.forget()
        self.jobs.forget_types()
        self.present.went_back(seen, got)
