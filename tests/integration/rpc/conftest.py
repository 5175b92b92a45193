"""A coordinator on real etcd, with stubs, for each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.app import running_coordinator
from coordinator.config import EtcdSettings, ServerSettings, Settings
from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import job_service_pb2_grpc, worker_service_pb2_grpc
from leasekeeper.v1 import worker_service_pb2 as workers_pb
from tests.unit.rpc import builders


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


@dataclass(frozen=True)
class OpenedWorker:
    """A session, and the calls that a worker makes."""

    api: Api
    session_id: str

    async def claim(self, *, max_jobs: int = 10, wait: float = 0, **more: Any) -> list[Any]:
        """Claims of queue "mail", type "send"."""
        request = builders.claim_jobs(
            session_id=self.session_id,
            request_id=uuid.uuid4().hex,
            max_jobs=max_jobs,
            wait=Duration(nanos=round(wait * 1e9)) if wait < 1 else Duration(seconds=round(wait)),
            **more,
        )
        return list((await self.api.workers.ClaimJobs(request, timeout=10)).claims)

    async def beat(self, number: int, *claims: Any) -> Any:
        """A heartbeat that lists *claims*."""
        held = [
            workers_pb.HeldClaim(job_id=claim.job_id, fencing_token=claim.fencing_token, sequence=number)
            for claim in claims
        ]
        request = builders.heartbeat(
            session_id=self.session_id, number=number, sent_at=Duration(seconds=number), claims=held
        )
        return await self.api.workers.Heartbeat(request, timeout=5)


@pytest.fixture
async def worker(api: Api) -> OpenedWorker:
    """An open session."""
    return await open_worker(api)


async def open_worker(api: Api, **changes: Any) -> OpenedWorker:
    """Open one more session."""
    request = builders.open_session(**({"request_id": uuid.uuid4().hex} | changes))
    opened = await api.workers.OpenSession(request, timeout=5)
    return OpenedWorker(api, opened.session_id)
