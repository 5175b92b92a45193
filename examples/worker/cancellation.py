"""How a running job is stopped: one handler on the event loop, one in a thread, one in a child process.

LEASEKEEPER_ENDPOINTS=127.0.0.1:7420 python examples/worker/cancellation.py
"""

from __future__ import annotations

import asyncio

from worker_sdk import (
    ConnectionConfig,
    Context,
    JobCancelled,
    JobClient,
    JobSpec,
    JobState,
    ProcessContext,
    SyncContext,
    Worker,
)

worker = Worker(ConnectionConfig.from_env(), queues={"long": 3})


@worker.handler("on-loop")
async def on_loop(ctx: Context) -> None:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        # Tidy up, then let it go on: what ends here is this task, not the worker.
        print(f"on the loop: {ctx.stop_reason}")
        raise


@worker.handler("in-thread")
def in_thread(ctx: SyncContext) -> None:
    try:
        while True:
            ctx.sleep(60)  # wakes at once when the job is to stop; `check` does the same between two steps
    except JobCancelled:
        print(f"in a thread: {ctx.stop_reason}")
        raise


@worker.handler("in-process", pool="process")
def in_process(ctx: ProcessContext) -> None:
    # Nothing to look at: the process is killed, with whatever it has started.
    while True:
        ctx.progress(0.5, "in a process")
        ctx.sleep(0.05)


async def main() -> None:
    running = asyncio.create_task(worker.run())
    names = ("on-loop", "in-thread", "in-process")
    async with JobClient(ConnectionConfig.from_env()) as client:
        for name in names:
            submitted = await client.submit(JobSpec(queue="long", type=name))
            async with client.watch(job_ids=[submitted.job_id]) as watch:
                await watch.ready()
                job = await client.get(submitted.job_id)
                while job.state is not JobState.RUNNING:
                    change = await anext(watch)
                    job = change.job or job
            asked = await client.cancel(submitted.job_id, reason="nobody needs it any more")
            job = await client.wait(submitted.job_id, timeout=60)
            print(f"{name}: {asked.state.name} when asked, then {job.state.name}")
    worker.stop()
    await running


if __name__ == "__main__":
    asyncio.run(main())
