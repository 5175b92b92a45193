"""Claims by id under contention: what reaches the store, who gets the job, and what the others are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.core.commands import Cancel, Command, Complete, Lose, Release
from coordinator.core.machine import Decision, decide
from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.services.api import ClaimedJob
from coordinator.services.claim_by_id import JOB
from coordinator.services.commits import operation_of
from coordinator.services.contention import Resource
from tests.support.builders import FAR, NOW_MS, a_job, a_session, open_session, store_job
from tests.support.memory_etcd import MemoryEtcd
from tests.unit.services.workbench import NS, Coordinator, bench_with

HOUR_MS = 3_600_000
HOLDER = "00000000000000aa"
A = Resource(JOB, NS, "a")


@dataclass
class Looks:
    """When a coordinator read the job, monotonic seconds."""

    times: list[float] = field(default_factory=list)

    def most_in_a_second(self) -> int:
        return max((sum(t <= other <= t + 1.0 for other in self.times) for t in self.times), default=0)


def watched(c: Coordinator) -> Looks:
    """Count the reads of ``c`` from now on."""
    looks, read = Looks(), c.jobs.read

    async def counted(*args: Any, **more: Any) -> Any:
        looks.times.append(c.clock.monotonic())
        return await read(*args, **more)

    c.jobs.read = counted  # type: ignore[method-assign]
    return looks


def session(number: int) -> str:
    return f"{number + 0x1000:016x}"


async def contended(etcd: MemoryEtcd | None = None, sessions: int = 0) -> tuple[Coordinator, ClaimedJob]:
    """A coordinator, and job ``a`` held by session HOLDER; and more open sessions."""
    c = await bench_with(etcd)
    await open_session(c.session_store, a_session(HOLDER, ttl_ms=HOUR_MS))
    for number in range(sessions):
        await open_session(c.session_store, a_session(session(number), ttl_ms=HOUR_MS))
    await c.submit("a")
    [claimed] = await c.claim(request="holder", session=HOLDER)
    return c, claimed


async def settle(c: Coordinator, claimed: ClaimedJob, command: Command) -> None:
    """Commit what ``command`` makes of the job."""
    stored = c.etcd.stored(NS, "a")
    assert stored is not None
    held = None if isinstance(command, Lose) else c.etcd.claim(NS, "a")
    decision = decide(stored.job, held, command, c.clock.now_ms())
    assert isinstance(decision, Decision), decision
    commit = await c.jobs.commit(operation_of(stored, decision, FAR, token=claimed.claim.token))
    assert commit.won


async def let_go(c: Coordinator, claimed: ClaimedJob) -> None:
    await settle(c, claimed, Release(token=claimed.claim.token, digest=b"d"))


async def complete(c: Coordinator, claimed: ClaimedJob) -> None:
    await settle(c, claimed, Complete(token=claimed.claim.token, digest=b"d"))


async def refusal(call: Coroutine[Any, Any, ClaimedJob]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await call
    return caught.value


def wait_in_line(c: Coordinator, number: int, *, wait_s: float = 30) -> asyncio.Task[ClaimedJob]:
    return asyncio.ensure_future(
        c.claim_one("a", wait_ms=round(wait_s * 1000), request=f"w{number}", session=session(number))
    )


async def lined_up(c: Coordinator, count: int, *, wait_s: float = 30) -> list[asyncio.Task[ClaimedJob]]:
    """That many, in this order."""
    tasks = []
    for number in range(count):
        tasks.append(wait_in_line(c, number, wait_s=wait_s))
        await until(lambda number=number: c.dispatch.waiting > number)  # type: ignore[misc]
    await c.clock.advance(0)
    return tasks


async def until(happened: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if happened():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


async def end(tasks: list[asyncio.Task[ClaimedJob]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- without waiting


async def test_each_failure_is_told_a_longer_delay_and_who_comes_early_does_not_reach_the_store() -> None:
    c, _ = await contended()
    looks = watched(c)
    told = []
    for n in range(9):
        held = await refusal(c.claim_one("a", request=f"r{n}"))
        if n == 4:  # the fifth within a second, over all callers
            assert (held.reason, held.metadata["limit_of"]) == (Reason.RELOCK_THROTTLED, "job")
        else:
            assert (held.reason, held.metadata["holder"]) == (Reason.CLAIM_HELD, HOLDER)
        told.append(held.retry_after_ms or 0)
        await c.clock.advance((told[-1] - 10) / 1000)
        early = await refusal(c.claim_one("a", request=f"early{n}"))
        assert (early.reason, early.retry_after_ms) == (Reason.RELOCK_THROTTLED, 10)
        assert early.metadata == {"job_id": "a", "limit_of": "session"}
        await c.clock.advance(0.01)
    assert told == [50, 100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]
    assert len(looks.times) == 8


@pytest.mark.parametrize("ended", [let_go, complete])
async def test_a_clean_end_of_ones_own_claim_empties_the_bucket(ended: Callable[..., Any]) -> None:
    c, claimed = await contended(sessions=1)
    other = session(0)
    for n in range(3):
        held = await refusal(c.claim_one("a", request=f"r{n}", session=other))
        await c.clock.advance((held.retry_after_ms or 0) / 1000)
    await let_go(c, claimed)
    mine = await c.claim_one("a", request="mine", session=other)
    assert len(c.contention) > 0
    await c.clock.advance(0.2)
    await ended(c, mine)
    if ended is let_go:
        await c.claim(request="holder again", session=HOLDER)
        held = await refusal(c.claim_one("a", request="later", session=other))
        assert held.retry_after_ms == 50
    assert c.contention.next_delay_ms(other, A) <= 100


async def test_a_loss_is_no_clean_end() -> None:
    c, claimed = await contended(sessions=1)
    other = session(0)
    for n in range(3):
        held = await refusal(c.claim_one("a", request=f"r{n}", session=other))
        await c.clock.advance((held.retry_after_ms or 0) / 1000)
    await let_go(c, claimed)
    await c.claim_one("a", request="mine", session=other)
    await c.session_store.close(NS, other, deadline=FAR)
    lost = Lose()
    await settle(c, claimed, lost)
    assert c.contention.next_delay_ms(other, A) == 400


async def test_two_hundred_who_ignore_what_they_are_told_reach_the_store_four_times_a_second() -> None:
    c, _ = await contended(sessions=200)
    looks = watched(c)
    for step in range(50):
        calls = [
            refusal(c.claim_one("a", request=f"r{step}", session=session(number))) for number in range(200)
        ]
        answers = await asyncio.gather(*calls)
        assert {one.reason for one in answers} <= {Reason.CLAIM_HELD, Reason.RELOCK_THROTTLED}
        assert all(one.retry_after_ms for one in answers)
        await c.clock.advance(0.1)
    assert looks.most_in_a_second() <= 4
    assert len(looks.times) >= 8, "somebody still looks"


async def test_two_hundred_who_obey_reach_it_no_oftener_and_one_has_the_job_in_time() -> None:
    c, claimed = await contended(sessions=200)
    looks = watched(c)
    won: list[tuple[float, int]] = []

    async def contend(number: int) -> None:
        for n in range(100):
            try:
                await c.claim_one("a", request=f"r{n}", session=session(number))
            except RequestError as error:
                await c.clock.sleep((error.retry_after_ms or 0) / 1000)
            else:
                won.append((c.clock.monotonic(), number))
                return

    tasks = [asyncio.ensure_future(contend(number)) for number in range(200)]
    await c.clock.advance(12)
    await let_go(c, claimed)
    freed = c.clock.monotonic()
    await c.clock.advance(5.5)
    await end(tasks)  # type: ignore[arg-type]
    assert len(won) == 1
    looks.times.remove(won[0][0])  # the one that did not fail
    assert looks.most_in_a_second() <= 4
    assert won[0][0] - freed <= 5.5


async def test_a_job_that_is_not_due_is_contended_too_and_its_time_is_told() -> None:
    c = await bench_with()
    await store_job(c.jobs, a_job("later", run_at_ms=NOW_MS + 60_000))
    first = await refusal(c.claim_one("later", request="r1"))
    early = await refusal(c.claim_one("later", request="r2"))
    assert (first.reason, first.retry_after_ms) == (Reason.NOT_CLAIMABLE, 60_000)
    assert (early.reason, early.retry_after_ms) == (Reason.RELOCK_THROTTLED, 50)


async def test_a_job_that_is_not_there_is_said_at_once_and_its_caller_not_charged() -> None:
    c = await bench_with()
    looks = watched(c)
    for n in range(4):
        assert (await refusal(c.claim_one("none", request=f"r{n}"))).reason is Reason.JOB_NOT_FOUND
    fifth = await refusal(c.claim_one("none", request="r5"))
    assert fifth.reason is Reason.RELOCK_THROTTLED
    assert fifth.metadata["limit_of"] == "job"
    assert len(looks.times) == 4


async def test_of_many_at_once_one_gets_it_and_who_lost_the_race_is_told_who_did() -> None:
    c = await bench_with()
    for number in range(4):
        await open_session(c.session_store, a_session(session(number)))
    await c.submit("a")
    looks = watched(c)
    calls = [c.claim_one("a", request="r", session=session(number)) for number in range(4)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    [winner] = [one for one in answers if isinstance(one, ClaimedJob)]
    losers = [one for one in answers if isinstance(one, RequestError)]
    assert [one.reason for one in losers] == [Reason.CLAIM_HELD] * 3
    assert {one.metadata["holder"] for one in losers} == {winner.claim.session}
    assert {one.metadata["token"] for one in losers} == {str(winner.claim.token)}
    assert len(looks.times) == 4, "what stands there came with the lost commit"


async def test_the_repeat_of_a_claim_that_stands_is_answered_whatever_the_contention() -> None:
    c, claimed = await contended(sessions=1)
    await let_go(c, claimed)
    mine = await c.claim_one("a", request="mine", session=session(0))
    for n in range(10):
        await refusal(c.claim_one("a", request=f"r{n}"))
    again = await c.claim_one("a", request="mine", session=session(0), repeat=True)
    assert again.claim.token == mine.claim.token


async def test_trouble_of_the_store_charges_nobody() -> None:
    c, _ = await contended()
    c.etcd.read_error = EtcdUnavailable("away")
    assert (await refusal(c.claim_one("a", request="r1"))).reason is Reason.ETCD_UNAVAILABLE
    c.etcd.read_error = None
    assert (await refusal(c.claim_one("a", request="r2"))).retry_after_ms == 50


# -- in line


async def test_two_hundred_who_wait_cost_the_store_a_look_now_and_then() -> None:
    c, _ = await contended(sessions=200)
    looks = watched(c)
    tasks = await lined_up(c, 200)
    assert len(looks.times) == 1
    await c.clock.advance(20)
    assert 2 <= len(looks.times) <= 6
    await end(tasks)
    assert c.dispatch.waiting == 0


async def test_one_hand_over_wakes_one_who_waits_first_come_first_served() -> None:
    c, claimed = await contended(sessions=200)
    tasks = await lined_up(c, 200)
    for expected in range(5):
        looks = watched(c)
        await let_go(c, claimed)
        claimed = await asyncio.wait_for(tasks[expected], 1)
        assert claimed.claim.session == session(expected)
        assert len(looks.times) == 1
        assert not any(task.done() for task in tasks[expected + 1 :])
        await c.clock.advance(0.5)
    await end(tasks)


async def test_a_job_held_via_another_coordinator_is_handed_over_by_the_watch_and_not_by_polling() -> None:
    first, claimed = await contended(sessions=3)
    second = await bench_with(first.etcd, own_id="c2")
    for observer in (second.index, second.by_id):
        first.etcd.observers.remove(observer)
    tasks = await lined_up(second, 3)
    looks = watched(second)
    await second.clock.advance(3)
    assert looks.times == []
    await let_go(first, claimed)
    won = await asyncio.wait_for(tasks[0], 1)
    assert won.claim.session == session(0)
    assert len(looks.times) == 1
    await end(tasks)


async def test_the_line_is_looked_for_though_the_watch_says_nothing() -> None:
    """A missed event costs seconds, never for ever."""
    c, claimed = await contended(sessions=2)
    tasks = await lined_up(c, 2)
    c.etcd.listeners.clear()
    c.etcd.observers.clear()
    await let_go(c, claimed)
    await c.clock.advance(4.5)
    assert tasks[0].done()
    assert (await tasks[0]).claim.session == session(0)
    await end(tasks)


async def test_a_look_that_its_caller_left_is_made_by_the_next() -> None:
    c, claimed = await contended(sessions=3)
    tasks = await lined_up(c, 3)
    looks, read = watched(c), c.jobs.read

    async def hanging(*args: Any, **more: Any) -> Any:
        await read(*args, **more)
        return await asyncio.Event().wait()

    c.jobs.read = hanging  # type: ignore[method-assign]
    await let_go(c, claimed)
    await until(lambda: len(looks.times) == 1)
    c.jobs.read = read  # type: ignore[method-assign]
    tasks[0].cancel()
    assert (await asyncio.wait_for(tasks[1], 1)).claim.session == session(1)
    await end(tasks)


async def test_trouble_of_the_store_ends_one_wait_and_not_the_whole_line() -> None:
    c, _ = await contended(sessions=20)
    tasks = await lined_up(c, 20)
    c.etcd.read_error = EtcdUnavailable("away")
    await c.clock.advance(10)
    c.etcd.read_error = None
    assert 1 <= sum(task.done() for task in tasks) <= 7
    await end(tasks)


async def test_who_waited_in_vain_is_told_the_holder_and_charged_nothing() -> None:
    c, _ = await contended(sessions=2)
    tasks = await lined_up(c, 2, wait_s=2)
    await c.clock.advance(2)
    for task in tasks:
        with pytest.raises(RequestError) as told:
            await task
        assert (told.value.reason, told.value.metadata["holder"]) == (Reason.CLAIM_HELD, HOLDER)
        assert told.value.retry_after_ms == 50
    assert (await refusal(c.claim_one("a", request="x", session=session(0)))).retry_after_ms == 50


async def test_who_was_told_to_come_later_may_wait_in_line() -> None:
    c, claimed = await contended(sessions=1)
    await refusal(c.claim_one("a", request="r1", session=session(0)))
    looks = watched(c)
    task = wait_in_line(c, 0)
    await until(lambda: c.dispatch.waiting == 1)
    await let_go(c, claimed)
    assert (await asyncio.wait_for(task, 1)).claim.session == session(0)
    assert len(looks.times) <= 2


async def test_those_who_do_not_wait_cannot_starve_the_line() -> None:
    c, claimed = await contended(sessions=100)
    tasks = await lined_up(c, 1)
    looks = watched(c)
    for step in range(30):
        calls = [
            refusal(c.claim_one("a", request=f"r{step}", session=session(number))) for number in range(1, 100)
        ]
        await asyncio.gather(*calls)
        await c.clock.advance(0.1)
    assert looks.most_in_a_second() <= 4
    await let_go(c, claimed)
    assert (await asyncio.wait_for(tasks[0], 1)).claim.session == session(0)


async def test_the_end_of_the_job_is_told_to_all_who_wait_after_one_look() -> None:
    c, claimed = await contended(sessions=50)
    tasks = await lined_up(c, 50)
    await complete(c, claimed)
    looks = watched(c)
    await c.clock.advance(1.1)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert {one.reason for one in answers if isinstance(one, RequestError)} == {Reason.JOB_TERMINAL}
    assert len(answers) == 50
    assert len(looks.times) == 1


async def test_a_session_that_ends_while_it_waits_keeps_the_job_from_nobody() -> None:
    c, claimed = await contended(sessions=3)
    tasks = await lined_up(c, 3)
    looks = watched(c)
    for number in (0, 1):
        await c.session_store.close(NS, session(number), deadline=FAR)
    await let_go(c, claimed)
    won = await asyncio.wait_for(tasks[2], 1)
    assert won.claim.session == session(2)
    assert len(looks.times) == 1
    for task in tasks[:2]:
        with pytest.raises(RequestError) as told:
            await task
        assert told.value.reason is Reason.SESSION_NOT_FOUND


async def test_a_repeat_in_line_finds_its_own_claim_though_others_stand_before_it() -> None:
    """The call that claimed was another coordinator's, and the watch has not told of its claim yet."""
    first, claimed = await contended(sessions=3)
    second = await bench_with(first.etcd, own_id="c2")
    for observer in (second.index, second.by_id):
        first.etcd.observers.remove(observer)
    first.etcd.listeners.remove(second.index)
    tasks = await lined_up(second, 2)
    await let_go(first, claimed)
    mine = await first.claim_one("a", request="mine", session=session(2))
    again = await asyncio.wait_for(
        second.claim_one("a", request="mine", session=session(2), wait_ms=10_000, repeat=True), 1
    )
    assert again.claim.token == mine.claim.token
    await end(tasks)


async def test_draining_answers_the_line() -> None:
    c, _ = await contended(sessions=2)
    tasks = await lined_up(c, 2)
    c.dispatch.drain()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [one.reason for one in answers if isinstance(one, RequestError)] == [Reason.CLAIM_HELD] * 2
    assert (await refusal(c.claim_one("a", wait_ms=1_000, request="x"))).reason is Reason.DRAINING


async def test_a_cancelled_job_is_told_as_ended() -> None:
    c = await bench_with()
    await store_job(c.jobs, a_job("a", run_at_ms=NOW_MS + 60_000))
    task = asyncio.ensure_future(c.claim_one("a", wait_ms=30_000))
    await until(lambda: c.dispatch.waiting == 1)
    await c.clock.advance(0)
    stored = c.etcd.stored(NS, "a")
    assert stored is not None
    decision = decide(stored.job, None, Cancel(reason="told"), c.clock.now_ms())
    assert isinstance(decision, Decision)
    await c.jobs.commit(operation_of(stored, decision, FAR))
    await c.clock.advance(1.1)
    with pytest.raises(RequestError) as told:
        await asyncio.wait_for(task, 1)
    assert told.value.reason is Reason.JOB_TERMINAL


async def test_of_two_lines_at_two_coordinators_that_of_the_preferred_one_looks_alone() -> None:
    members = ["c1", "c2"]
    first = await bench_with(members=members)
    for number, owner in enumerate((HOLDER, session(0), session(1))):
        await open_session(first.session_store, a_session(owner, ttl_ms=HOUR_MS + number))
    await first.submit("a")
    claimed = await first.claim_one("a", request="holder", session=HOLDER)
    second = await bench_with(first.etcd, own_id="c2", members=members)
    assert second.arrivals.is_ours("a")
    tasks = [wait_in_line(first, 0), wait_in_line(second, 1)]
    await until(lambda: first.dispatch.waiting == second.dispatch.waiting == 1)
    await first.clock.advance(0)
    looks = watched(first)
    await let_go(first, claimed)
    assert (await asyncio.wait_for(tasks[1], 1)).claim.session == session(1)
    await asyncio.sleep(5 * first.arrivals.steal_delay)
    assert looks.times == []
    assert not tasks[0].done()
    await end(tasks)
