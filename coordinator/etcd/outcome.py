"""The one place that says what a gRPC error of etcd means: nothing written, unknown, or merely not readable.

Rules: INVALID_ARGUMENT, NOT_FOUND and etcd's own "too many requests" are raised before anything is proposed,
so this try wrote nothing. UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED and every other RESOURCE_EXHAUSTED
leave a write unknown: NOSPACE may be answered for a write that was applied, and a reply that is too large
for the client comes after the commit. Codes that etcd is not known to send are unknown too. A refusal
speaks of its own try only: after an unknown first try, the refusal of a second proves nothing about the
first.

Texts are those of ``api/v3rpc/rpctypes/error.go`` (etcd 3.4 to 3.7); where a text is not recognised, the code
alone decides, towards the weaker claim.
"""

from __future__ import annotations

import re

import grpc

from coordinator.errors import (
    Compacted,
    DuplicateKey,
    EtcdUnavailable,
    FutureRevision,
    InvalidRequest,
    LeaseExists,
    LeaseNotFound,
    OutcomeUnknown,
    PermissionDenied,
    RequestTooLarge,
    StorageError,
    StorageFull,
    TooManyRequests,
)

__all__ = ["classify", "is_stale_login"]

_TOO_MANY_REQUESTS = "etcdserver: too many requests"
_NO_SPACE = "database space exceeded"
_COMPACTED = "required revision has been compacted"
_FUTURE = "required revision is a future revision"
_LEASE_NOT_FOUND = "requested lease not found"
_LEASE_EXISTS = "lease already exists"
_DUPLICATE_KEY = "duplicate key given in txn request"
_TOO_LARGE = ("too many operations in txn request", "request is too large")
_LOGIN_REFUSED = (
    "user name is empty",
    "authentication failed",
    "password was given for no password user",
)
_STALE_LOGIN = ("invalid auth token", "revision of auth store is old")


def is_stale_login(error: grpc.aio.AioRpcError) -> bool:
    """Tell whether etcd refused the login token, so that a fresh one may do; nothing was written.

    etcd checks the token before it proposes a request, and the auth revision again before it applies it.
    """
    details = (error.details() or "").lower()
    return error.code() in (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,
    ) and any(text in details for text in _STALE_LOGIN)


def classify(error: grpc.aio.AioRpcError, *, mutation: bool) -> StorageError:
    """Return the storage error that *error* stands for; the caller raises it ``from error``.

    Args:
        error: what a call to etcd raised.
        mutation: whether the call could have written.
    """
    code = error.code()
    details = error.details() or ""
    text = details.lower()
    message = f"{code.name}: {details}" if details else code.name
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            if _DUPLICATE_KEY in text:
                return DuplicateKey(message)
            if any(each in text for each in _TOO_LARGE):
                return RequestTooLarge(message)
            if any(each in text for each in (*_LOGIN_REFUSED, *_STALE_LOGIN)):
                return PermissionDenied(message)
            return InvalidRequest(message)
        case grpc.StatusCode.NOT_FOUND:
            return LeaseNotFound(message) if _LEASE_NOT_FOUND in text else InvalidRequest(message)
        case grpc.StatusCode.OUT_OF_RANGE:
            if _COMPACTED in text:
                return Compacted(message, _compact_revision(text))
            return FutureRevision(message) if _FUTURE in text else InvalidRequest(message)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return LeaseExists(message) if _LEASE_EXISTS in text else InvalidRequest(message)
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return PermissionDenied(message)
        case grpc.StatusCode.UNIMPLEMENTED:
            return InvalidRequest(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if text == _TOO_MANY_REQUESTS:
            return TooManyRequests(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if mutation and _NO_SPACE in text:
            return StorageFull(message)
        case _:
            return OutcomeUnknown(message) if mutation else EtcdUnavailable(message)


def _compact_revision(text: str) -> int:
    """Some answers name the revision; 0 if this one does not."""
    found = re.search(r"compact(?:ed)? revision[^0-9]*(\d+)", text)
    return int(found[1]) if found else 0
