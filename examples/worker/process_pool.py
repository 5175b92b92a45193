"""CPU-bound work in child processes: counts primes on all cores, while the event loop stays free.

    LEASEKEEPER_ENDPOINTS=127.0.0.1:7420 python examples/worker/process_pool.py

A child imports the handler by its name, so it stands at the top of a module, and the program's start is
guarded by ``if __name__``.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict, dataclass

from worker_sdk import ConnectionConfig, JobClient, JobSpec, ProcessContext, Worker

CORES = os.cpu_count() or 1
# As many slots as cores: each running job has a process.
worker = Worker(ConnectionConfig.from_env(), queues={"primes": CORES})


@dataclass
class Span:
    first: int
    last: int


@worker.handler("count", pool="process")
def count(ctx: ProcessContext, span: Span) -> dict[str, int]:
    found = 0
    for number in range(span.first, span.last):
        found += number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
        if number % 5000 == 0:
            ctx.progress((number - span.first) / (span.last - span.first))
    return {"primes": found, "pid": os.getpid()}


async def main(size: int = 10_000, jobs: int = 8) -> None:
    running = asyncio.create_task(worker.run())
    async with JobClient(ConnectionConfig.from_env()) as client:
        spans = [Span(n * size, (n + 1) * size) for n in range(jobs)]
        submitted = await client.submit_many(
            JobSpec(queue="primes", type="count", payload=json.dumps(asdict(span)).encode()) for span in spans
        )
        done = [await client.wait(one.job_id, timeout=60) for one in submitted]
    worker.stop()
    await running
    results = [json.loads(job.result) for job in done]
    pids = {result["pid"] for result in results}
    print(f"{sum(result['primes'] for result in results)} primes below {jobs * size}")
    print(f"counted in {len(pids)} processes, none of them this one: {os.getpid() not in pids}")


if __name__ == "__main__":
    asyncio.run(main())
