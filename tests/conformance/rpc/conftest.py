"""The two that must answer alike: the service on real etcd, and the fake of `worker_sdk.testing`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from coordinator.app import running_coordinator
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdClient, EtcdConfig
from tests.conformance.rpc.subject import Subject
from tests.integration.rpc.conftest import settings_for
from worker_sdk.testing import FakeCoordinator


@asynccontextmanager
async def service(etcd: EtcdProcess) -> AsyncIterator[Subject]:
    """A coordinator with keys of its own on etcd."""
    settings = settings_for(etcd, f"/test-{uuid.uuid4().hex[:12]}")

    async def end_session(session_id: str) -> None:
        async with EtcdClient(EtcdConfig(endpoints=settings.etcd.endpoint_list)) as client:
            await client.lease_revoke(int(session_id, 16), timeout=5)

    async with running_coordinator(settings) as address, grpc.aio.insecure_channel(address) as channel:
        yield Subject.on("service", channel, asyncio.sleep, end_session)


@asynccontextmanager
async def fake() -> AsyncIterator[Subject]:
    """The fake, whose time passes at a word."""
    with FakeCoordinator() as coordinator:

        async def pass_time(seconds: float) -> None:
            coordinator.advance(seconds)

        async def end_session(session_id: str) -> None:
            coordinator.expire_session(session_id)

        async with grpc.aio.insecure_channel(coordinator.endpoint) as channel:
            yield Subject.on("fake", channel, pass_time, end_session)


@pytest.fixture(params=["fake", "service"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """One of them."""
    if request.param == "fake":
        async with fake() as made:
            yield made
    else:
        async with service(request.getfixturevalue("etcd_server")) as made:
            yield made


@pytest.fixture
async def both(etcd_server: EtcdProcess) -> AsyncIterator[tuple[Subject, Subject]]:
    """The fake and the service."""
    async with fake() as one, service(etcd_server) as other:
        yield one, other
