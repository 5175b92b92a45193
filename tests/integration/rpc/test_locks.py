"""LockService on real etcd, through two coordinators."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.app import running_coordinator
from coordinator.config import Settings
from leasekeeper.v1 import lock_service_pb2 as pb
from leasekeeper.v1 import lock_service_pb2_grpc, worker_service_pb2_grpc
from leasekeeper.v1 import worker_service_pb2 as w
from tests.support.polling import eventually
from tests.unit.rpc.fakes import Told, refusal

SHARED, SEMAPHORE = pb.LOCK_MODE_SHARED, pb.LOCK_MODE_SEMAPHORE


@dataclass
class Side:
    """One coordinator's stubs."""

    locks: Any
    workers: Any

    async def open(self, ttl: int = 10) -> str:
        request = w.OpenSessionRequest(request_id=uuid.uuid4().hex, ttl=Duration(seconds=ttl))
        opened = await self.workers.OpenSession(request, timeout=5)
        return str(opened.session_id)

    async def take(self, session: str, *names: str, wait: float = 0, **more: Any) -> list[pb.HeldLock]:
        request = pb.AcquireLockRequest(
            session_id=session,
            names=names,
            wait=Duration(seconds=int(wait), nanos=int(wait % 1 * 1e9)),
            **{"request_id": uuid.uuid4().hex} | more,
        )
        return list((await self.locks.AcquireLock(request, timeout=wait + 10)).locks)

    async def give(self, session: str, locks: list[pb.HeldLock], **more: Any) -> int:
        request = pb.ReleaseLockRequest(session_id=session, locks=locks, **more)
        return int((await self.locks.ReleaseLock(request, timeout=5)).released)

    async def get(self, name: str) -> pb.Lock:
        return (await self.locks.GetLock(pb.GetLockRequest(name=name), timeout=5)).lock  # type: ignore[no-any-return]

    async def close(self, session: str) -> None:
        await self.workers.CloseSession(w.CloseSessionRequest(session_id=session), timeout=5)


@pytest.fixture
async def sides(settings: Settings) -> AsyncIterator[tuple[Side, Side]]:
    """Two coordinators on one etcd."""
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(2):
            address = await stack.enter_async_context(running_coordinator(settings))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            made.append(
                Side(
                    lock_service_pb2_grpc.LockServiceStub(channel),
                    worker_service_pb2_grpc.WorkerServiceStub(channel),
                )
            )
        yield made[0], made[1]


async def refused(awaitable: Any) -> Told:
    return await refusal(awaitable)


async def test_a_lock_goes_from_one_to_the_next_with_a_higher_token(sides: tuple[Side, Side]) -> None:
    one, two = sides
    a, b = await one.open(), await two.open()
    [first] = await one.take(a, "item/42", value=b"a")
    held = await refused(two.take(b, "item/42"))
    assert (held.code, held.reason) == (grpc.StatusCode.ABORTED, "LOCK_HELD")
    assert held.metadata == {"name": "item/42", "holder": a, "token": str(first.fencing_token)}
    assert held.retry_ms
    waiting = asyncio.ensure_future(two.take(b, "item/42", wait=10))
    await eventually(lambda: _waiters(one, "item/42", 1))
    assert await one.give(a, [first]) == 1
    [second] = await waiting
    assert second.fencing_token > first.fencing_token
    lost = await refused(one.give(a, [first]))
    assert (lost.code, lost.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LOCK_LOST")
    assert lost.metadata == {
        "name": "item/42",
        "held": str(first.fencing_token),
        "current": str(second.fencing_token),
    }
    assert await one.give(a, [first], repeat=True) == 0
    [owner] = (await one.get("item/42")).owners
    assert (owner.session_id, owner.fencing_token) == (b, second.fencing_token)


async def _waiters(side: Side, name: str, count: int) -> bool:
    return len((await side.get(name)).waiters) == count


async def test_a_session_s_end_hands_over_and_its_locks_are_lost(sides: tuple[Side, Side]) -> None:
    one, two = sides
    a, b = await one.open(), await two.open()
    [mine] = await one.take(a, "l")
    waiting = asyncio.ensure_future(two.take(b, "l", wait=10))
    await eventually(lambda: _waiters(one, "l", 1))
    await one.close(a)
    assert (await waiting)[0].fencing_token > mine.fencing_token
    assert (await refused(one.give(a, [mine], repeat=True))).reason == "LOCK_LOST"


async def test_a_caller_that_hangs_up_leaves_the_line(sides: tuple[Side, Side]) -> None:
    one, two = sides
    a, b = await one.open(), await two.open()
    await one.take(a, "l")
    waiting = asyncio.ensure_future(two.take(b, "l", wait=20))
    await eventually(lambda: _waiters(one, "l", 1))
    waiting.cancel()
    await eventually(lambda: _waiters(one, "l", 0))
    short = await refused(two.take(b, "l", wait=0.2))
    assert short.reason == "LOCK_HELD"
    assert await _waiters(one, "l", 0)


async def test_check_and_revoke_by_token(sides: tuple[Side, Side]) -> None:
    one, two = sides
    a, b = await one.open(), await two.open()
    [r1] = await one.take(a, "l", mode=SHARED)
    [r2] = await two.take(b, "l", mode=SHARED)

    async def check(token: int) -> tuple[bool, int]:
        answer = await two.locks.CheckToken(pb.CheckTokenRequest(name="l", fencing_token=token), timeout=5)
        return answer.current, answer.largest

    assert await check(r1.fencing_token) == (True, r2.fencing_token)
    revoke = pb.RevokeLockRequest(name="l", fencing_token=r2.fencing_token, reason="stuck")
    assert (await one.locks.RevokeLock(revoke, timeout=5)).session_id == b
    assert await check(r2.fencing_token) == (False, r1.fencing_token)
    assert (await refused(one.locks.RevokeLock(revoke, timeout=5))).reason == "LOCK_LOST"
    future = await refused(check(r2.fencing_token + (1 << 30)))
    assert future.reason == "EPOCH_REGRESSED"


async def test_semaphores_and_lists(sides: tuple[Side, Side]) -> None:
    one, two = sides
    a, b = await one.open(), await two.open()
    await one.take(a, "s", mode=SEMAPHORE, permits=2)
    await two.take(b, "s", mode=SEMAPHORE, permits=2)
    assert (await refused(two.take(b, "s", mode=SEMAPHORE, permits=3))).reason == "PERMITS_MISMATCH"
    await one.take(a, "x", "y")

    async def pages() -> list[pb.ListLocksResponse]:
        answers: list[pb.ListLocksResponse] = []
        while not answers or (answers[-1].next_page_token and len(answers) < 9):
            token = answers[-1].next_page_token if answers else ""
            request = pb.ListLocksRequest(page_size=1, page_token=token)
            answers.append(await two.locks.ListLocks(request, timeout=5))
        return answers

    async def all_are_listed() -> bool:
        return [[(lock.name, len(lock.owners)) for lock in page.locks] for page in await pages()] == [
            [("s", 2)],
            [("x", 1)],
            [("y", 1)],
        ]

    await eventually(all_are_listed)


async def test_observers_see_each_leader_s_value(sides: tuple[Side, Side]) -> None:
    one, two = sides
    a, b = await one.open(), await two.open()
    seen: list[list[bytes]] = []
    stream = two.locks.ObserveLock(pb.ObserveLockRequest(name="leader"))

    async def follow() -> None:
        async for message in stream:
            owners = message.lock.owners
            seen.append([owner.value for owner in owners])

    following = asyncio.ensure_future(follow())
    await eventually(lambda: seen == [[]])
    [led] = await one.take(a, "leader", value=b"a")
    await eventually(lambda: seen[-1] == [b"a"])
    second = asyncio.ensure_future(one.take(b, "leader", value=b"b", wait=10))
    await eventually(lambda: _waiters(one, "leader", 1))
    await one.give(a, [led])
    await second
    await eventually(lambda: seen[-1] == [b"b"])
    await one.close(b)
    await eventually(lambda: seen[-1] == [])
    stream.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_bad_input_names_its_fields(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    a = await one.open()
    bad = await refused(one.take(a, "x", "x", "", mode=SEMAPHORE, permits=0, value=b"v" * 1025, wait=0))
    assert bad.reason == "VALIDATION_FAILED"
    assert bad.fields == ["names[1]", "names[2]", "permits", "value"]
    odd = pb.ReleaseLockRequest(session_id=a, locks=[pb.HeldLock(name="x")])
    assert (await refused(one.locks.ReleaseLock(odd, timeout=5))).fields == ["locks[0].fencing_token"]


@dataclass
class Sink:
    """What a lock guards: a store that compares tokens, and one that counts who is inside."""

    highest: dict[str, int] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    order: dict[str, list[int]] = field(default_factory=dict)

    def enter(self, lock: pb.HeldLock) -> None:
        assert lock.fencing_token > self.highest.get(lock.name, 0), "tokens grow with each owner"
        self.highest[lock.name] = lock.fencing_token
        self.inside[lock.name] = self.inside.get(lock.name, 0) + 1
        assert self.inside[lock.name] == 1, "one owner at a time"
        self.order.setdefault(lock.name, []).append(lock.fencing_token)

    def leave(self, lock: pb.HeldLock) -> None:
        self.inside[lock.name] -= 1


async def test_nobody_meets_inside_and_nobody_is_forgotten_over_two_coordinators(
    sides: tuple[Side, Side],
) -> None:
    sink = Sink()

    async def worker(number: int) -> None:
        side = sides[number % 2]
        session = await side.open()
        for round_ in range(10):
            names = [("x",), ("y",), ("x", "y"), ("y", "x")][(number + round_) % 4]
            locks = await side.take(session, *names, wait=30)
            for lock in locks:
                sink.enter(lock)
            await asyncio.sleep(0)
            for lock in locks:
                sink.leave(lock)
            assert await side.give(session, locks) == len(locks)

    async with asyncio.timeout(60):
        await asyncio.gather(*(worker(number) for number in range(12)))
    assert sum(map(len, sink.order.values())) == 12 * 10 * 3 // 2
    assert not (await sides[0].get("x")).owners
