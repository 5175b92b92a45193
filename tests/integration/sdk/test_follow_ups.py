"""Follow-up jobs through SDK, coordinator and etcd."""

from __future__ import annotations

import asyncio

from worker_sdk import Context, JobClient, JobSpec, JobState, Worker


async def test_a_chain_of_jobs_that_submit_each_other_runs_to_its_end(
    endpoint: str, client: JobClient
) -> None:
    worker = Worker(endpoint, queues={"chain": 4})

    @worker.handler("step")
    async def step(ctx: Context, left: int) -> None:
        if left:
            ctx.submit(JobSpec(queue="chain", type="step", payload=b"%d" % (left - 1), unique_key="chain"))
            ctx.submit(JobSpec(queue="chain", type="leaf", job_id=f"leaf-{left}"))

    @worker.handler("leaf")
    async def leaf(ctx: Context) -> None:
        return

    running = asyncio.create_task(worker.run())
    try:
        await client.submit(JobSpec(queue="chain", type="step", payload=b"10", unique_key="chain"))
        for left in range(10, 0, -1):
            async with asyncio.timeout(10):
                while True:
                    found = [job async for job in client.list(queue="chain", type="leaf")]
                    if f"leaf-{left}" in {job.job_id for job in found}:
                        break
                    await asyncio.sleep(0.01)
            assert (await client.wait(f"leaf-{left}", timeout=10)).state is JobState.SUCCEEDED
    finally:
        worker.stop()
        await running
    jobs = [job async for job in client.list(queue="chain")]
    assert len(jobs) == 21
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}


async def test_a_follow_up_that_another_job_stands_in_the_way_of_fails_the_attempt(
    endpoint: str, client: JobClient
) -> None:
    await client.submit(JobSpec(queue="elsewhere", type="t", job_id="taken", payload=b"other"))
    worker = Worker(endpoint, queues={"q": 1})

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        ctx.submit(JobSpec(queue="elsewhere", type="t", job_id="fresh"))
        if ctx.attempt == 1:
            ctx.submit(JobSpec(queue="elsewhere", type="t", job_id="taken"))

    running = asyncio.create_task(worker.run())
    try:
        await client.submit(JobSpec(queue="q", type="t", job_id="j"))
        job = await client.wait("j", timeout=20)
    finally:
        worker.stop()
        await running
    assert job.state is JobState.SUCCEEDED
    failed, well = job.attempts
    assert failed.failure is not None
    assert failed.failure.type == "JobExists"
    assert well.number == 2
    assert (await client.get("fresh")).state is JobState.PENDING
