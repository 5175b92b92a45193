"""Coordinators without RPC on a real etcd: the services over ``EtcdStore``, several of them over one root."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from coordinator.app.machine import SystemClock
from coordinator.app.relay import ChangesRelay, CommitRelay
from coordinator.core.invariants import check_job
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdConfig
from coordinator.etcd.commit_config import CommitterConfig
from coordinator.etcd.store import EtcdStore, StoreConfig, StoreListeners
from coordinator.ports import Commit, Session, Stored
from coordinator.reconciler.due import DuePass
from coordinator.reconciler.lost import LostConfig, LostPass
from coordinator.reconciler.state_walk import StateWalk
from coordinator.services.api import NewJob, SubmitOutcome
from coordinator.services.holders import Holders
from coordinator.services.index import Index, IndexConfig
from coordinator.services.job_changes import JobChanges
from coordinator.services.late_calls import LateCalls
from coordinator.services.queries import Queries
from coordinator.services.settlement import SettlementService
from coordinator.services.submission import Submission
from coordinator.services.subscription import Subscription
from tests.integration.store.conftest import MachineEntropy
from tests.support.builders import a_session, claim_job
from tests.support.fake_ports import RecordedMeters, RecordedNotices


@dataclass
class Side:
    """One coordinator: its store, its services, its passes."""

    namespace: str
    store: EtcdStore
    holders: Holders
    submission: Submission
    settlement: SettlementService
    changes: JobChanges
    queries: Queries
    subscription: Subscription
    lost: LostPass
    due: DuePass
    index: Index
    clock: SystemClock = field(default_factory=SystemClock)

    @property
    def deadline(self) -> float:
        return self.clock.monotonic() + 10.0

    async def submit(self, job: NewJob, request_id: str = "") -> Stored:
        """Submit one job that must be taken."""
        [outcome] = await self.submission.submit(
            self.namespace, request_id or job.job_id, [job], self.deadline
        )
        assert isinstance(outcome, SubmitOutcome), outcome
        return outcome.stored

    async def open(self, ttl_ms: int = 5_000) -> Session:
        """Open a session of its own id."""
        session = a_session(f"{uuid.uuid4().int >> 65:016x}", ttl_ms=ttl_ms, namespace=self.namespace)
        return await self.store.sessions.open(session, deadline=self.deadline)

    async def claim(self, stored: Stored, session: Session) -> Commit:
        """Claim a waiting job; it must succeed."""
        return await claim_job(self.store.jobs, stored, session, now_ms=self.clock.now_ms())

    async def stored(self, job_id: str) -> Stored:
        """The record, which must be there and be sound beside its claim."""
        snapshot = await self.store.jobs.read(self.namespace, job_id, deadline=self.deadline)
        assert snapshot.stored is not None, job_id
        assert check_job(snapshot.stored.job, snapshot.claim) == []
        return snapshot.stored


SideFactory = Callable[..., "contextlib.AbstractAsyncContextManager[Side]"]


@pytest.fixture
def start_side(etcd_server: EtcdProcess, namespace: str) -> SideFactory:
    """``async with start_side() as side``; sides of one test share namespace and keys."""
    root = f"/test-{uuid.uuid4().hex[:12]}"

    @contextlib.asynccontextmanager
    async def start(endpoint: str = "", *, txn_timeout: float = 5.0) -> AsyncIterator[Side]:
        clock, entropy = SystemClock(), MachineEntropy()
        changes, commits = ChangesRelay(), CommitRelay()
        config = StoreConfig(
            etcd=EtcdConfig(endpoints=(endpoint or etcd_server.endpoint,)),
            coordinator_id=uuid.uuid4().hex[:8],
            root=root,
            committer=CommitterConfig(txn_timeout=txn_timeout),
        )
        store = EtcdStore(
            config, StoreListeners(changes=changes, commits=commits), clock=clock, entropy=entropy
        )
        notices = RecordedNotices()
        lost = LostPass(
            store.jobs,
            StateWalk(store.jobs, clock),
            store.present,
            store.membership,
            clock,
            entropy,
            LostConfig(others_s=0.2),
            notices=notices,
        )
        due = DuePass(store.jobs, store.membership, clock, notices=notices)
        holders = Holders(lost.suspect, notices=notices)
        late = LateCalls(store.jobs, notices, RecordedMeters(), clock)
        index = Index(
            store.jobs, store.sessions, holders, clock, IndexConfig(), arrived=lambda pair, job_id: None
        )
        changes.bind(index)
        commits.bind((index, due))
        queries = Queries(store.jobs, holders)
        subscription = Subscription(store.jobs, queries, clock)
        side = Side(
            namespace=namespace,
            store=store,
            holders=holders,
            submission=Submission(store.jobs, store.namespaces, store.gauge, clock, entropy),
            settlement=SettlementService(
                store.jobs, holders, store.present, clock, entropy, notices=notices, late=late.add
            ),
            changes=JobChanges(store.jobs, holders, clock),
            queries=queries,
            subscription=subscription,
            lost=lost,
            due=due,
            index=index,
        )
        async with store:
            passes = [asyncio.create_task(index.run()), asyncio.create_task(lost.run())]
            await store.namespaces.ensure(namespace, deadline=clock.monotonic() + 10)
            try:
                yield side
            finally:
                await subscription.close()
                for task in passes:
                    task.cancel()
                await asyncio.gather(*passes, return_exceptions=True)

    return start


@pytest.fixture
async def side(start_side: SideFactory) -> AsyncIterator[Side]:
    async with start_side() as started:
        yield started
