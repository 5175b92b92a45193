"""Waiting and following on a real etcd."""

from __future__ import annotations

import asyncio

from coordinator.core.commands import Complete
from coordinator.core.job import JobState
from coordinator.services.api import JobFilter, Settle, WatchedJob
from tests.integration.services.conftest import Side, SideFactory
from tests.support.builders import a_new_job


async def complete(side: Side, job_id: str, token: int) -> None:
    item = Settle(job_id, Complete(token=token, digest=b"", result=b"r"))
    await side.settlement.settle(side.namespace, [item], side.deadline)


async def test_a_wait_at_one_coordinator_ends_when_another_settles_the_job(start_side: SideFactory) -> None:
    async with start_side() as first, start_side() as second:
        session = await first.open()
        claimed = await first.claim(await first.submit(a_new_job("j1")), session)
        waits = [
            asyncio.create_task(second.subscription.wait(second.namespace, "j1", 10, second.deadline))
            for _ in range(5)
        ]
        await asyncio.sleep(0.1)
        await complete(first, "j1", claimed.token)
        for view, finished in await asyncio.wait_for(asyncio.gather(*waits), 3):
            assert finished
            assert view.result == b"r"


async def test_a_stream_resumed_from_any_message_tells_the_rest_in_order(side: Side) -> None:
    session = await side.open()
    stream = side.subscription.watch(side.namespace, JobFilter(), 0)
    seen = [await anext(stream)]
    for n in range(5):
        claimed = await side.claim(await side.submit(a_new_job(f"j{n}")), session)
        await complete(side, f"j{n}", claimed.token)
    seen += [await asyncio.wait_for(anext(stream), 3) for _ in range(15)]
    await stream.aclose()  # type: ignore[attr-defined]
    states = [message.stored.job.state for message in seen[1:] if message.stored is not None]
    assert states == [JobState.PENDING, JobState.RUNNING, JobState.SUCCEEDED] * 5

    for start in (0, 4, 9):
        again = side.subscription.watch(side.namespace, JobFilter(), seen[start].revision)
        assert await anext(again) == WatchedJob(seen[start].revision)
        rest = [await asyncio.wait_for(anext(again), 3) for _ in range(15 - start)]
        assert rest == seen[start + 1 :]
        await again.aclose()  # type: ignore[attr-defined]


async def test_a_listing_shows_every_job_once_whatever_the_page(side: Side) -> None:
    jobs = [a_new_job(f"j{n:03}", queue="odd" if n % 2 else "even") for n in range(90)]
    await side.submission.submit(side.namespace, "r", jobs, side.deadline)
    for size in (7, 50):
        found: list[str] = []
        cursor = ""
        while True:
            page = await side.queries.list(
                side.namespace, JobFilter(queue="odd"), size, cursor, side.deadline
            )
            assert len(page.jobs) <= size
            found += [stored.job.job_id for stored in page.jobs]
            cursor = page.cursor
            if not cursor:
                break
        assert sorted(found) == [f"j{n:03}" for n in range(90) if n % 2]
