"""The values that producers give and get: what is to be done, and a job as it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum

from worker_sdk._lock_mode import LockMode
from worker_sdk.errors import RequestError

__all__ = [
    "Attempt",
    "AttemptOutcome",
    "Attempts",
    "Failure",
    "Job",
    "JobChange",
    "JobLock",
    "JobSpec",
    "JobState",
    "Progress",
    "Redriven",
    "RetryPolicy",
    "RollbackJob",
    "Submitted",
]


class JobState(IntEnum):
    """The state of a job; numbers as on the wire. A state that this SDK does not know is UNSPECIFIED."""

    UNSPECIFIED = 0
    SCHEDULED = 1
    PENDING = 2
    RUNNING = 3
    SUCCEEDED = 4
    DEAD = 5
    CANCELLED = 6
    QUARANTINED = 7

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self >= JobState.SUCCEEDED

    @classmethod
    def _missing_(cls, value: object) -> JobState:
        return cls.UNSPECIFIED


class AttemptOutcome(IntEnum):
    """How one attempt ended; numbers as on the wire."""

    UNSPECIFIED = 0
    RUNNING = 1
    SUCCEEDED = 2
    FAILED = 3
    RELEASED = 4
    LOST = 5
    UNDELIVERED = 6
    TIMED_OUT = 7
    CANCELLED = 8

    @classmethod
    def _missing_(cls, value: object) -> AttemptOutcome:
        return cls.UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When and how often a failed job runs again; None means the coordinator's default. Times in seconds."""

    max_retries: int | None = None
    initial_delay: float | None = None
    multiplier: float | None = None
    max_delay: float | None = None
    jitter: float | None = None
    non_retryable_types: tuple[str, ...] = ()
    max_lease_losses: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackJob:
    """What is to run when a job has failed for good; enqueued in the moment it is DEAD or QUARANTINED.

    Its id is made by the coordinator (`Job.rollback_job_id`); its labels ``leasekeeper.rollback-of`` and
    ``leasekeeper.rollback-reason`` name the job and its state.

    Args:
        queue, type: as of a `JobSpec`.
        payload: at most 4 KiB.
        priority: 1 to 5; 0: that of the job.
    """

    queue: str
    type: str
    payload: bytes = b""
    content_type: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class JobLock:
    """A named lock that a job holds while it runs: taken by its claim, given back by the claim's end.

    Args:
        name: 1-256 bytes of UTF-8 without control characters.
        mode: how it is shared.
        permits: 1-1,000, of a semaphore, the same for all its users; 0 for other modes.
    """

    name: str
    mode: LockMode = LockMode.EXCLUSIVE
    permits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What is to be done.

    Args:
        queue, type: ``[a-z0-9][a-z0-9._-]{0,62}``; the type chooses the handler.
        payload: at most 256 KiB.
        job_id: the caller's id; empty: the coordinator makes one.
        priority: 1 (first) to 5 (last); 0 means 3.
        due_time: by when it should have started; pulls it forward.
        run_at: not before this time.
        queue_timeout, run_timeout, total_timeout, heartbeat_timeout: seconds; None: none.
        unique_key: at most one non-terminal job of the queue has this key; empty: none.
        rollback: enqueued when the job has failed for good; None: nothing is.
        locks: at most 8, of different names. The job waits until its claim can take all of them.

    Datetimes must know their zone.
    """

    queue: str
    type: str
    payload: bytes = b""
    content_type: str = ""
    job_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    due_time: datetime | None = None
    run_at: datetime | None = None
    queue_timeout: float | None = None
    run_timeout: float | None = None
    total_timeout: float | None = None
    heartbeat_timeout: float | None = None
    retry: RetryPolicy | None = None
    unique_key: str = ""
    rollback: RollbackJob | None = None
    locks: Sequence[JobLock] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What became of one submitted job. ``error`` is set iff it was refused (`JobClient.submit_many` alone).

    ``created`` False: a job with this id and content was there already.
    """

    job_id: str
    created: bool = False
    state: JobState = JobState.UNSPECIFIED
    etag: str = ""
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed: a short class of failure, and words for people."""

    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the handler says it is: 0 to 1, and words for people."""

    ratio: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of a job."""

    number: int
    fencing_token: int
    session_id: str
    outcome: AttemptOutcome
    start_time: datetime | None
    end_time: datetime | None
    failure: Failure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as it stands. Times are None where they have not come; `spec.payload` is empty in lists."""

    namespace: str
    job_id: str
    state: JobState
    etag: str
    spec: JobSpec
    payload_size: int
    attempt: int
    failures: int
    lease_losses: int
    uncharged: int
    session_id: str
    fencing_token: int
    cancel_requested: bool
    progress: Progress | None
    result: bytes
    result_content_type: str
    failure: Failure | None
    submit_time: datetime | None
    ready_time: datetime | None
    claim_time: datetime | None
    last_beat_time: datetime | None
    settle_time: datetime | None
    rank_time: datetime | None
    attempts: tuple[Attempt, ...]
    end_reason: str
    rollback_job_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """The last 8 attempts of a job, oldest first, and how many of each kind there were."""

    attempts: tuple[Attempt, ...]
    total: int
    failures: int
    lease_losses: int
    uncharged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven:
    """What one call of a redrive did: jobs that are claimable again, and jobs that stayed as they were.

    ``examined``: records looked at, matching or not.
    """

    job_ids: tuple[str, ...]
    failures: Mapping[str, RequestError]
    examined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """A change of a job. ``job`` is None iff the job was deleted or its retention has ended."""

    revision: int
    job_id: str
    job: Job | None

    @property
    def deleted(self) -> bool:
        """Whether the job is gone."""
        return self.job is None
