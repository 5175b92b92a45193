"""Between the published messages and the values of the core, as the service converts them."""

from __future__ import annotations

import base64
import struct
from hashlib import sha256

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.core.commands import Complete, Fail, Release, Settlement
from coordinator.core.job import Attempt, Claim, Job, JobLock, JobState, Progress, Rollback, Terms
from coordinator.core.lock_order import LockMode
from coordinator.core.rank import DEFAULT_PRIORITY
from coordinator.core.retry import RetryPolicy
from leasekeeper.v1 import job_service_pb2 as jobs_pb
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as work_pb
from worker_sdk.testing._fields import duration_ms, timestamp_ms
from worker_sdk.testing._world import Record

__all__ = [
    "Settling",
    "attempts_message",
    "claim_message",
    "cut",
    "digest",
    "job_message",
    "listed_message",
    "made_job_id",
    "made_session_id",
    "optional_ms",
    "progress_of",
    "request_digest",
    "settlement",
    "span",
    "state",
    "terms_of",
    "timestamp",
]

_DEFAULT = RetryPolicy()


def span(ms: int) -> Duration:
    """Milliseconds as a Duration."""
    return Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)


def timestamp(ms: int) -> Timestamp | None:
    """Unix milliseconds as a Timestamp; 0 is none."""
    return Timestamp(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000) if ms else None


def state(value: JobState) -> types.JobState.ValueType:
    """The published number of a state."""
    return types.JobState.ValueType(value.value)


def cut(text: str) -> str:
    """*text* cut to 512 bytes at a character's end."""
    return text.encode()[:512].decode(errors="ignore")


def progress_of(message: types.Progress) -> Progress:
    """How far a handler is."""
    return Progress(ratio=message.ratio, note=message.note)


def optional_ms(value: Timestamp | Duration, present: bool) -> int:
    """Milliseconds of a field, 0 if it is absent."""
    if not present:
        return 0
    return timestamp_ms(value) if isinstance(value, Timestamp) else duration_ms(value)


def _fold(*parts: bytes) -> bytes:
    lengths = struct.pack(f">{len(parts)}I", *map(len, parts))
    return sha256(lengths + b"".join(parts)).digest()[:16]


def digest(*said: object) -> bytes:
    """16 bytes over anything whose ``repr`` says it all."""
    return _fold(*(repr(part).encode() for part in said))


def request_digest(request_id: str) -> bytes:
    """16 bytes for a request id, empty for none."""
    return digest("request", request_id) if request_id else b""


def made_job_id(namespace: str, request_id: str, item: int) -> str:
    """The id of a job whose submitter named none, the same for every repeat of the request."""
    return base64.b32encode(digest("job", namespace, request_id, item)).decode()[:26].lower()


def made_session_id(namespace: str, request_id: str) -> str:
    """The id of a session: 16 hex digits of a positive int64."""
    number = int.from_bytes(digest("session", namespace, request_id)[:8], "big")
    return f"{number % (2**63 - 1) + 1:016x}"


def terms_of(spec: types.JobSpec, *, submit_ms: int, counter: int, request_id: str) -> Terms:
    """What a job is submitted with. Its digest covers all that the submitter said, save the job's id."""
    has = spec.HasField
    policy = spec.retry_policy
    told = policy.HasField
    retry = RetryPolicy(
        max_retries=policy.max_retries if told("max_retries") else _DEFAULT.max_retries,
        initial_ms=duration_ms(policy.initial_delay) if told("initial_delay") else _DEFAULT.initial_ms,
        multiplier=policy.multiplier if told("multiplier") else _DEFAULT.multiplier,
        cap_ms=duration_ms(policy.max_delay) if told("max_delay") else _DEFAULT.cap_ms,
        jitter=policy.jitter if told("jitter") else _DEFAULT.jitter,
        non_retryable_types=tuple(policy.non_retryable_types),
        max_lease_losses=policy.max_lease_losses if told("max_lease_losses") else _DEFAULT.max_lease_losses,
    )
    rollback = None
    if has("rollback"):
        wanted = spec.rollback
        rollback = Rollback(
            queue=wanted.queue,
            type=wanted.type,
            payload=wanted.payload,
            content_type=wanted.content_type,
            priority=wanted.priority,
        )
    locks = tuple(
        JobLock(name=lock.name, mode=LockMode(lock.mode or LockMode.EXCLUSIVE), permits=lock.permits or 1)
        for lock in spec.locks
    )
    priority = spec.priority or DEFAULT_PRIORITY
    times = tuple(
        optional_ms(getattr(spec, name), has(name))
        for name in (
            "due_time",
            "run_at",
            "queue_timeout",
            "run_timeout",
            "total_timeout",
            "heartbeat_timeout",
        )
    )
    labels = dict(sorted(spec.labels.items()))
    said = (spec.queue, spec.type, spec.payload, spec.content_type, spec.unique_key)
    due_ms, run_at_ms, queue_ms, run_ms, total_ms, heartbeat_ms = times
    return Terms(
        queue=spec.queue,
        type=spec.type,
        priority=priority,
        labels=labels,
        submit_ms=submit_ms,
        due_ms=due_ms,
        run_at_ms=run_at_ms,
        counter=counter,
        retry=retry,
        queue_timeout_ms=queue_ms,
        run_timeout_ms=run_ms,
        total_timeout_ms=total_ms,
        heartbeat_timeout_ms=heartbeat_ms,
        unique_key=spec.unique_key,
        payload_size=len(spec.payload),
        digest=digest(*said, priority, labels, times, retry, rollback, locks),
        request_digest=request_digest(request_id),
        rollback=rollback,
        locks=locks,
    )


def _said(spec: types.JobSpec) -> tuple[str, bytes]:
    """What tells one follow-up job from another."""
    return spec.job_id, terms_of(spec, submit_ms=0, counter=0, request_id="").digest


Settling = (
    work_pb.CompleteJobRequest
    | work_pb.FailJobRequest
    | work_pb.ReleaseJobRequest
    | work_pb.Completion
    | work_pb.FailureSettlement
    | work_pb.Release
)


def settlement(token: int, how: Settling, progress: Progress | None, *, jitter_number: float) -> Settlement:
    """What a worker says of an attempt's end."""
    if isinstance(how, work_pb.CompleteJobRequest | work_pb.Completion):
        return Complete(
            token=token,
            digest=digest("complete", how.result, how.result_content_type, *map(_said, how.follow_ups)),
            result=how.result,
            result_content_type=how.result_content_type,
            progress=progress,
        )
    if isinstance(how, work_pb.FailJobRequest | work_pb.FailureSettlement):
        delay = duration_ms(how.retry_delay) if how.HasField("retry_delay") else None
        message = cut(how.failure.message)
        return Fail(
            token=token,
            digest=digest("fail", delay, how.no_retry, how.failure.type, message),
            failure_type=how.failure.type,
            failure_message=message,
            retry_delay_ms=delay,
            no_retry=how.no_retry,
            jitter_number=jitter_number,
            progress=progress,
        )
    delay_ms = optional_ms(how.delay, how.HasField("delay"))
    reason = cut(how.reason)
    return Release(
        token=token,
        digest=digest("release", delay_ms, reason),
        delay_ms=delay_ms,
        reason=reason,
        progress=progress,
    )


def claim_message(record: Record) -> work_pb.Claim:
    """A claimed job."""
    job, claim, spec = record.job, record.claim, record.spec
    assert claim is not None, "it is held"
    assert spec is not None, "a running job has its spec"
    terms = job.terms
    return work_pb.Claim(
        job_id=job.job_id,
        fencing_token=claim.token,
        queue=terms.queue,
        type=terms.type,
        attempt=claim.attempt,
        payload=spec.payload,
        content_type=spec.content_type,
        labels=terms.labels,
        checkpoint=record.checkpoint.data if record.checkpoint is not None else b"",
        run_timeout=span(claim.run_timeout_ms) if claim.run_timeout_ms else None,
        heartbeat_timeout=span(terms.heartbeat_timeout_ms) if terms.heartbeat_timeout_ms else None,
        due_time=timestamp(terms.due_ms),
        submit_time=timestamp(terms.submit_ms),
        priority=terms.priority,
        failures=job.failures,
        max_retries=terms.retry.max_retries,
        lock_names=[lock.name for lock in terms.locks],
    )


def listed_message(job: Job, revision: int) -> types.Job:
    """A job as its record alone says: without payload, and with a token only once an attempt has ended."""
    message = _message(Record(job, revision), job, revision)
    if job.state is not JobState.RUNNING:
        message.fencing_token = _last_token(job)
    return message


def job_message(record: Record, *, whole: bool = True) -> types.Job:
    """A job with all that is known of it; not *whole*: without spec and large result."""
    message = _message(record, record.job, record.revision)
    held = record.claim.token if record.claim is not None else 0
    message.fencing_token = held or _last_token(record.job)
    progress = record.job.progress
    if whole:
        message.result = record.result or record.job.result
        if record.spec is not None:
            _fill_payloads(message.spec, record)
        if progress is None and record.checkpoint is not None:
            progress = record.checkpoint.progress
    if record.job.state is JobState.RUNNING:
        progress = record.progress or progress
        beaten = timestamp(record.last_beat_ms)
        if beaten is not None:
            message.last_beat_time.CopyFrom(beaten)
    if progress is not None:
        message.progress.CopyFrom(types.Progress(ratio=progress.ratio, note=progress.note))
    return message


def _fill_payloads(spec: types.JobSpec, record: Record) -> None:
    assert record.spec is not None, "it was asked before"
    spec.payload, spec.content_type = record.spec
    rollback = record.job.terms.rollback
    if rollback is not None:
        spec.rollback.payload, spec.rollback.content_type = rollback.payload, rollback.content_type


def _last_token(job: Job) -> int:
    return next((attempt.token for attempt in reversed(job.attempts) if attempt.token), 0)


def _message(record: Record, job: Job, revision: int) -> types.Job:
    claim, current = record.claim, job.current
    last = job.attempts[-1] if job.attempts else None
    failed = job.last_failed
    progress = job.progress
    return types.Job(
        namespace=job.namespace,
        job_id=job.job_id,
        state=state(job.state),
        etag=str(revision),
        spec=_spec(job),
        payload_size=job.terms.payload_size,
        attempt=job.attempt,
        failures=job.failures,
        lease_losses=job.lease_losses,
        uncharged=job.uncharged,
        session_id=claim.session if claim is not None else current.session if current is not None else "",
        cancel_requested=job.cancel_requested,
        progress=types.Progress(ratio=progress.ratio, note=progress.note) if progress is not None else None,
        result=job.result,
        result_content_type=job.result_content_type,
        failure=_failure(failed) if failed is not None else None,
        submit_time=timestamp(job.terms.submit_ms),
        ready_time=timestamp(job.ready_ms),
        claim_time=timestamp(last.start_ms) if last is not None else None,
        settle_time=timestamp(job.settle_ms),
        rank_time=timestamp(job.rank.ms),
        end_reason=job.end_reason,
        rollback_job_id=job.rollback_job,
        attempts=[_attempt(attempt, claim) for attempt in job.attempts],
    )


def attempts_message(record: Record) -> jobs_pb.ListAttemptsResponse:
    """ListAttempts' answer."""
    job = record.job
    return jobs_pb.ListAttemptsResponse(
        attempts=[_attempt(attempt, record.claim) for attempt in job.attempts],
        total=job.attempt,
        failures=job.failures,
        lease_losses=job.lease_losses,
        uncharged=job.uncharged,
    )


def _failure(attempt: Attempt) -> types.Failure | None:
    if not attempt.failure_type and not attempt.failure_message:
        return None
    return types.Failure(type=attempt.failure_type, message=attempt.failure_message)


def _attempt(attempt: Attempt, claim: Claim | None) -> types.Attempt:
    token = attempt.token
    if not token and claim is not None and claim.attempt == attempt.number:
        token = claim.token
    return types.Attempt(
        number=attempt.number,
        fencing_token=token,
        session_id=attempt.session,
        start_time=timestamp(attempt.start_ms),
        end_time=timestamp(attempt.end_ms),
        outcome=types.AttemptOutcome.ValueType(attempt.outcome.value),
        failure=_failure(attempt),
    )


def _spec(job: Job) -> types.JobSpec:
    terms = job.terms
    retry = terms.retry
    message = types.JobSpec(
        job_id=job.job_id,
        queue=terms.queue,
        type=terms.type,
        labels=terms.labels,
        priority=terms.priority,
        due_time=timestamp(terms.due_ms),
        run_at=timestamp(terms.run_at_ms),
        queue_timeout=span(terms.queue_timeout_ms) if terms.queue_timeout_ms else None,
        run_timeout=span(terms.run_timeout_ms) if terms.run_timeout_ms else None,
        total_timeout=span(terms.total_timeout_ms) if terms.total_timeout_ms else None,
        heartbeat_timeout=span(terms.heartbeat_timeout_ms) if terms.heartbeat_timeout_ms else None,
        retry_policy=types.RetryPolicy(
            max_retries=retry.max_retries,
            initial_delay=span(retry.initial_ms),
            multiplier=retry.multiplier,
            max_delay=span(retry.cap_ms),
            jitter=retry.jitter,
            non_retryable_types=retry.non_retryable_types,
            max_lease_losses=retry.max_lease_losses,
        ),
        unique_key=terms.unique_key,
    )
    rollback = terms.rollback
    if rollback is not None:
        message.rollback.queue, message.rollback.type = rollback.queue, rollback.type
        message.rollback.priority = rollback.priority
    for lock in terms.locks:
        permits = lock.permits if lock.mode is LockMode.SEMAPHORE else 0
        message.locks.add(name=lock.name, mode=types.LockMode.ValueType(lock.mode), permits=permits)
    return message
