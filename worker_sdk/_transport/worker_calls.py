"""WorkerService in values, for the event loop: claims, settlements, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from leasekeeper.v1 import worker_service_pb2 as pb
from worker_sdk._convert.work import (
    SettlementMessage,
    claim_to,
    claimed_from,
    settled_from,
)
from worker_sdk._transport.channel import CoordinatorChannel
from worker_sdk._transport.methods import CLAIM_JOBS, SAVE_CHECKPOINT, SETTLE_JOBS
from worker_sdk._work import ClaimedJob, QueueTypes
from worker_sdk.errors import InternalError, RequestError

__all__ = ["WorkerCalls"]

_POLL_GRACE = 5.0


class WorkerCalls:
    """Typed calls of WorkerService over *channel*, in one namespace; one try each, except checkpoints."""

    def __init__(self, channel: CoordinatorChannel, namespace: str) -> None:
        self._channel = channel
        self._namespace = namespace

    async def claim(
        self,
        *,
        request_id: str,
        session_id: str,
        queues: Sequence[QueueTypes],
        max_jobs: int,
        wait: float,
        repeat: bool,
        timeout: float | None = None,
    ) -> Sequence[ClaimedJob]:
        """Ask for up to *max_jobs* jobs, waiting up to *wait* seconds for the first."""
        request = claim_to(
            namespace=self._namespace,
            request_id=request_id,
            session_id=session_id,
            queues=queues,
            max_jobs=max_jobs,
            wait=wait,
            repeat=repeat,
        )
        answer = await self._channel.attempt(
            CLAIM_JOBS, request, timeout=wait + _POLL_GRACE if timeout is None else timeout
        )
        return [claimed_from(claim) for claim in answer.claims]

    async def settle(
        self, settlements: Sequence[SettlementMessage], *, timeout: float
    ) -> Sequence[RequestError | None]:
        """Settle up to 100 attempts; return for each why it was refused, None where it stands."""
        request = pb.SettleJobsRequest(namespace=self._namespace, settlements=settlements)
        answer = await self._channel.attempt(SETTLE_JOBS, request, timeout=timeout)
        if len(answer.results) != len(settlements):
            raise InternalError(f"{len(answer.results)} results for {len(settlements)} settlements")
        return [settled_from(result) for result in answer.results]

    async def save_checkpoint(
        self,
        *,
        job_id: str,
        fencing_token: int,
        data: bytes,
        sequence: int,
        progress: tuple[float, str] | None,
        timeout: float,
    ) -> None:
        """Store a checkpoint, repeating it while that may help; a later sequence stays."""
        request = pb.SaveCheckpointRequest(
            namespace=self._namespace,
            job_id=job_id,
            fencing_token=fencing_token,
            checkpoint=data,
            sequence=sequence,
        )
        if progress is not None:
            request.progress.ratio, request.progress.note = progress
        await self._channel.call(SAVE_CHECKPOINT, request, timeout=timeout)
