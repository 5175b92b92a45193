"""The values that pass between a worker's parts: claimed jobs, beats, verdicts, and how an attempt ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, IntEnum

__all__ = [
    "BeatAnswer",
    "BeatClaim",
    "BeatLine",
    "BeatLock",
    "ClaimedJob",
    "Command",
    "Completed",
    "Failed",
    "LockVerdictOn",
    "OpenedSession",
    "Outcome",
    "QueueTypes",
    "Released",
    "StopReason",
    "Verdict",
    "VerdictOn",
]


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job as it was claimed; spans in seconds. Positional, because one is made for every job."""

    job_id: str
    fencing_token: int
    queue: str
    type: str
    attempt: int
    payload: bytes
    content_type: str
    labels: Mapping[str, str]
    checkpoint: bytes
    run_timeout: float | None
    heartbeat_timeout: float | None
    due_time: datetime | None
    submit_time: datetime | None
    priority: int
    failures: int
    max_retries: int


@dataclass(frozen=True, slots=True)
class QueueTypes:
    """What one claim call asks for: a queue and the types that are wanted from it."""

    queue: str
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session as granted; seconds. `safe_duration` counts from the moment at which the request was sent."""

    session_id: str
    ttl: float
    heartbeat_interval: float
    safe_duration: float
    revision: int


class Verdict(IntEnum):
    """What a beat says about one claim; numbers as on the wire."""

    UNSPECIFIED = 0
    HELD = 1
    CANCEL_REQUESTED = 2
    LOST = 3


class Command(IntEnum):
    """What the coordinator wants the worker to do; numbers as on the wire."""

    NONE = 0
    QUIET = 1
    TERMINATE = 2


@dataclass(frozen=True, slots=True)
class BeatClaim:
    """One claim as a beat lists it; ``progress`` is (ratio, note) or None."""

    job_id: str
    fencing_token: int
    sequence: int
    progress: tuple[float, str] | None


@dataclass(frozen=True, slots=True)
class BeatLock:
    """One lock as a beat lists it; ``fencing_token`` 0: AcquireLock is not answered yet."""

    name: str
    fencing_token: int
    request_id: str


BeatLine = BeatClaim | BeatLock


@dataclass(frozen=True, slots=True)
class LockVerdictOn:
    """The verdict on one lock; ``fencing_token`` is that of the entry that stands."""

    name: str
    fencing_token: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class VerdictOn:
    """The verdict on one claim."""

    job_id: str
    fencing_token: int
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatAnswer:
    """The answer to one beat. Not `confirmed`: etcd was out of reach, nothing is known."""

    confirmed: bool
    verdicts: tuple[VerdictOn, ...]
    safe_duration: float
    revision: int
    command: Command
    locks: tuple[LockVerdictOn, ...] = ()


class StopReason(Enum):
    """Why a handler was told to stop."""

    LOST = "lost"
    CANCELLED = "cancelled"
    RUN_TIMEOUT = "run_timeout"
    SHUTDOWN = "worker_shutdown"


@dataclass(frozen=True, slots=True)
class Completed:
    """The attempt succeeded; ``follow_ups`` are encoded jobs, submitted with it, all or none."""

    result: bytes = b""
    content_type: str = ""
    follow_ups: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed; ``delay`` in seconds overrides the policy's."""

    type: str
    message: str
    delay: float | None = None
    no_retry: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """The job goes back uncharged."""

    reason: str


Outcome = Completed | Failed | Released
