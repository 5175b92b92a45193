"""The one table from reasons to gRPC codes, and how an error becomes ``google.rpc.Status``.

Details travel as headers, and a peer may refuse more than 8 KiB of them: every text is cut, so that the
answer itself never fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from coordinator.errors import Reason, RequestError, StorageError
from coordinator.services.storage_errors import refused

__all__ = ["CODES", "DETAILS_KEY", "DOMAIN", "to_request_error", "to_status"]

DOMAIN: Final = "leasekeeper"
DETAILS_KEY: Final = "grpc-status-details-bin"

_LOG = logging.getLogger(__name__)
_Code = grpc.StatusCode

CODES: Final[Mapping[Reason, grpc.StatusCode]] = MappingProxyType(
    {
        Reason.VALIDATION_FAILED: _Code.INVALID_ARGUMENT,
        Reason.PAYLOAD_TOO_LARGE: _Code.INVALID_ARGUMENT,
        Reason.RESULT_TOO_LARGE: _Code.INVALID_ARGUMENT,
        Reason.TTL_OUT_OF_RANGE: _Code.INVALID_ARGUMENT,
        Reason.REQUEST_ID_REUSED: _Code.INVALID_ARGUMENT,
        Reason.CLAIM_LOST: _Code.FAILED_PRECONDITION,
        Reason.JOB_TERMINAL: _Code.FAILED_PRECONDITION,
        Reason.NOT_CLAIMABLE: _Code.FAILED_PRECONDITION,
        Reason.EPOCH_REGRESSED: _Code.FAILED_PRECONDITION,
        Reason.SESSION_FULL: _Code.FAILED_PRECONDITION,
        Reason.QUEUE_PAUSED: _Code.FAILED_PRECONDITION,
        Reason.CIRCUIT_OPEN: _Code.FAILED_PRECONDITION,
        Reason.LOCK_LOST: _Code.FAILED_PRECONDITION,
        Reason.PERMITS_MISMATCH: _Code.FAILED_PRECONDITION,
        Reason.CLAIM_HELD: _Code.ABORTED,
        Reason.LOCK_HELD: _Code.ABORTED,
        Reason.ETAG_MISMATCH: _Code.ABORTED,
        Reason.JOB_EXISTS: _Code.ALREADY_EXISTS,
        Reason.DUPLICATE_JOB: _Code.ALREADY_EXISTS,
        Reason.JOB_NOT_FOUND: _Code.NOT_FOUND,
        Reason.SESSION_NOT_FOUND: _Code.NOT_FOUND,
        Reason.RELOCK_THROTTLED: _Code.RESOURCE_EXHAUSTED,
        Reason.RATE_LIMITED: _Code.RESOURCE_EXHAUSTED,
        Reason.STORAGE_FULL: _Code.RESOURCE_EXHAUSTED,
        Reason.TOO_MANY_REQUESTS: _Code.RESOURCE_EXHAUSTED,
        Reason.ETCD_UNAVAILABLE: _Code.UNAVAILABLE,
        Reason.OUTCOME_UNKNOWN: _Code.UNAVAILABLE,
        Reason.DRAINING: _Code.UNAVAILABLE,
        Reason.NOT_READY: _Code.UNAVAILABLE,
        Reason.REVISION_COMPACTED: _Code.OUT_OF_RANGE,
        Reason.UNAUTHENTICATED: _Code.UNAUTHENTICATED,
        Reason.PERMISSION_DENIED: _Code.PERMISSION_DENIED,
        Reason.INTERNAL: _Code.INTERNAL,
    }
)
"""Total over ``Reason``; a test says so."""

DEFAULT_RETRY_MS: Final[Mapping[Reason, int]] = MappingProxyType(
    {
        Reason.QUEUE_PAUSED: 5_000,
        Reason.CIRCUIT_OPEN: 1_000,
        Reason.CLAIM_HELD: 500,
        Reason.LOCK_HELD: 500,
        Reason.RELOCK_THROTTLED: 500,
        Reason.RATE_LIMITED: 1_000,
        Reason.STORAGE_FULL: 5_000,
        Reason.TOO_MANY_REQUESTS: 200,
        Reason.ETCD_UNAVAILABLE: 500,
        Reason.OUTCOME_UNKNOWN: 200,
        Reason.DRAINING: 100,
        Reason.NOT_READY: 200,
    }
)
"""Delay in RetryInfo where the error itself names none, milliseconds."""

_TEXT: Final = 300
_FIELD: Final = 100
_DESCRIPTION: Final = 160


def _cut(text: str, limit: int) -> str:
    raw = text.encode()
    return text if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "…"


def _pack(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def to_status(error: RequestError) -> status_pb2.Status:
    """The status with ErrorInfo, and RetryInfo and BadRequest where they apply."""
    code: int = CODES[error.reason].value[0]
    status = status_pb2.Status(code=code, message=_cut(error.message, _TEXT))
    metadata = {key: _cut(value, _TEXT) for key, value in error.metadata.items()}
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=metadata))
    retry_ms = error.retry_after_ms
    if retry_ms is None:
        retry_ms = DEFAULT_RETRY_MS.get(error.reason)
    if retry_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(retry_ms)
        _pack(status, retry)
    if error.fields:
        bad = error_details_pb2.BadRequest()
        for violation in error.fields:
            bad.field_violations.add(
                field=_cut(violation.field, _FIELD), description=_cut(violation.description, _DESCRIPTION)
            )
        _pack(status, bad)
    return status


def to_request_error(error: Exception, new_incident: Callable[[], str]) -> RequestError:
    """What a caller is told of an exception.

    One that nobody foresaw is logged here, once, with the number the caller gets.

    Args:
        error: what was raised.
        new_incident: makes the number.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, StorageError):
        return refused(error)
    return _internal_error(error, new_incident())


def _internal_error(error: Exception, incident: str) -> RequestError:
    # The text of the exception stays in the log: it may hold what the caller must not see.
    _LOG.error("internal error, incident %s", incident, exc_info=error)
    return RequestError(
        Reason.INTERNAL, f"a fault of the coordinator, incident {incident}", metadata={"incident": incident}
    )
