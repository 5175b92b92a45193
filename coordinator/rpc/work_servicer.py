"""The Work stream: reads a worker's requests, calls the use cases that the unary methods call, and writes.

The reader never waits for a use case: settlements and beats run beside each other, a bounded number of them,
and with that many under way (or answered and not yet written) nothing more is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from coordinator.errors import FieldViolation, Reason, RequestError
from coordinator.ports import Clock, Entropy
from coordinator.rpc import worker_convert as convert
from coordinator.rpc import worker_validation as validation
from coordinator.rpc.call_guard import Unreadable
from coordinator.rpc.convert import namespace_of
from coordinator.rpc.status import to_request_error, to_status
from coordinator.rpc.work_validation import check_work_open
from coordinator.rpc.worker_servicer import SessionsPort, SettlementPort
from coordinator.services.api import Settled
from coordinator.services.work_outbox import Answer, Outgoing, StopAsked
from coordinator.services.work_stream import LaneOpening, WorkOpening, WorkStream
from leasekeeper.v1 import worker_service_pb2 as pb

__all__ = ["WorkServicer", "WorkStreamsPort"]

_CALLS: Final = 16
_CALL_SECONDS: Final = 5.0
_FINISH_SECONDS: Final = 6.0


class WorkStreamsPort(Protocol):
    """Who has a stream."""

    def open(self, namespace: str, opening: WorkOpening) -> AbstractAsyncContextManager[WorkStream]:
        """A stream, inside the block."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """An answer that still counts among the calls under way, until it is written."""

    message: pb.WorkResponse


class WorkServicer:
    """Serves ``WorkerService.Work``.

    Args:
        streams: who has a stream.
        sessions: takes in beats.
        settlement: settles.
        clock: deadlines.
        entropy: makes incident ids.
        coordinator_id: told when a stream is open.
    """

    def __init__(
        self,
        streams: WorkStreamsPort,
        sessions: SessionsPort,
        settlement: SettlementPort,
        clock: Clock,
        entropy: Entropy,
        *,
        coordinator_id: str,
    ) -> None:
        self._streams = streams
        self._sessions = sessions
        self._settlement = settlement
        self._clock = clock
        self._entropy = entropy
        self._coordinator_id = coordinator_id

    async def work(
        self, first: pb.WorkRequest, requests: AsyncIterator[Any]
    ) -> AsyncGenerator[pb.WorkResponse, None]:
        """Work."""
        if first.WhichOneof("what") != "open":
            raise _invalid("open", "must be the first message of a stream, and is missing")
        opening = first.open
        check_work_open(opening)
        namespace = namespace_of(opening.namespace)
        async with self._streams.open(namespace, _opening(opening)) as stream:
            traffic = _Traffic(self, stream)
            reading = asyncio.create_task(traffic.read(requests), name=f"work of {stream.session_id}")
            try:
                yield pb.WorkResponse(opened=pb.WorkOpened(coordinator_id=self._coordinator_id))
                while (outgoing := await stream.outbox.take()) is not None:
                    yield traffic.message(outgoing)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                await traffic.close()

    async def settle(self, namespace: str, request: pb.WorkSettle) -> pb.WorkResponse:
        """One message of settlements; each alone, as of SettleJobs."""
        answer = pb.WorkSettled(number=request.number)
        try:
            if request.settlements:
                answer.results.extend(await self._results(namespace, request))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is answered
            del answer.results[:]
            answer.error.CopyFrom(to_status(to_request_error(error, self._entropy.identifier)))
        return pb.WorkResponse(settled=answer)

    async def _results(self, namespace: str, request: pb.WorkSettle) -> list[pb.SettleResult]:
        batch = pb.SettleJobsRequest(namespace=namespace, settlements=request.settlements)
        errors = validation.check_settle_batch(batch)
        pairs = list(zip(request.settlements, errors, strict=True))
        items = [convert.settle(item) for item, error in pairs if error is None]
        outcomes: list[Settled | RequestError] = []
        if items:
            deadline = self._clock.monotonic() + _CALL_SECONDS
            outcomes = await self._settlement.settle(namespace, items, deadline)
        answered = iter(outcomes)
        return [
            convert.settle_result(item.job_id, error if error is not None else next(answered))
            for item, error in pairs
        ]

    async def beat(self, namespace: str, session_id: str, request: pb.HeartbeatRequest) -> pb.WorkResponse:
        """One beat, as of Heartbeat."""
        answer = pb.WorkBeat(number=request.number)
        try:
            if request.session_id not in ("", session_id):
                raise _invalid("beat.session_id", "is another session's than the stream's")
            if request.namespace and namespace_of(request.namespace) != namespace:
                raise _invalid("beat.namespace", "is another than the stream's")
            request.namespace, request.session_id = namespace, session_id
            validation.check_heartbeat(request)
            said = convert.beat(request)
            reply = await self._sessions.beat(namespace, said, self._clock.monotonic() + _CALL_SECONDS)
            answer.response.CopyFrom(convert.heartbeat_response(said, reply))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is answered
            answer.error.CopyFrom(to_status(to_request_error(error, self._entropy.identifier)))
        return pb.WorkResponse(beat=answer)


class _Traffic:
    """What goes up one stream, and the calls that it has under way."""

    def __init__(self, servicer: WorkServicer, stream: WorkStream) -> None:
        self._servicer = servicer
        self._stream = stream
        self._room = asyncio.Semaphore(_CALLS)
        self._calls: set[asyncio.Task[None]] = set()

    async def read(self, requests: AsyncIterator[Any]) -> None:
        """Read until the caller ends its half, or does what it must not."""
        stream = self._stream
        try:
            async for request in requests:
                if type(request) is Unreadable:
                    raise request.error
                await self._take(request)
            # The caller wants no more claims, and the answers to what it has sent.
            await stream.stop_claiming()
            if self._calls:
                await asyncio.wait(self._calls, timeout=_FINISH_SECONDS)
            stream.end()
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream ends with it
            stream.end(error)

    async def _take(self, request: pb.WorkRequest) -> None:
        stream, what = self._stream, request.WhichOneof("what")
        if what == "credit":
            credit = request.credit
            stream.add_credit(credit.lane, credit.jobs, credit.bytes)
        elif what == "settle":
            await self._start(self._servicer.settle(stream.namespace, request.settle))
        elif what == "beat":
            await self._start(self._servicer.beat(stream.namespace, stream.session_id, request.beat))
        elif what == "open":
            raise _invalid("open", "must be the first message of a stream, and only the first")
        else:
            raise _invalid("what", "is missing, or newer than this coordinator")

    async def _start(self, call: Coroutine[Any, Any, pb.WorkResponse]) -> None:
        try:
            await self._room.acquire()
        except BaseException:
            call.close()
            raise
        task = asyncio.create_task(self._answer(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, call: Coroutine[Any, Any, pb.WorkResponse]) -> None:
        self._stream.outbox.put_answer(_Counted(await call))

    def message(self, outgoing: Outgoing) -> pb.WorkResponse:
        """What is written for one thing that was taken from the outbox."""
        if isinstance(outgoing, Answer):
            said = outgoing.message
            if isinstance(said, _Counted):
                self._room.release()
                return said.message
            assert isinstance(said, int), "the stream itself says nothing but commands"
            return pb.WorkResponse(command=pb.WorkerCommand.ValueType(said))
        response = pb.WorkResponse()
        for one in outgoing:
            if isinstance(one, StopAsked):
                response.stop.stops.add(job_id=one.job_id, fencing_token=one.token)
            else:
                response.claims.claims.append(convert.claim_message(one))
        return response

    async def close(self) -> None:
        """End the calls under way: their answers have nowhere to go, and the caller will ask again."""
        for task in list(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


def _opening(request: pb.WorkOpen) -> WorkOpening:
    return WorkOpening(
        session_id=request.session_id,
        request_id=request.request_id,
        lanes=tuple(
            LaneOpening(
                queues=tuple(
                    dict.fromkeys((wanted.queue, type_) for wanted in lane.queues for type_ in wanted.types)
                ),
                jobs=lane.credit.jobs,
                bytes=lane.credit.bytes,
            )
            for lane in request.lanes
        ),
    )


def _invalid(field: str, text: str) -> RequestError:
    return RequestError(Reason.VALIDATION_FAILED, f"{field}: {text}", fields=(FieldViolation(field, text),))
