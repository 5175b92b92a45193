"""Jobs: specs and requests to messages, messages to jobs as they stand."""

from __future__ import annotations

from google.protobuf.message import Message

from leasekeeper.v1 import job_service_pb2 as job_pb
from leasekeeper.v1 import types_pb2 as pb
from worker_sdk._convert.status import from_status
from worker_sdk._convert.times import duration, optional_time, seconds, timestamp
from worker_sdk._lock_mode import LockMode
from worker_sdk.jobs import (
    Attempt,
    AttemptOutcome,
    Attempts,
    Failure,
    Job,
    JobChange,
    JobLock,
    JobSpec,
    JobState,
    Progress,
    Redriven,
    RetryPolicy,
    RollbackJob,
    Submitted,
)

__all__ = [
    "attempts_from",
    "change_from",
    "job_from",
    "redriven_from",
    "spec_to",
    "state_to",
    "submitted_from",
    "submitted_from_result",
]

_TIMEOUTS = ("queue_timeout", "run_timeout", "total_timeout", "heartbeat_timeout")


def spec_to(spec: JobSpec) -> pb.JobSpec:
    """Return *spec* as a message.

    Raises:
        ValidationFailed: a time or span that no message can hold. All else is the coordinator's to judge.
    """
    message = pb.JobSpec(
        job_id=spec.job_id,
        queue=spec.queue,
        type=spec.type,
        payload=spec.payload,
        content_type=spec.content_type,
        priority=spec.priority,
        unique_key=spec.unique_key,
    )
    if spec.labels:
        message.labels.update(spec.labels)
    if spec.due_time is not None:
        message.due_time.CopyFrom(timestamp(spec.due_time, "due_time"))
    if spec.run_at is not None:
        message.run_at.CopyFrom(timestamp(spec.run_at, "run_at"))
    for name in _TIMEOUTS:
        value: float | None = getattr(spec, name)
        if value is not None:
            getattr(message, name).CopyFrom(duration(value, name))
    if spec.retry is not None:
        _fill_policy(message.retry_policy, spec.retry)
    if spec.rollback is not None:
        rollback = spec.rollback
        message.rollback.CopyFrom(
            pb.RollbackJob(
                queue=rollback.queue,
                type=rollback.type,
                payload=rollback.payload,
                content_type=rollback.content_type,
                priority=rollback.priority,
            )
        )
    for lock in spec.locks:
        message.locks.add(name=lock.name, mode=pb.LockMode.ValueType(lock.mode), permits=lock.permits)
    return message


def _fill_policy(message: pb.RetryPolicy, policy: RetryPolicy) -> None:
    message.SetInParent()
    if policy.max_retries is not None:
        message.max_retries = policy.max_retries
    if policy.initial_delay is not None:
        message.initial_delay.CopyFrom(duration(policy.initial_delay, "retry.initial_delay"))
    if policy.multiplier is not None:
        message.multiplier = policy.multiplier
    if policy.max_delay is not None:
        message.max_delay.CopyFrom(duration(policy.max_delay, "retry.max_delay"))
    if policy.jitter is not None:
        message.jitter = policy.jitter
    if policy.max_lease_losses is not None:
        message.max_lease_losses = policy.max_lease_losses
    message.non_retryable_types.extend(policy.non_retryable_types)


def state_to(state: JobState) -> pb.JobState.ValueType:
    """Return the wire's name for *state*."""
    return pb.JobState.ValueType(int(state))


def job_from(message: pb.Job) -> Job:
    """Return a job as it stands."""
    return Job(
        namespace=message.namespace,
        job_id=message.job_id,
        state=JobState(message.state),
        etag=message.etag,
        spec=_spec_from(message.spec),
        payload_size=message.payload_size,
        attempt=message.attempt,
        failures=message.failures,
        lease_losses=message.lease_losses,
        uncharged=message.uncharged,
        session_id=message.session_id,
        fencing_token=message.fencing_token,
        cancel_requested=message.cancel_requested,
        progress=Progress(message.progress.ratio, message.progress.note)
        if message.HasField("progress")
        else None,
        result=message.result,
        result_content_type=message.result_content_type,
        failure=_failure_from(message),
        submit_time=optional_time(message, "submit_time"),
        ready_time=optional_time(message, "ready_time"),
        claim_time=optional_time(message, "claim_time"),
        last_beat_time=optional_time(message, "last_beat_time"),
        settle_time=optional_time(message, "settle_time"),
        rank_time=optional_time(message, "rank_time"),
        attempts=tuple(_attempt_from(attempt) for attempt in message.attempts),
        end_reason=message.end_reason,
        rollback_job_id=message.rollback_job_id,
    )


def _spec_from(message: pb.JobSpec) -> JobSpec:
    return JobSpec(
        job_id=message.job_id,
        queue=message.queue,
        type=message.type,
        payload=message.payload,
        content_type=message.content_type,
        labels=dict(message.labels),
        priority=message.priority,
        due_time=optional_time(message, "due_time"),
        run_at=optional_time(message, "run_at"),
        queue_timeout=_optional_seconds(message, "queue_timeout"),
        run_timeout=_optional_seconds(message, "run_timeout"),
        total_timeout=_optional_seconds(message, "total_timeout"),
        heartbeat_timeout=_optional_seconds(message, "heartbeat_timeout"),
        retry=_policy_from(message.retry_policy) if message.HasField("retry_policy") else None,
        unique_key=message.unique_key,
        rollback=_rollback_from(message.rollback) if message.HasField("rollback") else None,
        locks=tuple(JobLock(lock.name, LockMode(lock.mode), lock.permits) for lock in message.locks),
    )


def _rollback_from(message: pb.RollbackJob) -> RollbackJob:
    return RollbackJob(
        queue=message.queue,
        type=message.type,
        payload=message.payload,
        content_type=message.content_type,
        priority=message.priority,
    )


def _policy_from(message: pb.RetryPolicy) -> RetryPolicy:
    return RetryPolicy(
        max_retries=message.max_retries if message.HasField("max_retries") else None,
        initial_delay=_optional_seconds(message, "initial_delay"),
        multiplier=message.multiplier if message.HasField("multiplier") else None,
        max_delay=_optional_seconds(message, "max_delay"),
        jitter=message.jitter if message.HasField("jitter") else None,
        non_retryable_types=tuple(message.non_retryable_types),
        max_lease_losses=message.max_lease_losses if message.HasField("max_lease_losses") else None,
    )


def _attempt_from(message: pb.Attempt) -> Attempt:
    return Attempt(
        number=message.number,
        fencing_token=message.fencing_token,
        session_id=message.session_id,
        outcome=AttemptOutcome(message.outcome),
        start_time=optional_time(message, "start_time"),
        end_time=optional_time(message, "end_time"),
        failure=_failure_from(message),
    )


def _failure_from(message: pb.Job | pb.Attempt) -> Failure | None:
    return Failure(message.failure.type, message.failure.message) if message.HasField("failure") else None


def _optional_seconds(message: Message, field: str) -> float | None:
    return seconds(getattr(message, field)) if message.HasField(field) else None


def submitted_from(message: job_pb.SubmitJobResponse) -> Submitted:
    """Return what became of the job of SubmitJob."""
    return Submitted(
        job_id=message.job_id, created=message.created, state=JobState(message.state), etag=message.etag
    )


def submitted_from_result(message: job_pb.SubmitResult) -> Submitted:
    """Return what became of one job of SubmitJobs."""
    return Submitted(
        job_id=message.job_id,
        created=message.created,
        state=JobState(message.state),
        etag=message.etag,
        error=from_status(message.error) if message.HasField("error") else None,
    )


def attempts_from(message: job_pb.ListAttemptsResponse) -> Attempts:
    """Return the attempts of a job."""
    return Attempts(
        attempts=tuple(_attempt_from(attempt) for attempt in message.attempts),
        total=message.total,
        failures=message.failures,
        lease_losses=message.lease_losses,
        uncharged=message.uncharged,
    )


def redriven_from(message: job_pb.RedriveJobsResponse) -> Redriven:
    """Return what a call of RedriveJobs did."""
    return Redriven(
        job_ids=tuple(message.job_ids),
        failures={failure.job_id: from_status(failure.error) for failure in message.failures},
        examined=message.examined,
    )


def change_from(message: job_pb.WatchJobsResponse) -> JobChange:
    """Return a change; the caller has seen that the message names a job."""
    job = None if message.deleted else job_from(message.job)
    return JobChange(revision=message.revision, job_id=message.job.job_id, job=job)
