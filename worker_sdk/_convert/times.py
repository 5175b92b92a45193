"""Times and spans: datetimes and seconds on one side, the well-known types on the other."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from worker_sdk.errors import FieldViolation, ValidationFailed

__all__ = ["duration", "optional_time", "seconds", "timestamp"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NANOS = 1_000_000_000
_MAX_SECONDS = 315_576_000_000


def duration(value: float, field: str) -> Duration:
    """Return *value* seconds as a Duration.

    Raises:
        ValidationFailed: not finite, or beyond what a Duration holds; names *field*.
    """
    if not math.isfinite(value) or abs(value) > _MAX_SECONDS:
        raise refusal(field, f"{value} s is no span of time")
    whole = int(value)
    nanos = round((value - whole) * _NANOS)
    if abs(nanos) == _NANOS:
        whole, nanos = whole + (1 if nanos > 0 else -1), 0
    return Duration(seconds=whole, nanos=nanos)


def seconds(value: Duration) -> float:
    """Return a Duration in seconds."""
    return value.seconds + value.nanos / _NANOS


def timestamp(value: datetime, field: str) -> Timestamp:
    """Return *value* as a Timestamp.

    Raises:
        ValidationFailed: it does not know its zone; names *field*.
    """
    if value.tzinfo is None:
        raise refusal(field, f"{value.isoformat()} has no time zone")
    micros = (value - _EPOCH) // timedelta(microseconds=1)
    whole, rest = divmod(micros, 1_000_000)
    return Timestamp(seconds=whole, nanos=rest * 1000)


def optional_time(message: Message, field: str) -> datetime | None:
    """Return the Timestamp *field* of *message* in UTC.

    None where it is absent or beyond what datetime holds.
    """
    if not message.HasField(field):
        return None
    value: Timestamp = getattr(message, field)
    try:
        return _EPOCH + timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)
    except OverflowError:
        return None


def refusal(field: str, description: str) -> ValidationFailed:
    """Return the error for one bad field that the SDK itself has found."""
    return ValidationFailed(
        f"{field}: {description}",
        reason="VALIDATION_FAILED",
        fields=(FieldViolation(field, description),),
    )
