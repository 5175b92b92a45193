"""Circuits: what opens one, what an open one holds, and how it closes; over the store in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.core.circuit import CLOSED, Circuit, CircuitPolicy, CircuitState, Counts, Probe
from coordinator.core.commands import Command, Complete, Fail, Lose, Release
from coordinator.core.job import JobState
from coordinator.core.machine import Decision, decide
from coordinator.core.notice import NoticeKind
from coordinator.errors import EtcdUnavailable, OutcomeUnknown, Reason, RequestError
from coordinator.ports import Stored
from coordinator.services.api import ClaimedJob, ClaimQuery
from coordinator.services.circuits import CircuitConfig
from coordinator.services.commits import operation_of
from tests.support.builders import FAR, a_job, a_session, claim_job, open_session, store_job
from tests.support.clock import SteppingClock
from tests.support.memory_circuits import MemoryCircuits
from tests.support.memory_etcd import Fault, MemoryEtcd
from tests.unit.services.workbench import NS, Coordinator, S, bench_with, ids, polling

T, U = (NS, "q", "t"), (NS, "q", "u")
POLICY = CircuitPolicy(min_outcomes=4, min_lost_sessions=2, first_pause_ms=5_000, probes_to_close=2)
PAUSE = 5.0
GRACE = CircuitConfig().probe_grace_s


async def bench(**config: Any) -> Coordinator:
    etcd = MemoryEtcd(SteppingClock())
    c = await beside(etcd, MemoryCircuits(etcd), "c1", **config)
    await open_session(c.session_store, a_session(ttl_ms=3_600_000))
    return c


async def beside(etcd: MemoryEtcd, store: MemoryCircuits, own_id: str, **config: Any) -> Coordinator:
    """A coordinator over what may be another's store."""
    return await bench_with(
        etcd,
        circuit_store=store,
        own_id=own_id,
        circuit_config=CircuitConfig(**{"policy": POLICY, **config}),
    )


async def pair_of() -> tuple[Coordinator, Coordinator]:
    first = await bench()
    assert first.circuit_store is not None
    return first, await beside(first.etcd, first.circuit_store, "c2")


async def end(c: Coordinator, stored: Stored, command: Command, token: int = 0) -> None:
    """Commit the end of an attempt as a service does."""
    snapshot = await c.jobs.read(NS, stored.job.job_id, deadline=FAR)
    assert snapshot.stored is not None
    decision = decide(snapshot.stored.job, snapshot.claim, command, c.clock.now_ms())
    assert isinstance(decision, Decision), decision
    commit = await c.jobs.commit(operation_of(snapshot.stored, decision, FAR, token=token))
    assert commit.won


async def complete(c: Coordinator, claimed: ClaimedJob) -> None:
    token = claimed.claim.token
    await end(c, claimed.stored, Complete(token=token, digest=b""), token)


async def fail(c: Coordinator, claimed: ClaimedJob) -> None:
    token = claimed.claim.token
    await end(c, claimed.stored, Fail(token=token, digest=b"", no_retry=True), token)


async def opened(c: Coordinator, *waiting: str) -> None:
    """Four jobs fail; ``waiting`` are left, held."""
    await c.submit("f1", "f2", "f3", "f4", *waiting)
    for claimed in await c.claim(n=4, request="fail"):
        await fail(c, claimed)
    await c.circuits.tend_once()
    assert state(c) is CircuitState.OPEN


def state(c: Coordinator) -> CircuitState:
    return c.circuits.shared.circuit(T).state


def facts(c: Coordinator) -> list[tuple[str, str]]:
    return [
        (notice.facts["circuit_before"], notice.facts["circuit"])
        for notice in c.notices.of(NoticeKind.CIRCUIT)
    ]


async def claim_type(c: Coordinator, *types: str, request: str, n: int = 10) -> list[ClaimedJob]:
    query = ClaimQuery(
        session_id=S, request_id=request, queues=tuple(("q", one) for one in types), max_jobs=n, wait_ms=0,
        repeat=False,
    )  # fmt: skip
    return await c.dispatch.claim_jobs(NS, query, FAR)


# -- opening


async def test_a_type_that_fails_is_held_and_other_types_go_on() -> None:
    c = await bench()
    await opened(c, "held")
    await c.jobs.register_type(NS, "q", "u", deadline=FAR)
    await store_job(c.jobs, a_job("other", type="u"))

    assert ids(await claim_type(c, "t", "u", request="r1")) == ["other"]
    assert await c.claim(request="r2") == []
    assert facts(c) == [("CLOSED", "OPEN")]
    [notice] = c.notices.of(NoticeKind.CIRCUIT)
    assert (notice.queue, notice.type, notice.facts["failures"]) == ("q", "t", "4")
    assert notice.reason == "4 of 4 attempts failed"


async def test_too_few_failures_or_too_many_successes_open_nothing() -> None:
    c = await bench()
    await c.submit(*(f"j{n}" for n in range(12)))
    claimed = await c.claim(n=12)
    for one in claimed[:3]:
        await fail(c, one)
    await c.circuits.tend_once()
    assert state(c) is CircuitState.CLOSED
    for one in claimed[3:6]:
        await complete(c, one)
    for one in claimed[6:]:
        await fail(c, one)
    await c.circuits.tend_once()
    assert state(c) is CircuitState.CLOSED, "9 of 12 are less than 0.8"
    assert c.circuits.outcomes.counts(T) == Counts(attempts=12, successes=3, failures=9)


async def test_outcomes_older_than_the_window_do_not_open() -> None:
    c = await bench()
    await c.submit(*(f"j{n}" for n in range(4)))
    claimed = await c.claim(n=4)
    for one in claimed[:3]:
        await fail(c, one)
    await c.clock.advance(POLICY.window_ms / 1000)
    await fail(c, claimed[3])
    await c.circuits.tend_once()
    assert state(c) is CircuitState.CLOSED


async def test_a_type_that_kills_its_holders_is_held_by_the_losses_and_others_go_on() -> None:
    """Each of two jobs kills two sessions; the second loss of each counts."""
    c = await bench()
    await c.jobs.register_type(NS, "q", "u", deadline=FAR)
    for name in ("p1", "p2"):
        [stored] = await c.submit(name)
        for n in range(2):
            await kill_holder(c, stored.job.job_id, f"{n:015x}{name[1]}")
    await c.circuits.tend_once()
    assert state(c) is CircuitState.OPEN
    [notice] = c.notices.of(NoticeKind.CIRCUIT)
    assert (notice.facts["lease_losses"], notice.facts["attempts"]) == ("2", "4")

    await store_job(c.jobs, a_job("other", type="u"))
    assert ids(await claim_type(c, "t", "u", request="r1")) == ["other"]


async def kill_holder(c: Coordinator, job_id: str, session_id: str) -> None:
    """A session claims the job, dies, and its loss is recovered."""
    await open_session(c.session_store, a_session(session_id))
    snapshot = await c.jobs.read(NS, job_id, deadline=FAR)
    assert snapshot.stored is not None
    won = await claim_job(c.jobs, snapshot.stored, session_id, now_ms=c.clock.now_ms())
    await c.session_store.close(NS, session_id, deadline=FAR)
    assert won.stored is not None
    await end(c, won.stored, Lose(token=won.token))


async def test_a_fleet_that_dies_once_opens_nothing() -> None:
    c = await bench()
    stored = await c.submit(*(f"j{n}" for n in range(20)))
    for n, one in enumerate(stored):
        await kill_holder(c, one.job.job_id, f"{n:016x}")
    await c.circuits.tend_once()
    assert state(c) is CircuitState.CLOSED
    assert c.circuits.outcomes.counts(T) == Counts(attempts=20)


async def test_who_recovers_anothers_losses_takes_them_of_all_that_ended_there() -> None:
    """A coordinator without workers sees every loss that it recovers, and no success."""
    c = await bench()
    await c.submit(*(f"j{n}" for n in range(6)), "p1", "p2")
    claims = await c.claim(n=6)
    c.etcd.observers.remove(c.index)
    c.etcd.observers.remove(c.circuits.outcomes)  # others settle
    for one in claims:
        await complete(c, one)
    c.etcd.observers.extend((c.index, c.circuits.outcomes))
    for name in ("p1", "p2"):
        for n in range(2):
            await kill_holder(c, name, f"{n:015x}{name[1]}")
    await c.circuits.tend_once()

    assert c.circuits.outcomes.counts(T) == Counts(attempts=10, lease_losses=2, lost_sessions=2)
    assert state(c) is CircuitState.CLOSED


async def test_while_all_is_well_the_shared_record_is_not_touched() -> None:
    c = await bench()
    await c.submit(*(f"j{n}" for n in range(20)))
    for one in await c.claim(n=20):
        await complete(c, one)
    await c.circuits.tend_once()
    assert c.circuit_store is not None
    assert c.circuit_store.swaps == 0
    assert not c.circuits.barred


async def test_one_opens_for_all_and_the_others_begin_to_count_anew() -> None:
    first, second = await pair_of()
    await opened(first, "held")
    assert state(second) is CircuitState.OPEN
    assert await second.claim(request="r2") == []
    assert second.circuits.outcomes.counts(T) == Counts()
    await second.circuits.tend_once()
    assert [facts(first), facts(second)] == [[("CLOSED", "OPEN")], []], "one tells"


@pytest.mark.parametrize("theirs", [CircuitState.OPEN, CircuitState.HALF_OPEN])
async def test_an_opening_that_finds_it_open_changes_nothing(theirs: CircuitState) -> None:
    first, _ = await pair_of()
    assert first.circuit_store is not None
    store = first.circuit_store
    by_another = Circuit(state=theirs, since_ms=1, probe_ms=2**43, openings=7, reason="theirs")
    store.silent = True
    store.before_swap = lambda: void(store.put(T, by_another))
    await first.submit("f1", "f2", "f3", "f4")
    for claimed in await first.claim(n=4):
        await fail(first, claimed)
    await first.circuits.tend_once()
    assert first.circuits.shared.circuit(T) == by_another
    assert facts(first) == []


def void(_: object) -> None:
    return


async def test_an_opening_waits_for_the_store() -> None:
    c = await bench()
    assert c.circuit_store is not None
    await c.submit("f1", "f2", "f3", "f4")
    for claimed in await c.claim(n=4):
        await fail(c, claimed)
    c.circuit_store.failures = [EtcdUnavailable("no member answered"), OutcomeUnknown("no answer")]
    assert [await c.circuits.tend_once() for _ in range(3)] == [False, False, True]
    assert state(c) is CircuitState.OPEN


# -- holding


async def test_a_held_type_costs_its_waiters_nothing() -> None:
    """No round of a poll, and no swap, until its pause is over."""
    c = await bench()
    await opened(c, "held")
    assert c.circuit_store is not None
    rounds, propose = [0], c.dispatch._propose

    def counted(*args: Any) -> Any:
        rounds[0] += 1
        return propose(*args)

    c.dispatch._propose = counted  # type: ignore[assignment, method-assign]
    before = c.circuit_store.swaps
    async with polling(c, request="r1") as first, polling(c, request="r2") as second:
        for _ in range(20):
            await c.circuits.tend_once()
            await asyncio.sleep(0.002)
        assert rounds[0] == 2
        assert not first.done()
        assert not second.done()
    assert c.circuit_store.swaps == before
    assert rounds[0] == 2, "who leaves wakes nobody for jobs that are held"


async def test_a_claim_by_id_is_told_that_the_circuit_is_open_and_when_to_come_again() -> None:
    c = await bench()
    await opened(c, "held")
    await c.clock.advance(1)
    for wait_ms in (0, 10_000):
        with pytest.raises(RequestError) as caught:
            await c.claim_one("held", request=f"r{wait_ms}", wait_ms=wait_ms)
        assert caught.value.reason is Reason.CIRCUIT_OPEN
        assert caught.value.metadata == {"queue": "q", "type": "t", "circuit": "OPEN"}
        assert caught.value.retry_after_ms == 4_000


async def test_what_was_claimed_before_may_be_claimed_again_by_the_same_request() -> None:
    c = await bench()
    [_] = await c.submit("mine")
    mine = await c.claim_one("mine")
    await opened(c)
    assert (await c.claim_one("mine")).claim.token == mine.claim.token


async def test_a_coordinator_that_heeds_no_circuits_opens_and_holds_none() -> None:
    c = await bench(enabled=False)
    await c.submit("f1", "f2", "f3", "f4", "more")
    for claimed in await c.claim(n=4):
        await fail(c, claimed)
    await c.circuits.tend_once()
    assert c.circuit_store is not None
    assert c.circuit_store.swaps == 0
    c.circuit_store.put(T, Circuit(state=CircuitState.OPEN, probe_ms=2**43))
    assert ids(await c.claim(request="r2")) == ["more"]
    assert await c.circuits.reset(T, "me", FAR) == CLOSED, "what others left can be cleared"


# -- probing


async def test_after_the_pause_probes_go_out_one_by_one_and_successes_close_it() -> None:
    c = await bench()
    await opened(c, "a", "b", "d", "e")
    async with polling(c, request="r1", n=4) as first, polling(c, request="r2", n=4) as second:
        await c.clock.advance(PAUSE)
        await c.circuits.tend_once()
        [probe] = await asyncio.wait_for(first, 1)
        assert probe.stored.job.job_id == "a"
        assert state(c) is CircuitState.HALF_OPEN
        await c.circuits.tend_once()
        await asyncio.sleep(0.03)
        assert not second.done(), "one at a time"
        with pytest.raises(RequestError) as caught:
            await c.claim_one("b", request="r3")
        assert caught.value.reason is Reason.CIRCUIT_OPEN

        await complete(c, probe)
        await c.circuits.tend_once()
        [probe] = await asyncio.wait_for(second, 1)
        assert probe.stored.job.job_id == "b"
    async with polling(c, request="r4", n=4) as third:
        await complete(c, probe)
        await c.circuits.tend_once()
        assert ids(await asyncio.wait_for(third, 1)) == ["d", "e"]
    assert state(c) is CircuitState.CLOSED
    assert not c.circuits.barred
    assert facts(c) == [("CLOSED", "OPEN"), ("OPEN", "HALF_OPEN"), ("HALF_OPEN", "CLOSED")]
    assert c.circuits.outcomes.counts(T) == Counts()


async def test_a_probe_that_fails_opens_it_again_for_twice_as_long() -> None:
    c = await bench()
    await opened(c, "a", "b")
    await c.clock.advance(PAUSE)
    [probe] = await c.claim(request="r1", n=2)
    await fail(c, probe)
    await c.circuits.tend_once()
    circuit = c.circuits.shared.circuit(T)
    assert (circuit.state, circuit.openings) == (CircuitState.OPEN, 2)
    assert circuit.probe_ms - circuit.since_ms == 10_000
    await c.clock.advance(9.9)
    assert await c.claim(request="r2") == []
    await c.clock.advance(0.1)
    assert ids(await c.claim(request="r3")) == ["b"]


async def test_a_probe_by_id_takes_the_slot_as_well() -> None:
    c = await bench()
    await opened(c, "a", "b")
    await c.clock.advance(PAUSE)
    probe = await c.claim_one("b", request="r1")
    assert c.circuits.shared.circuit(T).probe == Probe(job_id="b", attempt=1, who="c1")
    assert await c.claim(request="r2") == []
    await complete(c, probe)
    await c.circuits.tend_once()
    assert c.circuits.shared.circuit(T).passed == 1


async def test_a_type_is_probed_although_its_workers_have_other_work() -> None:
    c = await bench()
    await c.jobs.register_type(NS, "q", "u", deadline=FAR)
    await opened(c, "a")
    await c.clock.advance(PAUSE)
    await store_job(c.jobs, a_job("other", type="u"))
    assert ids(await claim_type(c, "u", "t", request="r1")) == ["a"]
    assert ids(await claim_type(c, "u", "t", request="r2")) == ["other"]


async def test_a_probe_that_is_given_back_frees_the_slot_and_says_nothing() -> None:
    c = await bench()
    await opened(c, "a", "b")
    await c.clock.advance(PAUSE)
    [probe] = await c.claim(request="r1")
    token = probe.claim.token
    await end(c, probe.stored, Release(token=token, digest=b"", delay_ms=60_000), token)
    await c.circuits.tend_once()
    circuit = c.circuits.shared.circuit(T)
    assert (circuit.state, circuit.probe, circuit.passed) == (CircuitState.HALF_OPEN, None, 0)
    assert ids(await c.claim(request="r2")) == ["b"]


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LOST_REQUEST])
async def test_a_claim_that_fails_gives_the_slot_back(fault: Fault) -> None:
    c = await bench()
    await opened(c, "a")
    await c.clock.advance(PAUSE)
    c.etcd.faults.append(fault)
    with pytest.raises(RequestError):
        await c.claim(request="r1")
    assert c.circuits.shared.circuit(T).probe is not None
    await c.circuits.tend_once()
    assert c.circuits.shared.circuit(T).probe is None
    assert ids(await c.claim(request="r2")) == ["a"]


async def test_a_caller_that_is_gone_while_it_takes_the_slot_gives_it_back() -> None:
    c = await bench()
    await opened(c, "a")
    await c.clock.advance(PAUSE)
    assert c.circuit_store is not None
    going = asyncio.ensure_future(c.claim(request="r1"))
    c.circuit_store.before_swap = lambda: void(going.cancel())
    with pytest.raises(asyncio.CancelledError):
        await going
    await c.circuits.tend_once()
    assert c.circuits.shared.circuit(T).probe is None
    assert ids(await c.claim(request="r2")) == ["a"]


async def test_two_coordinators_that_probe_at_once_take_one_job() -> None:
    first, second = await pair_of()
    await opened(first, "a", "b")
    assert first.circuit_store is not None
    first.circuit_store.silent = True  # neither hears of the other in time
    await first.clock.advance(PAUSE)
    taken = await asyncio.gather(first.claim(request="r1"), second.claim(request="r2"))
    assert sorted(map(len, taken)) == [0, 1]


async def test_the_slot_of_a_coordinator_that_died_before_its_claim_is_given_back_by_another() -> None:
    first, second = await pair_of()
    await opened(first, "a")
    await first.clock.advance(PAUSE)
    assert await first.circuits.take_slot(T, a_job("a"), FAR) is not None
    await second.clock.advance(GRACE - 0.1)
    await second.circuits.tend_once()
    assert await second.claim(request="r1") == []
    await second.clock.advance(0.1)
    await second.circuits.tend_once()
    assert ids(await second.claim(request="r2")) == ["a"]


async def test_the_end_of_a_probe_that_nobody_swapped_in_is_read_from_its_job() -> None:
    """Its coordinator committed the end and died."""
    first, second = await pair_of()
    await opened(first, "a")
    await first.clock.advance(PAUSE)
    [probe] = await first.claim(request="r1")
    first.etcd.observers.remove(first.circuits.outcomes)
    first.etcd.observers.remove(second.circuits.outcomes)
    await complete(first, probe)
    await second.clock.advance(GRACE)
    await second.circuits.tend_once()
    circuit = second.circuits.shared.circuit(T)
    assert (circuit.probe, circuit.passed) == (None, 1)


async def test_a_probe_that_runs_long_keeps_its_slot_and_is_looked_at_seldom() -> None:
    c = await bench()
    await opened(c, "a", "b")
    await c.clock.advance(PAUSE)
    [_] = await c.claim(request="r1")
    reads, read = [0], c.jobs.read

    async def counted(*args: Any, **more: Any) -> Any:
        reads[0] += 1
        return await read(*args, **more)

    c.jobs.read = counted  # type: ignore[method-assign]
    for _ in range(60):
        await c.clock.advance(1)
        await c.circuits.tend_once()
    assert 8 <= reads[0] <= 60 / GRACE
    assert await c.claim(request="r2") == []


async def test_a_probe_whose_holder_died_opens_it_again() -> None:
    first, second = await pair_of()
    await opened(first, "a", "b")
    await first.clock.advance(PAUSE)
    [probe] = await first.claim(request="r1")
    await first.session_store.close(NS, S, deadline=FAR)
    await end(second, probe.stored, Lose(token=probe.claim.token))
    await second.circuits.tend_once()
    assert state(second) is state(first) is CircuitState.OPEN
    job = first.etcd.stored(NS, "a")
    assert job is not None
    assert job.job.state is JobState.PENDING


# -- what is known


async def test_a_list_tells_of_circuits_that_are_open_already() -> None:
    c = await bench()
    await opened(c, "held")
    assert c.circuit_store is not None
    late = await beside(c.etcd, c.circuit_store, "c2")
    assert await late.claim(request="r1") == []
    assert state(late) is CircuitState.OPEN


async def test_a_list_replaces_what_was_known_also_where_history_went_back() -> None:
    c = await bench()
    await opened(c)
    assert c.circuit_store is not None
    restored = c.circuit_store
    c.etcd.revision = 3
    restored.stored.clear()
    restored.put(U, Circuit(state=CircuitState.OPEN, probe_ms=2**43))
    await c.circuits.shared.relist(NS, c.etcd.revision)
    assert set(c.circuits.barred) == {U}


async def test_a_change_that_is_older_than_what_is_known_changes_nothing() -> None:
    c = await bench()
    assert c.circuit_store is not None
    await opened(c)
    old = c.circuit_store.stored[T]
    await c.circuits.reset(T, "me", FAR)
    c.circuits.shared.circuit_changed(*T, old, old.revision)
    assert state(c) is CircuitState.CLOSED
    assert not c.circuits.barred


async def test_many_that_poll_at_once_send_one_swap() -> None:
    c = await bench()
    await opened(c, "a", "b")
    assert c.circuit_store is not None
    await c.clock.advance(PAUSE)
    before = c.circuit_store.swaps
    taken = await asyncio.gather(*(c.claim(request=f"r{n}") for n in range(50)))
    assert sum(map(len, taken)) == 1
    assert c.circuit_store.swaps == before + 1


# -- by hand


async def test_a_reset_closes_at_once_and_wakes_who_waits() -> None:
    c = await bench()
    await opened(c, "a", "b")
    async with polling(c, request="r1", n=2) as waiting:
        assert await c.circuits.reset(T, "anna", FAR) == CLOSED
        assert ids(await asyncio.wait_for(waiting, 1)) == ["a", "b"]
    assert facts(c)[-1] == ("OPEN", "CLOSED")
    assert c.notices.of(NoticeKind.CIRCUIT)[-1].reason == "reset by anna"
    assert await c.circuits.reset(T, "anna", FAR) == CLOSED
    assert len(facts(c)) == 2, "a closed one stays closed, and nobody is told"


async def test_a_reset_forgets_what_was_counted() -> None:
    c = await bench()
    await c.submit("f1", "f2", "f3", "f4")
    claimed = await c.claim(n=4)
    for one in claimed[:3]:
        await fail(c, one)
    await c.circuits.reset(T, "anna", FAR)
    await fail(c, claimed[3])
    await c.circuits.tend_once()
    assert state(c) is CircuitState.CLOSED


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EtcdUnavailable("none answered"), Reason.ETCD_UNAVAILABLE),
        (OutcomeUnknown("no answer"), Reason.OUTCOME_UNKNOWN),
    ],
)
async def test_a_reset_that_may_not_have_happened_is_not_told_as_done(error: Any, reason: Reason) -> None:
    c = await bench()
    await opened(c)
    assert c.circuit_store is not None
    c.circuit_store.failures = [error]
    with pytest.raises(RequestError) as caught:
        await c.circuits.reset(T, "anna", FAR)
    assert caught.value.reason is reason
    assert state(c) is CircuitState.OPEN
