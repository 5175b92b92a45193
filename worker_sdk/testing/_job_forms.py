"""Form of the requests of JobService: fields, sizes, ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from coordinator.core.job_locks import MAX_LOCKS
from coordinator.core.lock_order import MAX_PERMITS
from leasekeeper.v1 import job_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types
from worker_sdk.testing._fields import LONGEST_DELAY_MS, LONGEST_TIMEOUT_MS, Violations
from worker_sdk.testing._refusals import Refused

__all__ = [
    "ITEMS_PER_CALL",
    "LONGEST_WAIT_MS",
    "check_cancel",
    "check_delete",
    "check_job",
    "check_jobs",
    "check_list",
    "check_named",
    "check_redrive",
    "check_retry",
    "check_submit",
    "check_update",
    "check_wait",
    "check_watch",
]

ITEMS_PER_CALL: Final = 100
LONGEST_WAIT_MS: Final = 30_000

_FAILED: Final = (types.JOB_STATE_DEAD, types.JOB_STATE_QUARANTINED)
_TIMEOUTS: Final = ("queue_timeout", "run_timeout", "total_timeout", "heartbeat_timeout")


def _start(namespace: str) -> Violations:
    found = Violations()
    found.name("namespace", namespace, required=False)
    return found


def _policy(found: Violations, policy: types.RetryPolicy) -> None:
    has = policy.HasField
    if has("max_retries"):
        found.number("retry_policy.max_retries", policy.max_retries, 0, 1_000)
    if has("max_lease_losses"):
        found.number("retry_policy.max_lease_losses", policy.max_lease_losses, 0, 1_000)
    if has("multiplier"):
        found.number("retry_policy.multiplier", policy.multiplier, 1, 100)
    if has("jitter"):
        found.number("retry_policy.jitter", policy.jitter, 0, 1)
    if has("initial_delay"):
        found.duration("retry_policy.initial_delay", policy.initial_delay, LONGEST_DELAY_MS, positive=True)
    if has("max_delay"):
        found.duration("retry_policy.max_delay", policy.max_delay, LONGEST_DELAY_MS, positive=True)
    kinds = policy.non_retryable_types
    if found.count("retry_policy.non_retryable_types", len(kinds), 0, 64):
        for index, kind in enumerate(kinds):
            found.text(f"retry_policy.non_retryable_types[{index}]", kind, 127, required=True)


def check_job(found: Violations, job: types.JobSpec) -> None:
    """One job as submitted; ``found.place`` is where it stands in the request."""
    found.id("job_id", job.job_id, required=False)
    found.name("queue", job.queue)
    found.name("type", job.type)
    found.size("PAYLOAD_TOO_LARGE", "payload", job.payload, 256 << 10)
    found.text("content_type", job.content_type, 127)
    found.labels("labels", job.labels)
    if not 0 <= job.priority <= 5:
        found.add("priority", f"must be from 1 to 5, or 0 for the default, is {job.priority}")
    found.id("unique_key", job.unique_key, required=False)
    if job.HasField("due_time"):
        found.timestamp("due_time", job.due_time)
    if job.HasField("run_at"):
        found.timestamp("run_at", job.run_at)
    for name in _TIMEOUTS:
        if job.HasField(name):
            found.duration(name, getattr(job, name), LONGEST_TIMEOUT_MS, positive=True)
    if job.HasField("retry_policy"):
        _policy(found, job.retry_policy)
    if job.HasField("rollback"):
        rollback = job.rollback
        found.name("rollback.queue", rollback.queue)
        found.name("rollback.type", rollback.type)
        found.size("PAYLOAD_TOO_LARGE", "rollback.payload", rollback.payload, 4 << 10)
        found.text("rollback.content_type", rollback.content_type, 127)
        if not 0 <= rollback.priority <= 5:
            told = f"must be from 1 to 5, or 0 for the job's own, is {rollback.priority}"
            found.add("rollback.priority", told)
    _locks(found, job.locks)


def _locks(found: Violations, locks: Sequence[types.JobLock]) -> None:
    if not found.count("locks", len(locks), 0, MAX_LOCKS):
        return
    seen: set[str] = set()
    for index, lock in enumerate(locks):
        place = f"locks[{index}]"
        found.id(f"{place}.name", lock.name)
        if lock.name in seen:
            found.add(f"{place}.name", "is named twice")
        seen.add(lock.name)
        if lock.mode not in types.LockMode.values():
            found.add(f"{place}.mode", f"{lock.mode} is not a lock mode")
        elif lock.mode == types.LOCK_MODE_SEMAPHORE:
            found.number(f"{place}.permits", lock.permits, 1, MAX_PERMITS)
        elif lock.permits not in (0, 1):
            found.add(f"{place}.permits", f"only a semaphore has permits, is {lock.permits}")


def check_submit(request: pb.SubmitJobRequest) -> None:
    """SubmitJob."""
    found = _start(request.namespace)
    found.request_id(request.request_id)
    if not request.HasField("job"):
        found.add("job", "is required")
    else:
        found.place = "job"
        check_job(found, request.job)
        found.place = ""
        if not request.job.job_id and not request.request_id:
            found.add("request_id", "is required if job.job_id is empty")
    found.check()


def check_jobs(request: pb.SubmitJobsRequest) -> list[Refused | None]:
    """SubmitJobs: raises for the call as a whole; returns what refuses an item alone."""
    found = _start(request.namespace)
    found.request_id(request.request_id)
    if found.count("jobs", len(request.jobs), 1, ITEMS_PER_CALL):
        _no_id_twice(found, request.jobs, bool(request.request_id))
    found.check()
    errors: list[Refused | None] = []
    for index, job in enumerate(request.jobs):
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


def check_named(request: pb.GetJobRequest | pb.ListAttemptsRequest) -> None:
    """GetJob, ListAttempts."""
    found = _start(request.namespace)
    found.id("job_id", request.job_id)
    found.check()


def check_list(request: pb.ListJobsRequest) -> None:
    """ListJobs."""
    found = _start(request.namespace)
    found.number("page_size", request.page_size, 0, 1_000)
    found.text("page_token", request.page_token, 2_048)
    found.states("states", request.states)
    found.name("queue", request.queue, required=False)
    found.name("type", request.type, required=False)
    found.labels("labels", request.labels)
    found.check()


def check_wait(request: pb.WaitJobRequest) -> None:
    """WaitJob."""
    found = _start(request.namespace)
    found.id("job_id", request.job_id)
    if request.HasField("timeout"):
        found.duration("timeout", request.timeout, LONGEST_WAIT_MS)
    found.check()


def check_watch(request: pb.WatchJobsRequest) -> None:
    """WatchJobs."""
    found = _start(request.namespace)
    if found.count("job_ids", len(request.job_ids), 0, 1_000):
        for index, job_id in enumerate(request.job_ids):
            found.id(f"job_ids[{index}]", job_id)
    found.name("queue", request.queue, required=False)
    found.name("type", request.type, required=False)
    found.states("states", request.states)
    if request.resume_revision < 0:
        found.add("resume_revision", f"must not be negative, is {request.resume_revision}")
    found.check()


def check_update(request: pb.UpdateJobRequest) -> None:
    """UpdateJob."""
    found = _start(request.namespace)
    found.request_id(request.request_id)
    found.id("job_id", request.job_id)
    found.text("etag", request.etag, 128)
    if not 0 <= request.priority <= 5:
        found.add("priority", f"must be from 1 to 5, or 0 for unchanged, is {request.priority}")
    if request.HasField("due_time"):
        found.timestamp("due_time", request.due_time)
    if request.HasField("run_at"):
        found.timestamp("run_at", request.run_at)
    if not (request.priority or request.HasField("due_time") or request.HasField("run_at")):
        found.add("priority", "one of priority, due_time and run_at is required")
    found.check()


def check_cancel(request: pb.CancelJobRequest) -> None:
    """CancelJob."""
    found = _start(request.namespace)
    found.request_id(request.request_id)
    found.id("job_id", request.job_id)
    found.check()


def check_retry(request: pb.RetryJobRequest) -> None:
    """RetryJob."""
    found = _start(request.namespace)
    found.request_id(request.request_id)
    found.id("job_id", request.job_id)
    found.text("etag", request.etag, 128)
    if request.HasField("run_at"):
        found.timestamp("run_at", request.run_at)
    found.check()


def check_redrive(request: pb.RedriveJobsRequest) -> None:
    """RedriveJobs."""
    found = _start(request.namespace)
    found.request_id(request.request_id)
    for index, state in enumerate(request.states):
        if state not in _FAILED:
            found.add(f"states[{index}]", "must be DEAD or QUARANTINED; jobs in other states are not retried")
    found.name("queue", request.queue, required=False)
    found.name("type", request.type, required=False)
    found.labels("labels", request.labels)
    found.text("failure_type", request.failure_type, 127)
    if request.HasField("settled_before"):
        found.timestamp("settled_before", request.settled_before)
    found.number("max_jobs", request.max_jobs, 0, 1_000)
    found.number("jobs_per_second", request.jobs_per_second, 0, 1_000)
    found.text("page_token", request.page_token, 2_048)
    found.check()


def check_delete(request: pb.DeleteJobRequest) -> None:
    """DeleteJob."""
    found = _start(request.namespace)
    found.request_id(request.request_id)
    found.id("job_id", request.job_id)
    found.text("etag", request.etag, 128)
    found.check()
