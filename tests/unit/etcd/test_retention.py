"""Retention buckets: when one closes, when the next is granted, what happens if none can be had."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from coordinator.errors import DeadlinePassed, EtcdUnavailable, NotApplied
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.retention import RetentionBuckets, RetentionConfig
from leasekeeper.internal.etcd.v1.kv_pb2 import PutResponse
from leasekeeper.internal.etcd.v1.lease_pb2 import LeaseGrantResponse
from tests.support.clock import SteppingClock


class FakeClient:
    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.down = False
        self.hangs: asyncio.Event | None = None

    async def lease_grant(self, ttl: int, lease_id: int = 0, *, timeout: float) -> LeaseGrantResponse:
        if self.hangs is not None:
            await self.hangs.wait()
        if self.down:
            raise EtcdUnavailable("down")
        return LeaseGrantResponse(id=next(self.ids), ttl=ttl)

    async def put(self, key: bytes, value: bytes, *, lease: int, timeout: float) -> PutResponse:
        return PutResponse()


class Bench:
    def __init__(self) -> None:
        self.client = FakeClient()
        self.clock = SteppingClock()
        config = RetentionConfig(max_keys=10, open_for=60.0)
        self.buckets = RetentionBuckets(self.client, KeySpace("/r"), config, self.clock)  # type: ignore[arg-type]

    async def ensure(self, namespace: str = "default") -> None:
        await self.buckets.ensure(namespace, deadline=self.clock.monotonic() + 5)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    running = asyncio.create_task(made.buckets.run())
    await made.settle()
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_there_is_none_before_it_was_asked_for(bench: Bench) -> None:
    assert bench.buckets.take("default", 1) == 0
    await bench.ensure()
    assert bench.buckets.take("default", 1) == 1
    assert bench.buckets.take("other", 1) == 0


async def test_the_next_is_granted_while_one_fills_and_taken_when_it_is_full(bench: Bench) -> None:
    await bench.ensure()
    leases = []
    for _ in range(25):
        leases.append(bench.buckets.take("default", 1))
        await bench.settle()
    assert leases == [1] * 10 + [2] * 10 + [3] * 5


async def test_one_closes_after_its_time_and_the_next_was_granted_shortly_before(bench: Bench) -> None:
    await bench.ensure()
    await bench.clock.advance(50)
    assert bench.buckets.take("default", 1) == 1
    await bench.settle()
    await bench.clock.advance(20)
    assert bench.buckets.take("default", 1) == 2
    await bench.clock.advance(41)  # the second one was granted at 50 s
    assert bench.buckets.take("default", 1) == 0


async def test_a_dead_one_is_not_used_again(bench: Bench) -> None:
    await bench.ensure()
    bench.buckets.take("default", 6)
    await bench.settle()
    bench.buckets.dead("default", 1)
    assert bench.buckets.take("default", 1) == 2
    bench.buckets.dead("default", 2)
    bench.buckets.dead("unheard-of", 2)
    assert bench.buckets.take("default", 1) == 0


async def test_many_wait_for_one_grant(bench: Bench) -> None:
    await asyncio.gather(*(bench.ensure() for _ in range(20)))
    assert bench.buckets.granted == 1


async def test_those_who_wait_hear_that_none_can_be_had(bench: Bench) -> None:
    bench.client.down = True
    with pytest.raises(NotApplied):
        await bench.ensure()
    bench.client.down = False
    await bench.ensure()
    assert bench.buckets.take("default", 1) == 1


async def test_nobody_waits_past_the_deadline(bench: Bench) -> None:
    bench.client.hangs = asyncio.Event()
    with pytest.raises(DeadlinePassed):
        await bench.buckets.ensure("default", deadline=bench.clock.monotonic() + 0.02)
    bench.client.hangs.set()
    await bench.settle()
    assert bench.buckets.take("default", 1) == 1


async def test_a_closed_store_grants_nothing() -> None:
    bench = Bench()
    with pytest.raises(NotApplied):
        await bench.ensure()
