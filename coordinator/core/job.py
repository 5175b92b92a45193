"""The values that the core decides on: a job, its terms, its attempts and the claim that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from coordinator.core.copying import quick
from coordinator.core.lock_order import LockMode
from coordinator.core.rank import Rank
from coordinator.core.retry import RetryPolicy

__all__ = [
    "ATTEMPTS_KEPT",
    "FAILED",
    "INLINE_RESULT_BYTES",
    "RETAINED",
    "TERMINAL",
    "Attempt",
    "AttemptOutcome",
    "Claim",
    "Job",
    "JobLock",
    "JobState",
    "Progress",
    "Rollback",
    "Terms",
    "claim_for",
]

ATTEMPTS_KEPT: Final = 8
"""Attempts that a record remembers; settlements of older ones are not replayed (docs/guarantees.md, P2)."""

INLINE_RESULT_BYTES: Final = 1024
"""Larger results lie under a key of their own, so that transitions and listings stay small."""

_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


class JobState(IntEnum):
    """State of a job; the numbers are those of ``leasekeeper.v1.JobState``."""

    SCHEDULED = 1
    PENDING = 2
    RUNNING = 3
    SUCCEEDED = 4
    DEAD = 5
    CANCELLED = 6
    QUARANTINED = 7


TERMINAL: Final = frozenset({JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.QUARANTINED})
"""States that a job leaves only by hand."""

RETAINED: Final = frozenset({JobState.SUCCEEDED, JobState.CANCELLED})
"""Terminal states whose spec is dropped and whose record ends with a retention lease."""


FAILED: Final = frozenset({JobState.DEAD, JobState.QUARANTINED})
"""Terminal states that a retry by hand leads out of: spec and checkpoint are kept."""


class AttemptOutcome(IntEnum):
    """How an attempt ended; the numbers are those of ``leasekeeper.v1.AttemptOutcome``."""

    RUNNING = 1
    SUCCEEDED = 2
    FAILED = 3
    RELEASED = 4
    LOST = 5
    UNDELIVERED = 6
    TIMED_OUT = 7
    CANCELLED = 8


# Looked up once: a member of an enum costs thirty times what a global costs.
_SCHEDULED: Final = JobState.SCHEDULED
_PENDING: Final = JobState.PENDING
_RUNNING: Final = JobState.RUNNING
_ATTEMPT_RUNS: Final = AttemptOutcome.RUNNING
_FAILURES: Final = frozenset({AttemptOutcome.FAILED, AttemptOutcome.TIMED_OUT})


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The job that is enqueued in the very Txn that makes its parent DEAD or QUARANTINED (``core.rollback``).

    ``payload``: at most 4 KiB, for it travels with every record. ``priority`` 0: that of the parent.
    """

    queue: str
    type: str
    payload: bytes = b""
    content_type: str = ""
    priority: int = 0


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class JobLock:
    """A named lock that the claim of a job takes and its end gives back. ``permits`` count for SEMAPHORE
    alone."""

    name: str
    mode: LockMode = LockMode.EXCLUSIVE
    permits: int = 1


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a job was submitted with. Times are Unix milliseconds, spans are milliseconds, 0 is none.

    ``digest`` covers everything that the submitter said, the payload included; ``request_digest`` is the
    request id's. ``target_wait_ms``: of priorities 1 to 5 in its queue; empty: the defaults. ``locks`` are of
    different names.
    """

    queue: str
    type: str
    priority: int = 3
    labels: Mapping[str, str] = field(default_factory=lambda: _NO_LABELS)
    submit_ms: int
    due_ms: int = 0
    run_at_ms: int = 0
    counter: int = 0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    queue_timeout_ms: int = 0
    run_timeout_ms: int = 0
    total_timeout_ms: int = 0
    heartbeat_timeout_ms: int = 0
    unique_key: str = ""
    payload_size: int = 0
    digest: bytes = b""
    request_digest: bytes = b""
    rollback: Rollback | None = None
    target_wait_ms: tuple[int, ...] = ()
    locks: tuple[JobLock, ...] = ()


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of a job.

    ``token`` is 0 until the attempt has ended: the Txn that starts it cannot know its own revision. A claim
    that was handed out again (``services.redelivery``) has it before.
    ``state_after`` and ``ready_ms_after`` are what its settlement was answered with, for replays.
    """

    number: int
    session: str
    start_ms: int
    token: int = 0
    end_ms: int = 0
    outcome: AttemptOutcome = AttemptOutcome.RUNNING
    digest: bytes = b""
    failure_type: str = ""
    failure_message: str = ""
    state_after: JobState | None = None
    ready_ms_after: int = 0


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a handler says it is; ``ratio`` from 0 to 1."""

    ratio: float = 0.0
    note: str = ""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A session's exclusive hold on one attempt.

    ``token`` is the fencing token on the wire scale, 0 before the commit.
    """

    session: str
    attempt: int
    nonce: bytes
    start_ms: int
    token: int = 0
    queue: str = ""
    type: str = ""
    run_timeout_ms: int = 0
    heartbeat_timeout_ms: int = 0


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as its record says. Replaced, never mutated.

    ``hold_ms`` is set on a job that was taken away from a live session: whoever makes it claimable again must
    itself have seen it waiting that long, so that the holder hears of it first (docs/guarantees.md, P8). A
    DEAD or QUARANTINED job keeps it for a retry by hand.
    ``retry_ms`` is when it was last retried by hand, greater each time, and 0 before; ``retry_digest`` is the
    digest of that request. ``rollback_job`` was enqueued when it last became DEAD or QUARANTINED.
    """

    namespace: str
    job_id: str
    terms: Terms
    state: JobState
    ready_ms: int
    rank: Rank
    attempt: int = 0
    failures: int = 0
    lease_losses: int = 0
    uncharged: int = 0
    hold_ms: int = 0
    cancel_requested: bool = False
    cancel_reason: str = ""
    attempts: tuple[Attempt, ...] = ()
    progress: Progress | None = None
    result: bytes = b""
    result_content_type: str = ""
    result_size: int = 0
    end_reason: str = ""
    settle_ms: int = 0
    retry_ms: int = 0
    retry_digest: bytes = b""
    rollback_job: str = ""

    @property
    def terminal(self) -> bool:
        """Whether only an operator can make it run again."""
        return self.state in TERMINAL

    @property
    def total_end_ms(self) -> int:
        """When its total timeout passes, counted from the last retry by hand, if any; 0 for never."""
        terms = self.terms
        return (self.retry_ms or terms.submit_ms) + terms.total_timeout_ms if terms.total_timeout_ms else 0

    @property
    def due_key_ms(self) -> int:
        """Where its ``due/`` key stands: the earliest moment at which time alone changes it; 0 for none."""
        terms = self.terms
        if not terms.total_timeout_ms and not terms.queue_timeout_ms and self.state is not _SCHEDULED:
            return 0  # by far the most
        total = self.total_end_ms
        if self.state is _SCHEDULED:
            own = self.ready_ms
        elif self.state is _PENDING and self.terms.queue_timeout_ms:
            own = self.ready_ms + self.terms.queue_timeout_ms
        elif self.state is _PENDING:
            own = 0
        else:
            return 0
        return min(own, total) if own and total else own or total

    @property
    def current(self) -> Attempt | None:
        """The attempt under way."""
        return self.attempts[-1] if self.state is _RUNNING and self.attempts else None

    @property
    def last_failed(self) -> Attempt | None:
        """The last remembered attempt that failed or timed out; what was given back or lost is no failure."""
        return next((one for one in reversed(self.attempts) if one.outcome in _FAILURES), None)

    def attempt_with(self, token: int) -> Attempt | None:
        """The remembered attempt that ended under ``token``; 0 is nobody's, though lost ones may carry it."""
        if token <= 0:
            return None
        for attempt in reversed(self.attempts):
            if attempt.token == token and attempt.outcome is not _ATTEMPT_RUNS:
                return attempt
        return None


def claim_for(job: Job, session: str, nonce: bytes, now_ms: int) -> Claim:
    """The claim that ``session`` would hold of ``job`` from ``now_ms`` on."""
    terms = job.terms
    run = terms.run_timeout_ms
    if terms.total_timeout_ms:
        left = max(1, job.total_end_ms - now_ms)
        run = min(run, left) if run else left
    return Claim(
        session=session,
        attempt=job.attempt + 1,
        nonce=nonce,
        start_ms=now_ms,
        queue=terms.queue,
        type=terms.type,
        run_timeout_ms=run,
        heartbeat_timeout_ms=terms.heartbeat_timeout_ms,
    )
