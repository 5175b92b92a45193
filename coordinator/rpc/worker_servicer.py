"""WorkerService: validate, convert, call the use case, convert back. No rule of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.duration_pb2 import Duration

from coordinator.core.job import Progress
from coordinator.errors import RequestError
from coordinator.ports import Clock
from coordinator.rpc import worker_convert as convert
from coordinator.rpc import worker_validation as validation
from coordinator.rpc.convert import job_state, namespace_of, progress_of, timestamp
from coordinator.rpc.field_checks import duration_ms
from coordinator.rpc.limits import CallLimits
from coordinator.services.api import (
    Beat,
    BeatReply,
    ClaimedJob,
    ClaimQuery,
    NewSession,
    OpenedSession,
    Settle,
    Settled,
)
from coordinator.services.claim_by_id import OneClaim
from leasekeeper.v1 import worker_service_pb2 as pb

__all__ = ["DispatchPort", "SessionsPort", "SettlementPort", "WorkPort", "WorkerServicer", "WorkerUseCases"]


class SessionsPort(Protocol):
    """What OpenSession, CloseSession and Heartbeat need."""

    async def open(self, namespace: str, new: NewSession, deadline: float) -> OpenedSession:
        """Open a session."""

    async def close(self, namespace: str, session_id: str, deadline: float) -> int:
        """Give back its claims, end it; how many claims."""

    async def beat(self, namespace: str, beat: Beat, deadline: float) -> BeatReply:
        """Renew, read, judge."""


class DispatchPort(Protocol):
    """What ClaimJobs and ClaimJob need."""

    async def claim_jobs(self, namespace: str, query: ClaimQuery, deadline: float) -> list[ClaimedJob]:
        """Claim what waits."""

    async def claim_job(self, namespace: str, wanted: OneClaim, deadline: float) -> ClaimedJob:
        """Claim one job by its id."""


class SettlementPort(Protocol):
    """What the settling calls and SaveCheckpoint need."""

    async def settle(
        self, namespace: str, items: Sequence[Settle], deadline: float
    ) -> list[Settled | RequestError]:
        """Settle; results in their order."""

    async def checkpoint(
        self,
        namespace: str,
        job_id: str,
        token: int,
        sequence: int,
        data: bytes,
        progress: Progress | None,
        deadline: float,
    ) -> bool:
        """Store a checkpoint; False: a later one is there."""


class WorkPort(Protocol):
    """What serves Work; ``rpc.work_servicer.WorkServicer`` does."""

    def work(
        self, first: pb.WorkRequest, requests: AsyncIterator[Any]
    ) -> AsyncGenerator[pb.WorkResponse, None]:
        """A stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUseCases:
    """The use cases behind WorkerService."""

    sessions: SessionsPort
    dispatch: DispatchPort
    settlement: SettlementPort


class WorkerServicer:
    """The methods of ``leasekeeper.v1.WorkerService``; request and absolute deadline in, response out."""

    def __init__(
        self, use_cases: WorkerUseCases, clock: Clock, call_limits: CallLimits, work: WorkPort
    ) -> None:
        self.work = work.work
        self._sessions = use_cases.sessions
        self._dispatch = use_cases.dispatch
        self._settlement = use_cases.settlement
        self._clock = clock
        self._limits = call_limits

    async def open_session(self, request: pb.OpenSessionRequest, deadline: float) -> pb.OpenSessionResponse:
        """OpenSession."""
        validation.check_open_session(request, self._limits)
        new = convert.new_session(request, self._limits)
        opened = await self._sessions.open(namespace_of(request.namespace), new, deadline)
        return convert.open_session_response(opened)

    async def close_session(
        self, request: pb.CloseSessionRequest, deadline: float
    ) -> pb.CloseSessionResponse:
        """CloseSession."""
        validation.check_close_session(request)
        released = await self._sessions.close(namespace_of(request.namespace), request.session_id, deadline)
        return pb.CloseSessionResponse(released=released)

    async def heartbeat(self, request: pb.HeartbeatRequest, deadline: float) -> pb.HeartbeatResponse:
        """Heartbeat."""
        validation.check_heartbeat(request)
        said = convert.beat(request)
        reply = await self._sessions.beat(namespace_of(request.namespace), said, deadline)
        return convert.heartbeat_response(said, reply)

    async def claim_jobs(self, request: pb.ClaimJobsRequest, deadline: float) -> pb.ClaimJobsResponse:
        """ClaimJobs."""
        validation.check_claims(request, self._limits)
        query = convert.claim_query(request, self._wait_ms(request.wait, deadline))
        claimed = await self._dispatch.claim_jobs(namespace_of(request.namespace), query, deadline)
        return pb.ClaimJobsResponse(claims=[convert.claim_message(one) for one in claimed])

    async def claim_job(self, request: pb.ClaimJobRequest, deadline: float) -> pb.ClaimJobResponse:
        """ClaimJob."""
        validation.check_claim(request, self._limits)
        wanted = OneClaim(
            session_id=request.session_id,
            request_id=request.request_id,
            job_id=request.job_id,
            wait_ms=self._wait_ms(request.wait, deadline),
            repeat=request.repeat,
        )
        claimed = await self._dispatch.claim_job(namespace_of(request.namespace), wanted, deadline)
        return pb.ClaimJobResponse(claim=convert.claim_message(claimed))

    async def complete_job(self, request: pb.CompleteJobRequest, deadline: float) -> pb.CompleteJobResponse:
        """CompleteJob."""
        validation.check_complete(request)
        command = convert.complete(request.fencing_token, request)
        settle = Settle(request.job_id, command, convert.follow_ups(request))
        settled = await self._settle_one(request.namespace, settle, deadline)
        return pb.CompleteJobResponse(state=job_state(settled.state))

    async def fail_job(self, request: pb.FailJobRequest, deadline: float) -> pb.FailJobResponse:
        """FailJob."""
        validation.check_fail(request)
        command = convert.fail(request.fencing_token, request)
        settled = await self._settle_one(request.namespace, Settle(request.job_id, command), deadline)
        return pb.FailJobResponse(state=job_state(settled.state), ready_time=timestamp(settled.ready_ms))

    async def release_job(self, request: pb.ReleaseJobRequest, deadline: float) -> pb.ReleaseJobResponse:
        """ReleaseJob."""
        validation.check_release(request)
        command = convert.release(request.fencing_token, request)
        settled = await self._settle_one(request.namespace, Settle(request.job_id, command), deadline)
        return pb.ReleaseJobResponse(state=job_state(settled.state), ready_time=timestamp(settled.ready_ms))

    async def settle_jobs(self, request: pb.SettleJobsRequest, deadline: float) -> pb.SettleJobsResponse:
        """SettleJobs. Settlements of bad form are refused here, the others go on together."""
        errors = validation.check_settle_batch(request)
        items = [
            convert.settle(item)
            for item, error in zip(request.settlements, errors, strict=True)
            if error is None
        ]
        outcomes: list[Settled | RequestError] = []
        if items:
            outcomes = await self._settlement.settle(namespace_of(request.namespace), items, deadline)
        answered = iter(outcomes)
        return pb.SettleJobsResponse(
            results=[
                convert.settle_result(item.job_id, error if error is not None else next(answered))
                for item, error in zip(request.settlements, errors, strict=True)
            ]
        )

    async def save_checkpoint(
        self, request: pb.SaveCheckpointRequest, deadline: float
    ) -> pb.SaveCheckpointResponse:
        """SaveCheckpoint."""
        validation.check_checkpoint(request)
        stored = await self._settlement.checkpoint(
            namespace_of(request.namespace),
            request.job_id,
            request.fencing_token,
            request.sequence,
            request.checkpoint,
            progress_of(request.progress) if request.HasField("progress") else None,
            deadline,
        )
        return pb.SaveCheckpointResponse(stored=stored)

    async def _settle_one(self, namespace: str, item: Settle, deadline: float) -> Settled:
        [outcome] = await self._settlement.settle(namespace_of(namespace), [item], deadline)
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def _wait_ms(self, wait: Duration, deadline: float) -> int:
        """How long to wait, so that the empty answer still leaves before the caller's deadline."""
        left_ms = int((deadline - self._clock.monotonic()) * 1000)
        return max(0, min(duration_ms(wait), left_ms))
