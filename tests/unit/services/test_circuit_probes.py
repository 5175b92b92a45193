"""How an open circuit is probed and closed, what a coordinator that died left behind, and resets by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.core.circuit import CLOSED, Circuit, CircuitState, Counts, Probe
from coordinator.core.commands import Lose, Release
from coordinator.core.job import JobState
from coordinator.core.notice import NoticeKind
from coordinator.errors import EtcdUnavailable, OutcomeUnknown, Reason, RequestError
from tests.support.builders import FAR, a_job, store_job
from tests.support.memory_etcd import Fault
from tests.unit.services.circuit_bench import (
    GRACE,
    PAUSE,
    T,
    U,
    bench,
    beside,
    claim_type,
    complete,
    end,
    facts,
    fail,
    opened,
    pair_of,
    state,
    void,
)
from tests.unit.services.workbench import NS, S, ids, polling

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


@pytest.mark.parametrize("jump_s", [-3_600, 3_600])
async def test_a_clock_that_jumps_holds_no_type_for_longer_than_its_pause(jump_s: int) -> None:
    """Set forward, one job runs early. Set back, a pause that has been seen to pass is over."""
    c = await bench()
    await opened(c, "a", "b")
    c.clock.jump_wall(jump_s)
    await c.clock.advance(PAUSE - 1)
    if jump_s < 0:
        assert not c.circuits.may_probe(T)
        assert await c.claim(request="r1", n=2) == []
        with pytest.raises(RequestError) as held:
            await c.claim_one("a", request="r2")
        assert held.value.reason is Reason.CIRCUIT_OPEN
    await c.clock.advance(2)
    [probe] = await c.claim(request="r3", n=2)
    await complete(c, probe)
    await c.circuits.tend_once()
    [probe] = await c.claim(request="r4", n=2)
    await complete(c, probe)
    await c.circuits.tend_once()
    assert state(c) is CircuitState.CLOSED


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
    await c.circuits.reset(T, FAR)
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
        assert await c.circuits.reset(T, FAR) == CLOSED
        assert ids(await asyncio.wait_for(waiting, 1)) == ["a", "b"]
    assert facts(c)[-1] == ("OPEN", "CLOSED")
    assert c.notices.of(NoticeKind.CIRCUIT)[-1].reason == "reset by hand"
    assert await c.circuits.reset(T, FAR) == CLOSED
    assert len(facts(c)) == 2, "a closed one stays closed, and nobody is told"


async def test_a_reset_forgets_what_was_counted() -> None:
    c = await bench()
    await c.submit("f1", "f2", "f3", "f4")
    claimed = await c.claim(n=4)
    for one in claimed[:3]:
        await fail(c, one)
    await c.circuits.reset(T, FAR)
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
        await c.circuits.reset(T, FAR)
    assert caught.value.reason is reason
    assert state(c) is CircuitState.OPEN


@pytest.mark.parametrize("what", ["circuits", "index"])
async def test_background_work_ends_when_told_so_also_at_the_moment_it_is_woken(what: str) -> None:
    """``asyncio.wait_for`` of Python 3.11 would lose the cancellation, and the process never stop."""
    c = await bench()
    part = c.circuits if what == "circuits" else c.index
    running = asyncio.ensure_future(part.run())
    for _ in range(5):
        await asyncio.sleep(0)
    part._wake.set()
    await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=1)
    assert done
    assert running.cancelled()


async def test_in_the_background_a_pause_ends_by_the_clock() -> None:
    c = await bench()
    await opened(c, "a")
    running = asyncio.ensure_future(c.circuits.run())
    async with polling(c, request="r1") as waiting:
        await c.clock.advance(PAUSE - 0.01)
        assert not waiting.done()
        await c.clock.advance(0.01)
        assert ids(await asyncio.wait_for(waiting, 1)) == ["a"]
    running.cancel()
    await asyncio.wait({running}, timeout=1)
