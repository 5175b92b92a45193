"""A worker process for tests: handlers that block, hold and hang, and write to a sink that checks tokens."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from worker_sdk import ConnectionConfig, Context, SyncContext, Worker, WorkerConfig

NAME = os.environ["WORKER_NAME"]
FOLDER = Path(os.environ["WORKER_FOLDER"])


def write(job: str, token: int) -> None:
    """Write an effect unless the sink has seen a larger token for the job."""
    with closing(sqlite3.connect(os.environ["WORKER_SINK"], timeout=10)) as database:
        database.execute("BEGIN IMMEDIATE")
        [(seen,)] = database.execute("SELECT coalesce(max(token), 0) FROM accepted WHERE job = ?", (job,))
        table = "accepted" if token > seen else "refused"
        database.execute(f"INSERT INTO {table} VALUES (?, ?, ?)", (job, token, NAME))
        database.commit()


worker = Worker(
    ConnectionConfig.from_env(),
    queues={"q": int(os.environ["WORKER_SLOTS"])},
    config=WorkerConfig(
        session_ttl=float(os.environ["WORKER_TTL"]),
        drain_timeout=float(os.environ["WORKER_DRAIN"]),
        cancel_grace=0.3,
        stall_warning=0.5,
    ),
)


def mark(job_id: str, what: str) -> None:
    """Leave a file that the test waits for."""
    (FOLDER / f"{job_id}.{what}.{NAME}").touch()


@worker.handler("write")
async def write_at_once(ctx: Context) -> str:
    write(ctx.job_id, ctx.fencing_token)
    return NAME


@worker.handler("block-loop")
async def block_loop(ctx: Context) -> str:
    mark(ctx.job_id, "started")
    seconds = float(ctx.payload)
    time.sleep(seconds)  # noqa: ASYNC251  blocks the event loop on purpose
    write(ctx.job_id, ctx.fencing_token)
    return NAME


@worker.handler("hold")
def hold(ctx: SyncContext) -> str:
    """Hold the claim until the test says go, then write before any call of the SDK."""
    mark(ctx.job_id, "started")
    while ctx.attempt == 1 and not (FOLDER / f"{ctx.job_id}.go").exists():
        time.sleep(0.01)
    write(ctx.job_id, ctx.fencing_token)
    mark(ctx.job_id, "wrote")
    try:
        ctx.check()
    except Exception as error:
        mark(ctx.job_id, type(error).__name__)
        raise
    return NAME


@worker.handler("sleep")
async def sleep(ctx: Context) -> str:
    mark(ctx.job_id, "started")
    await asyncio.sleep(float(ctx.payload))
    write(ctx.job_id, ctx.fencing_token)
    return NAME


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(worker.run())
