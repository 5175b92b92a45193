"""From gRPC failures to the SDK's errors.

Reads ``grpc-status-details-bin`` itself, so that grpcio-status is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from worker_sdk._convert.times import seconds
from worker_sdk.errors import (
    DeadlineExceeded,
    Exhausted,
    FieldViolation,
    InternalError,
    InvalidRequest,
    LeasekeeperError,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    PreconditionFailed,
    RequestError,
    Unauthenticated,
    Unavailable,
    error_class,
)

__all__ = ["from_rpc_failure", "from_status", "never_sent"]

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "leasekeeper"
# What to raise where there is no ErrorInfo of ours: a proxy's answer, an older or newer coordinator.
_BY_CODE: dict[int, type[RequestError]] = {
    3: InvalidRequest,
    5: NotFound,
    7: PermissionDenied,
    8: Exhausted,
    9: PreconditionFailed,
    11: InvalidRequest,
    13: InternalError,
    14: Unavailable,
    16: Unauthenticated,
}
# gRPC says so when no connection could be made and the call was therefore never sent. Should a later version
# say it otherwise, a failure counts as of unknown outcome, which is the safe side.
_NOT_CONNECTED = "failed to connect to all addresses"


def from_status(status: Status) -> RequestError:
    """Return the error that *status* describes; its code is not OK."""
    reason, metadata, retry_after = "", {}, None
    fields: tuple[FieldViolation, ...] = ()
    for detail in status.details:
        info, retry, bad = ErrorInfo(), RetryInfo(), BadRequest()
        if detail.Unpack(info) and info.domain == _DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after = max(0.0, seconds(retry.retry_delay))
        elif detail.Unpack(bad):
            fields = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations)
    made = error_class(reason) or _BY_CODE.get(status.code, RequestError)
    message = status.message or reason or f"status code {status.code}"
    return made(message, reason=reason, metadata=metadata, retry_after=retry_after, fields=fields)


def from_rpc_failure(
    code: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, str | bytes]], *, changes: bool
) -> LeasekeeperError:
    """Return the error for a failed call.

    Args:
        code, details, trailing: as gRPC gave them.
        changes: whether the call changes something, so that an unanswered one is of unknown outcome.
    """
    number: int = code.value[0]
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status = Status.FromString(value)
            except DecodeError:
                continue
            if status.code == number:
                return from_status(status)
    if number in (1, 2, 4, 14) and changes and not never_sent(details):
        # Cancelled, unknown, deadline, unavailable, and nobody said that nothing was done.
        return OutcomeUnknown(f"no answer: {details or code.name}", reason="OUTCOME_UNKNOWN")
    if number == 4:
        return DeadlineExceeded(details or "deadline exceeded")
    return from_status(Status(code=number, message=details or code.name))


def never_sent(details: str) -> bool:
    """Return whether a failed call's *details* say that it never left this process."""
    return details.startswith(_NOT_CONNECTED)
