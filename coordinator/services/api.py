"""What the services take and give: plain values between the RPC layer and the use cases. No proto crosses
this line.

Inputs are already checked for form (``rpc/validation.py``); the services check them against state.
Deadlines are absolute seconds of ``Clock.monotonic``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from coordinator.core.commands import Settlement
from coordinator.core.copying import changed, quick
from coordinator.core.due_time import is_past_due
from coordinator.core.job import Claim, Job, JobLock, JobState, Progress, Rollback, Terms
from coordinator.core.queue_settings import QueueSettings
from coordinator.core.retry import RetryPolicy
from coordinator.errors import RequestError
from coordinator.ports import Checkpoint, Spec, Stored

__all__ = [
    "Authority",
    "Beat",
    "BeatLock",
    "BeatReply",
    "ClaimQuery",
    "ClaimedJob",
    "HeldClaim",
    "JobFilter",
    "JobListing",
    "JobView",
    "NewJob",
    "NewSession",
    "OpenedSession",
    "RedriveQuery",
    "Redriven",
    "Settle",
    "Settled",
    "SubmitOutcome",
    "Verdict",
    "WatchedJob",
]


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """One job as submitted. Times are Unix milliseconds, spans milliseconds, 0 is none.

    ``job_id`` empty: it is made from the request id and ``item``, the job's place in the call. ``own_retry``
    False: ``retry`` is the default, for the submitter said nothing of it.
    """

    job_id: str
    queue: str
    type: str
    payload: bytes
    content_type: str
    labels: Mapping[str, str]
    priority: int
    due_ms: int
    run_at_ms: int
    queue_timeout_ms: int
    run_timeout_ms: int
    total_timeout_ms: int
    heartbeat_timeout_ms: int
    retry: RetryPolicy
    unique_key: str
    rollback: Rollback | None = None
    locks: tuple[JobLock, ...] = ()
    item: int = 0
    own_retry: bool = True

    def terms(
        self,
        *,
        submit_ms: int,
        counter: int,
        digest: bytes,
        request_digest: bytes,
        settings: QueueSettings | None = None,
    ) -> Terms:
        """The terms under which it is stored; what the submitter left out comes from the queue's settings."""
        terms = self._own_terms(submit_ms, counter, digest, request_digest)
        if settings is None:
            return terms
        inherited = settings.retry if not self.own_retry else None
        return changed(
            terms,
            retry=inherited or terms.retry,
            queue_timeout_ms=terms.queue_timeout_ms or settings.queue_timeout_ms,
            run_timeout_ms=terms.run_timeout_ms or settings.run_timeout_ms,
            total_timeout_ms=terms.total_timeout_ms or settings.total_timeout_ms,
            heartbeat_timeout_ms=terms.heartbeat_timeout_ms or settings.heartbeat_timeout_ms,
            target_wait_ms=settings.target_wait_ms,
        )

    def _own_terms(self, submit_ms: int, counter: int, digest: bytes, request_digest: bytes) -> Terms:
        return Terms(
            queue=self.queue,
            type=self.type,
            priority=self.priority,
            labels=self.labels,
            submit_ms=submit_ms,
            due_ms=self.due_ms,
            run_at_ms=self.run_at_ms,
            counter=counter,
            retry=self.retry,
            queue_timeout_ms=self.queue_timeout_ms,
            run_timeout_ms=self.run_timeout_ms,
            total_timeout_ms=self.total_timeout_ms,
            heartbeat_timeout_ms=self.heartbeat_timeout_ms,
            unique_key=self.unique_key,
            payload_size=len(self.payload),
            digest=digest,
            request_digest=request_digest,
            rollback=self.rollback,
            locks=self.locks,
        )


@quick
@dataclass(frozen=True, slots=True)
class SubmitOutcome:
    """A stored job; ``created`` False: it was there already, with the same content."""

    stored: Stored
    created: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job with all that GetJob tells. ``token`` is the present claim's or the last attempt's, 0 for
    none."""

    stored: Stored
    claim: Claim | None = None
    spec: Spec | None = None
    result: bytes = b""
    progress: Progress | None = None
    last_beat_ms: int = 0
    token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs; empty means all.

    ``past_due_at_ms``: only those that miss their due time, as of then (Unix milliseconds); 0: all.
    """

    states: frozenset[JobState] = frozenset()
    queue: str = ""
    type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    job_ids: frozenset[str] = frozenset()
    past_due_at_ms: int = 0

    def matches(self, job: Job) -> bool:
        """Whether ``job`` is one of them."""
        terms = job.terms
        return (
            (not self.states or job.state in self.states)
            and (not self.queue or terms.queue == self.queue)
            and (not self.type or terms.type == self.type)
            and (not self.job_ids or job.job_id in self.job_ids)
            and (not self.past_due_at_ms or is_past_due(job, self.past_due_at_ms))
            and all(terms.labels.get(key) == value for key, value in self.labels.items())
        )


@dataclass(frozen=True, slots=True)
class JobListing:
    """A page; ``cursor`` empty at the end."""

    jobs: tuple[Stored, ...]
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveQuery:
    """Which DEAD and QUARANTINED jobs to retry; empty fields match all. ``cursor`` is of an earlier answer.

    ``failure_type`` is that of the last failure, ``settled_before_ms`` Unix milliseconds, 0 for any time.
    ``validate_only``: nothing is changed.
    """

    states: frozenset[JobState]
    queue: str = ""
    type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    failure_type: str = ""
    settled_before_ms: int = 0
    max_jobs: int
    jobs_per_second: int
    validate_only: bool = False
    request_id: str = ""
    cursor: str = ""

    def matches(self, job: Job) -> bool:
        """Whether ``job`` is one of them, whatever its state."""
        terms, failed = job.terms, job.last_failed
        return (
            (not self.queue or terms.queue == self.queue)
            and (not self.type or terms.type == self.type)
            and (not self.settled_before_ms or job.settle_ms < self.settled_before_ms)
            and (not self.failure_type or (failed is not None and failed.failure_type == self.failure_type))
            and all(terms.labels.get(key) == value for key, value in self.labels.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven:
    """What one call retried, or would retry; jobs that it left as they were, and why."""

    job_ids: tuple[str, ...]
    failures: tuple[tuple[str, RequestError], ...]
    examined: int
    cursor: str


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """One message of a watch. ``stored`` None and ``job_id`` empty: only the revision; ``stored`` None:
    deleted."""

    revision: int
    job_id: str = ""
    stored: Stored | None = None


@quick
@dataclass(frozen=True, slots=True)
class Settle:
    """One settlement of a job; its token and digest are inside ``command``.

    ``follow_ups`` are submitted with a completion, all or none.
    """

    job_id: str
    command: Settlement
    follow_ups: tuple[NewJob, ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class Settled:
    """What the settlement made of the job; ``ready_ms`` 0 unless it runs again."""

    job_id: str
    state: JobState
    ready_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A session to open."""

    request_id: str
    identity: str
    sdk: str
    labels: Mapping[str, str]
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session that is open. ``position`` is on the token scale."""

    session_id: str
    ttl_ms: int
    interval_ms: int
    safe_ms: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldClaim:
    """A claim that a beat lists."""

    job_id: str
    token: int
    sequence: int
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class BeatLock:
    """A lock, or a place in its line, that a beat lists; ``token`` 0: its AcquireLock is not answered."""

    name: str
    token: int
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One heartbeat; ``sent_ms`` is the sender's monotonic clock."""

    session_id: str
    number: int
    sent_ms: int
    claims: Sequence[HeldClaim]
    locks: Sequence[BeatLock] = ()


class Verdict(IntEnum):
    """What a beat says about one claim; the numbers are those of ``leasekeeper.v1.Verdict``."""

    HELD = 1
    CANCEL_REQUESTED = 2
    LOST = 3


class Authority(IntEnum):
    """How much a beat's answer is worth; the numbers are those of ``leasekeeper.v1.Authority``."""

    CONFIRMED = 1
    UNKNOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReply:
    """The answer to a beat; verdicts in the order of its claims, none if the authority is UNKNOWN.

    ``locks``: verdict and token of each lock, likewise.
    """

    authority: Authority
    verdicts: tuple[Verdict, ...] = ()
    locks: tuple[tuple[Verdict, int], ...] = ()
    safe_ms: int = 0
    position: int = 0
    command: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimQuery:
    """What a worker wants to claim. ``queues`` are (queue, type) pairs; ``wait_ms`` 0: answer at once.

    ``max_bytes``: of payloads and checkpoints, 0: as many as a reply takes. The first job is taken whole.
    """

    session_id: str
    request_id: str
    queues: tuple[tuple[str, str], ...]
    max_jobs: int
    wait_ms: int
    repeat: bool
    max_bytes: int = 0


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """A claimed job, all that its worker needs. ``run_timeout_ms`` already reckons with the total timeout."""

    stored: Stored
    claim: Claim
    spec: Spec
    checkpoint: Checkpoint | None


Failed = RequestError
"""Per-item results are either a value or the error that refuses this item alone."""
