"""A coordinator on real etcd, with stubs, for each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from leasekeeper.v1 import job_service_pb2_grpc, worker_service_pb2_grpc

from coordinator.app import running_coordinator
from coordinator.config import EtcdSettings, ServerSettings, Settings
from coordinator.embedded.etcd_process import EtcdProcess


@dataclass
class Api:
    """Stubs of one coordinator."""

    address: str
    channel: grpc.aio.Channel
    jobs: Any
    workers: Any


def settings_for(etcd: EtcdProcess, root: str) -> Settings:
    """Settings of a coordinator with keys of its own, on a free port."""
    return Settings(
        server=ServerSettings(listen="127.0.0.1:0"),
        etcd=EtcdSettings(endpoints=etcd.endpoint, root=root, allow_unsafe=True),
    )


@pytest.fixture
def settings(etcd_server: EtcdProcess) -> Settings:
    """Settings of this test's coordinator."""
    return settings_for(etcd_server, f"/test-{uuid.uuid4().hex[:12]}")


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Api]:
    """A coordinator that serves, and a channel to it."""
    async with running_coordinator(settings) as address, grpc.aio.insecure_channel(address) as channel:
        yield Api(
            address,
            channel,
            job_service_pb2_grpc.JobServiceStub(channel),
            worker_service_pb2_grpc.WorkerServiceStub(channel),
        )
