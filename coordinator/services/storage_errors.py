"""What a caller is told when the store did not do as asked: the one map to RequestError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coordinator.errors import (
    ClusterChanged,
    CodecError,
    Compacted,
    DeadlinePassed,
    DuplicateKey,
    EpochChanged,
    EtcdUnavailable,
    FutureRevision,
    InvalidRequest,
    LeasekeeperError,
    LeaseNotFound,
    NotApplied,
    OutcomeUnknown,
    PermissionDenied,
    Reason,
    RequestError,
    RequestTooLarge,
    StorageError,
    StorageFull,
    TooManyRequests,
)

__all__ = ["RETRY_MS", "refused"]

RETRY_MS: Final = 200
"""When to repeat a call that the store did not take; a leader election takes one to three seconds."""

_TABLE: Final[tuple[tuple[type[LeasekeeperError], Reason, str, int | None], ...]] = (
    # The first that matches counts: subclasses stand before their bases.
    (StorageFull, Reason.OUTCOME_UNKNOWN, "etcd is out of space and may have applied the change", 5_000),
    (
        OutcomeUnknown,
        Reason.OUTCOME_UNKNOWN,
        "the change may or may not stand; repeat with the same ids",
        RETRY_MS,
    ),
    (TooManyRequests, Reason.TOO_MANY_REQUESTS, "the store is overloaded; nothing was changed", RETRY_MS),
    (DeadlinePassed, Reason.ETCD_UNAVAILABLE, "the deadline passed first; nothing was changed", RETRY_MS),
    (
        RequestTooLarge,
        Reason.PAYLOAD_TOO_LARGE,
        "etcd refuses a request of this size; nothing was changed",
        None,
    ),
    (EpochChanged, Reason.NOT_READY, "the epoch has changed; nothing was changed", RETRY_MS),
    (LeaseNotFound, Reason.ETCD_UNAVAILABLE, "a lease ended meanwhile; nothing was changed", RETRY_MS),
    (
        PermissionDenied,
        Reason.ETCD_UNAVAILABLE,
        "etcd refuses the coordinator's user; nothing was changed",
        5_000,
    ),
    (InvalidRequest, Reason.INTERNAL, "etcd calls the request malformed; nothing was changed", None),
    (DuplicateKey, Reason.INTERNAL, "etcd calls the request malformed; nothing was changed", None),
    (NotApplied, Reason.ETCD_UNAVAILABLE, "the store did not take the change; nothing was changed", RETRY_MS),
    (Compacted, Reason.REVISION_COMPACTED, "that revision is gone", None),
    (FutureRevision, Reason.EPOCH_REGRESSED, "the store's history went back", None),
    (ClusterChanged, Reason.NOT_READY, "another etcd cluster answers", 1_000),
    (EtcdUnavailable, Reason.ETCD_UNAVAILABLE, "etcd does not answer; nothing was changed", RETRY_MS),
    (CodecError, Reason.INTERNAL, "the record cannot be decoded; nothing was changed", None),
)


def refused(error: LeasekeeperError, metadata: Mapping[str, str] | None = None) -> RequestError:
    """The answer to a caller whose request ended in ``error``. Unknown stays unknown.

    Args:
        error: what the store did; a RequestError is the answer already.
        metadata: what the call was about, e.g. ``job_id``.
    """
    if isinstance(error, RequestError):
        return error
    facts = dict(metadata or {})
    facts["storage"] = type(error).__name__
    if isinstance(error, Compacted) and error.compact_revision:
        facts["compact_revision"] = str(error.compact_revision)
    rows = (row for row in _TABLE if isinstance(error, row[0]))
    _, reason, message, retry_ms = next(rows, (StorageError, Reason.INTERNAL, "the store failed", None))
    told = RequestError(reason, message, metadata=facts, retry_after_ms=retry_ms)
    told.__cause__ = error
    return told
