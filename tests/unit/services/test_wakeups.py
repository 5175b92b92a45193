"""Nobody waits beside a job that waits: whoever is woken for a job and does not take it wakes the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from coordinator.errors import Reason, RequestError
from coordinator.services.api import ClaimedJob, ClaimQuery
from tests.support.builders import FAR, a_job, a_session, open_session, store_job
from tests.support.memory_etcd import Fault
from tests.unit.services.workbench import NS, Coordinator, S, bench_with, ids, polling

OTHER = "00000000000000b2"


async def test_a_dead_session_that_still_waits_keeps_no_job_from_the_next() -> None:
    """A worker was killed or frozen: its session has ended, its long poll still stands first in line."""
    c = await bench_with()
    await open_session(c.session_store, a_session(OTHER))
    async with polling(c, request="r1") as dead, polling(c, request="r2", session=OTHER) as alive:
        await c.session_store.close(NS, S, deadline=FAR)
        await c.submit("a")
        with pytest.raises(RequestError) as refusal:
            await asyncio.wait_for(dead, 1)
        assert refusal.value.reason is Reason.SESSION_NOT_FOUND
        assert ids(await asyncio.wait_for(alive, 1)) == ["a"]


async def test_a_refused_commit_wakes_the_next_who_waits() -> None:
    c = await bench_with()
    async with polling(c, request="r1") as first, polling(c, request="r2") as second:
        c.etcd.faults.extend([None, Fault.REFUSED])  # the submission, then the first claim
        await c.submit("a")
        with pytest.raises(RequestError):
            await asyncio.wait_for(first, 1)
        assert ids(await asyncio.wait_for(second, 1)) == ["a"]


async def test_a_commit_refused_for_a_caller_that_is_gone_wakes_the_next() -> None:
    c = await bench_with()
    async with polling(c, request="r1") as gone, polling(c, request="r2") as second:
        await c.submit("a")
        c.etcd.hold()
        for _ in range(10):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        c.etcd.faults.append(Fault.REFUSED)
        c.etcd.go()
        await c.abandoned.run_once()
        assert ids(await asyncio.wait_for(second, 1)) == ["a"]


async def test_who_is_woken_for_one_type_and_takes_another_wakes_the_next() -> None:
    c = await bench_with()
    await store_types(c, "t", "u")
    both = asyncio.ensure_future(poll_types(c, "r1", "t", "u"))
    await waiting(c, 1)
    only = asyncio.ensure_future(poll_types(c, "r2", "u"))
    await waiting(c, 2)
    try:
        # Both jobs come before the woken one has its turn; it takes the first by rank, the other stays.
        await asyncio.gather(
            store_job(c.jobs, a_job("late", type="u", counter=9)),
            store_job(c.jobs, a_job("early", type="t", counter=1)),
        )
        assert ids(await asyncio.wait_for(both, 1)) == ["early"]
        assert ids(await asyncio.wait_for(only, 1)) == ["late"]
    finally:
        for task in (both, only):
            task.cancel()


async def test_a_cancelled_caller_hands_its_wake_to_whoever_waits_for_that_type() -> None:
    c = await bench_with()
    await store_types(c, "t", "u")
    both = asyncio.ensure_future(poll_types(c, "r1", "t", "u"))
    await waiting(c, 1)
    idle = asyncio.ensure_future(poll_types(c, "r2", "t"))
    await waiting(c, 2)
    only = asyncio.ensure_future(poll_types(c, "r3", "u"))
    await waiting(c, 3)
    try:
        storing = asyncio.ensure_future(store_job(c.jobs, a_job("a", type="u")))
        await until(lambda: c.dispatch.waiting == 2)
        both.cancel()
        await storing
        assert ids(await asyncio.wait_for(only, 1)) == ["a"]
        assert not idle.done()
    finally:
        for task in (both, idle, only):
            task.cancel()


async def test_a_wake_that_meets_the_end_of_the_wait_is_not_lost() -> None:
    """The timer and the job in one turn of the loop."""
    c = await bench_with()
    await c.submit()
    loop = asyncio.get_running_loop()
    waiter = c.waiters.add(c.waiters.number(), [(NS, "q", "t")])
    waiting_task = asyncio.ensure_future(c.dispatch._wait(waiter, 0.01))
    await asyncio.sleep(0)
    late = loop.time() + 0.02
    while loop.time() < late:
        pass  # the timer is due now, and fires in the turn after next
    loop.call_soon(c.waiters.wake_one, (NS, "q", "t"))
    assert await asyncio.wait_for(waiting_task, 1)


async def store_types(c: Coordinator, *types: str) -> None:
    for type_ in types:
        await c.jobs.register_type(NS, "q", type_, deadline=FAR)


async def poll_types(c: Coordinator, request: str, *types: str) -> list[ClaimedJob]:
    query = ClaimQuery(
        session_id=S,
        request_id=request,
        queues=tuple(("q", type_) for type_ in types),
        max_jobs=1,
        wait_ms=20_000,
        repeat=False,
    )
    return await c.dispatch.claim_jobs(NS, query, FAR)


async def waiting(c: Coordinator, count: int) -> None:
    await until(lambda: c.dispatch.waiting >= count)


async def until(happened: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if happened():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")
