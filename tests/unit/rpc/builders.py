"""Valid requests, to be spoiled field by field, and jobs to answer with."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from coordinator.core.job import Job, JobState, Terms
from coordinator.core.rank import Rank
from coordinator.ports import Stored
from leasekeeper.v1 import job_service_pb2 as jobs_pb
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as workers_pb

SESSION = "0123456789abcdef"
TOKEN = (1 << 44) | 77


def job_spec(**changes: object) -> types.JobSpec:
    fields: dict[str, object] = {"job_id": "j1", "queue": "mail", "type": "send", "payload": b"p"}
    return types.JobSpec(**(fields | changes))  # type: ignore[arg-type]


def submit(**changes: object) -> jobs_pb.SubmitJobRequest:
    return jobs_pb.SubmitJobRequest(job=job_spec(**changes))


def submit_batch(*specs: types.JobSpec) -> jobs_pb.SubmitJobsRequest:
    return jobs_pb.SubmitJobsRequest(request_id="r1", jobs=specs)


def open_session(**changes: object) -> workers_pb.OpenSessionRequest:
    return workers_pb.OpenSessionRequest(**({"request_id": "r1"} | changes))  # type: ignore[arg-type]


def heartbeat(**changes: object) -> workers_pb.HeartbeatRequest:
    fields: dict[str, object] = {"session_id": SESSION, "number": 1, "sent_at": Duration(seconds=5)}
    return workers_pb.HeartbeatRequest(**(fields | changes))  # type: ignore[arg-type]


def claim_jobs(**changes: object) -> workers_pb.ClaimJobsRequest:
    fields: dict[str, object] = {
        "session_id": SESSION,
        "request_id": "c1",
        "queues": [workers_pb.QueueTypes(queue="mail", types=["send"])],
        "max_jobs": 10,
    }
    return workers_pb.ClaimJobsRequest(**(fields | changes))  # type: ignore[arg-type]


def complete(**changes: object) -> workers_pb.CompleteJobRequest:
    fields: dict[str, object] = {"job_id": "j1", "fencing_token": TOKEN}
    return workers_pb.CompleteJobRequest(**(fields | changes))  # type: ignore[arg-type]


def stored(job_id: str = "j1", **changes: object) -> Stored:
    fields: dict[str, object] = {
        "namespace": "default",
        "job_id": job_id,
        "terms": Terms(queue="mail", type="send", submit_ms=1_000),
        "state": JobState.PENDING,
        "ready_ms": 1_000,
        "rank": Rank(61_000, 0),
    }
    return Stored(Job(**(fields | changes)), 42)  # type: ignore[arg-type]
