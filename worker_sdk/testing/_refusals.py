"""How the fake refuses a call: the codes, reasons and details that the service sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from coordinator.core.machine import Refusal

__all__ = ["CODES", "DETAILS_KEY", "Field", "Refused", "not_found", "refused_by", "session_gone", "to_status"]

DETAILS_KEY: Final = "grpc-status-details-bin"

_DOMAIN: Final = "leasekeeper"
_TEXT, _FIELD, _DESCRIPTION = 300, 100, 160
_Code = grpc.StatusCode

CODES: Final[Mapping[str, grpc.StatusCode]] = MappingProxyType(
    {
        "VALIDATION_FAILED": _Code.INVALID_ARGUMENT,
        "PAYLOAD_TOO_LARGE": _Code.INVALID_ARGUMENT,
        "RESULT_TOO_LARGE": _Code.INVALID_ARGUMENT,
        "TTL_OUT_OF_RANGE": _Code.INVALID_ARGUMENT,
        "REQUEST_ID_REUSED": _Code.INVALID_ARGUMENT,
        "CLAIM_LOST": _Code.FAILED_PRECONDITION,
        "JOB_TERMINAL": _Code.FAILED_PRECONDITION,
        "NOT_CLAIMABLE": _Code.FAILED_PRECONDITION,
        "EPOCH_REGRESSED": _Code.FAILED_PRECONDITION,
        "SESSION_FULL": _Code.FAILED_PRECONDITION,
        "QUEUE_PAUSED": _Code.FAILED_PRECONDITION,
        "PERMITS_MISMATCH": _Code.FAILED_PRECONDITION,
        "CLAIM_HELD": _Code.ABORTED,
        "LOCK_HELD": _Code.ABORTED,
        "ETAG_MISMATCH": _Code.ABORTED,
        "JOB_EXISTS": _Code.ALREADY_EXISTS,
        "DUPLICATE_JOB": _Code.ALREADY_EXISTS,
        "JOB_NOT_FOUND": _Code.NOT_FOUND,
        "SESSION_NOT_FOUND": _Code.NOT_FOUND,
        "RELOCK_THROTTLED": _Code.RESOURCE_EXHAUSTED,
        "DRAINING": _Code.UNAVAILABLE,
        "NOT_READY": _Code.UNAVAILABLE,
        "NOT_IN_THE_FAKE": _Code.UNIMPLEMENTED,
    }
)
"""Codes of the reasons that the fake knows. The last is its own: a field of the contract that it lacks."""

_RETRY_MS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "QUEUE_PAUSED": 5_000,
        "CLAIM_HELD": 500,
        "LOCK_HELD": 500,
        "RELOCK_THROTTLED": 500,
        "DRAINING": 100,
        "NOT_READY": 200,
    }
)


class Field(NamedTuple):
    """One bad field: its path in the request, and what is wrong with it."""

    field: str
    description: str


class Refused(Exception):
    """A call is refused; nothing was changed.

    Args:
        reason: a key of ``CODES``.
        message: one sentence for people.
        metadata: facts for ``ErrorInfo.metadata``.
        retry_after_ms: when a repeat makes sense; None: the reason's own delay, if it has one.
        fields: the violations.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
        fields: Sequence[Field] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_ms = _RETRY_MS.get(reason) if retry_after_ms is None else retry_after_ms
        self.fields = tuple(fields)


def not_found(job_id: str) -> Refused:
    """JOB_NOT_FOUND."""
    return Refused("JOB_NOT_FOUND", "there is no such job", metadata={"job_id": job_id})


def session_gone(session_id: str) -> Refused:
    """SESSION_NOT_FOUND."""
    return Refused(
        "SESSION_NOT_FOUND", "the session has ended, or never was", metadata={"session_id": session_id}
    )


def refused_by(refusal: Refusal, **more: str) -> Refused:
    """What the core refuses."""
    return Refused(refusal.reason.value, refusal.message, metadata={**more, **refusal.metadata})


def to_status(error: Refused) -> status_pb2.Status:
    """The status with ErrorInfo, and RetryInfo and BadRequest where they apply."""
    code: int = CODES[error.reason].value[0]
    status = status_pb2.Status(code=code, message=_cut(error.message, _TEXT))
    metadata = {key: _cut(value, _TEXT) for key, value in error.metadata.items()}
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN, metadata=metadata))
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        _pack(status, retry)
    if error.fields:
        bad = error_details_pb2.BadRequest()
        for violation in error.fields:
            bad.field_violations.add(
                field=_cut(violation.field, _FIELD), description=_cut(violation.description, _DESCRIPTION)
            )
        _pack(status, bad)
    return status


def _cut(text: str, limit: int) -> str:
    raw = text.encode()
    return text if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "…"


def _pack(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
