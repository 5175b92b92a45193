"""Beats that list locks, and beats that leave them out, on a real etcd."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from leasekeeper.v1 import lock_service_pb2 as locks_pb
from leasekeeper.v1 import lock_service_pb2_grpc
from leasekeeper.v1 import worker_service_pb2 as pb
from tests.integration.rpc.conftest import Api
from tests.support.polling import eventually


class Caller:
    """A session, its locks, and beats with a clock of the test's choice."""

    def __init__(self, api: Api, session_id: str) -> None:
        self.api = api
        self.session_id = session_id
        self.locks: Any = lock_service_pb2_grpc.LockServiceStub(api.channel)
        self.beats = 0

    @classmethod
    async def open(cls, api: Api, ttl: int = 10) -> Caller:
        """Open a session."""
        request = pb.OpenSessionRequest(
            request_id=uuid.uuid4().hex, identity="locks", ttl=Duration(seconds=ttl)
        )
        return cls(api, (await api.workers.OpenSession(request, timeout=10)).session_id)

    async def acquire(self, *names: str, request_id: str, wait: int = 0) -> locks_pb.AcquireLockResponse:
        """AcquireLock, exclusive."""
        request = locks_pb.AcquireLockRequest(
            session_id=self.session_id, request_id=request_id, names=names, wait=Duration(seconds=wait)
        )
        answer: locks_pb.AcquireLockResponse = await self.locks.AcquireLock(request, timeout=wait + 10)
        return answer

    async def beat(self, *locks: pb.BeatLock, seconds: int = 0) -> pb.HeartbeatResponse:
        """A beat that says it was sent ``seconds`` after the start."""
        self.beats += 1
        request = pb.HeartbeatRequest(
            session_id=self.session_id, number=self.beats, sent_at=Duration(seconds=seconds), locks=locks
        )
        answer: pb.HeartbeatResponse = await self.api.workers.Heartbeat(request, timeout=10)
        return answer

    async def owners(self, name: str) -> list[str]:
        """Sessions that own a lock."""
        answer = await self.locks.GetLock(locks_pb.GetLockRequest(name=name), timeout=10)
        return [entry.session_id for entry in answer.lock.owners]


def listed(lock: locks_pb.HeldLock, request_id: str) -> pb.BeatLock:
    """A lock that is held, as a beat lists it."""
    return pb.BeatLock(name=lock.name, fencing_token=lock.fencing_token, request_id=request_id)


def _asking(probe: Callable[[], Awaitable[bool]]) -> Callable[[], bool | Awaitable[bool]]:
    return probe


async def test_a_beat_tells_of_each_lock_whether_it_is_held(api: Api) -> None:
    caller = await Caller.open(api)
    answer = await caller.acquire("a", "b", request_id="r")
    a, b = answer.locks
    old = pb.BeatLock(name="b", fencing_token=b.fencing_token - 1, request_id="r")
    reply = await caller.beat(listed(a, "r"), old, listed(a, "another"))
    assert [(one.name, one.verdict) for one in reply.lock_verdicts] == [
        ("a", pb.VERDICT_HELD),
        ("b", pb.VERDICT_LOST),
        ("a", pb.VERDICT_LOST),
    ]
    assert reply.lock_verdicts[0].fencing_token == a.fencing_token <= reply.revision


async def test_a_lock_that_was_revoked_is_lost_at_the_next_beat(api: Api) -> None:
    caller = await Caller.open(api)
    [lock] = (await caller.acquire("a", request_id="r")).locks
    await caller.locks.RevokeLock(
        locks_pb.RevokeLockRequest(name="a", fencing_token=lock.fencing_token, request_id="x"), timeout=10
    )
    reply = await caller.beat(listed(lock, "r"))
    assert [one.verdict for one in reply.lock_verdicts] == [pb.VERDICT_LOST]


async def test_more_locks_than_fit_into_one_read_get_their_verdicts(api: Api) -> None:
    caller = await Caller.open(api)
    held: list[pb.BeatLock] = []
    for number in range(40):
        names = [f"n{number}.{part}" for part in range(8)]
        answer = await caller.acquire(*names, request_id=f"r{number}")
        held += [listed(lock, f"r{number}") for lock in answer.locks]
    reply = await caller.beat(*held)
    assert [one.verdict for one in reply.lock_verdicts] == [pb.VERDICT_HELD] * 320


async def test_a_wait_is_told_the_token_of_its_place_in_the_line(api: Api) -> None:
    first, second = await Caller.open(api), await Caller.open(api)
    [held] = (await first.acquire("a", request_id="r")).locks
    waiting = asyncio.ensure_future(second.acquire("a", request_id="w", wait=20))
    wait = pb.BeatLock(name="a", request_id="w")

    found: list[pb.LockVerdict] = []

    async def stands() -> bool:
        found[:] = (await second.beat(wait)).lock_verdicts
        return found[0].verdict == pb.VERDICT_HELD

    await eventually(_asking(stands))
    [verdict] = found
    release = locks_pb.ReleaseLockRequest(session_id=first.session_id, request_id="x", locks=[held])
    await first.locks.ReleaseLock(release, timeout=10)
    [mine] = (await waiting).locks
    assert mine.fencing_token == verdict.fencing_token


async def test_a_lock_that_the_beats_leave_out_is_taken_away_and_goes_to_the_next(api: Api) -> None:
    caller, other = await Caller.open(api, ttl=2), await Caller.open(api)
    await caller.acquire("a", request_id="r")
    waiting = asyncio.ensure_future(other.acquire("a", request_id="w", wait=20))
    wait = pb.BeatLock(name="a", request_id="w")

    async def taken() -> bool:
        # Its lease is kept all the while; what it says of its own clock is not what delays it.
        await caller.beat(seconds=caller.beats * 100)
        await other.beat(wait, seconds=other.beats)
        return waiting.done()

    await eventually(_asking(taken))
    assert len((await waiting).locks) == 1
    assert await caller.owners("a") == [other.session_id]


@pytest.mark.parametrize(
    ("lock", "field"),
    [
        (pb.BeatLock(request_id="r"), "locks[0].name"),
        (pb.BeatLock(name="a"), "locks[0].request_id"),
        (pb.BeatLock(name="a", request_id="r", fencing_token=-1), "locks[0].fencing_token"),
    ],
)
async def test_malformed_locks_are_refused_by_field(api: Api, lock: pb.BeatLock, field: str) -> None:
    caller = await Caller.open(api)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.beat(lock)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (refused.value.details() or "")
