"""The implementations that must behave alike: over etcd, and in memory (what the services' tests run on)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coordinator.app.machine import SystemClock
from tests.conformance.actor import Actor
from tests.integration.store.conftest import HarnessFactory, make_harness, store_root
from tests.support.memory_etcd import MemoryEtcd
from tests.support.memory_job_store import MemoryJobStore, MemorySessionStore

__all__ = ["actor", "make_harness", "store_root"]


@pytest.fixture(params=["memory", "etcd"])
async def actor(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Actor]:
    """Somebody who acts on one of the implementations."""
    if request.param == "memory":
        clock = SystemClock()
        etcd = MemoryEtcd(clock)
        yield Actor(
            jobs=MemoryJobStore(etcd),
            sessions=MemorySessionStore(etcd),
            clock=clock,
            namespace=namespace,
        )
        return
    make: HarnessFactory = request.getfixturevalue("make_harness")
    async with make() as harness:
        yield harness
