"""Messages of the Work stream: values to messages and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leasekeeper.v1 import worker_service_pb2 as pb
from worker_sdk._convert.status import from_status
from worker_sdk._convert.work import SettlementMessage, claimed_from, settled_from
from worker_sdk._work import ClaimedJob, Command, QueueTypes
from worker_sdk.errors import RequestError

__all__ = [
    "Commanded",
    "Opened",
    "Pushed",
    "Settled",
    "StopsAsked",
    "WorkAnswer",
    "WorkRequest",
    "credit_to",
    "opening_to",
    "settle_to",
    "work_from",
]

WorkRequest = pb.WorkRequest
WorkAnswer = pb.WorkResponse


@dataclass(frozen=True, slots=True)
class Opened:
    """The stream is open."""

    coordinator_id: str


@dataclass(frozen=True, slots=True)
class Pushed:
    """Claims."""

    jobs: Sequence[ClaimedJob]


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer to settlements; ``error``: nothing was looked at."""

    number: int
    results: Sequence[RequestError | None]
    error: RequestError | None


@dataclass(frozen=True, slots=True)
class StopsAsked:
    """Claims, as (job id, fencing token), whose handlers are asked to stop."""

    claims: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Commanded:
    """What the coordinator wants the worker to do."""

    command: Command


def opening_to(
    *,
    namespace: str,
    session_id: str,
    request_id: str,
    lanes: Sequence[tuple[Sequence[QueueTypes], int]],
) -> pb.WorkRequest:
    """Return the message that opens a stream; a lane is what it wants, and for how many jobs."""
    opening = pb.WorkOpen(namespace=namespace, session_id=session_id, request_id=request_id)
    for queues, jobs in lanes:
        lane = opening.lanes.add(queues=[pb.QueueTypes(queue=one.queue, types=one.types) for one in queues])
        lane.credit.jobs = jobs
    return pb.WorkRequest(open=opening)


def credit_to(lane: int, jobs: int) -> pb.WorkRequest:
    """Return leave for more jobs, and for as many bytes as they may have."""
    return pb.WorkRequest(credit=pb.WorkCredit(lane=lane, jobs=jobs))


def settle_to(number: int, settlements: Sequence[SettlementMessage]) -> pb.WorkRequest:
    """Return settlements; without any it asks whether the stream lives."""
    return pb.WorkRequest(settle=pb.WorkSettle(number=number, settlements=settlements))


def work_from(message: pb.WorkResponse) -> Opened | Pushed | Settled | StopsAsked | Commanded | None:
    """Return what came down; None for what this SDK does not know."""
    what = message.WhichOneof("what")
    if what == "claims":
        return Pushed([claimed_from(claim) for claim in message.claims.claims])
    if what == "settled":
        answer = message.settled
        error = from_status(answer.error) if answer.HasField("error") else None
        return Settled(answer.number, [settled_from(result) for result in answer.results], error)
    if what == "stop":
        return StopsAsked(frozenset((stop.job_id, stop.fencing_token) for stop in message.stop.stops))
    if what == "opened":
        return Opened(message.opened.coordinator_id)
    if what == "command":
        number = int(message.command)
        return Commanded(Command(number) if number in _COMMANDS else Command.NONE)
    return None


_COMMANDS = frozenset(int(command) for command in Command)
