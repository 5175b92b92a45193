"""The RPCs that the SDK calls: path, messages, and whether an unanswered call may have changed something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from leasekeeper.v1 import job_service_pb2 as job_pb
from leasekeeper.v1 import lock_service_pb2 as lock_pb
from leasekeeper.v1 import worker_service_pb2 as work_pb

__all__ = [
    "ACQUIRE_LOCK",
    "CANCEL_JOB",
    "CHECK_TOKEN",
    "CLAIM_JOBS",
    "CLOSE_SESSION",
    "DELETE_JOB",
    "GET_JOB",
    "HEARTBEAT",
    "LIST_ATTEMPTS",
    "LIST_JOBS",
    "OBSERVE_LOCK",
    "OPEN_SESSION",
    "REDRIVE_JOBS",
    "RELEASE_LOCK",
    "RETRY_JOB",
    "SAVE_CHECKPOINT",
    "SETTLE_JOBS",
    "SUBMIT_JOB",
    "SUBMIT_JOBS",
    "UPDATE_JOB",
    "WAIT_JOB",
    "WATCH_JOBS",
    "WORK",
    "Method",
]

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

_JOBS = "/leasekeeper.v1.JobService/"
_LOCKS = "/leasekeeper.v1.LockService/"
_WORK = "/leasekeeper.v1.WorkerService/"


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, A]):
    """One RPC; `changes`: an unanswered call is of unknown outcome."""

    path: str
    request: type[Q]
    answer: type[A]
    changes: bool


SUBMIT_JOB = Method(_JOBS + "SubmitJob", job_pb.SubmitJobRequest, job_pb.SubmitJobResponse, True)
SUBMIT_JOBS = Method(_JOBS + "SubmitJobs", job_pb.SubmitJobsRequest, job_pb.SubmitJobsResponse, True)
GET_JOB = Method(_JOBS + "GetJob", job_pb.GetJobRequest, job_pb.GetJobResponse, False)
LIST_JOBS = Method(_JOBS + "ListJobs", job_pb.ListJobsRequest, job_pb.ListJobsResponse, False)
WAIT_JOB = Method(_JOBS + "WaitJob", job_pb.WaitJobRequest, job_pb.WaitJobResponse, False)
WATCH_JOBS = Method(_JOBS + "WatchJobs", job_pb.WatchJobsRequest, job_pb.WatchJobsResponse, False)
UPDATE_JOB = Method(_JOBS + "UpdateJob", job_pb.UpdateJobRequest, job_pb.UpdateJobResponse, True)
CANCEL_JOB = Method(_JOBS + "CancelJob", job_pb.CancelJobRequest, job_pb.CancelJobResponse, True)
RETRY_JOB = Method(_JOBS + "RetryJob", job_pb.RetryJobRequest, job_pb.RetryJobResponse, True)
REDRIVE_JOBS = Method(_JOBS + "RedriveJobs", job_pb.RedriveJobsRequest, job_pb.RedriveJobsResponse, True)
LIST_ATTEMPTS = Method(_JOBS + "ListAttempts", job_pb.ListAttemptsRequest, job_pb.ListAttemptsResponse, False)
DELETE_JOB = Method(_JOBS + "DeleteJob", job_pb.DeleteJobRequest, job_pb.DeleteJobResponse, True)
OPEN_SESSION = Method(_WORK + "OpenSession", work_pb.OpenSessionRequest, work_pb.OpenSessionResponse, True)
CLOSE_SESSION = Method(
    _WORK + "CloseSession", work_pb.CloseSessionRequest, work_pb.CloseSessionResponse, True
)
HEARTBEAT = Method(_WORK + "Heartbeat", work_pb.HeartbeatRequest, work_pb.HeartbeatResponse, True)
CLAIM_JOBS = Method(_WORK + "ClaimJobs", work_pb.ClaimJobsRequest, work_pb.ClaimJobsResponse, True)
SETTLE_JOBS = Method(_WORK + "SettleJobs", work_pb.SettleJobsRequest, work_pb.SettleJobsResponse, True)
SAVE_CHECKPOINT = Method(
    _WORK + "SaveCheckpoint", work_pb.SaveCheckpointRequest, work_pb.SaveCheckpointResponse, True
)
# What an unanswered settlement on it means is its owner's to say.
WORK = Method(_WORK + "Work", work_pb.WorkRequest, work_pb.WorkResponse, False)
ACQUIRE_LOCK = Method(_LOCKS + "AcquireLock", lock_pb.AcquireLockRequest, lock_pb.AcquireLockResponse, True)
RELEASE_LOCK = Method(_LOCKS + "ReleaseLock", lock_pb.ReleaseLockRequest, lock_pb.ReleaseLockResponse, True)
CHECK_TOKEN = Method(_LOCKS + "CheckToken", lock_pb.CheckTokenRequest, lock_pb.CheckTokenResponse, False)
OBSERVE_LOCK = Method(_LOCKS + "ObserveLock", lock_pb.ObserveLockRequest, lock_pb.ObserveLockResponse, False)
