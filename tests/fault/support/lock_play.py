"""Callers that take, hold, give up and lose locks at random, and what they were told."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from coordinator.core.fencing import split_token
from coordinator.core.lock_order import LockEntry, LockMode
from coordinator.errors import KeyFormatError
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.lock_codec import decode_lock
from leasekeeper.v1 import lock_service_pb2, types_pb2, worker_service_pb2
from leasekeeper.v1.lock_service_pb2_grpc import LockServiceStub
from leasekeeper.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fault.support.history import History
from tests.fault.support.lock_judge import LockHistory, Sink, Told
from worker_sdk import LeasekeeperError, Lock, LockClient
from worker_sdk import LockMode as Mode

__all__ = ["LockPlay", "entries_in"]

NAMES = {
    "one": (LockMode.EXCLUSIVE, 1),
    "two": (LockMode.EXCLUSIVE, 1),
    "few": (LockMode.SEMAPHORE, 2),
    "mixed": (None, 1),
}
"""Locks and how they are used; None: exclusive or shared, as it falls."""

_TTL = 2.0
_WAIT = 40.0


class LockPlay:
    """Clients of several coordinators, each with a few callers.

    Args:
        endpoints: of the coordinators.
        namespace: of all calls.
        client: of etcd, for how far it has come.
        seed: decides what is done.
    """

    def __init__(self, endpoints: Sequence[str], namespace: str, client: EtcdClient, seed: int) -> None:
        self._endpoints = endpoints
        self._namespace = namespace
        self._client = client
        self._chance = random.Random(seed)
        self._space = KeySpace()
        self.sink = Sink()
        self.told: list[Told] = []
        self.owned = 0
        self.refusals: list[str] = []

    async def run(self, rounds: int, *, clients: int = 4, callers: int = 3) -> None:
        """Play so many rounds; every one of them has to come to an end.

        Raises:
            TimeoutError: somebody was never woken.
        """
        left = iter(range(rounds))
        async with asyncio.timeout(60 + rounds), AsyncExitStack() as stack:
            made = []
            for n in range(clients):
                order = [*self._endpoints[n % len(self._endpoints) :], *self._endpoints]
                endpoints = ",".join(dict.fromkeys(order))
                client = LockClient(endpoints, namespace=self._namespace, ttl=_TTL)
                made.append(await stack.enter_async_context(client))
            async with asyncio.TaskGroup() as tasks:
                for client in made:
                    for _ in range(callers):
                        tasks.create_task(self._caller(client, left))

    async def _caller(self, client: LockClient, left: Any) -> None:
        for _ in left:
            lot = self._chance.random()
            try:
                if lot < 0.04:
                    await self._die_holding()
                elif lot < 0.20:
                    await self._give_up(client)
                else:
                    await self._hold(client)
            except LeasekeeperError as error:
                self.refusals.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.05)

    def _wish(self) -> tuple[str, LockMode, int]:
        name = self._chance.choice(sorted(NAMES))
        mode, permits = NAMES[name]
        return name, mode or self._chance.choice([LockMode.EXCLUSIVE, LockMode.SHARED]), permits

    async def _hold(self, client: LockClient) -> None:
        name, mode, permits = self._wish()
        size = permits if mode is LockMode.SEMAPHORE else 0
        async with client.lock(name, mode=Mode(mode), permits=size, wait=_WAIT) as lock:
            await self._work(lock, name, mode, permits)

    async def _work(self, lock: Lock, name: str, mode: LockMode, permits: int) -> None:
        self.owned += 1
        # Without an await between check and write: what the check allows is what is written.
        lock.check()
        self.sink.enter(name, lock.token, mode, permits)
        leave = asyncio.create_task(self._leave_when_lost(lock, name, mode, permits))
        try:
            await self._note(name, lock.token)
            for _ in range(self._chance.randrange(3)):
                await asyncio.sleep(self._chance.random() * 0.02)
                lock.check()
                self.sink.write(name, lock.token, mode)
        finally:
            leave.cancel()
            self.sink.leave(name, lock.token, mode, permits)

    async def _leave_when_lost(self, lock: Lock, name: str, mode: LockMode, permits: int) -> None:
        await lock.lost.wait()
        self.sink.leave(name, lock.token, mode, permits)

    async def _note(self, name: str, token: int) -> None:
        answer = await self._client.range(self._space.epoch, count_only=True, timeout=10)
        self.told.append(Told(name, split_token(token).revision, answer.header.revision))

    async def _give_up(self, client: LockClient) -> None:
        holding = asyncio.create_task(self._hold(client))
        await asyncio.wait([holding], timeout=self._chance.random() * 0.1)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)

    async def _die_holding(self) -> None:
        """Take a lock with a session that never beats: what a killed process leaves behind."""
        async with grpc.aio.insecure_channel(self._endpoints[0]) as channel:
            workers: Any = WorkerServiceStub(channel)
            locks: Any = LockServiceStub(channel)
            opened = worker_service_pb2.OpenSessionRequest(
                namespace=self._namespace,
                request_id=uuid.uuid4().hex,
                identity="dies",
                ttl=Duration(seconds=2),
            )
            try:
                session = (await workers.OpenSession(opened, timeout=5)).session_id
                name, mode, permits = self._wish()
                request = lock_service_pb2.AcquireLockRequest(
                    namespace=self._namespace, request_id="r", session_id=session, names=[name],
                    mode=types_pb2.LockMode.ValueType(mode),
                    permits=permits if mode is LockMode.SEMAPHORE else 0, wait=Duration(seconds=1),
                )  # fmt: skip
                await locks.AcquireLock(request, timeout=5)
            except grpc.aio.AioRpcError as error:
                self.refusals.append(f"{error.code().name}: {error.details()}")


def entries_in(history: History) -> LockHistory:
    """The entries of locks, as they came and went."""
    keys = KeySpace().namespace(history.namespace)
    changes: list[tuple[int, str, str, LockEntry | None]] = []
    for step in history.steps:
        for kv in step.puts:
            try:
                name, waiter = keys.parse_lock(kv.key)
            except KeyFormatError:
                continue
            changes.append((step.revision, name, waiter, decode_lock(name, waiter, kv)))
        for key in step.deletes:
            try:
                name, waiter = keys.parse_lock(key)
            except KeyFormatError:
                continue
            changes.append((step.revision, name, waiter, None))
    return LockHistory(changes)
