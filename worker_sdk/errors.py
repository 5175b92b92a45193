"""The SDK's error tree: one class for each reason that the coordinator gives, and a few of the SDK's own.

::

    LeasekeeperError
    ├── RequestError                     a call was refused; `reason`, `metadata`, `retry_after`
    │   ├── InvalidRequest               ValidationFailed, PayloadTooLarge, ResultTooLarge, TtlOutOfRange,
    │   │                                RequestIdReused: nothing was changed, the call is wrong as it stands
    │   ├── PreconditionFailed           JobTerminal, NotClaimable, EpochRegressed, SessionFull,
    │   │                                CircuitOpen, QueuePaused, PermitsMismatch
    │   ├── ClaimLost, LockLost          somebody else may hold the job or lock: stop, never retry
    │   ├── ClaimHeld, LockHeld, EtagMismatch    somebody else was first
    │   ├── JobExists, DuplicateJob
    │   ├── NotFound                     JobNotFound, SessionNotFound
    │   ├── Exhausted                    RelockThrottled, RateLimited, StorageFull, TooManyRequests
    │   ├── Unavailable                  nothing was done: EtcdUnavailable, Draining, NotReady
    │   ├── OutcomeUnknown               it may have been done: repeat with the same request_id
    │   ├── RevisionCompacted
    │   ├── Unauthenticated, PermissionDenied
    │   └── InternalError
    ├── DeadlineExceeded                 a read or a wait was not answered in time
    ├── ConfigError                      settings that cannot work
    ├── ClientClosed, WrongEventLoop, ForkedProcess     the object is used where it cannot work
    └── JobCancelled                     raised by `check()` in a handler that was asked to stop

`Retry` and `NoRetry` stand beside the tree: handlers raise them to say what shall follow a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "CircuitOpen",
    "ClaimHeld",
    "ClaimLost",
    "ClientClosed",
    "ConfigError",
    "DeadlineExceeded",
    "Draining",
    "DuplicateJob",
    "EpochRegressed",
    "EtagMismatch",
    "EtcdUnavailable",
    "Exhausted",
    "FieldViolation",
    "ForkedProcess",
    "InternalError",
    "InvalidRequest",
    "JobCancelled",
    "JobExists",
    "JobNotFound",
    "JobTerminal",
    "LeasekeeperError",
    "LockHeld",
    "LockLost",
    "NoRetry",
    "NotClaimable",
    "NotFound",
    "NotReady",
    "OutcomeUnknown",
    "PayloadTooLarge",
    "PermissionDenied",
    "PermitsMismatch",
    "PreconditionFailed",
    "QueuePaused",
    "RateLimited",
    "RelockThrottled",
    "RequestError",
    "RequestIdReused",
    "ResultTooLarge",
    "Retry",
    "RevisionCompacted",
    "SessionFull",
    "SessionNotFound",
    "StorageFull",
    "TooManyRequests",
    "TtlOutOfRange",
    "Unauthenticated",
    "Unavailable",
    "ValidationFailed",
    "WrongEventLoop",
    "error_class",
]


class LeasekeeperError(Exception):
    """Base of every error that the SDK raises."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field: its path in the request (``jobs[3].payload``) and what is wrong with it."""

    field: str
    description: str


class RequestError(LeasekeeperError):
    """A call was refused.

    Attributes:
        reason: ``ErrorInfo.reason`` as the coordinator gave it, or empty.
        metadata: machine-readable facts beside it.
        retry_after: seconds after which a repeat makes sense, or None.
        fields: the violations, where the request was malformed.
    """

    reason: str
    metadata: Mapping[str, str]
    retry_after: float | None
    fields: tuple[FieldViolation, ...]

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        fields: Sequence[FieldViolation] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = MappingProxyType(dict(metadata or {}))
        self.retry_after = retry_after
        self.fields = tuple(fields)

    def _number(self, key: str) -> int:
        try:
            return int(self.metadata.get(key, "0"))
        except ValueError:
            return 0


class InvalidRequest(RequestError):
    """The call is wrong as it stands; nothing was changed."""


class ValidationFailed(InvalidRequest):
    """Malformed input; `fields` names each bad field."""


class PayloadTooLarge(InvalidRequest):
    """A payload or checkpoint over 256 KiB."""


class ResultTooLarge(InvalidRequest):
    """A result over 64 KiB."""


class TtlOutOfRange(InvalidRequest):
    """A session TTL outside 2 s - 1 h."""


class RequestIdReused(InvalidRequest):
    """The same request_id came with other content."""


class PreconditionFailed(RequestError):
    """The job or session is not in a state that allows this."""


class JobTerminal(PreconditionFailed):
    """The job has ended."""


class NotClaimable(PreconditionFailed):
    """The job is not in a state that allows this now."""


class EpochRegressed(PreconditionFailed):
    """The token lies above what etcd has reached: etcd was set back. An operator must act."""


class SessionFull(PreconditionFailed):
    """The session holds as many keys as one lease may."""


class CircuitOpen(PreconditionFailed):
    """Jobs of this queue and type fail or kill their holders, and wait for at least `retry_after`."""


class QueuePaused(PreconditionFailed):
    """Nothing is claimed from the queue until somebody resumes it."""


class PermitsMismatch(PreconditionFailed):
    """The users of this semaphore do not agree on its size; `metadata` has both sizes."""


class ClaimLost(RequestError):
    """The claim is lost: somebody else may hold the job. Stop the work; a retry can never help.

    Attributes:
        held: the token that this attempt holds.
        current: the token of the present holder, 0 if nobody holds the job or it is not known.
    """

    @property
    def held(self) -> int:
        """The token that this attempt holds, 0 if not told."""
        return self._number("held")

    @property
    def current(self) -> int:
        """The token of the present holder, 0 if nobody holds the job or it is not known."""
        return self._number("current")


class LockLost(RequestError):
    """The lock is lost: somebody else may own it. Stop the work; a retry can never help.

    Attributes:
        held: the token that the caller held.
        current: the largest token that owns the lock now, 0 if nobody does or it is not known.
    """

    @property
    def held(self) -> int:
        """The token that the caller held, 0 if not told."""
        return self._number("held")

    @property
    def current(self) -> int:
        """The largest token that owns the lock now, 0 if nobody does or it is not known."""
        return self._number("current")


class ClaimHeld(RequestError):
    """Somebody else holds the job; `retry_after` says when to ask again."""


class LockHeld(RequestError):
    """Somebody else owns the lock; `retry_after` says when to ask again."""


class EtagMismatch(RequestError):
    """The job has changed since it was read: read it again, then retry."""


class JobExists(RequestError):
    """A job with this id and other content exists."""


class DuplicateJob(RequestError):
    """The unique key belongs to another job."""

    @property
    def job_id(self) -> str:
        """The job that owns the key."""
        return self.metadata.get("job_id", "")


class NotFound(RequestError):
    """What the call names does not exist."""


class JobNotFound(NotFound):
    """No such job."""


class SessionNotFound(NotFound):
    """The session has ended: everything it held is lost."""


class Exhausted(RequestError):
    """A limit is reached; nothing was changed. `retry_after` says when to try again."""


class RelockThrottled(Exhausted):
    """Too many failed tries to get one job."""


class RateLimited(Exhausted):
    """Too many calls of this caller."""


class StorageFull(Exhausted):
    """etcd is near its quota; submissions stop first."""


class TooManyRequests(Exhausted):
    """The coordinator has too much under way."""


class Unavailable(RequestError):
    """No coordinator could serve the call; nothing was done."""


class EtcdUnavailable(Unavailable):
    """The coordinator cannot reach etcd; nothing was written."""


class Draining(Unavailable):
    """The coordinator is stopping."""


class NotReady(Unavailable):
    """The coordinator has not yet read what it needs."""


class OutcomeUnknown(RequestError):
    """The call may have been carried out, or may yet be. Repeat it with the same request_id to learn which.

    Not an `Unavailable`, so that nobody who catches that repeats the work under a new request_id.

    Attributes:
        request_id: the id to repeat the call with; empty where the call carries none.
    """

    request_id: str = ""


class RevisionCompacted(RequestError):
    """The revision to resume from is gone: read the present state and watch afresh."""


class Unauthenticated(RequestError):
    """No valid credentials."""


class PermissionDenied(RequestError):
    """The credentials do not allow this."""


class InternalError(RequestError):
    """A fault of the coordinator's; `metadata` may name the incident."""


class DeadlineExceeded(LeasekeeperError):
    """A call that changes nothing, or a wait, was not answered within its deadline."""


class ConfigError(LeasekeeperError):
    """Settings that cannot work; the message names them."""


class ClientClosed(LeasekeeperError):
    """The object was closed."""


class WrongEventLoop(LeasekeeperError):
    """The object belongs to another event loop, which still exists; make one object for each loop."""


class ForkedProcess(LeasekeeperError):
    """The object was made in a parent process; connections and claims do not pass over a fork."""


class JobCancelled(LeasekeeperError):
    """The job was asked to stop: by a user, by the run's deadline, or by the worker's shutdown."""


_LONGEST_DELAY = 30 * 24 * 3600


class Retry(Exception):
    """Raise it in a handler: the attempt failed and is charged; run again after `delay` seconds.

    Args:
        message: for people; cut to 512 bytes.
        delay: seconds until the next attempt, 0 to 30 days, in place of the policy's; None: as the policy
            says.
        type: class of failure; default ``Retry``.

    Raises:
        ValueError: a delay that is no such number. In a handler, the attempt has failed with that.
    """

    def __init__(self, message: str = "", *, delay: float | None = None, type: str = "Retry") -> None:
        if delay is not None and not 0 <= delay <= _LONGEST_DELAY:
            raise ValueError(f"delay: must be from 0 to {_LONGEST_DELAY} s, is {delay!r}")
        super().__init__(message)
        self.delay = delay
        self.type = type


class NoRetry(Exception):
    """Raise it in a handler: the attempt failed, and no retry can help; the job is DEAD.

    Args:
        message: for people; cut to 512 bytes.
        type: class of failure; default ``NoRetry``.
    """

    def __init__(self, message: str = "", *, type: str = "NoRetry") -> None:
        super().__init__(message)
        self.type = type


_CLASSES: Mapping[str, type[RequestError]] = MappingProxyType(
    {
        "VALIDATION_FAILED": ValidationFailed,
        "PAYLOAD_TOO_LARGE": PayloadTooLarge,
        "RESULT_TOO_LARGE": ResultTooLarge,
        "TTL_OUT_OF_RANGE": TtlOutOfRange,
        "REQUEST_ID_REUSED": RequestIdReused,
        "CLAIM_LOST": ClaimLost,
        "LOCK_LOST": LockLost,
        "PERMITS_MISMATCH": PermitsMismatch,
        "JOB_TERMINAL": JobTerminal,
        "NOT_CLAIMABLE": NotClaimable,
        "EPOCH_REGRESSED": EpochRegressed,
        "SESSION_FULL": SessionFull,
        "QUEUE_PAUSED": QueuePaused,
        "CIRCUIT_OPEN": CircuitOpen,
        "CLAIM_HELD": ClaimHeld,
        "LOCK_HELD": LockHeld,
        "ETAG_MISMATCH": EtagMismatch,
        "JOB_EXISTS": JobExists,
        "DUPLICATE_JOB": DuplicateJob,
        "JOB_NOT_FOUND": JobNotFound,
        "SESSION_NOT_FOUND": SessionNotFound,
        "RELOCK_THROTTLED": RelockThrottled,
        "RATE_LIMITED": RateLimited,
        "STORAGE_FULL": StorageFull,
        "TOO_MANY_REQUESTS": TooManyRequests,
        "ETCD_UNAVAILABLE": EtcdUnavailable,
        "OUTCOME_UNKNOWN": OutcomeUnknown,
        "DRAINING": Draining,
        "NOT_READY": NotReady,
        "REVISION_COMPACTED": RevisionCompacted,
        "UNAUTHENTICATED": Unauthenticated,
        "PERMISSION_DENIED": PermissionDenied,
        "INTERNAL": InternalError,
    }
)


def error_class(reason: str) -> type[RequestError] | None:
    """Return the class of an ``ErrorInfo.reason``; None for a reason that this SDK does not know."""
    return _CLASSES.get(reason)
