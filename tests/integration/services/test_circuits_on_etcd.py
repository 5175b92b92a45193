"""Circuits of several coordinators over one etcd: shared by the watch, and outliving whoever used them."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from coordinator.app.machine import SystemClock
from coordinator.app.relay import CircuitsRelay, CommitRelay
from coordinator.core.circuit import CircuitPolicy, CircuitState, Probe
from coordinator.core.commands import Command, Complete, Fail, Lose
from coordinator.core.machine import Decision, decide
from coordinator.core.notice import NoticeKind
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdConfig
from coordinator.etcd.store import EtcdStore, StoreConfig, StoreListeners
from coordinator.ports import Session, Stored
from coordinator.services.circuits import CircuitConfig, Circuits
from coordinator.services.commits import operation_of
from tests.integration.store.conftest import MachineEntropy, Told
from tests.support.builders import FAR, a_job, a_session, claim_job, store_job
from tests.support.fake_ports import RecordedNotices
from tests.support.polling import eventually

POLICY = CircuitPolicy(min_outcomes=4, first_pause_ms=100, longest_pause_ms=100, probes_to_close=2)
CONFIG = CircuitConfig(policy=POLICY, probe_grace_s=0.3, tick=0.05)


@dataclass
class Side:
    """One coordinator: its store and its circuits."""

    store: EtcdStore
    circuits: Circuits
    notices: RecordedNotices
    namespace: str

    @property
    def pair(self) -> tuple[str, str, str]:
        return (self.namespace, "q", "t")

    @property
    def state(self) -> CircuitState:
        return self.circuits.shared.circuit(self.pair).state

    async def submit(self, job_id: str) -> Stored:
        now_ms = SystemClock().now_ms()
        return await store_job(self.store.jobs, a_job(job_id, namespace=self.namespace, submit_ms=now_ms))

    async def open(self) -> Session:
        session = a_session(f"{uuid.uuid4().int >> 65:016x}", ttl_ms=5_000, namespace=self.namespace)
        return await self.store.sessions.open(session, deadline=FAR)

    async def end(self, job_id: str, make: Callable[[int], Command]) -> None:
        """Commit the end of a job's attempt, as whoever serves the call does."""
        snapshot = await self.store.jobs.read(self.namespace, job_id, deadline=FAR)
        assert snapshot.stored is not None
        token = snapshot.claim.token if snapshot.claim is not None else 0
        outcome = decide(snapshot.stored.job, snapshot.claim, make(token), SystemClock().now_ms())
        assert isinstance(outcome, Decision), outcome
        assert (await self.store.jobs.commit(operation_of(snapshot.stored, outcome, FAR, token=token))).won

    async def fails(self, *job_ids: str) -> None:
        session = await self.open()
        for job_id in job_ids:
            await claim_job(self.store.jobs, await self.submit(job_id), session)
            await self.end(job_id, lambda token: Fail(token=token, digest=b"", no_retry=True))

    async def probe(self, stored: Stored) -> Probe:
        """Take the slot, as soon as it may be taken."""

        def taken() -> Awaitable[Probe | None]:
            return self.circuits.take_slot(self.pair, stored.job, FAR)

        probe: Probe | None = await eventually(taken)
        assert probe is not None
        return probe

    async def stored_state(self) -> CircuitState:
        return (await self.store.circuits.read(*self.pair, deadline=FAR)).circuit.state


Start = Callable[[], "contextlib.AbstractAsyncContextManager[Side]"]


@pytest.fixture
def start(etcd_server: EtcdProcess, namespace: str) -> Start:
    root = f"/test-{uuid.uuid4().hex[:12]}"

    @contextlib.asynccontextmanager
    async def made() -> AsyncIterator[Side]:
        clock, entropy, notices = SystemClock(), MachineEntropy(), RecordedNotices()
        commits, changes = CommitRelay(), CircuitsRelay()
        own_id = uuid.uuid4().hex[:8]
        store = EtcdStore(
            StoreConfig(etcd=EtcdConfig(endpoints=(etcd_server.endpoint,)), coordinator_id=own_id, root=root),
            StoreListeners(changes=Told(), commits=commits, circuits=changes),
            clock=clock,
            entropy=entropy,
        )
        circuits = Circuits(store.circuits, store.jobs, notices, clock, entropy, CONFIG, own_id=own_id)
        commits.bind((circuits.outcomes,))
        changes.bind(circuits.shared)
        async with store:
            await store.namespaces.ensure(namespace, deadline=clock.monotonic() + 10)
            tending = asyncio.create_task(circuits.run())
            try:
                yield Side(store, circuits, notices, namespace)
            finally:
                tending.cancel()
                await asyncio.gather(tending, return_exceptions=True)

    return made


async def test_one_opens_and_the_others_hold_as_their_watch_tells(start: Start) -> None:
    async with start() as first, start() as second:
        await first.fails("f1", "f2", "f3", "f4")
        await eventually(lambda: first.pair in second.circuits.barred)
        assert second.circuits.refusal(second.pair).metadata["circuit"] == "OPEN"
        await eventually(lambda: bool(first.notices.of(NoticeKind.CIRCUIT)))
        assert second.notices.of(NoticeKind.CIRCUIT) == []


async def test_an_open_circuit_holds_elsewhere_within_a_tenth_of_a_second(start: Start) -> None:
    """The median of ten, for the machine may be busy with other things at any one of them."""
    spans = []
    async with start() as first, start() as second:
        both = (first, second)
        for number in range(10):
            await first.fails(*(f"{number}-{failure}" for failure in range(4)))
            began = time.monotonic()
            await eventually(lambda: first.pair in second.circuits.barred, interval=0.001)
            spans.append(time.monotonic() - began)
            await first.circuits.reset(first.pair, FAR)
            await eventually(lambda: all(first.pair not in side.circuits.barred for side in both))
    assert statistics.median(spans) < 0.1, spans


async def test_each_counts_what_it_saw_and_either_opens(start: Start) -> None:
    async with start() as first, start() as second:
        await asyncio.gather(first.fails("a1", "a2", "a3"), second.fails("b1", "b2", "b3"))
        assert [side.circuits.outcomes.counts(side.pair).failures for side in (first, second)] == [3, 3]
        assert await first.stored_state() is CircuitState.CLOSED
        await second.fails("b4")
        await eventually(lambda: first.state is second.state is CircuitState.OPEN)
        assert first.circuits.outcomes.counts(first.pair).failures == 0


async def test_both_that_trip_at_once_open_it_once(start: Start) -> None:
    async with start() as first, start() as second:
        await asyncio.gather(first.fails("a1", "a2", "a3", "a4"), second.fails("b1", "b2", "b3", "b4"))
        await eventually(lambda: first.state is second.state is CircuitState.OPEN)
        assert first.circuits.shared.circuit(first.pair).openings == 1

        def told() -> int:
            return len(first.notices.of(NoticeKind.CIRCUIT)) + len(second.notices.of(NoticeKind.CIRCUIT))

        assert await eventually(told) == 1


async def test_probes_of_two_coordinators_go_one_by_one_until_it_is_closed_for_both(start: Start) -> None:
    async with start() as first, start() as second:
        await first.fails("f1", "f2", "f3", "f4")
        await eventually(lambda: first.pair in second.circuits.barred)
        session = await first.open()
        a, b = await first.submit("a"), await first.submit("b")
        assert (await second.probe(a)).job_id == "a"
        await eventually(lambda: first.state is CircuitState.HALF_OPEN)
        assert await first.circuits.take_slot(first.pair, b.job, FAR) is None
        await claim_job(second.store.jobs, a, session)
        await first.end("a", lambda token: Complete(token=token, digest=b""))
        await first.probe(b)
        await claim_job(first.store.jobs, b, session)
        await second.end("b", lambda token: Complete(token=token, digest=b""))
        await eventually(lambda: not first.circuits.barred and not second.circuits.barred)
        assert await first.stored_state() is CircuitState.CLOSED


async def test_an_open_circuit_outlives_every_coordinator(start: Start) -> None:
    async with start() as first:
        await first.fails("f1", "f2", "f3", "f4")
        await eventually(lambda: first.state is CircuitState.OPEN)
    async with start() as later:
        assert later.pair in later.circuits.barred
        assert (await later.probe(await later.submit("a"))).job_id == "a"


async def test_a_coordinator_that_dies_before_its_probe_is_claimed_blocks_nobody(start: Start) -> None:
    async with start() as second:
        async with start() as first:
            await first.fails("f1", "f2", "f3", "f4")
            await eventually(lambda: first.state is CircuitState.OPEN)
            a, b = await first.submit("a"), await first.submit("b")
            await first.probe(a)
        await eventually(lambda: second.state is CircuitState.HALF_OPEN)
        assert (await second.probe(b)).job_id == "b"


async def test_a_coordinator_that_dies_with_its_probe_under_way_leaves_the_verdict_to_others(
    start: Start,
) -> None:
    """The probe's holder dies as well; whoever recovers its job ends the probe."""
    async with start() as second:
        async with start() as first:
            await first.fails("f1", "f2", "f3", "f4")
            await eventually(lambda: first.state is CircuitState.OPEN)
            a = await first.submit("a")
            session = await first.open()
            await first.probe(a)
            await claim_job(first.store.jobs, a, session)
        await eventually(lambda: second.circuits.shared.circuit(second.pair).probe is not None)
        await second.store.sessions.close(second.namespace, session.session_id, deadline=FAR)
        await second.end("a", lambda _: Lose())
        await eventually(lambda: second.state is CircuitState.OPEN)
        assert second.circuits.shared.circuit(second.pair).openings == 2
        assert "a probed it" in second.circuits.shared.circuit(second.pair).reason
