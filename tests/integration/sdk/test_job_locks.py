"""Locks that jobs name, through SDK, coordinator and etcd."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Literal

import pytest

from worker_sdk import (
    Context,
    JobClient,
    JobLock,
    JobSpec,
    JobState,
    LockClient,
    LockMode,
    Worker,
    WorkerConfig,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[None]:
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await task


@pytest.mark.parametrize("transport", ["stream", "poll"])
async def test_jobs_of_one_lock_run_one_at_a_time_in_several_workers(
    endpoint: str, client: JobClient, transport: Literal["stream", "poll"]
) -> None:
    inside, most, tokens = 0, 0, list[int]()
    async with AsyncExitStack() as stack:
        for _ in range(2):
            worker = Worker(endpoint, queues={"q": 8}, config=WorkerConfig(transport=transport))

            @worker.handler("t")
            async def handle(ctx: Context) -> None:
                nonlocal inside, most
                inside += 1
                most = max(most, inside)
                tokens.append(ctx.fencing_token)
                await asyncio.sleep(0.01)
                inside -= 1

            await stack.enter_async_context(running(worker))
        lock = JobLock("item/42")
        specs = [JobSpec(queue="q", type="t", job_id=f"j{n}", locks=[lock]) for n in range(20)]
        await client.submit_many(specs)
        for spec in specs:
            assert (await client.wait(spec.job_id, timeout=20)).state is JobState.SUCCEEDED
    assert most == 1
    assert tokens == sorted(tokens)


async def test_a_lock_that_a_client_holds_keeps_the_job_waiting_and_its_release_starts_it(
    endpoint: str, client: JobClient
) -> None:
    worker = Worker(endpoint, queues={"q": 4})

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        return

    async with running(worker), LockClient(endpoint) as locks:
        async with locks.lock("l", wait=5) as held:
            await client.submit(JobSpec(queue="q", type="t", job_id="waits", locks=[JobLock("l")]))
            await client.submit(JobSpec(queue="q", type="t", job_id="free"))
            assert (await client.wait("free", timeout=10)).state is JobState.SUCCEEDED
            assert (await client.get("waits")).state is JobState.PENDING
        async with asyncio.timeout(5):
            job = await client.wait("waits", timeout=5)
    assert job.state is JobState.SUCCEEDED
    assert job.attempts[-1].fencing_token > held.token


async def test_a_job_says_which_locks_it_names(client: JobClient) -> None:
    locks = (JobLock("a"), JobLock("pool", LockMode.SEMAPHORE, 3))
    await client.submit(JobSpec(queue="q", type="t", job_id="j", locks=locks))
    assert (await client.get("j")).spec.locks == locks
