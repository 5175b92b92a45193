"""What the tests of the SDK share: a scripted coordinator, and a worker that is stopped at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from tests.support.fake_worker_server import FakeCoordinator
from worker_sdk import ConnectionConfig, RetryConfig, Timeouts, Worker, WorkerConfig

__all__ = ["Working", "make", "server", "working"]

Working = Callable[[Worker], AbstractAsyncContextManager["asyncio.Task[None]"]]


@pytest.fixture
def server() -> Iterator[FakeCoordinator]:
    """A coordinator of this test alone."""
    with FakeCoordinator() as running:
        yield running


@pytest.fixture
def working() -> Working:
    """Run a worker for the length of a block; at its end it is stopped, and must have ended well."""

    @asynccontextmanager
    async def run(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(worker.run())
        try:
            yield task
        finally:
            worker.stop()
            async with asyncio.timeout(10):
                await task

    return run


def make(
    server: FakeCoordinator | str, *, slots: int = 4, attempt: float = 0.5, config: WorkerConfig | None = None
) -> Worker:
    """Return a worker for queue ``q`` with short timeouts."""
    endpoints = server if isinstance(server, str) else server.endpoint
    connection = ConnectionConfig(
        endpoints=endpoints,
        timeouts=Timeouts(attempt=attempt, call=3.0, close=1.0),
        retry=RetryConfig(initial=0.01, maximum=0.1),
    )
    return Worker(connection, queues={"q": slots}, config=config)
