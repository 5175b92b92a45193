"""What can be asked of a job. Each command is data; ``machine.decide`` says what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from coordinator.core.copying import quick
from coordinator.core.job import AttemptOutcome, Claim, Progress, Terms

__all__ = [
    "Cancel",
    "ClaimIt",
    "Command",
    "Complete",
    "Delete",
    "Fail",
    "FallDue",
    "Lose",
    "Release",
    "Repair",
    "Retry",
    "Settlement",
    "Submit",
    "TakeAway",
    "Taken",
    "Update",
]


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Create the job. ``run_at_ms`` 0 means now."""

    namespace: str
    job_id: str
    terms: Terms
    run_at_ms: int = 0


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimIt:
    """Give the job to a session."""

    claim: Claim


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """End the attempt with success. ``result`` is whole; the core decides where it lies."""

    token: int
    digest: bytes
    result: bytes = b""
    result_content_type: str = ""
    progress: Progress | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """End the attempt with a failure. ``retry_delay_ms`` None: the policy's delay."""

    token: int
    digest: bytes
    failure_type: str = ""
    failure_message: str = ""
    retry_delay_ms: int | None = None
    no_retry: bool = False
    jitter_number: float = 0.5
    progress: Progress | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give the job back without charge."""

    token: int
    digest: bytes
    delay_ms: int = 0
    reason: str = ""
    progress: Progress | None = None


Settlement = Complete | Fail | Release
"""What a worker says at the end of an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Cancel a waiting job, or ask a running one to stop.

    ``token`` is the running one's claim as read, 0 if it is not known: the record is written again, so that
    its revision does not tell it any more.
    """

    reason: str = ""
    token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lose:
    """The claim key is gone though the record says RUNNING: the holder's lease has ended.

    ``token`` is the lost claim's, as far as it is known (mod revision of the state that the claim wrote),
    else 0. ``delay_ms``: where many are lost together they come back one after the other.
    """

    token: int = 0
    delay_ms: int = 0


class Taken(IntEnum):
    """Why the coordinator takes a claim away; the values are those of the attempt's outcome."""

    UNDELIVERED = AttemptOutcome.UNDELIVERED
    TIMED_OUT = AttemptOutcome.TIMED_OUT
    CANCELLED = AttemptOutcome.CANCELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeAway:
    """Take the claim from a session that may be alive. ``hold_ms`` is that session's TTL."""

    token: int
    why: Taken
    hold_ms: int
    reason: str = ""
    jitter_number: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FallDue:
    """Time has passed: make it claimable, or end it by its queue or total timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Change what may change while it waits; None leaves it as it is."""

    priority: int | None = None
    due_ms: int | None = None
    run_at_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Run a DEAD or QUARANTINED job again, by hand. ``run_at_ms`` 0 means now.

    ``digest`` is the request id's, empty for none: one request retries a job once, however often it comes.
    """

    run_at_ms: int = 0
    digest: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Forget a terminal job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Write the record again as it is, so that every key that follows from it is right.

    ``token`` is the claim's as read, 0 if there is none; see ``Cancel``.
    """

    token: int = 0


Command = (
    Submit
    | ClaimIt
    | Complete
    | Fail
    | Release
    | Cancel
    | Lose
    | TakeAway
    | FallDue
    | Update
    | Retry
    | Delete
    | Repair
)
