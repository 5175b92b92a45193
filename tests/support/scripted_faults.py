"""Faults that a scripted server can be told to make, and statuses as the coordinator would send them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

__all__ = ["Answer", "Fail", "Fault", "Hang", "LoseReply", "abort", "status_of"]

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_of(
    code: grpc.StatusCode,
    reason: str,
    message: str = "",
    *,
    metadata: dict[str, str] | None = None,
    retry_after: float | None = None,
    fields: Iterable[tuple[str, str]] = (),
) -> Status:
    """Return a status with ErrorInfo, and with RetryInfo and BadRequest where asked for."""
    details = []

    def pack(detail: Any) -> None:
        packed = AnyMessage()
        packed.Pack(detail)
        details.append(packed)

    pack(ErrorInfo(reason=reason, domain="leasekeeper", metadata=metadata or {}))
    if retry_after is not None:
        nanos = round(retry_after * 1e9)
        pack(RetryInfo(retry_delay=Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)))
    violations = [BadRequest.FieldViolation(field=name, description=text) for name, text in fields]
    if violations:
        pack(BadRequest(field_violations=violations))
    return Status(code=code.value[0], message=message or reason, details=details)


@dataclass(frozen=True)
class Fail:
    """Refuse the call; nothing is done."""

    status: Status


@dataclass(frozen=True)
class LoseReply:
    """Carry the call out, then let the caller see a broken connection."""


@dataclass(frozen=True)
class Hang:
    """Answer nothing until the caller gives up; nothing is done. ``done``: it is carried out all the same."""

    carried_out: bool = False


@dataclass(frozen=True)
class Answer:
    """Answer this in place of what would be answered."""

    message: Any


Fault = Fail | LoseReply | Hang | Answer


def abort(context: Any, status: Status) -> None:
    """End a call with *status* and its details."""
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(_CODES[status.code], status.message)
