"""Settlements and checkpoints on the fake's world: judged by the token alone, as the core judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from coordinator.core.commands import Submit
from coordinator.core.fencing import split_token
from coordinator.core.follow_ups import Standing, admit, follow_up_job_id
from coordinator.core.job import AttemptOutcome, Job, JobState
from coordinator.core.machine import Refusal, Replay
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as pb
from worker_sdk.testing import _messages as messages
from worker_sdk.testing import _work_forms as forms
from worker_sdk.testing._refusals import Refused, not_found, refused_by, to_status
from worker_sdk.testing._stage import Call, Stage
from worker_sdk.testing._world import Checkpoint, Place, Record, Spec

__all__ = ["Settlements"]

_CLEAN: Final = (AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED, AttemptOutcome.RELEASED)


class Settlements:
    """CompleteJob, FailJob, ReleaseJob, SettleJobs, SaveCheckpoint.

    Args:
        stage: where it plays.
        settled: told (session, job) of each clean settlement.

    Attributes:
        jitter: the number in [0, 1) that moves each backoff; 0.5 moves none.
    """

    def __init__(self, stage: Stage, settled: Callable[[str, Place], None]) -> None:
        self._world = stage.world
        self._settled = settled
        self.jitter = 0.5

    def complete_job(self, request: pb.CompleteJobRequest, call: Call) -> pb.CompleteJobResponse:
        """CompleteJob."""
        forms.check_settlement(request)
        state, _ = self._settle(request.namespace, request.job_id, request.fencing_token, request)
        return pb.CompleteJobResponse(state=state)

    def fail_job(self, request: pb.FailJobRequest, call: Call) -> pb.FailJobResponse:
        """FailJob."""
        forms.check_settlement(request)
        state, ready_ms = self._settle(request.namespace, request.job_id, request.fencing_token, request)
        return pb.FailJobResponse(state=state, ready_time=messages.timestamp(ready_ms))

    def release_job(self, request: pb.ReleaseJobRequest, call: Call) -> pb.ReleaseJobResponse:
        """ReleaseJob."""
        forms.check_settlement(request)
        state, ready_ms = self._settle(request.namespace, request.job_id, request.fencing_token, request)
        return pb.ReleaseJobResponse(state=state, ready_time=messages.timestamp(ready_ms))

    def settle_jobs(self, request: pb.SettleJobsRequest, call: Call) -> pb.SettleJobsResponse:
        """SettleJobs."""
        answer = pb.SettleJobsResponse()
        for item, error in zip(request.settlements, forms.check_settlements(request), strict=True):
            try:
                if error is not None:
                    raise error
                how = getattr(item, item.WhichOneof("how") or "")
                state, ready_ms = self._settle(request.namespace, item.job_id, item.fencing_token, how)
            except Refused as refused:
                answer.results.add(job_id=item.job_id, error=to_status(refused))
            else:
                ready_time = messages.timestamp(ready_ms)
                answer.results.add(job_id=item.job_id, state=state, ready_time=ready_time)
        return answer

    def _settle(
        self, namespace: str, job_id: str, token: int, how: messages.Settling
    ) -> tuple[types.JobState.ValueType, int]:
        """The state that the job comes to, and when it runs again, 0 if it does not."""
        self._check_future(token, job_id)
        place = (_ns(namespace), job_id)
        record = self._world.records.get(place)
        if record is None:
            raise not_found(job_id)
        if split_token(token).epoch != split_token(self._world.token).epoch:
            raise _lost(record, token)
        command = messages.settlement(token, how, record.progress, jitter_number=self.jitter)
        holder = record.claim.session if record.claim is not None else ""
        outcome = self._world.decide(record, command)
        if isinstance(outcome, Refusal):
            raise refused_by(outcome, job_id=job_id)
        if isinstance(outcome, Replay):
            attempt = outcome.attempt
            assert attempt.state_after is not None, "an attempt that has ended knows what became of the job"
            return messages.state(attempt.state_after), attempt.ready_ms_after
        follow_ups: Sequence[types.JobSpec] = ()
        if isinstance(how, pb.CompleteJobRequest | pb.Completion):
            follow_ups = how.follow_ups
        new = self._admit(record.job, token, follow_ups)
        self._world.act(record, command)
        for child, spec in new:
            self._world.enqueue(child, spec, record.revision)
        job = record.job
        if job.attempts and job.attempts[-1].outcome in _CLEAN:
            self._settled(holder, place)
        waits = job.state in (JobState.SCHEDULED, JobState.PENDING)
        return messages.state(job.state), job.ready_ms if waits else 0

    def _admit(self, parent: Job, token: int, specs: Sequence[types.JobSpec]) -> list[tuple[Job, Spec]]:
        """The follow-up jobs that are not there yet, all of which can be stored."""
        world, namespace = self._world, parent.namespace
        commands = []
        for item, spec in enumerate(specs):
            job_id = spec.job_id or follow_up_job_id(namespace, parent.job_id, token, item)
            counter = world.next_counter()
            terms = messages.terms_of(spec, submit_ms=world.now_ms, counter=counter, request_id="")
            commands.append(
                Submit(namespace=namespace, job_id=job_id, terms=terms, run_at_ms=terms.run_at_ms)
            )
        ids = {command.job_id for command in commands}
        if len(ids) != len(commands) or parent.job_id in ids:
            raise Refused(
                "VALIDATION_FAILED",
                "two follow-up jobs have the same id, or one has the id of the job that completes",
                metadata={"job_id": parent.job_id},
            )
        found = [self._standing(command) for command in commands]
        admitted = admit(parent, commands, found, world.now_ms)
        if isinstance(admitted, Refusal):
            raise refused_by(admitted)
        return [
            (decision.job, Spec(specs[place].payload, specs[place].content_type))
            for place, decision in admitted.items()
            if decision.job is not None
        ]

    def _standing(self, command: Submit) -> Standing:
        terms = command.terms
        record = self._world.records.get((command.namespace, command.job_id))
        return Standing(
            job=record.job if record is not None else None,
            unique_owner=self._world.owner_of(command.namespace, terms.queue, terms.unique_key),
        )

    def save_checkpoint(self, request: pb.SaveCheckpointRequest, call: Call) -> pb.SaveCheckpointResponse:
        """SaveCheckpoint."""
        forms.check_checkpoint(request)
        token = request.fencing_token
        self._check_future(token, request.job_id)
        record = self._world.records.get((_ns(request.namespace), request.job_id))
        if record is None:
            raise not_found(request.job_id)
        claim = record.claim
        if claim is None or claim.token != token:
            raise _lost(record, token)
        lying = record.checkpoint
        if lying is not None and (lying.attempt, lying.sequence) > (claim.attempt, request.sequence):
            return pb.SaveCheckpointResponse(stored=False)
        progress = messages.progress_of(request.progress) if request.HasField("progress") else None
        record.checkpoint = Checkpoint(claim.attempt, request.sequence, request.checkpoint, progress)
        self._world.next_revision()
        return pb.SaveCheckpointResponse(stored=True)

    def _check_future(self, token: int, job_id: str) -> None:
        present = self._world.token
        if token > present:
            raise Refused(
                "EPOCH_REGRESSED",
                "this token lies in the future of the store;"
                " it was set back, or the token belongs to another one",
                metadata={"job_id": job_id, "held": str(token), "present": str(present)},
            )


def _ns(namespace: str) -> str:
    return namespace or "default"


def _lost(record: Record, token: int) -> Refused:
    job, current = record.job, record.claim.token if record.claim is not None else 0
    return Refused(
        "CLAIM_LOST",
        "the claim that this token stood for has ended",
        metadata={
            "job_id": job.job_id,
            "held": str(token),
            "current": str(current),
            "state": job.state.name,
        },
    )
