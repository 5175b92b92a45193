"""Load on named locks: distinct names side by side, and one name that goes from hand to hand.

`timed_pairs` and `timed_handovers` drive anything that can take and give back a lock; `raw_locks` is
LockService through the generated stubs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from coordinator.cli.bench_numbers import Measured
from leasekeeper.v1 import lock_service_pb2, worker_service_pb2
from leasekeeper.v1.lock_service_pb2_grpc import LockServiceStub
from leasekeeper.v1.worker_service_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from leasekeeper.v1.lock_service_pb2_grpc import LockServiceAsyncStub
    from leasekeeper.v1.worker_service_pb2_grpc import WorkerServiceAsyncStub

__all__ = ["Locker", "RawLocks", "raw_locks", "timed_handovers", "timed_pairs"]

H = TypeVar("H")

_CALL_SECONDS = 30.0
_WAIT_SECONDS = 20
_TTL_SECONDS = 30
_WAITERS = 8


class Locker(Protocol[H]):
    """Something that has locks."""

    async def acquire(self, name: str) -> H:
        """Take a lock, waiting for it."""

    async def release(self, held: H) -> None:
        """Give it back."""


async def timed_pairs(locker: Locker[H], pairs: int, *, callers: int = 64) -> Measured:
    """Take and give back, each caller a name of its own; a latency is that of one pair."""
    run = uuid.uuid4().hex[:8]
    left = iter(range(pairs))
    latencies: list[float] = []
    start = time.perf_counter()

    async def caller(number: int) -> None:
        for _ in left:
            begun = time.perf_counter()
            await locker.release(await locker.acquire(f"{run}-{number}"))
            latencies.append(time.perf_counter() - begun)

    async with asyncio.timeout(_CALL_SECONDS + pairs / 50), asyncio.TaskGroup() as tasks:
        for number in range(callers):
            tasks.create_task(caller(number))
    return Measured(count=pairs, seconds=time.perf_counter() - start, latencies=latencies)


async def timed_handovers(locker: Locker[H], handovers: int) -> Measured:
    """Eight callers wait for one name; a latency runs from a release being sent until the next one owns."""
    name = f"one-{uuid.uuid4().hex[:8]}"
    left = iter(range(handovers + 1))
    latencies: list[float] = []
    released = 0.0
    start = time.perf_counter()

    async def caller() -> None:
        nonlocal released
        for _ in left:
            held = await locker.acquire(name)
            if released:
                latencies.append(time.perf_counter() - released)
            released = time.perf_counter()
            await locker.release(held)

    async with asyncio.timeout(_CALL_SECONDS + handovers), asyncio.TaskGroup() as tasks:
        for _ in range(_WAITERS):
            tasks.create_task(caller())
    return Measured(count=handovers, seconds=time.perf_counter() - start, latencies=latencies)


class RawLocks:
    """One client process with one session; made by `raw_locks`."""

    def __init__(self, channel: grpc.aio.Channel, namespace: str) -> None:
        # The async stubs exist for the type checker alone.
        self._locks = cast("LockServiceAsyncStub", LockServiceStub(channel))
        self._workers = cast("WorkerServiceAsyncStub", WorkerServiceStub(channel))
        self._namespace = namespace
        self._session = ""
        self._listed: dict[str, worker_service_pb2.BeatLock] = {}

    async def acquire(self, name: str) -> tuple[str, lock_service_pb2.HeldLock]:
        """AcquireLock; waits in line."""
        request_id = uuid.uuid4().hex
        self._listed[request_id] = worker_service_pb2.BeatLock(name=name, request_id=request_id)
        reply = await self._locks.AcquireLock(
            lock_service_pb2.AcquireLockRequest(
                namespace=self._namespace,
                request_id=request_id,
                session_id=self._session,
                names=[name],
                wait=Duration(seconds=_WAIT_SECONDS),
            ),
            timeout=_CALL_SECONDS,
        )
        [lock] = reply.locks
        return request_id, lock

    async def release(self, held: tuple[str, lock_service_pb2.HeldLock]) -> None:
        """ReleaseLock."""
        request_id, lock = held
        await self._locks.ReleaseLock(
            lock_service_pb2.ReleaseLockRequest(
                namespace=self._namespace,
                request_id=uuid.uuid4().hex,
                session_id=self._session,
                locks=[lock],
            ),
            timeout=_CALL_SECONDS,
        )
        del self._listed[request_id]

    async def open(self) -> float:
        """Open the session; returns the seconds between beats."""
        reply = await self._workers.OpenSession(
            worker_service_pb2.OpenSessionRequest(
                namespace=self._namespace,
                request_id=uuid.uuid4().hex,
                identity="bench",
                ttl=Duration(seconds=_TTL_SECONDS),
            ),
            timeout=_CALL_SECONDS,
            wait_for_ready=True,
        )
        self._session = reply.session_id
        return reply.heartbeat_interval.ToNanoseconds() / 1e9

    async def beat(self, interval: float) -> None:
        """Beat until cancelled."""
        number = 0
        while True:
            await asyncio.sleep(interval)
            number += 1
            request = worker_service_pb2.HeartbeatRequest(
                namespace=self._namespace,
                session_id=self._session,
                number=number,
                locks=list(self._listed.values()),
            )
            request.sent_at.FromNanoseconds(time.monotonic_ns())
            await self._workers.Heartbeat(request, timeout=_CALL_SECONDS)

    async def close(self) -> None:
        """Close the session."""
        await self._workers.CloseSession(
            worker_service_pb2.CloseSessionRequest(
                namespace=self._namespace, request_id=uuid.uuid4().hex, session_id=self._session
            ),
            timeout=_CALL_SECONDS,
        )


@contextlib.asynccontextmanager
async def raw_locks(address: str, namespace: str) -> AsyncIterator[RawLocks]:
    """Locks with an open, beating session; closed at the end."""
    async with grpc.aio.insecure_channel(address) as channel:
        load = RawLocks(channel, namespace)
        interval = await load.open()
        beats = asyncio.create_task(load.beat(interval), name="bench beats")
        try:
            yield load
        finally:
            beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beats
            await load.close()
