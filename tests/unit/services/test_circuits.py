"""Circuits: what opens one, and what an open one holds; over the store in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.core.circuit import CLOSED, Circuit, CircuitState, Counts
from coordinator.core.notice import NoticeKind
from coordinator.errors import EtcdUnavailable, OutcomeUnknown, Reason, RequestError
from tests.support.builders import FAR, a_job, store_job
from tests.unit.services.circuit_bench import (
    POLICY,
    T,
    bench,
    claim_type,
    complete,
    facts,
    fail,
    kill_holder,
    opened,
    pair_of,
    state,
    void,
)
from tests.unit.services.workbench import NS, ids, polling

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
    assert await c.circuits.reset(T, FAR) == CLOSED, "what others left can be cleared"
