"""LockService on real etcd, through two coordinators."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.app import running_coordinator
from coordinator.config import EtcdSettings, ServerSettings, Settings
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.keys import KeySpace
from leasekeeper.v1 import lock_service_pb2 as pb
from leasekeeper.v1 import lock_service_pb2_grpc, types_pb2, worker_service_pb2_grpc
from leasekeeper.v1 import worker_service_pb2 as w
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy
from tests.unit.rpc.fakes import Told, refusal

SHARED, SEMAPHORE = types_pb2.LOCK_MODE_SHARED, types_pb2.LOCK_MODE_SEMAPHORE


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


@asynccontextmanager
async def running_side(settings: Settings) -> AsyncIterator[Side]:
    """A coordinator, and a channel to it."""
    async with running_coordinator(settings) as address, grpc.aio.insecure_channel(address) as channel:
        yield Side(
            lock_service_pb2_grpc.LockServiceStub(channel),
            worker_service_pb2_grpc.WorkerServiceStub(channel),
        )


@pytest.fixture
async def sides(settings: Settings) -> AsyncIterator[tuple[Side, Side]]:
    """Two coordinators on one etcd."""
    async with running_side(settings) as one, running_side(settings) as two:
        yield one, two


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


@pytest.fixture
async def cut_off(etcd_server: EtcdProcess) -> AsyncIterator[tuple[Side, Side, TcpProxy]]:
    """Two coordinators; the path of the second one to etcd can be hurt."""
    root = f"/test-{uuid.uuid4().hex[:12]}"
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(TcpProxy(etcd_server.endpoint))
        made = []
        for endpoint in (etcd_server.endpoint, proxy.endpoint):
            settings = Settings(
                server=ServerSettings(listen="127.0.0.1:0"),
                etcd=EtcdSettings(endpoints=endpoint, root=root, allow_unsafe=True),
            )
            made.append(await stack.enter_async_context(running_side(settings)))
        yield made[0], made[1], proxy


async def test_a_wait_outlives_a_cut_and_owns_once_the_coordinator_is_back(
    cut_off: tuple[Side, Side, TcpProxy],
) -> None:
    one, two, proxy = cut_off
    a, b = await one.open(60), await one.open(60)
    [held] = await one.take(a, "l")
    waiting = asyncio.ensure_future(two.take(b, "l", wait=30))
    await eventually(lambda: _waiters(one, "l", 1))
    proxy.set_mode(ProxyMode.DROP)
    await one.give(a, [held])
    [owner] = (await one.get("l")).owners
    assert owner.session_id == b, "it owns; its coordinator cannot know"
    assert not waiting.done()
    proxy.set_mode(ProxyMode.PASS)
    assert (await waiting)[0].fencing_token == owner.fencing_token


async def test_a_wait_that_ends_in_a_cut_leaves_the_line_when_it_is_over(
    cut_off: tuple[Side, Side, TcpProxy],
) -> None:
    one, two, proxy = cut_off
    a, b = await one.open(60), await one.open(60)
    await one.take(a, "l")
    waiting = asyncio.ensure_future(refused(two.take(b, "l", wait=1)))
    await eventually(lambda: _waiters(one, "l", 1))
    proxy.set_mode(ProxyMode.DROP)
    assert (await waiting).reason == "LOCK_HELD"
    assert await _waiters(one, "l", 1)
    proxy.set_mode(ProxyMode.PASS)
    await eventually(lambda: _waiters(one, "l", 0), timeout=15)


async def test_a_repeat_at_another_coordinator_keeps_the_place(
    sides: tuple[Side, Side], settings: Settings
) -> None:
    one, two = sides
    a, b, c = await one.open(), await one.open(), await one.open()
    [held] = await one.take(a, "l")
    first = asyncio.ensure_future(one.take(b, "l", wait=20, request_id="same"))
    await eventually(lambda: _waiters(one, "l", 1))
    later = asyncio.ensure_future(one.take(c, "l", wait=20))
    await eventually(lambda: _waiters(one, "l", 2))
    again = asyncio.ensure_future(two.take(b, "l", wait=20, request_id="same", repeats=1))
    place = (await one.get("l")).waiters[0].fencing_token

    span = KeySpace(settings.etcd.root).namespace("default").lock_entries("l")
    etcd = EtcdClient(EtcdConfig(endpoints=(settings.etcd.endpoints,)))

    async def adopted() -> bool:
        kvs = (await etcd.range(span.start, span.end, timeout=5)).kvs
        return any(kv.mod_revision > kv.create_revision for kv in kvs)

    await eventually(adopted)
    await etcd.close()
    first.cancel()
    await one.give(a, [held])
    [own] = await again
    assert own.fencing_token == place
    assert not later.done()
    await two.give(b, [own])
    assert (await later)[0].fencing_token > place
