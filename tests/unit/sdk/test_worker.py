"""A worker against a coordinator of real gRPC and scripted faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tests.support.fake_worker_server import FakeCoordinator
from tests.support.polling import eventually
from worker_sdk import Context, JobClient, JobSpec, Worker, WorkerConfig


@pytest.fixture
def server() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as running:
        yield running


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[None]:
    run = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        async with asyncio.timeout(10):
            await run


def make(server: FakeCoordinator, *, slots: int = 4, **config: object) -> Worker:
    return Worker(server.endpoint, queues={"q": slots}, config=WorkerConfig(**config))


async def test_a_submitted_job_runs_and_its_result_is_settled(server: FakeCoordinator) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> bytes:
        return ctx.payload.upper()

    async with working(worker), JobClient(server.endpoint) as client:
        submitted = await client.submit(JobSpec(queue="q", type="t", payload=b"abc"))
        job = await client.wait(submitted.job_id, timeout=5)
        assert job.state.name == "SUCCEEDED"
        assert server.jobs[submitted.job_id].settlements[0].complete.result == b"ABC"
    assert worker.stats.completed == 1
    await eventually(lambda: len(server.calls["CloseSession"]) == 1)
