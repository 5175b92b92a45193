"""Form of every request of JobService.

Fields, sizes, ranges. What state says about them is the services' business.

Each function raises RequestError with all violations at once, or returns having changed nothing. Items of a
batch are checked one by one, so that one bad item refuses itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core.job import FAILED
from coordinator.core.job_locks import MAX_LOCKS
from coordinator.core.lock_order import MAX_PERMITS
from coordinator.errors import Reason, RequestError
from coordinator.rpc import limits
from coordinator.rpc.field_checks import (
    Violations,
    check_count,
    check_duration,
    check_id,
    check_labels,
    check_name,
    check_number,
    check_states,
    check_text,
    check_timestamp,
)
from coordinator.rpc.limits import CallLimits
from leasekeeper.v1 import job_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types

__all__ = [
    "check_cancel",
    "check_delete",
    "check_get",
    "check_job",
    "check_list",
    "check_list_attempts",
    "check_redrive",
    "check_request_id",
    "check_retry",
    "check_retry_policy",
    "check_submit",
    "check_submit_batch",
    "check_update",
    "check_wait",
    "check_watch",
]

_LOCK_MODES = frozenset(types.LockMode.values())


def check_request_id(found: Violations, request_id: str, *, required: bool = False) -> None:
    """The id that makes a repeat recognisable, 1-128 bytes."""
    check_text(found, "request_id", request_id, limits.REQUEST_ID_BYTES, required=required)


def _namespace(found: Violations, namespace: str) -> None:
    check_name(found, "namespace", namespace, required=False)


def check_retry_policy(found: Violations, policy: types.RetryPolicy) -> None:
    """The fields of a `retry_policy`, each alone."""
    if policy.HasField("max_retries"):
        check_number(found, "retry_policy.max_retries", policy.max_retries, 0, 1_000)
    if policy.HasField("max_lease_losses"):
        check_number(found, "retry_policy.max_lease_losses", policy.max_lease_losses, 0, 1_000)
    if policy.HasField("multiplier"):
        check_number(found, "retry_policy.multiplier", policy.multiplier, 1, 100)
    if policy.HasField("jitter"):
        check_number(found, "retry_policy.jitter", policy.jitter, 0, 1)
    if policy.HasField("initial_delay"):
        check_duration(
            found, "retry_policy.initial_delay", policy.initial_delay, limits.LONGEST_DELAY_MS, positive=True
        )
    if policy.HasField("max_delay"):
        check_duration(
            found, "retry_policy.max_delay", policy.max_delay, limits.LONGEST_DELAY_MS, positive=True
        )
    kinds = policy.non_retryable_types
    if kinds and check_count(
        found, "retry_policy.non_retryable_types", len(kinds), 0, limits.NON_RETRYABLE_TYPES
    ):
        for index, kind in enumerate(kinds):
            field = f"retry_policy.non_retryable_types[{index}]"
            check_text(found, field, kind, limits.FAILURE_TYPE_BYTES, required=True)


def check_job(found: Violations, job: types.JobSpec) -> None:
    """One job as submitted; ``found.place`` is where it stands in the request (``job``, ``jobs[3]``)."""
    check_id(found, "job_id", job.job_id, required=False)
    check_name(found, "queue", job.queue)
    check_name(found, "type", job.type)
    size = len(job.payload)
    if size > limits.PAYLOAD_BYTES:
        found.add_special(
            Reason.PAYLOAD_TOO_LARGE,
            "payload",
            f"is {size} bytes, the limit is {limits.PAYLOAD_BYTES}",
            size=size,
            limit=limits.PAYLOAD_BYTES,
        )
    check_text(found, "content_type", job.content_type, limits.CONTENT_TYPE_BYTES)
    check_labels(found, "labels", job.labels)
    if not 0 <= job.priority <= 5:
        found.add("priority", f"must be from 1 to 5, or 0 for the default, is {job.priority}")
    check_id(found, "unique_key", job.unique_key, required=False)
    if job.HasField("due_time"):
        check_timestamp(found, "due_time", job.due_time)
    if job.HasField("run_at"):
        check_timestamp(found, "run_at", job.run_at)
    for name in ("queue_timeout", "run_timeout", "total_timeout", "heartbeat_timeout"):
        if job.HasField(name):
            check_duration(found, name, getattr(job, name), limits.LONGEST_TIMEOUT_MS, positive=True)
    if job.HasField("retry_policy"):
        check_retry_policy(found, job.retry_policy)
    if job.HasField("rollback"):
        _rollback(found, job.rollback)
    if job.locks:
        _locks(found, job.locks)


def _locks(found: Violations, locks: Sequence[types.JobLock]) -> None:
    if not check_count(found, "locks", len(locks), 0, MAX_LOCKS):
        return
    seen: set[str] = set()
    for index, lock in enumerate(locks):
        place = f"locks[{index}]"
        check_id(found, f"{place}.name", lock.name)
        if lock.name in seen:
            found.add(f"{place}.name", "is named twice")
        seen.add(lock.name)
        if lock.mode not in _LOCK_MODES:
            found.add(f"{place}.mode", f"{lock.mode} is not a lock mode")
        elif lock.mode == types.LOCK_MODE_SEMAPHORE:
            check_number(found, f"{place}.permits", lock.permits, 1, MAX_PERMITS)
        elif lock.permits not in (0, 1):
            found.add(f"{place}.permits", f"only a semaphore has permits, is {lock.permits}")


def _rollback(found: Violations, rollback: types.RollbackJob) -> None:
    check_name(found, "rollback.queue", rollback.queue)
    check_name(found, "rollback.type", rollback.type)
    size = len(rollback.payload)
    if size > limits.ROLLBACK_PAYLOAD_BYTES:
        found.add_special(
            Reason.PAYLOAD_TOO_LARGE,
            "rollback.payload",
            f"is {size} bytes, the limit is {limits.ROLLBACK_PAYLOAD_BYTES}",
            size=size,
            limit=limits.ROLLBACK_PAYLOAD_BYTES,
        )
    check_text(found, "rollback.content_type", rollback.content_type, limits.CONTENT_TYPE_BYTES)
    if not 0 <= rollback.priority <= 5:
        found.add("rollback.priority", f"must be from 1 to 5, or 0 for the job's own, is {rollback.priority}")


def check_submit(request: pb.SubmitJobRequest) -> None:
    """SubmitJob."""
    found = Violations()
    _namespace(found, request.namespace)
    check_request_id(found, request.request_id)
    if not request.HasField("job"):
        found.add("job", "is required")
    else:
        found.place = "job"
        check_job(found, request.job)
        found.place = ""
        if not request.job.job_id and not request.request_id:
            found.add("request_id", "is required if job.job_id is empty")
    found.check()


def check_submit_batch(request: pb.SubmitJobsRequest) -> list[RequestError | None]:
    """SubmitJobs: raises for the call as a whole; returns, item by item, what refuses that item alone."""
    found = Violations()
    _namespace(found, request.namespace)
    check_request_id(found, request.request_id)
    jobs = request.jobs
    if check_count(found, "jobs", len(jobs), 1, limits.ITEMS_PER_CALL):
        _no_id_twice(found, jobs, bool(request.request_id))
    found.check()
    errors: list[RequestError | None] = []
    for index, job in enumerate(jobs):
        item = Violations(f"jobs[{index}]")
        check_job(item, job)
        errors.append(item.error())
    return errors


def _no_id_twice(found: Violations, jobs: Sequence[types.JobSpec], has_request_id: bool) -> None:
    seen: dict[str, int] = {}
    for index, job in enumerate(jobs):
        job_id = job.job_id
        if not job_id:
            if not has_request_id:
                found.add("request_id", f"is required if a job_id is empty (jobs[{index}].job_id)")
                has_request_id = True
        elif seen.setdefault(job_id, index) != index:
            found.add(f"jobs[{index}].job_id", f"is the same as jobs[{seen[job_id]}].job_id")


def check_get(request: pb.GetJobRequest) -> None:
    """GetJob."""
    found = Violations()
    _namespace(found, request.namespace)
    check_id(found, "job_id", request.job_id)
    found.check()


def check_list(request: pb.ListJobsRequest) -> None:
    """ListJobs."""
    found = Violations()
    _namespace(found, request.namespace)
    check_number(found, "page_size", request.page_size, 0, limits.PAGE_SIZE)
    check_text(found, "page_token", request.page_token, limits.PAGE_TOKEN_BYTES)
    check_states(found, "states", request.states)
    check_name(found, "queue", request.queue, required=False)
    check_name(found, "type", request.type, required=False)
    check_labels(found, "labels", request.labels)
    found.check()


def check_wait(request: pb.WaitJobRequest, call_limits: CallLimits) -> None:
    """WaitJob."""
    found = Violations()
    _namespace(found, request.namespace)
    check_id(found, "job_id", request.job_id)
    if request.HasField("timeout"):
        check_duration(found, "timeout", request.timeout, call_limits.wait_max_ms)
    found.check()


def check_watch(request: pb.WatchJobsRequest) -> None:
    """WatchJobs."""
    found = Violations()
    _namespace(found, request.namespace)
    if check_count(found, "job_ids", len(request.job_ids), 0, limits.WATCHED_IDS):
        for index, job_id in enumerate(request.job_ids):
            check_id(found, f"job_ids[{index}]", job_id)
    check_name(found, "queue", request.queue, required=False)
    check_name(found, "type", request.type, required=False)
    check_states(found, "states", request.states)
    if request.resume_revision < 0:
        found.add("resume_revision", f"must not be negative, is {request.resume_revision}")
    found.check()


def check_update(request: pb.UpdateJobRequest) -> None:
    """UpdateJob."""
    found = Violations()
    _namespace(found, request.namespace)
    check_request_id(found, request.request_id)
    check_id(found, "job_id", request.job_id)
    check_text(found, "etag", request.etag, limits.REQUEST_ID_BYTES)
    if not 0 <= request.priority <= 5:
        found.add("priority", f"must be from 1 to 5, or 0 for unchanged, is {request.priority}")
    if request.HasField("due_time"):
        check_timestamp(found, "due_time", request.due_time)
    if request.HasField("run_at"):
        check_timestamp(found, "run_at", request.run_at)
    if not (request.priority or request.HasField("due_time") or request.HasField("run_at")):
        found.add("priority", "one of priority, due_time and run_at is required")
    found.check()


def check_cancel(request: pb.CancelJobRequest) -> None:
    """CancelJob."""
    found = Violations()
    _namespace(found, request.namespace)
    check_request_id(found, request.request_id)
    check_id(found, "job_id", request.job_id)
    found.check()


def check_retry(request: pb.RetryJobRequest) -> None:
    """RetryJob."""
    found = Violations()
    _namespace(found, request.namespace)
    check_request_id(found, request.request_id)
    check_id(found, "job_id", request.job_id)
    check_text(found, "etag", request.etag, limits.REQUEST_ID_BYTES)
    if request.HasField("run_at"):
        check_timestamp(found, "run_at", request.run_at)
    found.check()


def check_redrive(request: pb.RedriveJobsRequest) -> None:
    """RedriveJobs."""
    found = Violations()
    _namespace(found, request.namespace)
    check_request_id(found, request.request_id)
    for index, state in enumerate(request.states):
        if int(state) not in FAILED:
            found.add(f"states[{index}]", "must be DEAD or QUARANTINED; jobs in other states are not retried")
    check_name(found, "queue", request.queue, required=False)
    check_name(found, "type", request.type, required=False)
    check_labels(found, "labels", request.labels)
    check_text(found, "failure_type", request.failure_type, limits.FAILURE_TYPE_BYTES)
    if request.HasField("settled_before"):
        check_timestamp(found, "settled_before", request.settled_before)
    check_number(found, "max_jobs", request.max_jobs, 0, limits.REDRIVEN_JOBS)
    check_number(found, "jobs_per_second", request.jobs_per_second, 0, limits.REDRIVES_PER_SECOND)
    check_text(found, "page_token", request.page_token, limits.PAGE_TOKEN_BYTES)
    found.check()


def check_list_attempts(request: pb.ListAttemptsRequest) -> None:
    """ListAttempts."""
    found = Violations()
    _namespace(found, request.namespace)
    check_id(found, "job_id", request.job_id)
    found.check()


def check_delete(request: pb.DeleteJobRequest) -> None:
    """DeleteJob."""
    found = Violations()
    _namespace(found, request.namespace)
    check_request_id(found, request.request_id)
    check_id(found, "job_id", request.job_id)
    check_text(found, "etag", request.etag, limits.REQUEST_ID_BYTES)
    found.check()
