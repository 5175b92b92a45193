"""Locks through the SDK, against a coordinator on a real etcd."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from leasekeeper.v1 import lock_service_pb2 as pb
from leasekeeper.v1 import lock_service_pb2_grpc, worker_service_pb2, worker_service_pb2_grpc
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy
from worker_sdk import (
    ClientClosed,
    ConnectionConfig,
    ForkedProcess,
    Lock,
    LockClient,
    LockHeld,
    LockLost,
    LockMode,
    SyncLockClient,
    Timeouts,
    ValidationFailed,
    WrongEventLoop,
)


@pytest.fixture
async def one(endpoint: str) -> AsyncIterator[LockClient]:
    """A client."""
    async with LockClient(endpoint) as made:
        yield made


@pytest.fixture
async def two(endpoint: str) -> AsyncIterator[LockClient]:
    """Another, with a session of its own."""
    async with LockClient(endpoint) as made:
        yield made


async def revoke(endpoint: str, name: str, token: int) -> None:
    """What an operator does."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        request = pb.RevokeLockRequest(request_id="x", name=name, fencing_token=token)
        stub: Any = lock_service_pb2_grpc.LockServiceStub(channel)
        await stub.RevokeLock(request, timeout=10)


def block(seconds: float) -> None:
    """Stop whatever runs in this thread, its event loop included."""
    time.sleep(seconds)


async def test_a_lock_is_held_for_the_block_and_goes_to_the_next_with_a_larger_token(
    one: LockClient, two: LockClient
) -> None:
    async with one.lock("item/42") as lock:
        lock.check()
        assert await two.check_token("item/42", lock.token)
        with pytest.raises(LockHeld):
            async with two.lock("item/42", wait=0):
                pass
    async with two.lock("item/42") as after:
        assert after.token > lock.token
    assert not await two.check_token("item/42", after.token)


async def test_whoever_waits_gets_it_when_it_is_given_back(one: LockClient, two: LockClient) -> None:
    order: list[str] = []

    async def wait() -> None:
        async with two.lock("a", wait=20):
            order.append("two")

    async with one.lock("a"):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.2)
        order.append("one")
    await waiting
    assert order == ["one", "two"]


async def test_a_wait_longer_than_one_call_keeps_its_place(
    one: LockClient, two: LockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of half a second, each taking over from the one before; a later comer stays behind."""
    monkeypatch.setattr("worker_sdk._lock_engine._LONGEST_WAIT", 0.5)
    monkeypatch.setattr("worker_sdk._lock_engine._OVERLAP", 0.2)
    order: list[str] = []

    async def wait(client: LockClient, name: str) -> None:
        async with client.lock("a", wait=None):
            order.append(name)

    async with one.lock("a"):
        first = asyncio.create_task(wait(two, "first"))
        await asyncio.sleep(0.2)
        second = asyncio.create_task(wait(one, "second"))
        for _ in range(8):
            await asyncio.sleep(0.2)
    await asyncio.gather(first, second)
    assert order == ["first", "second"]


async def test_a_wait_outlives_its_session(endpoint: str, one: LockClient, two: LockClient) -> None:
    async def wait() -> int:
        async with two.lock("a", wait=None) as lock:
            lock.check()
            return lock.token

    async with one.lock("a") as held:
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.2)
        assert two._engine._current is not None
        async with grpc.aio.insecure_channel(endpoint) as channel:
            workers: Any = worker_service_pb2_grpc.WorkerServiceStub(channel)
            ended = two._engine._current[1]
            await workers.CloseSession(
                worker_service_pb2.CloseSessionRequest(session_id=ended, request_id="x"), timeout=10
            )
    async with asyncio.timeout(20):
        assert await waiting > held.token
    assert two._engine._current is not None
    assert two._engine._current[1] != ended


async def test_a_holder_that_is_cut_off_knows_before_the_next_one_owns(endpoint: str) -> None:
    async with TcpProxy(endpoint) as proxy, LockClient(endpoint) as two:
        timeouts = Timeouts(attempt=1.0, call=2.0, close=0.5)
        cut = LockClient(ConnectionConfig(endpoints=proxy.endpoint, timeouts=timeouts), ttl=3)
        block = cut.lock("a")
        lock = await block.__aenter__()
        proxy.set_mode(ProxyMode.DROP)
        async with two.lock("a", wait=25) as after:
            assert lock.lost.is_set()
            assert after.token > lock.token
        with pytest.raises(LockLost):
            await block.__aexit__(None, None, None)
        await cut.close()


async def test_several_names_are_had_all_or_none(one: LockClient, two: LockClient) -> None:
    async with one.lock("b"):
        with pytest.raises(LockHeld):
            async with two.lock("a", "b", wait=0):
                pass
        async with one.lock("a", wait=0):
            pass
    async with two.lock("a", "b") as both:
        assert set(both.tokens) == {"a", "b"}


async def test_shared_owners_stand_beside_each_other_and_a_semaphore_counts(
    one: LockClient, two: LockClient
) -> None:
    async with one.lock("s", mode=LockMode.SHARED), two.lock("s", mode=LockMode.SHARED, wait=0):
        pass
    semaphore = {"mode": LockMode.SEMAPHORE, "permits": 2, "wait": 0}
    async with one.lock("n", **semaphore), one.lock("n", **semaphore):  # type: ignore[arg-type]
        with pytest.raises(LockHeld):
            async with two.lock("n", **semaphore):  # type: ignore[arg-type]
                pass


async def test_a_revoked_lock_tells_its_holder_and_the_end_of_the_block_does_too(endpoint: str) -> None:
    async with LockClient(endpoint, ttl=2) as client:
        block = client.lock("a")
        lock = await block.__aenter__()
        await revoke(endpoint, "a", lock.token)
        async with asyncio.timeout(5):
            await lock.lost.wait()
        with pytest.raises(LockLost):
            lock.check()
        with pytest.raises(LockLost) as lost:
            await block.__aexit__(None, None, None)
        assert lost.value.held == lock.token


async def test_an_error_of_the_block_goes_over_the_loss(endpoint: str, one: LockClient) -> None:
    async def work() -> None:
        async with one.lock("a") as lock:
            await revoke(endpoint, "a", lock.token)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    async with one.lock("a", wait=0):
        pass


async def test_a_caller_that_is_cancelled_in_its_wait_leaves_nothing_behind(
    one: LockClient, two: LockClient
) -> None:
    async def wait() -> None:
        async with two.lock("a", wait=20):
            raise AssertionError("it never owns")

    async with one.lock("a"):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with one.lock("a", wait=5):
        pass


async def test_a_caller_that_is_cancelled_as_it_gets_its_lock_gives_it_back_at_once(
    one: LockClient, two: LockClient
) -> None:
    """Wherever the cancel meets the call, its answer on the way included: not after a TTL, which is 10 s."""

    async def hold() -> None:
        async with one.lock("a"):
            await asyncio.Event().wait()

    async with one.lock("warm"):
        pass
    begun = asyncio.get_running_loop().time()
    for number in range(40):
        holding = asyncio.create_task(hold())
        await asyncio.sleep(number * 0.0005)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        async with two.lock("a", wait=5):
            pass
    assert asyncio.get_running_loop().time() - begun < 8.0


async def test_a_blocked_loop_loses_no_lock(endpoint: str) -> None:
    """The coordinator runs on the test's loop, so the client has one of its own, in a thread."""

    def work() -> bool:
        async def hold() -> bool:
            async with LockClient(endpoint, ttl=4) as client, client.lock("a") as lock:
                until = time.monotonic() + 5.0
                while time.monotonic() < until:
                    block(0.1)
                lock.check()
                return True

        return asyncio.run(hold())

    assert await asyncio.to_thread(work)


async def test_the_leader_is_observed_with_its_value_and_token(one: LockClient, two: LockClient) -> None:
    states: list[list[tuple[bytes, int]]] = []

    async def observe() -> None:
        async for owners in two.observe("leader"):
            states[len(states) :] = [[(owner.value, owner.token) for owner in owners]]

    observing = asyncio.create_task(observe())
    await eventually(lambda: states == [[]])
    async with one.lead("leader", b"10.0.0.1:80") as lead:
        await eventually(lambda: states[-1] == [(b"10.0.0.1:80", lead.token)])
    await eventually(lambda: states[-1] == [])
    observing.cancel()
    await asyncio.gather(observing, return_exceptions=True)


async def test_the_blocking_client_is_the_same_without_a_loop(endpoint: str) -> None:
    def work() -> tuple[int, int]:
        with SyncLockClient(endpoint) as client:
            with client.lock("a") as first:
                first.check()
                refused: list[BaseException] = []

                def other() -> None:
                    try:
                        with client.lock("a", wait=0):
                            pass
                    except LockHeld as error:
                        refused.append(error)

                thread = threading.Thread(target=other)
                thread.start()
                thread.join(10)
                assert len(refused) == 1
                assert client.check_token("a", first.token)
            with client.lead("a") as second:
                return first.token, second.token

    first, second = await asyncio.to_thread(work)
    assert second > first


async def test_the_blocking_client_observes_and_closing_ends_whoever_waits(
    endpoint: str, one: LockClient
) -> None:
    client = SyncLockClient(endpoint)
    states: list[list[bytes]] = []
    ends: list[str] = []

    def observe() -> None:
        try:
            for owners in client.observe("leader"):
                states[len(states) :] = [[owner.value for owner in owners]]
        except ClientClosed:
            ends.append("observer")

    def wait() -> None:
        try:
            with client.lock("leader", wait=None):
                raise AssertionError("it never owns")
        except ClientClosed:
            ends.append("waiter")

    threads = [threading.Thread(target=observe), threading.Thread(target=wait)]
    async with one.lead("leader", b"first"):
        threads[0].start()
        await eventually(lambda: states == [[b"first"]])
    await eventually(lambda: states[-1] == [])
    async with one.lead("leader", b"second"):
        await eventually(lambda: states[-1] == [b"second"])
        threads[1].start()
        await asyncio.sleep(0.2)
        await asyncio.to_thread(client.close)
    for thread in threads:
        await asyncio.to_thread(thread.join, 5.0)
    assert sorted(ends) == ["observer", "waiter"]


async def test_the_blocking_client_stops_observing_when_the_loop_is_left(endpoint: str) -> None:
    def work() -> None:
        with SyncLockClient(endpoint) as client:
            for owners in client.observe("a"):
                assert owners == []
                break
            with client.lock("a"):
                pass

    await asyncio.to_thread(work)


async def test_the_blocking_client_says_when_it_is_closed_and_what_is_malformed(endpoint: str) -> None:
    def work() -> None:
        client = SyncLockClient(endpoint)
        with pytest.raises(ValidationFailed), client.lock("a", "a"):
            pass
        client.close()
        client.close()
        with pytest.raises(ClientClosed), client.lock("a"):
            pass

    await asyncio.to_thread(work)


async def test_closing_loses_what_is_held_and_frees_it_at_once(endpoint: str, two: LockClient) -> None:
    client = LockClient(endpoint)
    block = client.lock("a")
    lock: Lock = await block.__aenter__()
    await client.close()
    with pytest.raises(LockLost):
        lock.check()
    async with two.lock("a", wait=5):
        pass
    with pytest.raises(LockLost):
        await block.__aexit__(None, None, None)
    with pytest.raises(ClientClosed):
        async with client.lock("a"):
            pass


async def test_another_event_loop_is_refused(one: LockClient) -> None:
    async def use() -> None:
        async with one.lock("a"):
            pass

    async with one.lock("b"):
        with pytest.raises(WrongEventLoop):
            await asyncio.to_thread(lambda: asyncio.run(use()))


async def test_a_forked_child_holds_no_lock(one: LockClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async with one.lock("a") as lock:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 1)
            with pytest.raises(ForkedProcess):
                lock.check()
            with pytest.raises(ForkedProcess):
                await one.check_token("a", lock.token)
        lock.check()
