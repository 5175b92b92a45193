"""Form of every request of WorkerService; the rules of `coordinator.rpc.validation` hold here too."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

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
    check_session_id,
    check_text,
    check_token,
    check_well_formed,
)
from coordinator.rpc.limits import CallLimits
from coordinator.rpc.validation import check_job, check_request_id
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as pb

__all__ = [
    "check_checkpoint",
    "check_claim",
    "check_claims",
    "check_close_session",
    "check_complete",
    "check_fail",
    "check_heartbeat",
    "check_open_session",
    "check_release",
    "check_settle_batch",
]


def _start(namespace: str) -> Violations:
    found = Violations()
    check_name(found, "namespace", namespace, required=False)
    return found


def _ttl(found: Violations, ttl: Duration, call_limits: CallLimits) -> None:
    if not check_well_formed(found, "ttl", ttl):
        return
    total_ns = ttl.seconds * 1_000_000_000 + ttl.nanos
    low, high = call_limits.ttl_min_ms, call_limits.ttl_max_ms
    if not low * 1_000_000 <= total_ns <= high * 1_000_000:
        wanted = f"{total_ns / 1e9:.15g} s"
        found.add_special(
            Reason.TTL_OUT_OF_RANGE,
            "ttl",
            f"must be from {low / 1000:g} s to {high / 1000:g} s, is {wanted}",
            ttl=wanted,
            min=f"{low / 1000:g} s",
            max=f"{high / 1000:g} s",
        )


def check_open_session(request: pb.OpenSessionRequest, call_limits: CallLimits) -> None:
    """OpenSession."""
    found = _start(request.namespace)
    check_request_id(found, request.request_id, required=True)
    check_text(found, "identity", request.identity, limits.IDENTITY_BYTES)
    check_text(found, "sdk", request.sdk, limits.IDENTITY_BYTES)
    check_labels(found, "labels", request.labels)
    if request.HasField("ttl"):
        _ttl(found, request.ttl, call_limits)
    found.check()


def check_close_session(request: pb.CloseSessionRequest) -> None:
    """CloseSession."""
    found = _start(request.namespace)
    check_request_id(found, request.request_id)
    check_session_id(found, "session_id", request.session_id)
    found.check()


def _progress(found: Violations, field: str, progress: types.Progress) -> None:
    check_number(found, f"{field}.ratio", progress.ratio, 0, 1)
    size = len(progress.note.encode())
    if size > limits.PROGRESS_NOTE_BYTES:
        found.add(f"{field}.note", f"is {size} bytes long, the limit is {limits.PROGRESS_NOTE_BYTES}")


def check_heartbeat(request: pb.HeartbeatRequest) -> None:
    """Heartbeat."""
    found = _start(request.namespace)
    check_session_id(found, "session_id", request.session_id)
    if request.number <= 0:
        found.add("number", f"must be 1, 2, … for a session, is {request.number}")
    if request.HasField("sent_at"):
        check_duration(found, "sent_at", request.sent_at, 1 << 53)
    else:
        found.add("sent_at", "is required: the sender's monotonic clock")
    if check_count(found, "claims", len(request.claims), 0, limits.HELD_CLAIMS):
        for index, claim in enumerate(request.claims):
            path = f"claims[{index}]"
            check_id(found, f"{path}.job_id", claim.job_id)
            check_token(found, f"{path}.fencing_token", claim.fencing_token)
            if claim.sequence < 0:
                found.add(f"{path}.sequence", f"must not be negative, is {claim.sequence}")
            if claim.HasField("progress"):
                _progress(found, f"{path}.progress", claim.progress)
    _locks(found, request)
    found.check()


def _locks(found: Violations, request: pb.HeartbeatRequest) -> None:
    left = max(0, limits.HELD_CLAIMS - len(request.claims))
    if not check_count(found, "locks", len(request.locks), 0, left):
        return
    for index, lock in enumerate(request.locks):
        path = f"locks[{index}]"
        check_id(found, f"{path}.name", lock.name)
        check_text(found, f"{path}.request_id", lock.request_id, limits.REQUEST_ID_BYTES, required=True)
        if lock.fencing_token < 0:
            found.add(f"{path}.fencing_token", f"must not be negative, is {lock.fencing_token}")


def _wait(found: Violations, wait: Duration, call_limits: CallLimits) -> None:
    check_duration(found, "wait", wait, call_limits.wait_max_ms)


def check_claims(request: pb.ClaimJobsRequest, call_limits: CallLimits) -> None:
    """ClaimJobs."""
    found = _start(request.namespace)
    check_request_id(found, request.request_id, required=True)
    check_session_id(found, "session_id", request.session_id)
    types_in_all = 0
    if check_count(found, "queues", len(request.queues), 1, limits.QUEUES_PER_CLAIM):
        for index, wanted in enumerate(request.queues):
            check_name(found, f"queues[{index}].queue", wanted.queue)
            types_in_all += len(wanted.types)
            if not wanted.types:
                found.add(f"queues[{index}].types", "must have at least one type")
            elif types_in_all <= limits.TYPES_PER_CLAIM:
                for place, type_ in enumerate(wanted.types):
                    check_name(found, f"queues[{index}].types[{place}]", type_)
        if types_in_all > limits.TYPES_PER_CLAIM:
            found.add("queues", f"name {types_in_all} types in all, the limit is {limits.TYPES_PER_CLAIM}")
    if not 1 <= request.max_jobs <= limits.ITEMS_PER_CALL:
        found.add("max_jobs", f"must be from 1 to {limits.ITEMS_PER_CALL}, is {request.max_jobs}")
    if request.HasField("wait"):
        _wait(found, request.wait, call_limits)
    found.check()


def check_claim(request: pb.ClaimJobRequest, call_limits: CallLimits) -> None:
    """ClaimJob."""
    found = _start(request.namespace)
    check_request_id(found, request.request_id, required=True)
    check_session_id(found, "session_id", request.session_id)
    check_id(found, "job_id", request.job_id)
    if request.HasField("wait"):
        _wait(found, request.wait, call_limits)
    found.check()


def _complete(found: Violations, job_id: str, how: pb.CompleteJobRequest | pb.Completion) -> None:
    size, content_type = len(how.result), how.result_content_type
    if size > limits.RESULT_BYTES:
        found.add_special(
            Reason.RESULT_TOO_LARGE,
            "result",
            f"is {size} bytes, the limit is {limits.RESULT_BYTES}",
            size=size,
            limit=limits.RESULT_BYTES,
        )
    if content_type:
        check_text(found, "result_content_type", content_type, limits.CONTENT_TYPE_BYTES)
    if how.follow_ups:
        _follow_ups(found, job_id, how.follow_ups)


def _follow_ups(found: Violations, job_id: str, jobs: Sequence[types.JobSpec]) -> None:
    if not check_count(found, "follow_ups", len(jobs), 0, limits.FOLLOW_UPS):
        return
    size = sum(job.ByteSize() for job in jobs)
    if size > limits.FOLLOW_UP_BYTES:
        found.add_special(
            Reason.PAYLOAD_TOO_LARGE,
            "follow_ups",
            f"are {size} bytes in all, the limit is {limits.FOLLOW_UP_BYTES}",
            size=size,
            limit=limits.FOLLOW_UP_BYTES,
        )
    outer = found.place
    ids: dict[str, int] = {}
    keys: dict[tuple[str, str], int] = {}
    for index, job in enumerate(jobs):
        path = f"follow_ups[{index}]"
        found.place = f"{outer}.{path}" if outer else path
        check_job(found, job)
        found.place = outer
        if job.job_id and job.job_id == job_id:
            found.add(f"{path}.job_id", "is the id of the job that completes")
        elif job.job_id and ids.setdefault(job.job_id, index) != index:
            found.add(f"{path}.job_id", f"is the same as follow_ups[{ids[job.job_id]}].job_id")
        unique = (job.queue, job.unique_key)
        if job.unique_key and keys.setdefault(unique, index) != index:
            found.add(f"{path}.unique_key", f"is the same as follow_ups[{keys[unique]}].unique_key")


def _fail(found: Violations, how: pb.FailJobRequest | pb.FailureSettlement) -> None:
    check_text(found, "failure.type", how.failure.type, limits.FAILURE_TYPE_BYTES)
    if how.HasField("retry_delay"):
        check_duration(found, "retry_delay", how.retry_delay, limits.LONGEST_DELAY_MS)


def _release(found: Violations, how: pb.ReleaseJobRequest | pb.Release) -> None:
    if how.HasField("delay"):
        check_duration(found, "delay", how.delay, limits.LONGEST_DELAY_MS)


def check_complete(request: pb.CompleteJobRequest) -> None:
    """CompleteJob."""
    found = _start(request.namespace)
    check_id(found, "job_id", request.job_id)
    check_token(found, "fencing_token", request.fencing_token)
    _complete(found, request.job_id, request)
    found.check()


def check_fail(request: pb.FailJobRequest) -> None:
    """FailJob."""
    found = _start(request.namespace)
    check_id(found, "job_id", request.job_id)
    check_token(found, "fencing_token", request.fencing_token)
    _fail(found, request)
    found.check()


def check_release(request: pb.ReleaseJobRequest) -> None:
    """ReleaseJob."""
    found = _start(request.namespace)
    check_id(found, "job_id", request.job_id)
    check_token(found, "fencing_token", request.fencing_token)
    _release(found, request)
    found.check()


def check_settle_batch(request: pb.SettleJobsRequest) -> list[RequestError | None]:
    """SettleJobs: raises for the call as a whole; returns, item by item, what refuses that item alone."""
    found = _start(request.namespace)
    check_count(found, "settlements", len(request.settlements), 1, limits.ITEMS_PER_CALL)
    found.check()
    return [_settlement(index, item) for index, item in enumerate(request.settlements)]


def _settlement(index: int, item: pb.Settlement) -> RequestError | None:
    found = Violations(f"settlements[{index}]")
    check_id(found, "job_id", item.job_id)
    check_token(found, "fencing_token", item.fencing_token)
    how = item.WhichOneof("how")
    if how is None:
        found.add("how", "one of complete, fail and release is required")
        return found.error()
    found.place = f"{found.place}.{how}"
    if how == "complete":
        _complete(found, item.job_id, item.complete)
    elif how == "fail":
        _fail(found, item.fail)
    else:
        _release(found, item.release)
    return found.error()


def check_checkpoint(request: pb.SaveCheckpointRequest) -> None:
    """SaveCheckpoint."""
    found = _start(request.namespace)
    check_id(found, "job_id", request.job_id)
    check_token(found, "fencing_token", request.fencing_token)
    size = len(request.checkpoint)
    if size > limits.CHECKPOINT_BYTES:
        found.add_special(
            Reason.PAYLOAD_TOO_LARGE,
            "checkpoint",
            f"is {size} bytes, the limit is {limits.CHECKPOINT_BYTES}",
            size=size,
            limit=limits.CHECKPOINT_BYTES,
        )
    if request.sequence < 0:
        found.add("sequence", f"must not be negative, is {request.sequence}")
    if request.HasField("progress"):
        _progress(found, "progress", request.progress)
    found.check()
