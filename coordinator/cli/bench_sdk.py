"""Load through the Python SDK: what a user's producer and worker reach, in one process."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

from coordinator.cli.bench_numbers import Measured
from coordinator.cli.bench_raw import PAYLOAD, QUEUE, TYPE
from worker_sdk import ConnectionConfig, Context, JobClient, JobSpec, Worker, WorkerConfig

__all__ = ["SdkLoad"]

_TTL_SECONDS = 30.0
_LIMIT_SECONDS = 60.0
_SLOTS_PER_CLAIMER = 100

_Handler = Callable[[Context], Coroutine[Any, Any, None]]


class SdkLoad:
    """One client process against one coordinator.

    Args:
        address: ``host:port``.
        namespace: of all jobs.
    """

    def __init__(self, address: str, namespace: str) -> None:
        self._connection = ConnectionConfig(endpoints=address, namespace=namespace)

    async def batch_round(self, jobs: int, *, submitters: int = 4, claimers: int = 4) -> Measured:
        """Submit ``jobs`` jobs, a hundred a call, to a worker that runs an empty handler for each.

        The rate counts until every settlement is answered and the worker has stopped; latencies count from
        a job's submission to the end of its handler: the SDK does not tell when a settlement is answered.
        """
        sent: dict[str, float] = {}
        latencies: list[float] = []
        done = asyncio.Event()

        async def handle(ctx: Context) -> None:
            latencies.append(time.perf_counter() - sent.pop(ctx.job_id))
            if len(latencies) == jobs:
                done.set()

        def specs() -> Iterator[JobSpec]:
            for job_id in _ids(jobs):
                sent[job_id] = time.perf_counter()
                yield JobSpec(queue=QUEUE, type=TYPE, payload=PAYLOAD, job_id=job_id)

        async with asyncio.timeout(_LIMIT_SECONDS + jobs / 200), JobClient(self._connection) as client:
            async with self._worker(handle, slots=claimers * _SLOTS_PER_CLAIMER, loops=claimers):
                start = time.perf_counter()
                results = await client.submit_many(specs(), concurrency=submitters)
                refused = [one for one in results if one.error is not None]
                if refused:
                    raise RuntimeError(f"a job was refused: {refused[0].error}")
                await done.wait()
            seconds = time.perf_counter() - start
        return Measured(count=jobs, seconds=seconds, latencies=latencies)

    async def idle_round(self, jobs: int, *, gap: float = 0.01) -> Measured:
        """Submit one job every ``gap`` seconds to an idle queue, and time each until its handler starts."""
        sent: dict[str, float] = {}
        latencies: list[float] = []
        done = asyncio.Event()

        async def handle(ctx: Context) -> None:
            latencies.append(time.perf_counter() - sent[ctx.job_id])
            if len(latencies) == jobs:
                done.set()

        async with asyncio.timeout(_LIMIT_SECONDS + jobs), JobClient(self._connection) as client:
            async with self._worker(handle, slots=4, loops=2):
                start = time.perf_counter()
                for job_id in _ids(jobs):
                    sent[job_id] = time.perf_counter()
                    await client.submit(JobSpec(queue=QUEUE, type=TYPE, payload=PAYLOAD, job_id=job_id))
                    await asyncio.sleep(gap)
                await done.wait()
            seconds = time.perf_counter() - start
        return Measured(count=jobs, seconds=seconds, latencies=latencies)

    @asynccontextmanager
    async def _worker(self, handle: _Handler, *, slots: int, loops: int) -> AsyncIterator[None]:
        worker = Worker(
            self._connection,
            queues={QUEUE: slots},
            config=WorkerConfig(
                session_ttl=_TTL_SECONDS, identity="bench", claim_loops=loops, handle_signals=False
            ),
        )
        worker.handler(TYPE)(handle)
        running = asyncio.create_task(worker.run(), name="bench worker")
        try:
            await worker.ready()
            yield
        finally:
            worker.stop()
            await running


def _ids(jobs: int) -> Iterator[str]:
    run = uuid.uuid4().hex[:8]
    return (f"{run}-{number:07d}" for number in range(jobs))
