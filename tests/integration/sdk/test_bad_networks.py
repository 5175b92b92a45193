"""Broken connections and restarted coordinators between the SDK and a real coordinator on etcd."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from coordinator.app import running_coordinator
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


async def test_001_a_claim_whose_reply_never_came_is_claimed_again_as_the_same_attempt(
    endpoint: str, client: JobClient
) -> None:
    async with TcpProxy(endpoint) as proxy:
        config = WorkerConfig(session_ttl=10, transport="poll")
        worker = Worker(connection(proxy.endpoint), queues={"q": 1}, config=config)
        runs = counting(worker)
        async with working(worker):
            # Old enough to have reached the coordinator: through half a line it could not connect.
            await eventually(lambda: (worker.health().oldest_poll or 0.0) > 0.5)
            proxy.set_mode(ProxyMode.HALF_DROP)
            await client.submit(JobSpec(queue="q", type="t", job_id="j"))

            async def claimed() -> bool:
                return (await client.get("j")).state is JobState.RUNNING

            await eventually(claimed)
            token = (await client.get("j")).fencing_token
            proxy.set_mode(ProxyMode.PASS)
            done = await client.wait("j", timeout=10)
    assert runs == {"j": [1]}
    assert (done.state, done.attempt, done.uncharged, done.fencing_token) == (JobState.SUCCEEDED, 1, 0, token)


async def test_037_a_cut_line_costs_neither_claim_nor_session(endpoint: str, client: JobClient) -> None:
    go = asyncio.Event()
    async with TcpProxy(endpoint) as proxy:
        worker = Worker(connection(proxy.endpoint), queues={"q": 1}, config=WorkerConfig(session_ttl=4))

        @worker.handler("t")
        async def handle(ctx: Context) -> int:
            await go.wait()
            ctx.check()
            return ctx.attempt

        async with working(worker):
            await client.submit(JobSpec(queue="q", type="t", job_id="j"))
            await eventually(lambda: worker.stats.claimed == 1)
            for mode, length in ((ProxyMode.RESET, 0.5), (ProxyMode.DELAY, 0.5), (ProxyMode.DROP, 1.0)):
                proxy.set_mode(mode)
                until = time.monotonic() + length
                await eventually(lambda until=until: time.monotonic() > until)
                proxy.set_mode(ProxyMode.PASS)
                await eventually(lambda: worker.health().session_safe_for > 2.2, timeout=8)
            go.set()
            done = await client.wait("j", timeout=10)
    assert done.result == b"1"
    assert worker.stats.sessions == 1


async def test_007_a_submit_over_a_line_that_breaks_stores_each_job_once(
    endpoint: str, client: JobClient
) -> None:
    async with TcpProxy(endpoint) as proxy, JobClient(connection(proxy.endpoint)) as broken:
        await broken.submit(JobSpec(queue="q", type="t", job_id="first"))
        for n in range(5):
            proxy.set_mode(ProxyMode.HALF_DROP)
            submitting = asyncio.create_task(broken.submit(JobSpec(queue="q", type="t"), request_id=f"r{n}"))
            await asyncio.sleep(0.1)
            proxy.set_mode(ProxyMode.PASS)
            submitted = await submitting
            assert (await client.get(submitted.job_id)).state is JobState.PENDING
        assert len([job async for job in client.list(queue="q")]) == 6


async def test_131_every_call_over_a_dead_line_ends_by_its_deadline(endpoint: str) -> None:
    async with TcpProxy(endpoint) as proxy, JobClient(connection(proxy.endpoint)) as client:
        await client.submit(JobSpec(queue="q", type="t", job_id="j"))
        proxy.set_mode(ProxyMode.DROP)
        began = time.monotonic()
        calls = (
            client.submit(JobSpec(queue="q", type="t"), timeout=0.5),
            client.submit_many([JobSpec(queue="q", type="t")], timeout=0.5),
            client.get("j", timeout=0.5),
            client.wait("j", timeout=0.5),
            client.cancel("j", timeout=0.5),
            client.delete("j", timeout=0.5),
            client.update("j", priority=1, timeout=0.5),
            anext(client.list(timeout=0.5)),
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < 0.5 + 2.0
        assert all(isinstance(result, Exception) for result in results), results


async def test_133_coordinators_that_restart_one_after_the_other_lose_and_double_nothing(
    etcd_server: EtcdProcess,
) -> None:
    root = f"/test-{uuid.uuid4().hex[:12]}"

    def settings(listen: str) -> Settings:
        return Settings(
            server=ServerSettings(listen=listen, grace_s=2.0),
            etcd=EtcdSettings(endpoints=etcd_server.endpoint, root=root, allow_unsafe=True),
        )

    async with AsyncExitStack() as one, AsyncExitStack() as two:
        stacks = {0: one, 1: two}
        addresses = [
            await stack.enter_async_context(running_coordinator(settings("127.0.0.1:0")))
            for stack in stacks.values()
        ]
        endpoints = ",".join(addresses)
        worker = Worker(connection(endpoints), queues={"q": 8}, config=WorkerConfig(session_ttl=10))
        runs = counting(worker)
        async with JobClient(connection(endpoints)) as client, working(worker):
            submitted = 0
            for round_ in range(4):
                turn = round_ % 2
                stopping = asyncio.create_task(stacks[turn].aclose())
                for _ in range(25):
                    await client.submit(JobSpec(queue="q", type="t", job_id=f"j{submitted}"))
                    submitted += 1
                await stopping
                stacks[turn] = AsyncExitStack()
                await stacks[turn].enter_async_context(running_coordinator(settings(addresses[turn])))
            for n in range(submitted):
                assert (await client.wait(f"j{n}", timeout=15)).state is JobState.SUCCEEDED
        await stacks[0].aclose()
        await stacks[1].aclose()
    assert sorted(runs) == sorted(f"j{n}" for n in range(submitted))
    assert [job for job, attempts in runs.items() if len(attempts) > 1] == []
    assert worker.stats.sessions == 1
