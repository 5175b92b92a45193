"""Form of the requests of WorkerService: fields, sizes, ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration

from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as pb
from worker_sdk.testing._fields import LONGEST_DELAY_MS, Violations
from worker_sdk.testing._job_forms import ITEMS_PER_CALL, LONGEST_WAIT_MS, check_job
from worker_sdk.testing._refusals import Refused

__all__ = [
    "check_checkpoint",
    "check_claim",
    "check_claims",
    "check_close_session",
    "check_heartbeat",
    "check_open_session",
    "check_settlement",
    "check_settlements",
]

_TTL_MS: Final = (2_000, 3_600_000)
_LISTED: Final = 2_000
_FOLLOW_UPS: Final = 20
_FOLLOW_UP_BYTES: Final = 256 << 10

SettlingRequest = pb.CompleteJobRequest | pb.FailJobRequest | pb.ReleaseJobRequest


def _start(namespace: str) -> Violations:
    found = Violations()
    found.name("namespace", namespace, required=False)
    return found


def check_open_session(request: pb.OpenSessionRequest) -> None:
    """OpenSession."""
    found = _start(request.namespace)
    found.request_id(request.request_id, required=True)
    found.text("identity", request.identity, 255)
    found.text("sdk", request.sdk, 255)
    found.labels("labels", request.labels)
    if request.HasField("ttl") and found.well_formed("ttl", request.ttl):
        _ttl(found, request.ttl)
    found.check()


def _ttl(found: Violations, ttl: Duration) -> None:
    total_ns = ttl.seconds * 1_000_000_000 + ttl.nanos
    low, high = _TTL_MS
    if not low * 1_000_000 <= total_ns <= high * 1_000_000:
        bounds = {"min": f"{low / 1000:g} s", "max": f"{high / 1000:g} s"}
        wanted = f"{total_ns / 1e9:.15g} s"
        told = f"must be from {bounds['min']} to {bounds['max']}, is {wanted}"
        found.add_special("TTL_OUT_OF_RANGE", "ttl", told, ttl=wanted, **bounds)


def check_close_session(request: pb.CloseSessionRequest) -> None:
    """CloseSession."""
    found = _start(request.namespace)
    found.request_id(request.request_id)
    found.session_id(request.session_id)
    found.check()


def _progress(found: Violations, field: str, progress: types.Progress) -> None:
    found.number(f"{field}.ratio", progress.ratio, 0, 1)
    size = len(progress.note.encode())
    if size > 4096 - 16:
        found.add(f"{field}.note", f"is {size} bytes long, the limit is {4096 - 16}")


def check_heartbeat(request: pb.HeartbeatRequest) -> None:
    """Heartbeat."""
    found = _start(request.namespace)
    found.session_id(request.session_id)
    if request.number <= 0:
        found.add("number", f"must be 1, 2, … for a session, is {request.number}")
    if request.HasField("sent_at"):
        found.duration("sent_at", request.sent_at, 1 << 53)
    else:
        found.add("sent_at", "is required: the sender's monotonic clock")
    if found.count("claims", len(request.claims), 0, _LISTED):
        for index, claim in enumerate(request.claims):
            path = f"claims[{index}]"
            found.id(f"{path}.job_id", claim.job_id)
            found.token(f"{path}.fencing_token", claim.fencing_token)
            if claim.sequence < 0:
                found.add(f"{path}.sequence", f"must not be negative, is {claim.sequence}")
            if claim.HasField("progress"):
                _progress(found, f"{path}.progress", claim.progress)
    found.check()


def check_claims(request: pb.ClaimJobsRequest) -> None:
    """ClaimJobs."""
    found = _start(request.namespace)
    found.request_id(request.request_id, required=True)
    found.session_id(request.session_id)
    types_in_all = 0
    if found.count("queues", len(request.queues), 1, 32):
        for index, wanted in enumerate(request.queues):
            found.name(f"queues[{index}].queue", wanted.queue)
            types_in_all += len(wanted.types)
            if not wanted.types:
                found.add(f"queues[{index}].types", "must have at least one type")
            elif types_in_all <= 256:
                for place, type_ in enumerate(wanted.types):
                    found.name(f"queues[{index}].types[{place}]", type_)
        if types_in_all > 256:
            found.add("queues", f"name {types_in_all} types in all, the limit is 256")
    if not 1 <= request.max_jobs <= ITEMS_PER_CALL:
        found.add("max_jobs", f"must be from 1 to {ITEMS_PER_CALL}, is {request.max_jobs}")
    if request.HasField("wait"):
        found.duration("wait", request.wait, LONGEST_WAIT_MS)
    found.check()


def check_claim(request: pb.ClaimJobRequest) -> None:
    """ClaimJob."""
    found = _start(request.namespace)
    found.request_id(request.request_id, required=True)
    found.session_id(request.session_id)
    found.id("job_id", request.job_id)
    if request.HasField("wait"):
        found.duration("wait", request.wait, LONGEST_WAIT_MS)
    found.check()


def _complete(found: Violations, job_id: str, how: pb.CompleteJobRequest | pb.Completion) -> None:
    found.size("RESULT_TOO_LARGE", "result", how.result, 64 << 10)
    found.text("result_content_type", how.result_content_type, 127)
    if found.count("follow_ups", len(how.follow_ups), 0, _FOLLOW_UPS):
        _follow_ups(found, job_id, how.follow_ups)


def _follow_ups(found: Violations, job_id: str, jobs: Sequence[types.JobSpec]) -> None:
    size = sum(job.ByteSize() for job in jobs)
    if size > _FOLLOW_UP_BYTES:
        told = f"are {size} bytes in all, the limit is {_FOLLOW_UP_BYTES}"
        found.add_special("PAYLOAD_TOO_LARGE", "follow_ups", told, size=size, limit=_FOLLOW_UP_BYTES)
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
    found.text("failure.type", how.failure.type, 127)
    if how.HasField("retry_delay"):
        found.duration("retry_delay", how.retry_delay, LONGEST_DELAY_MS)


def _release(found: Violations, how: pb.ReleaseJobRequest | pb.Release) -> None:
    if how.HasField("delay"):
        found.duration("delay", how.delay, LONGEST_DELAY_MS)


def check_settlement(request: SettlingRequest) -> None:
    """CompleteJob, FailJob, ReleaseJob."""
    found = _start(request.namespace)
    found.id("job_id", request.job_id)
    found.token("fencing_token", request.fencing_token)
    if isinstance(request, pb.CompleteJobRequest):
        _complete(found, request.job_id, request)
    elif isinstance(request, pb.FailJobRequest):
        _fail(found, request)
    else:
        _release(found, request)
    found.check()


def check_settlements(request: pb.SettleJobsRequest) -> list[Refused | None]:
    """SettleJobs: raises for the call as a whole; returns what refuses an item alone."""
    found = _start(request.namespace)
    found.count("settlements", len(request.settlements), 1, ITEMS_PER_CALL)
    found.check()
    return [_item(index, item) for index, item in enumerate(request.settlements)]


def _item(index: int, item: pb.Settlement) -> Refused | None:
    found = Violations(f"settlements[{index}]")
    found.id("job_id", item.job_id)
    found.token("fencing_token", item.fencing_token)
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
    found.id("job_id", request.job_id)
    found.token("fencing_token", request.fencing_token)
    found.size("PAYLOAD_TOO_LARGE", "checkpoint", request.checkpoint, 256 << 10)
    if request.sequence < 0:
        found.add("sequence", f"must not be negative, is {request.sequence}")
    if request.HasField("progress"):
        _progress(found, "progress", request.progress)
    found.check()
