"""What repeats: connections that break again and again, and objects that are made and thrown away."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time

import pytest

from tests.support.fake_worker_server import FakeCoordinator
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working, make
from worker_sdk import (
    ConfigError,
    ConnectionConfig,
    Context,
    JobClient,
    JobSpec,
    LockClient,
    Worker,
    WorkerConfig,
)


def open_things() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def test_137_short_uses_leave_no_file_and_no_thread_behind(server: FakeCoordinator) -> None:
    async def use(number: int) -> None:
        async with JobClient(server.endpoint) as client:
            await client.submit(JobSpec(queue="other", type="t", job_id=f"j{number}"))
        with pytest.raises(ConfigError):
            Worker(server.endpoint, queues={})
        with pytest.raises(ConfigError):
            ConnectionConfig(endpoints="nowhere")
        JobClient(server.endpoint)
        await LockClient(server.endpoint).close()
        worker = make(server, config=WorkerConfig(health_listen="127.0.0.1:0"))
        worker.handler("t")(lambda ctx: None)
        run = asyncio.create_task(worker.run())
        await worker.ready()
        worker.stop()
        await run

    for number in range(5):
        await use(number)
    files, threads = open_things()
    for number in range(5, 30):
        await use(number)

    def flat() -> bool:
        now = open_things()
        return now[0] <= files + 5 and now[1] <= threads + 5

    await eventually(flat, what=f"as few as {files} files and {threads} threads")


async def test_146_a_worker_works_again_after_every_break(server: FakeCoordinator, working: Working) -> None:
    chance = random.Random(146)
    server.interval = 0.1
    port = int(server.endpoint.rpartition(":")[2])
    worker = make(server, slots=2)

    @worker.handler("t")
    async def handle(ctx: Context) -> None: ...

    longest = 0.0
    async with working(worker):
        await worker.ready()
        for cycle in range(10):
            for _ in range(chance.randint(1, 3)):
                await asyncio.to_thread(server.stop)
                await asyncio.sleep(chance.uniform(0, 0.3))
                if chance.random() < 0.3:
                    server.end_sessions()
                server.start(port)
                await asyncio.sleep(chance.uniform(0, 0.1))
            began = time.monotonic()
            server.add(f"j{cycle}")
            await eventually(lambda cycle=cycle: server.how(f"j{cycle}")[-1:] == ["complete"], timeout=10)
            longest = max(longest, time.monotonic() - began)
            assert worker.health().not_live == ()
    assert longest < 10
