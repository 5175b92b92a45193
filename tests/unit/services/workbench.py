"""Index, dispatch and sessions over the store in memory, wired as the app wires them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.errors import RequestError
from coordinator.ports import Stored
from coordinator.reconciler.take_away import TakeAwayPass
from coordinator.services.abandoned import Abandoned
from coordinator.services.api import ClaimedJob, ClaimQuery
from coordinator.services.arrivals import Arrivals
from coordinator.services.circuit_gate import ALL_CLOSED, CircuitGate
from coordinator.services.circuits import CircuitConfig, Circuits
from coordinator.services.claim_by_id import ClaimById, ClaimByIdConfig, OneClaim
from coordinator.services.claiming import Delivery
from coordinator.services.contention import Contention, ContentionConfig
from coordinator.services.dispatch import Dispatch, DispatchConfig
from coordinator.services.holders import Holders, Suspect
from coordinator.services.index import Index, IndexConfig
from coordinator.services.job_lines import JobLines
from coordinator.services.late_calls import LateCalls
from coordinator.services.pause_gate import PauseGate
from coordinator.services.redelivery import Redelivery
from coordinator.services.sessions import SessionConfig, Sessions
from coordinator.services.shared_queues import SharedQueues
from coordinator.services.waiters import Waiters
from tests.support.builders import FAR, a_job, open_session, store_job
from tests.support.clock import SteppingClock
from tests.support.fake_ports import FixedPresent, RecordedMeters, RecordedNotices, SteadyEntropy, StillFeeds
from tests.support.memory_circuits import MemoryCircuits
from tests.support.memory_etcd import MemoryEtcd
from tests.support.memory_job_store import MemoryJobStore, MemorySessionStore
from tests.support.memory_queues import MemoryQueues

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NS, S = "default", "00000000000000a1"


@dataclass
class Coordinator:
    """One coordinator's dispatch half. ``members`` are the coordinators that it believes in.

    With a ``circuit_store`` it has ``circuits``; a test drives what they do in the background.
    """

    etcd: MemoryEtcd
    clock: SteppingClock
    own_id: str = "c1"
    members: list[str] = field(default_factory=lambda: ["c1"])
    config: DispatchConfig = field(default_factory=DispatchConfig)
    index_config: IndexConfig = field(default_factory=IndexConfig)
    contention_config: ContentionConfig = field(default_factory=ContentionConfig)
    circuit_store: MemoryCircuits | None = None
    queue_store: MemoryQueues | None = None
    circuit_config: CircuitConfig = field(default_factory=CircuitConfig)
    suspects: list[Suspect] = field(default_factory=list)
    expired: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.jobs = MemoryJobStore(self.etcd)
        self.session_store = MemorySessionStore(self.etcd)
        self.notices, self.meters = RecordedNotices(), RecordedMeters()
        self.circuits = Circuits(
            self.circuit_store or MemoryCircuits(self.etcd),
            self.jobs,
            self.notices,
            self.clock,
            SteadyEntropy(0.0),
            self.circuit_config,
            own_id=self.own_id,
        )
        circuit_gate: CircuitGate = self.circuits if self.circuit_store is not None else ALL_CLOSED
        if self.queue_store is None:
            self.queue_store = MemoryQueues(self.etcd)
        self.queues = SharedQueues(self.queue_store, self.clock)
        self.queue_store.watchers.append(self.queues)
        gate = PauseGate(circuit_gate, self.queues.paused)
        self.holders = Holders(
            self.suspects.append, notices=self.notices, ended=self.circuits.outcomes.claim_ended
        )
        self.late_calls = LateCalls(self.jobs, self.notices, self.meters, self.clock)
        self.waiters, self.lines = Waiters(), JobLines()
        self.circuits.freed = self.waiters.wake_one
        self.queues.resumed = lambda name: [
            self.waiters.wake_one(pair) for pair in self.index.windows() if pair[:2] == name
        ].clear()
        self.present = FixedPresent(self.etcd)
        self.arrivals = Arrivals(
            self.waiters,
            self.lines,
            own_id=self.own_id,
            members=lambda: self.members,
            preferred=lambda job_id, members: members[sum(job_id.encode()) % len(members)],
        )
        self.index = Index(
            self.jobs,
            self.session_store,
            self.holders,
            self.clock,
            self.index_config,
            arrived=self.arrivals.arrived,
        )
        self.abandoned = Abandoned(self.jobs, self.clock, arrived=self.arrivals.arrived)
        redelivery = Redelivery(self.jobs, self.session_store)
        delivery = Delivery(self.jobs, redelivery, self.abandoned, self.clock, timeout=5.0)
        self.contention = Contention(
            self.clock, self.contention_config, has_line=lambda one: self.lines.has(one.namespace, one.name)
        )
        self.by_id = ClaimById(
            self.jobs,
            StillFeeds(),
            self.present,
            self.index,
            self.holders,
            self.lines,
            self.contention,
            delivery,
            redelivery,
            self.abandoned,
            self.clock,
            ClaimByIdConfig(),
            expired=lambda namespace, job_id: self.expired.append((namespace, job_id)),
            circuits=gate,
        )
        self.dispatch = Dispatch(
            self.jobs,
            self.session_store,
            StillFeeds(),
            self.present,
            self.index,
            self.holders,
            self.waiters,
            self.arrivals,
            self.abandoned,
            redelivery,
            delivery,
            self.by_id,
            self.clock,
            SteadyEntropy(),
            self.config,
            expired=lambda namespace, job_id: self.expired.append((namespace, job_id)),
            circuits=gate,
        )
        self.take_away = TakeAwayPass(
            self.jobs, self.clock, SteadyEntropy(), again=self.holders.report_again, notices=self.notices
        )
        self.sessions = Sessions(
            self.jobs,
            self.session_store,
            StillFeeds(),
            self.present,
            self.holders,
            self.clock,
            SessionConfig(),
            overdue=self.take_away.add,
            late=self.late_calls.add,
        )

    async def start(self) -> None:
        """List and listen."""
        if self.circuit_store is not None:
            self.circuit_store.watchers.append(self.circuits.shared)
            await self.circuits.shared.relist(NS, self.etcd.revision)
            self.etcd.observers.append(self.circuits.outcomes)
        self.etcd.observers.extend((self.index, self.by_id))
        await self.etcd.listen(self.index, NS)

    async def submit(self, *names: str, **terms: object) -> list[Stored]:
        """Waiting jobs of queue q, type t."""
        if names:
            await self.jobs.register_type(NS, "q", "t", deadline=FAR)
        return [await store_job(self.jobs, a_job(name, counter=n, **terms)) for n, name in enumerate(names)]

    async def claim(
        self, *, n: int = 1, wait_ms: int = 0, request: str = "r1", session: str = S, repeat: bool = False
    ) -> list[ClaimedJob]:
        """Claim from q/t."""
        query = ClaimQuery(
            session_id=session,
            request_id=request,
            queues=(("q", "t"),),
            max_jobs=n,
            wait_ms=wait_ms,
            repeat=repeat,
        )
        return await self.dispatch.claim_jobs(NS, query, FAR)

    async def claim_one(
        self,
        job_id: str,
        *,
        wait_ms: int = 0,
        request: str = "r1",
        session: str = S,
        repeat: bool = False,
    ) -> ClaimedJob:
        """Claim by id."""
        wanted = OneClaim(
            session_id=session, request_id=request, job_id=job_id, wait_ms=wait_ms, repeat=repeat
        )
        return await self.dispatch.claim_job(NS, wanted, FAR)


def ids(claimed: Sequence[ClaimedJob]) -> list[str]:
    """Their job ids."""
    return [one.stored.job.job_id for one in claimed]


async def bench_with(etcd: MemoryEtcd | None = None, **fields: object) -> Coordinator:
    """A coordinator that listens, and an open session."""
    clock = etcd.clock if etcd is not None else SteppingClock()
    assert isinstance(clock, SteppingClock)
    coordinator = Coordinator(etcd or MemoryEtcd(clock), clock, **fields)  # type: ignore[arg-type]
    await coordinator.start()
    if etcd is None:
        await open_session(coordinator.session_store)
    return coordinator


@asynccontextmanager
async def polling(coordinator: Coordinator, **query: object) -> AsyncIterator[asyncio.Task[list[ClaimedJob]]]:
    """A long poll under way; cancelled at the end."""
    before = coordinator.dispatch.waiting
    task = asyncio.ensure_future(coordinator.claim(wait_ms=20_000, **query))  # type: ignore[arg-type]
    for _ in range(100):
        await asyncio.sleep(0)
        if coordinator.dispatch.waiting > before or task.done():
            break
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, RequestError):
            await task
