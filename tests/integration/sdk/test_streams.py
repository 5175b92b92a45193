"""Workers on a stream: stops at once, breaks and hung lines, two coordinators, drains, and the way back."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from coordinator.app import Coordinator
from coordinator.config import EtcdSettings, ServerSettings, Settings
from coordinator.embedded.etcd_process import EtcdProcess
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy
from worker_sdk import ConnectionConfig, Context, JobClient, JobSpec, JobState, Timeouts, Worker, WorkerConfig


def connection(endpoints: str) -> ConnectionConfig:
    return ConnectionConfig(endpoints=endpoints, timeouts=Timeouts(attempt=1.0, call=10.0))


def counting(worker: Worker) -> dict[str, list[int]]:
    """Register a handler that counts its runs; return job -> attempts."""
    runs: dict[str, list[int]] = {}

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        runs.setdefault(ctx.job_id, []).append(ctx.attempt)

    return runs


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[None]:
    run = asyncio.create_task(worker.run())
    await worker.ready()
    try:
        yield
    finally:
        worker.stop()
        async with asyncio.timeout(15):
            await run


class Pair:
    """Two coordinators on one etcd, in this loop."""

    def __init__(self, etcd: EtcdProcess) -> None:
        settings = Settings(
            server=ServerSettings(listen="127.0.0.1:0", grace_s=4),
            etcd=EtcdSettings(
                endpoints=etcd.endpoint, root=f"/test-{uuid.uuid4().hex[:12]}", allow_unsafe=True
            ),
        )
        self.coordinators = [Coordinator(settings) for _ in range(2)]
        self.running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Pair:
        for coordinator in self.coordinators:
            self.running.append(asyncio.create_task(coordinator.run()))
            await coordinator.started.wait()
        return self

    async def __aexit__(self, *error: object) -> None:
        for coordinator in self.coordinators:
            coordinator.stop()
        await asyncio.gather(*self.running)

    @property
    def endpoints(self) -> str:
        return ",".join(coordinator.address for coordinator in self.coordinators)

    async def stop(self, number: int) -> None:
        self.coordinators[number].stop()
        await self.running[number]


async def ended(client: JobClient, *job_ids: str, timeout: float = 10) -> list[Any]:
    return [await client.wait(job_id, timeout=timeout) for job_id in job_ids]


@pytest.mark.parametrize("after", [0.1, 1.5])
async def test_035_a_cancel_reaches_the_handler_within_two_seconds_at_a_ttl_of_a_minute(
    endpoint: str, client: JobClient, after: float
) -> None:
    begun, told = asyncio.Event(), asyncio.Event()
    worker = Worker(connection(endpoint), queues={"q": 2}, config=WorkerConfig(session_ttl=60))

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            told.set()

    async with working(worker):
        await client.submit(JobSpec(queue="q", type="t", job_id="j"))
        async with asyncio.timeout(5):
            await begun.wait()
        await asyncio.sleep(after)
        asked = time.monotonic()
        await client.cancel("j")
        async with asyncio.timeout(5):
            await told.wait()
        took = time.monotonic() - asked
        [done] = await ended(client, "j")

    assert took < 2, f"the handler was told after {took:.2f} s"
    assert done.state is JobState.CANCELLED


async def test_each_pool_gets_no_more_than_its_slots(endpoint: str, client: JobClient) -> None:
    running = {"a": 0, "b": 0}
    most = {"a": 0, "b": 0}
    worker = Worker(connection(endpoint), queues={"a": 2, "b": 5}, config=WorkerConfig(session_ttl=10))

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        running[ctx.queue] += 1
        most[ctx.queue] = max(most[ctx.queue], running[ctx.queue])
        await asyncio.sleep(0.01)
        running[ctx.queue] -= 1

    specs = [JobSpec(queue=queue, type="t", job_id=f"{queue}{n}") for n in range(40) for queue in "ab"]
    async with working(worker):
        await client.submit_many(specs)
        await ended(client, *(str(spec.job_id) for spec in specs))
        claimed = worker.stats.claimed

    assert (most, claimed) == ({"a": 2, "b": 5}, 80)


@pytest.mark.parametrize("mode", [ProxyMode.DROP, ProxyMode.HALF_DROP])
async def test_146_a_stream_that_falls_silent_is_noticed_and_the_worker_is_not_deaf(
    endpoint: str, client: JobClient, mode: ProxyMode
) -> None:
    async with TcpProxy(endpoint) as proxy:
        worker = Worker(
            connection(f"{proxy.endpoint},{endpoint}"), queues={"q": 1}, config=WorkerConfig(session_ttl=10)
        )
        runs = counting(worker)
        async with working(worker):
            await client.submit(JobSpec(queue="q", type="t", job_id="before"))
            await ended(client, "before")
            proxy.set_mode(mode)
            silent = time.monotonic()
            await asyncio.sleep(0.2)
            await client.submit(JobSpec(queue="q", type="t", job_id="after"))
            # A claim that went down the silent line comes back when the beats left it out for a TTL.
            [done] = await ended(client, "after", timeout=30)
            took = time.monotonic() - silent
    assert done.state is JobState.SUCCEEDED
    assert "before" in runs
    assert took < 28
    assert done.failures == 0


async def test_133_streams_that_are_cut_again_and_again_cost_no_job(endpoint: str, client: JobClient) -> None:
    async with TcpProxy(endpoint) as proxy:
        worker = Worker(connection(proxy.endpoint), queues={"q": 4}, config=WorkerConfig(session_ttl=4))
        done: dict[str, int] = {}

        @worker.handler("t")
        async def handle(ctx: Context) -> None:
            await asyncio.sleep(0.02)
            done[ctx.job_id] = done.get(ctx.job_id, 0) + 1

        ids = [f"j{n}" for n in range(60)]
        async with working(worker):
            for start in range(0, 60, 10):
                await client.submit_many(
                    [JobSpec(queue="q", type="t", job_id=one) for one in ids[start : start + 10]]
                )
                await asyncio.sleep(0.1)
                proxy.close_connections()
            views = await ended(client, *ids, timeout=20)

    assert {view.state for view in views} == {JobState.SUCCEEDED}
    assert all(view.failures == 0 for view in views)
    assert set(done) == set(ids)


async def test_a_coordinator_that_stops_sends_its_workers_on_and_no_attempt_is_lost(
    etcd_server: EtcdProcess,
) -> None:
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(Pair(etcd_server))
        worker = Worker(connection(pair.endpoints), queues={"q": 4}, config=WorkerConfig(session_ttl=10))

        @worker.handler("t")
        async def handle(ctx: Context) -> None:
            await asyncio.sleep(0.05)

        ids = [f"j{n}" for n in range(80)]
        async with working(worker), JobClient(connection(pair.endpoints)) as client:
            for start in range(0, 80, 20):
                await client.submit_many(
                    [JobSpec(queue="q", type="t", job_id=one) for one in ids[start : start + 20]]
                )
                if start == 20:
                    await pair.stop(0)
            views = await ended(client, *ids, timeout=20)
            sessions = worker.stats.sessions

    assert {(view.state, view.failures, view.lease_losses) for view in views} == {(JobState.SUCCEEDED, 0, 0)}
    assert sessions == 1


async def test_settlements_go_on_while_a_stopping_worker_drains(endpoint: str, client: JobClient) -> None:
    go, begun = asyncio.Event(), asyncio.Event()
    worker = Worker(connection(endpoint), queues={"q": 2}, config=WorkerConfig(session_ttl=10))

    @worker.handler("t")
    async def handle(ctx: Context) -> str:
        begun.set()
        await go.wait()
        return "done"

    run = asyncio.create_task(worker.run())
    await client.submit(JobSpec(queue="q", type="t", job_id="j"))
    async with asyncio.timeout(5):
        await begun.wait()
    worker.stop()
    await client.submit(JobSpec(queue="q", type="t", job_id="late"))
    await asyncio.sleep(0.3)
    late = await client.get("late")
    go.set()
    async with asyncio.timeout(10):
        await run
    done = await client.get("j")

    assert (done.state, late.state) == (JobState.SUCCEEDED, JobState.PENDING)


async def test_a_cancel_reaches_a_handler_of_a_worker_that_drains(endpoint: str, client: JobClient) -> None:
    begun, told = asyncio.Event(), asyncio.Event()
    worker = Worker(connection(endpoint), queues={"q": 2}, config=WorkerConfig(session_ttl=60))

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            told.set()

    run = asyncio.create_task(worker.run())
    await client.submit(JobSpec(queue="q", type="t", job_id="j"))
    async with asyncio.timeout(5):
        await begun.wait()
    worker.stop()
    await eventually(lambda: worker.health().stopping)
    await client.cancel("j")
    async with asyncio.timeout(2):
        await told.wait()
    async with asyncio.timeout(10):
        await run
    assert (await client.get("j")).state is JobState.CANCELLED


async def test_many_short_jobs_are_done_once_each(endpoint: str, client: JobClient) -> None:
    worker = Worker(connection(endpoint), queues={"q": 200}, config=WorkerConfig(session_ttl=10))
    runs = counting(worker)
    ids = [f"j{n:04}" for n in range(2_000)]
    async with working(worker):
        await client.submit_many([JobSpec(queue="q", type="t", job_id=one) for one in ids])
        await eventually(lambda: len(runs) == len(ids), timeout=30)
        stats = worker.stats
    assert {len(attempts) for attempts in runs.values()} == {1}
    assert (stats.claimed, stats.refused, stats.lost) == (2_000, 0, 0)
