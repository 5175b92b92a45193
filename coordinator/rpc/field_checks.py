"""Checks of single fields. Each notes what is wrong under the field's path and never raises.

Numbers are compared only after they are known to be finite; text is measured in bytes of UTF-8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.errors import FieldViolation, Reason, RequestError
from coordinator.rpc import limits

__all__ = [
    "Violations",
    "check_count",
    "check_duration",
    "check_id",
    "check_labels",
    "check_name",
    "check_number",
    "check_session_id",
    "check_states",
    "check_text",
    "check_timestamp",
    "check_token",
    "check_well_formed",
    "duration_ms",
    "timestamp_ms",
]

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SESSION_ID: Final = re.compile(r"[0-9a-f]{16}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NANOS: Final = 1_000_000_000
_SHOWN: Final = 10
_STATES: Final = frozenset(range(1, 8))


class Violations:
    """What is wrong with a request.

    A violation with a reason of its own (a size, say) names the whole refusal if it comes first.
    """

    __slots__ = ("_fields", "_special", "place")

    def __init__(self, place: str = "") -> None:
        self.place = place
        self._fields: list[FieldViolation] = []
        self._special: tuple[Reason, dict[str, str]] | None = None

    def __bool__(self) -> bool:
        return bool(self._fields)

    def add(self, field: str, description: str) -> None:
        """Note one violation."""
        self._fields.append(FieldViolation(f"{self.place}.{field}" if self.place else field, description))

    def add_special(self, reason: Reason, field: str, description: str, **metadata: object) -> None:
        """Note a violation that has a reason of its own."""
        if self._special is None and not self._fields:
            self._special = (reason, {key: str(value) for key, value in metadata.items()})
        self.add(field, description)

    def error(self) -> RequestError | None:
        """The refusal that says it all, or None if nothing is wrong.

        At most 10 fields are named: status details travel as headers.
        """
        if not self._fields:
            return None
        reason, metadata = self._special or (Reason.VALIDATION_FAILED, {})
        shown = self._fields[:_SHOWN]
        first = shown[0]
        more = len(self._fields) - 1
        message = f"{first.field}: {first.description}" + (f" (and {more} more)" if more else "")
        return RequestError(reason, message, metadata=metadata, fields=shown)

    def check(self) -> None:
        """Raise the refusal, if there is one.

        Raises:
            RequestError: VALIDATION_FAILED, or the reason of the first violation.
        """
        error = self.error()
        if error is not None:
            raise error


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def check_text(found: Violations, field: str, text: str, limit: int, *, required: bool = False) -> None:
    """Text without control characters, at most ``limit`` bytes."""
    if not text:
        if required:
            found.add(field, "is required")
        return
    plain = text.isascii() and text.isprintable()
    if plain and len(text) <= limit:
        return
    size = _bytes(text)
    if size > limit:
        found.add(field, f"is {size} bytes long, the limit is {limit}")
    if not plain:
        control = _CONTROL.search(text)
        if control is not None:
            found.add(
                field, f"contains the control character U+{ord(control[0]):04X} at position {control.start()}"
            )


def check_id(found: Violations, field: str, text: str, *, required: bool = True) -> None:
    """A caller's id: 1-256 bytes without control characters; anything else is just text."""
    check_text(found, field, text, limits.ID_BYTES, required=required)


def check_name(found: Violations, field: str, text: str, *, required: bool = True) -> None:
    """A namespace, queue or type: ``[a-z0-9][a-z0-9._-]{0,62}``."""
    if not text:
        if required:
            found.add(field, "is required")
        return
    if _NAME.fullmatch(text) is None:
        found.add(field, "must match [a-z0-9][a-z0-9._-]{0,62}")


def check_session_id(found: Violations, field: str, text: str) -> None:
    """A session id as OpenSession makes them. Others cannot exist, so they never reach the store."""
    if not text:
        found.add(field, "is required")
    elif _SESSION_ID.fullmatch(text) is None:
        found.add(field, "is not a session id: 16 lower-case hex digits, as OpenSession answered")


def check_token(found: Violations, field: str, token: int) -> None:
    """A fencing token: above 0. Absent never means "any"."""
    if token <= 0:
        found.add(field, f"must be greater than 0, is {token}; 0 or absent never means 'any'")


def check_number(found: Violations, field: str, value: float, low: float, high: float) -> None:
    """A finite number within [low, high]."""
    if not math.isfinite(value):
        found.add(field, f"must be a finite number, is {value}")
    elif not low <= value <= high:
        found.add(field, f"must be from {low:g} to {high:g}, is {value:g}")


def check_count(found: Violations, field: str, count: int, low: int, high: int) -> bool:
    """A number of items within [low, high]; says whether it is."""
    if low <= count <= high:
        return True
    found.add(field, f"must have {low} to {high} items, has {count}")
    return False


def check_labels(found: Violations, field: str, labels: Mapping[str, str]) -> None:
    """At most 16 labels; keys 1-63 bytes, values at most 255 bytes."""
    if not labels:
        return
    check_count(found, field, len(labels), 0, limits.LABELS)
    for index, (key, value) in enumerate(labels.items()):
        if index >= limits.LABELS:
            break
        check_text(found, f"{field}[{key[:63]!r}] (key)", key, limits.LABEL_KEY_BYTES, required=True)
        check_text(found, f"{field}[{key[:63]!r}]", value, limits.LABEL_VALUE_BYTES)


def check_states(found: Violations, field: str, states: Iterable[int]) -> None:
    """Known job states."""
    for index, state in enumerate(states):
        if state not in _STATES:
            found.add(f"{field}[{index}]", f"{state} is not a job state")


def check_well_formed(found: Violations, field: str, value: Duration) -> bool:
    """A Duration whose parts have one sign and whose nanoseconds are less than a second.

    Says whether it is.
    """
    seconds, nanos = value.seconds, value.nanos
    if -_NANOS < nanos < _NANOS and not (seconds > 0 > nanos or seconds < 0 < nanos):
        return True
    found.add(field, f"is not a valid Duration: {seconds} s, {nanos} ns")
    return False


def check_duration(
    found: Violations, field: str, value: Duration, high_ms: int, *, positive: bool = False
) -> None:
    """A well-formed Duration of 0 (or, if ``positive``, more) to ``high_ms`` milliseconds."""
    if not check_well_formed(found, field, value):
        return
    total = value.seconds * _NANOS + value.nanos
    if not 0 <= total <= high_ms * 1_000_000 or (positive and total == 0):
        low = "more than 0" if positive else "0 s"
        found.add(field, f"must be from {low} to {high_ms / 1000:.15g} s, is {total / _NANOS:.15g} s")


def check_timestamp(found: Violations, field: str, value: Timestamp) -> None:
    """A well-formed Timestamp from 1970 to 3000."""
    if not 0 <= value.nanos < _NANOS or not 0 <= value.seconds <= limits.LARGEST_TIMESTAMP_MS // 1000:
        found.add(
            field, f"must be a valid time from 1970 to the year 3000, is {value.seconds} s, {value.nanos} ns"
        )


def duration_ms(value: Duration) -> int:
    """Milliseconds, rounded up, so that a positive span never becomes 0, which is none."""
    return value.seconds * 1000 - (-value.nanos // 1_000_000)


def timestamp_ms(value: Timestamp) -> int:
    """Unix milliseconds, at least 1: 0 is none."""
    return max(1, value.seconds * 1000 + value.nanos // 1_000_000)
