"""Operators drain a worker through the service: quiet, claiming again, and ended."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from leasekeeper.v1 import admin_service_pb2 as a
from leasekeeper.v1 import admin_service_pb2_grpc
from tests.support.polling import eventually
from worker_sdk import Context, JobClient, JobSpec, JobState, Worker, WorkerConfig


async def test_a_drained_worker_is_quiet_claims_again_and_ends_with_its_job_done(
    client: JobClient, endpoint: str
) -> None:
    worker = Worker(endpoint, queues={"q": 2}, config=WorkerConfig(session_ttl=2.0, identity="mine"))
    go = asyncio.Event()

    @worker.handler("t")
    async def handle(ctx: Context) -> bytes:
        if ctx.job_id == "long":
            await go.wait()
        return b"done"

    async with asyncio.timeout(60), grpc.aio.insecure_channel(endpoint) as channel:
        admin: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
        run = asyncio.create_task(worker.run())
        await client.submit(JobSpec(queue="q", type="t", job_id="long"))
        await eventually(lambda: worker.health().running == 1, timeout=20)
        [session] = (await admin.ListSessions(a.ListSessionsRequest(), timeout=5)).sessions

        async def drain(**how: Any) -> None:
            request = a.DrainSessionRequest(session_id=session.session_id, **how)
            await admin.DrainSession(request, timeout=5)

        await drain()
        await eventually(lambda: worker.health().stopping, timeout=10)
        await client.submit(JobSpec(queue="q", type="t", job_id="later"))
        await drain(resume=True)
        assert (await client.wait("later", timeout=20)).state is JobState.SUCCEEDED
        assert not worker.health().stopping
        await drain(terminate_after=Duration())
        await eventually(lambda: worker.health().stopping, timeout=10)
        assert not run.done()
        go.set()
        await run
        done = await client.get("long")
    assert (done.state, done.result, done.attempt) == (JobState.SUCCEEDED, b"done", 1)
