"""What a Work stream passes through, over a real channel: bytes, access, its opening, slow readers, drain."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.app.machine import SystemClock
from coordinator.rpc.auth import Caller, Scope, TokenTable
from coordinator.rpc.call_guard import GuardConfig
from coordinator.services.api import ClaimedJob, ClaimQuery
from coordinator.services.work_stream import WorkOpening, WorkStream, WorkStreamConfig
from leasekeeper.v1 import worker_service_pb2 as w
from tests.support.polling import eventually
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import Served, Told, served, told

WORK = "/leasekeeper.v1.WorkerService/Work"
OPEN = w.WorkRequest(open=w.WorkOpen(session_id=b.SESSION, request_id="r1"))


class NoJobs:
    """Claims nothing, ever."""

    async def claim_jobs(self, namespace: str, query: ClaimQuery, deadline: float) -> list[ClaimedJob]:
        await asyncio.Event().wait()
        return []


class OpenStreams:
    """Opens every stream, and keeps those that are open."""

    def __init__(self) -> None:
        self.open_now: list[WorkStream] = []

    @asynccontextmanager
    async def open(self, namespace: str, opening: WorkOpening) -> AsyncGenerator[WorkStream, None]:
        stream = WorkStream(
            namespace,
            opening,
            NoJobs(),
            SystemClock(),
            WorkStreamConfig(),
            asked=lambda claimed: (),
            give_back=lambda claimed: None,
        )
        self.open_now.append(stream)
        try:
            yield stream
        finally:
            self.open_now.remove(stream)
            await stream.close()


def raw(s: Served) -> Any:
    return s.channel.stream_stream(WORK)


async def ending(call: Any, *messages: bytes) -> Told:
    """The error that a stream ends with after *messages*."""
    try:
        async with asyncio.timeout(10):
            for message in messages:
                await call.write(message)
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return told(error)
    raise AssertionError("the stream ended in order")


async def test_bytes_that_are_no_message_end_a_stream_first_or_later() -> None:
    streams = OpenStreams()
    async with served(streams=streams) as s:
        first = await ending(raw(s)(), b"\xff\xff\xff")
        later = await ending(raw(s)(), OPEN.SerializeToString(), b"\xff\xff\xff")
        await eventually(lambda: not streams.open_now)

    for error in (first, later):
        assert (grpc.StatusCode.INVALID_ARGUMENT, "VALIDATION_FAILED") == (error.code, error.reason)


async def test_a_stream_that_does_not_open_is_ended() -> None:
    async with served(streams=OpenStreams(), guard_config=GuardConfig(opening_s=0.1)) as s:
        error = await ending(raw(s)())

    assert (grpc.StatusCode.INVALID_ARGUMENT, "VALIDATION_FAILED") == (error.code, error.reason)


async def test_a_stream_before_the_start_and_after_the_stop_is_refused() -> None:
    async with served(streams=OpenStreams(), opened=False) as s:
        early = await ending(raw(s)(), OPEN.SerializeToString())
        s.guard.open()
        s.guard.drain()
        late = await ending(raw(s)(), OPEN.SerializeToString())

    assert ("NOT_READY", "DRAINING") == (early.reason, late.reason)


@pytest.mark.parametrize(
    ("scope", "namespaces", "header", "expected"),
    [
        (Scope.WORK, ("default",), "Bearer s3cret", ""),
        (Scope.READ, ("default",), "Bearer s3cret", "PERMISSION_DENIED"),
        (Scope.WORK, ("billing",), "Bearer s3cret", "PERMISSION_DENIED"),
        (Scope.WORK, ("default",), "Bearer other", "UNAUTHENTICATED"),
        (Scope.WORK, ("default",), "", "UNAUTHENTICATED"),
    ],
)
async def test_a_stream_needs_the_scope_of_workers_in_its_namespace(
    scope: Scope, namespaces: tuple[str, ...], header: str, expected: str
) -> None:
    caller = Caller(name="test", namespaces=frozenset(namespaces), scopes=frozenset({scope}))
    tokens = TokenTable({hashlib.sha256(b"s3cret").hexdigest(): caller})
    async with served(streams=OpenStreams(), tokens=tokens) as s:
        call = raw(s)(metadata=(("authorization", header),) if header else ())
        if expected:
            assert expected == (await ending(call, OPEN.SerializeToString())).reason
        else:
            await call.write(OPEN.SerializeToString())
            assert "opened" == w.WorkResponse.FromString(await call.read()).WhichOneof("what")
            call.cancel()


async def test_135_a_reader_that_does_not_read_is_ended_and_told_so() -> None:
    streams = OpenStreams()
    async with served(streams=streams, guard_config=GuardConfig(unread_s=0.3)) as s:
        call = raw(s)()
        await call.write(OPEN.SerializeToString())
        await eventually(lambda: bool(streams.open_now))
        # Small to send, and long to answer: each item is refused with its reason.
        settle = w.WorkRequest(settle=w.WorkSettle(number=1, settlements=[w.Settlement()] * 100))
        for _ in range(250):
            await call.write(settle.SerializeToString())
        await eventually(lambda: not streams.open_now, timeout=20)
        error = await ending(call)

    assert (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS") == (error.code, error.reason)


async def test_a_caller_that_goes_leaves_nothing_behind() -> None:
    streams = OpenStreams()
    async with served(streams=streams) as s:
        calls = [raw(s)() for _ in range(20)]
        for call in calls:
            await call.write(OPEN.SerializeToString())
        await eventually(lambda: len(streams.open_now) == 20)
        for call in calls:
            call.cancel()
        await eventually(lambda: not streams.open_now)
        names = [task.get_name() for task in asyncio.all_tasks()]

    assert not [name for name in names if name.startswith("work")]


async def test_an_error_that_nobody_foresaw_is_answered_by_number_and_the_stream_goes_on() -> None:
    async with served(streams=OpenStreams()) as s:
        s.use.answers["settle"] = KeyError("secret")
        call = raw(s)()
        item = w.Settlement(job_id="j", fencing_token=b.TOKEN, complete=w.Completion())
        await call.write(OPEN.SerializeToString())
        await call.write(w.WorkRequest(settle=w.WorkSettle(number=5, settlements=[item])).SerializeToString())
        await call.write(w.WorkRequest(settle=w.WorkSettle(number=6)).SerializeToString())
        answers = [w.WorkResponse.FromString(await call.read()) for _ in range(3)]
        call.cancel()

    settled = {one.settled.number: one.settled for one in answers if one.HasField("settled")}
    assert (13, False) == (settled[5].error.code, "secret" in settled[5].error.message)
    assert not settled[6].HasField("error")
