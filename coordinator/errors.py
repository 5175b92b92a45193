"""The whole error tree of the coordinator. Nothing else in the package defines an exception.

::

    LeasekeeperError
    ├── RequestError                    what a caller is told; ``rpc/status.py`` maps each reason to one
    gRPC code
    ├── StorageError                    what etcd did with a request; raised by ``coordinator/etcd`` only
    │   ├── NotApplied                  certain: nothing was written by this try
    │   │   ├── RequestTooLarge
    │   │   ├── DuplicateKey
    │   │   ├── LeaseNotFound
    │   │   ├── LeaseExists
    │   │   ├── TooManyRequests
    │   │   ├── InvalidRequest
    │   │   ├── PermissionDenied
    │   │   ├── EpochChanged
    │   │   └── DeadlinePassed          the deadline passed before the first try was sent
    │   ├── OutcomeUnknown              the write may or may not have been applied
    │   │   └── StorageFull             NOSPACE: etcd says no, yet may have applied it
    │   ├── EtcdUnavailable             a read failed, or no member could be reached before anything was sent
    │   ├── Compacted                   the revision asked for is gone
    │   ├── FutureRevision              the revision asked for does not exist yet: the store went back
    │   └── ClusterChanged              another cluster answers at the same address
    ├── CacheAway                       the reference cache is down, slow, full or refuses
    ├── CodecError                      a stored value cannot be decoded
    ├── KeyFormatError                  a key was not built by ``etcd/keys.py``
    └── ConfigError                     settings that cannot work together
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "CacheAway",
    "ClusterChanged",
    "CodecError",
    "Compacted",
    "ConfigError",
    "DeadlinePassed",
    "DuplicateKey",
    "EpochChanged",
    "EtcdUnavailable",
    "FieldViolation",
    "FutureRevision",
    "InvalidRequest",
    "KeyFormatError",
    "LeaseExists",
    "LeaseNotFound",
    "LeasekeeperError",
    "NotApplied",
    "OutcomeUnknown",
    "PermissionDenied",
    "Reason",
    "RequestError",
    "RequestTooLarge",
    "StorageError",
    "StorageFull",
    "TooManyRequests",
]


class LeasekeeperError(Exception):
    """Base of every error that this package raises."""


class Reason(StrEnum):
    """Reasons of ``google.rpc.ErrorInfo``; stable, part of the public contract."""

    VALIDATION_FAILED = "VALIDATION_FAILED"
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    RESULT_TOO_LARGE = "RESULT_TOO_LARGE"
    TTL_OUT_OF_RANGE = "TTL_OUT_OF_RANGE"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    CLAIM_LOST = "CLAIM_LOST"
    JOB_TERMINAL = "JOB_TERMINAL"
    NOT_CLAIMABLE = "NOT_CLAIMABLE"
    EPOCH_REGRESSED = "EPOCH_REGRESSED"
    SESSION_FULL = "SESSION_FULL"
    QUEUE_PAUSED = "QUEUE_PAUSED"
    CIRCUIT_OPEN = "CIRCUIT_OPEN"
    LOCK_LOST = "LOCK_LOST"
    PERMITS_MISMATCH = "PERMITS_MISMATCH"
    CLAIM_HELD = "CLAIM_HELD"
    LOCK_HELD = "LOCK_HELD"
    ETAG_MISMATCH = "ETAG_MISMATCH"
    JOB_EXISTS = "JOB_EXISTS"
    DUPLICATE_JOB = "DUPLICATE_JOB"
    JOB_NOT_FOUND = "JOB_NOT_FOUND"
    SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
    RELOCK_THROTTLED = "RELOCK_THROTTLED"
    RATE_LIMITED = "RATE_LIMITED"
    STORAGE_FULL = "STORAGE_FULL"
    TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
    ETCD_UNAVAILABLE = "ETCD_UNAVAILABLE"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    DRAINING = "DRAINING"
    NOT_READY = "NOT_READY"
    REVISION_COMPACTED = "REVISION_COMPACTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field: its path in the request (``jobs[3].payload``) and what is wrong with it."""

    field: str
    description: str


class RequestError(LeasekeeperError):
    """A call is refused; nothing was changed, except where ``reason`` is OUTCOME_UNKNOWN.

    Args:
        reason: why; decides the gRPC code.
        message: one sentence for people.
        metadata: machine-readable facts for ``ErrorInfo.metadata``.
        retry_after_ms: when a repeat makes sense, milliseconds.
        fields: the violations, for VALIDATION_FAILED and its kin.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
        fields: Sequence[FieldViolation] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.retry_after_ms = retry_after_ms
        self.fields = tuple(fields)

    def __repr__(self) -> str:
        return f"RequestError({self.reason.value}, {self.message!r}, {dict(self.metadata)!r})"


class StorageError(LeasekeeperError):
    """Base of what etcd did with a request."""


class NotApplied(StorageError):
    """Certain: this try wrote nothing."""


class RequestTooLarge(NotApplied):
    """The request has too many operations or bytes for etcd."""


class DuplicateKey(NotApplied):
    """Two operations of one Txn write the same key."""


class LeaseNotFound(NotApplied):
    """A put names a lease that does not exist (any more)."""


class LeaseExists(NotApplied):
    """A grant names a lease id that is in use."""


class TooManyRequests(NotApplied):
    """etcd, or our own queue in front of it, is overloaded."""


class InvalidRequest(NotApplied):
    """etcd calls the request malformed."""


class PermissionDenied(NotApplied):
    """The etcd user may not do this, or could not log in."""


class EpochChanged(NotApplied):
    """The epoch that the Txn was built under is not the current one."""


class DeadlinePassed(NotApplied):
    """The deadline passed before anything was sent."""


class OutcomeUnknown(StorageError):
    """The write may or may not have been applied; only reading the store can tell."""


class StorageFull(OutcomeUnknown):
    """etcd is out of space (NOSPACE). It refuses, yet may have applied the write."""


class EtcdUnavailable(StorageError):
    """No member answered; nothing was written."""


class Compacted(StorageError):
    """The revision asked for has been compacted.

    Args:
        compact_revision: first revision that still exists, 0 if etcd did not say.
    """

    def __init__(self, message: str, compact_revision: int = 0) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


class FutureRevision(StorageError):
    """The revision asked for does not exist yet: the store was set back."""


class ClusterChanged(StorageError):
    """Another etcd cluster answers at the same endpoints."""


class CacheAway(LeasekeeperError):
    """The reference cache cannot be used now. Do without it; nothing else depends on it."""


class CodecError(LeasekeeperError):
    """A stored value cannot be decoded; it is set aside, never trusted."""


class KeyFormatError(LeasekeeperError):
    """A key does not have the form that ``etcd/keys.py`` builds."""


class ConfigError(LeasekeeperError):
    """Settings are out of range or contradict each other; the message shows both numbers."""
