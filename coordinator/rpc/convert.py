"""Between the published messages of jobs and the values of the services.

Total functions: the input is validated already.

Times are Unix milliseconds on the inside, 0 for none; a message field stays absent then.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.core.job import Attempt, Claim, Job, JobLock, JobState, Progress, Rollback
from coordinator.core.lock_order import LockMode
from coordinator.core.rank import DEFAULT_PRIORITY
from coordinator.core.retry import RetryPolicy
from coordinator.errors import RequestError
from coordinator.ports import Stored
from coordinator.rpc import limits
from coordinator.rpc.field_checks import duration_ms, timestamp_ms
from coordinator.rpc.status import to_status
from coordinator.services.api import (
    JobFilter,
    JobView,
    NewJob,
    Redriven,
    RedriveQuery,
    SubmitOutcome,
    WatchedJob,
)
from leasekeeper.v1 import job_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types

__all__ = [
    "attempts_response",
    "cut_text",
    "duration",
    "etag",
    "job_state",
    "list_filter",
    "listed_job",
    "namespace_of",
    "new_job",
    "optional_ms",
    "progress_of",
    "redrive_query",
    "redrive_response",
    "retry_policy",
    "submit_response",
    "submit_result",
    "timestamp",
    "viewed_job",
    "watch_filter",
    "watch_response",
]

_DEFAULT_RETRY = RetryPolicy()

_PUBLISHED = {state: types.JobState.ValueType(state.value) for state in JobState}  # asked twice a job


def namespace_of(namespace: str) -> str:
    """The namespace of a request; empty is "default"."""
    return namespace or limits.DEFAULT_NAMESPACE


def duration(ms: int) -> Duration:
    """Milliseconds as a Duration."""
    return Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)


def timestamp(ms: int) -> Timestamp | None:
    """Unix milliseconds as a Timestamp; 0 is none."""
    return Timestamp(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000) if ms else None


def optional_ms(value: Timestamp | Duration, present: bool) -> int:
    """Milliseconds of a field, 0 if it is absent."""
    if not present:
        return 0
    return timestamp_ms(value) if isinstance(value, Timestamp) else duration_ms(value)


def etag(revision: int) -> str:
    """The tag of a record that was written at ``revision``."""
    return str(revision)


def job_state(state: JobState) -> types.JobState.ValueType:
    """The published number of a state."""
    return _PUBLISHED[state]


def cut_text(text: str, limit: int = limits.REASON_BYTES) -> str:
    """``text``, cut to ``limit`` bytes of UTF-8 at a character's end."""
    if len(text) * 4 <= limit:
        return text
    raw = text.encode()
    return text if len(raw) <= limit else raw[:limit].decode(errors="ignore")


def progress_of(message: types.Progress) -> Progress:
    """How far a handler is."""
    return Progress(ratio=message.ratio, note=message.note)


def retry_policy(policy: types.RetryPolicy) -> RetryPolicy:
    """A policy; fields that are left out have the defaults."""
    default = _DEFAULT_RETRY
    has = policy.HasField
    return RetryPolicy(
        max_retries=policy.max_retries if has("max_retries") else default.max_retries,
        initial_ms=duration_ms(policy.initial_delay) if has("initial_delay") else default.initial_ms,
        multiplier=policy.multiplier if has("multiplier") else default.multiplier,
        cap_ms=duration_ms(policy.max_delay) if has("max_delay") else default.cap_ms,
        jitter=policy.jitter if has("jitter") else default.jitter,
        non_retryable_types=tuple(policy.non_retryable_types),
        max_lease_losses=policy.max_lease_losses if has("max_lease_losses") else default.max_lease_losses,
    )


def new_job(spec: types.JobSpec, item: int = 0) -> NewJob:
    """A job as submitted, at place ``item`` of its call."""
    has = spec.HasField
    return NewJob(
        item=item,
        job_id=spec.job_id,
        queue=spec.queue,
        type=spec.type,
        payload=spec.payload,
        content_type=spec.content_type,
        labels=dict(spec.labels),
        priority=spec.priority or DEFAULT_PRIORITY,
        due_ms=timestamp_ms(spec.due_time) if has("due_time") else 0,
        run_at_ms=timestamp_ms(spec.run_at) if has("run_at") else 0,
        queue_timeout_ms=duration_ms(spec.queue_timeout) if has("queue_timeout") else 0,
        run_timeout_ms=duration_ms(spec.run_timeout) if has("run_timeout") else 0,
        total_timeout_ms=duration_ms(spec.total_timeout) if has("total_timeout") else 0,
        heartbeat_timeout_ms=duration_ms(spec.heartbeat_timeout) if has("heartbeat_timeout") else 0,
        retry=retry_policy(spec.retry_policy) if has("retry_policy") else _DEFAULT_RETRY,
        unique_key=spec.unique_key,
        rollback=_rollback(spec.rollback) if has("rollback") else None,
        locks=tuple([_lock(lock) for lock in spec.locks]) if spec.locks else (),
        own_retry=has("retry_policy"),
    )


def _lock(lock: types.JobLock) -> JobLock:
    mode = LockMode(lock.mode) if lock.mode else LockMode.EXCLUSIVE
    # Of a mode without permits, 0 and 1 are the same: so are their digests.
    return JobLock(name=lock.name, mode=mode, permits=lock.permits or 1)


def _rollback(rollback: types.RollbackJob) -> Rollback:
    return Rollback(
        queue=rollback.queue,
        type=rollback.type,
        payload=rollback.payload,
        content_type=rollback.content_type,
        priority=rollback.priority,
    )


def submit_response(outcome: SubmitOutcome) -> pb.SubmitJobResponse:
    """SubmitJob's answer."""
    stored = outcome.stored
    return pb.SubmitJobResponse(
        job_id=stored.job.job_id,
        created=outcome.created,
        state=job_state(stored.job.state),
        etag=etag(stored.revision),
    )


def submit_result(job_id: str, outcome: SubmitOutcome | RequestError) -> pb.SubmitResult:
    """One result of SubmitJobs; ``job_id`` is the caller's, for refused jobs."""
    if isinstance(outcome, RequestError):
        return pb.SubmitResult(job_id=job_id, error=to_status(outcome))
    stored = outcome.stored
    return pb.SubmitResult(
        job_id=stored.job.job_id,
        created=outcome.created,
        state=job_state(stored.job.state),
        etag=etag(stored.revision),
    )


def list_filter(request: pb.ListJobsRequest, now_ms: int) -> JobFilter:
    """What ListJobs asks for, at ``now_ms``."""
    return JobFilter(
        states=frozenset(map(JobState, request.states)),
        queue=request.queue,
        type=request.type,
        labels=dict(request.labels),
        past_due_at_ms=now_ms if request.past_due else 0,
    )


def redrive_query(request: pb.RedriveJobsRequest) -> RedriveQuery:
    """What RedriveJobs asks for."""
    return RedriveQuery(
        states=frozenset(map(JobState, request.states)),
        queue=request.queue,
        type=request.type,
        labels=dict(request.labels),
        failure_type=request.failure_type,
        settled_before_ms=optional_ms(request.settled_before, request.HasField("settled_before")),
        max_jobs=request.max_jobs or limits.DEFAULT_REDRIVEN_JOBS,
        jobs_per_second=request.jobs_per_second or limits.DEFAULT_REDRIVEN_JOBS,
        validate_only=request.validate_only,
        request_id=request.request_id,
        cursor=request.page_token,
    )


def redrive_response(done: Redriven) -> pb.RedriveJobsResponse:
    """RedriveJobs' answer."""
    return pb.RedriveJobsResponse(
        job_ids=done.job_ids,
        failures=[
            pb.RedriveFailure(job_id=job_id, error=to_status(error)) for job_id, error in done.failures
        ],
        examined=done.examined,
        next_page_token=done.cursor,
    )


def attempts_response(view: JobView) -> pb.ListAttemptsResponse:
    """ListAttempts' answer."""
    job = view.stored.job
    return pb.ListAttemptsResponse(
        attempts=[_attempt(attempt, view.claim) for attempt in job.attempts],
        total=job.attempt,
        failures=job.failures,
        lease_losses=job.lease_losses,
        uncharged=job.uncharged,
    )


def watch_filter(request: pb.WatchJobsRequest) -> JobFilter:
    """What WatchJobs asks for."""
    return JobFilter(
        states=frozenset(map(JobState, request.states)),
        queue=request.queue,
        type=request.type,
        job_ids=frozenset(request.job_ids),
    )


def watch_response(namespace: str, watched: WatchedJob) -> pb.WatchJobsResponse:
    """One message of WatchJobs."""
    if watched.stored is not None:
        return pb.WatchJobsResponse(revision=watched.revision, job=listed_job(watched.stored))
    if watched.job_id:
        gone = types.Job(namespace=namespace, job_id=watched.job_id)
        return pb.WatchJobsResponse(revision=watched.revision, job=gone, deleted=True)
    return pb.WatchJobsResponse(revision=watched.revision)


def listed_job(stored: Stored) -> types.Job:
    """A job as its record alone says: without payload, and with a token only once an attempt has ended."""
    token = next((attempt.token for attempt in reversed(stored.job.attempts) if attempt.token), 0)
    return viewed_job(JobView(stored=stored, token=0 if stored.job.state is JobState.RUNNING else token))


def viewed_job(view: JobView) -> types.Job:
    """A job with all that is known of it."""
    job, claim = view.stored.job, view.claim
    current = job.current
    last = job.attempts[-1] if job.attempts else None
    message = types.Job(
        namespace=job.namespace,
        job_id=job.job_id,
        state=job_state(job.state),
        etag=etag(view.stored.revision),
        spec=_spec(view),
        payload_size=job.terms.payload_size,
        attempt=job.attempt,
        failures=job.failures,
        lease_losses=job.lease_losses,
        uncharged=job.uncharged,
        session_id=claim.session if claim is not None else current.session if current is not None else "",
        fencing_token=view.token,
        cancel_requested=job.cancel_requested,
        progress=_progress(view.progress or job.progress),
        result=view.result or job.result,
        result_content_type=job.result_content_type,
        failure=_last_failure(job),
        submit_time=timestamp(job.terms.submit_ms),
        ready_time=timestamp(job.ready_ms),
        claim_time=timestamp(last.start_ms) if last is not None else None,
        last_beat_time=timestamp(view.last_beat_ms),
        settle_time=timestamp(job.settle_ms),
        rank_time=timestamp(job.rank.ms),
        end_reason=job.end_reason,
        rollback_job_id=job.rollback_job,
    )
    message.attempts.extend(_attempt(attempt, claim) for attempt in job.attempts)
    return message


def _progress(progress: Progress | None) -> types.Progress | None:
    return types.Progress(ratio=progress.ratio, note=progress.note) if progress is not None else None


def _failure(attempt: Attempt) -> types.Failure | None:
    if not attempt.failure_type and not attempt.failure_message:
        return None
    return types.Failure(type=attempt.failure_type, message=attempt.failure_message)


def _last_failure(job: Job) -> types.Failure | None:
    failed = job.last_failed
    return _failure(failed) if failed is not None else None


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


def _span(ms: int) -> Duration | None:
    return duration(ms) if ms else None


def _spec(view: JobView) -> types.JobSpec:
    terms, spec = view.stored.job.terms, view.spec
    retry = terms.retry
    policy = types.RetryPolicy(
        max_retries=retry.max_retries,
        initial_delay=duration(retry.initial_ms),
        multiplier=retry.multiplier,
        max_delay=duration(retry.cap_ms),
        jitter=retry.jitter,
        non_retryable_types=retry.non_retryable_types,
        max_lease_losses=retry.max_lease_losses,
    )
    message = types.JobSpec(
        job_id=view.stored.job.job_id,
        queue=terms.queue,
        type=terms.type,
        payload=spec.payload if spec is not None else b"",
        content_type=spec.content_type if spec is not None else "",
        labels=terms.labels,
        priority=terms.priority,
        due_time=timestamp(terms.due_ms),
        run_at=timestamp(terms.run_at_ms),
        queue_timeout=_span(terms.queue_timeout_ms),
        run_timeout=_span(terms.run_timeout_ms),
        total_timeout=_span(terms.total_timeout_ms),
        heartbeat_timeout=_span(terms.heartbeat_timeout_ms),
        retry_policy=policy,
        unique_key=terms.unique_key,
    )
    for lock in terms.locks:
        permits = lock.permits if lock.mode is LockMode.SEMAPHORE else 0
        message.locks.add(name=lock.name, mode=types.LockMode.ValueType(lock.mode), permits=permits)
    rollback = terms.rollback
    if rollback is not None:
        message.rollback.queue = rollback.queue
        message.rollback.type = rollback.type
        message.rollback.priority = rollback.priority
        if spec is not None:  # payloads are left out of lists
            message.rollback.payload = rollback.payload
            message.rollback.content_type = rollback.content_type
    return message
