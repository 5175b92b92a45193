"""A long job that goes on where its last attempt stopped: reads a document page by page, with checkpoints.

    LEASEKEEPER_ENDPOINTS=127.0.0.1:7420 python examples/worker/document_pipeline.py

The first attempt breaks down after page 3, as a machine would. The second one starts with page 4.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, field

from worker_sdk import ConnectionConfig, Context, JobClient, JobSpec, RetryPolicy, Worker

worker = Worker(ConnectionConfig.from_env(), queues={"documents": 4})
PAGES = ["the lease", "the key", "the lease", "the token", "the end"]


@dataclass
class Document:
    name: str
    pages: list[str]


@dataclass
class State:
    """What a checkpoint holds: all that the next attempt needs, and no more."""

    pages_done: int = 0
    words: dict[str, int] = field(default_factory=dict)


@worker.handler("index")
async def index(ctx: Context, document: Document) -> State:
    state = State(**json.loads(ctx.checkpoint)) if ctx.checkpoint else State()
    print(f"attempt {ctx.attempt} starts with page {state.pages_done + 1}")
    for page in document.pages[state.pages_done :]:
        for word in page.split():
            state.words[word] = state.words.get(word, 0) + 1
        state.pages_done += 1
        ctx.progress(state.pages_done / len(document.pages), f"page {state.pages_done}")
        # Stored at once, under the token of this attempt: a holder that lost the job cannot overwrite it.
        await ctx.save_checkpoint(json.dumps(asdict(state)).encode())
        if ctx.attempt == 1 and state.pages_done == 3:
            raise ConnectionError("the scanner is gone")
    return state


async def main() -> None:
    running = asyncio.create_task(worker.run())
    async with JobClient(ConnectionConfig.from_env()) as client:
        payload = json.dumps(asdict(Document("minutes", PAGES))).encode()
        retry = RetryPolicy(initial_delay=0.1)
        submitted = await client.submit(
            JobSpec(queue="documents", type="index", payload=payload, retry=retry)
        )
        job = await client.wait(submitted.job_id, timeout=60)
    worker.stop()
    await running
    print(f"{job.state.name} at attempt {job.attempt}: {job.result.decode()}")


if __name__ == "__main__":
    asyncio.run(main())
