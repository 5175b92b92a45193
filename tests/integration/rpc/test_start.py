"""A coordinator waits for its store, whatever keeps it away."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import pytest

from coordinator.app.coordinator import Coordinator
from coordinator.config import ServerSettings
from coordinator.embedded.child_process import free_ports
from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import job_service_pb2 as jobs_pb
from leasekeeper.v1.job_service_pb2_grpc import JobServiceStub
from tests.integration.etcd.test_login import etcdctl
from tests.integration.rpc.conftest import settings_for
from tests.support.polling import eventually
from tests.support.services import EtcdFactory

ROOT = "--user=root:secret"


@pytest.fixture
async def etcd(etcd_factory: EtcdFactory) -> EtcdProcess:
    server = await asyncio.to_thread(etcd_factory)
    await asyncio.to_thread(etcdctl, server, "user", "add", "root:secret")
    await asyncio.to_thread(etcdctl, server, "user", "grant-role", "root", "root")
    return server


async def test_a_store_that_refuses_us_is_waited_for_at_the_start_and_later(etcd: EtcdProcess) -> None:
    """An operator turned access control on and forgot us: all goes on once that is mended."""
    await asyncio.to_thread(etcdctl, etcd, "auth", "enable")
    [port] = free_ports(1)
    settings = settings_for(etcd, "/start")
    coordinator = Coordinator(replace(settings, server=ServerSettings(listen=f"127.0.0.1:{port}")))
    async with asyncio.TaskGroup() as tasks, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        tasks.create_task(coordinator.run())
        jobs = JobServiceStub(channel)

        async def answer() -> str:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await jobs.GetJob(jobs_pb.GetJobRequest(job_id="none"), timeout=2)
            return refused.value.code().name

        async def says(code: str) -> bool:
            return await answer() == code

        assert await answer() == "UNAVAILABLE"
        await asyncio.to_thread(etcdctl, etcd, ROOT, "auth", "disable")
        await eventually(lambda: says("NOT_FOUND"), timeout=15)
        await asyncio.to_thread(etcdctl, etcd, "auth", "enable")
        await eventually(lambda: says("UNAVAILABLE"), timeout=15)
        await asyncio.to_thread(etcdctl, etcd, ROOT, "auth", "disable")
        await eventually(lambda: says("NOT_FOUND"), timeout=15)
        coordinator.stop()
