"""Checks of single fields, as the service makes them. Each notes what is wrong and never raises."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from worker_sdk.testing._refusals import Field, Refused

__all__ = ["LONGEST_DELAY_MS", "LONGEST_TIMEOUT_MS", "Violations", "duration_ms", "timestamp_ms"]

LONGEST_DELAY_MS: Final = 30 * 24 * 3_600_000
LONGEST_TIMEOUT_MS: Final = 3650 * 24 * 3_600_000

_LAST_SECOND: Final = 32_503_680_000
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SESSION_ID: Final = re.compile(r"[0-9a-f]{16}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NANOS: Final = 1_000_000_000
_SHOWN: Final = 10


class Violations:
    """What is wrong with a request. One with a reason of its own names the refusal if it comes first."""

    def __init__(self, place: str = "") -> None:
        self.place = place
        self._fields: list[Field] = []
        self._special: tuple[str, dict[str, str]] | None = None

    def add(self, field: str, description: str) -> None:
        """Note one violation."""
        self._fields.append(Field(f"{self.place}.{field}" if self.place else field, description))

    def add_special(self, reason: str, field: str, description: str, **metadata: object) -> None:
        """Note a violation that has a reason of its own."""
        if not self._fields:
            self._special = (reason, {key: str(value) for key, value in metadata.items()})
        self.add(field, description)

    def error(self) -> Refused | None:
        """The refusal that says it all, or None."""
        if not self._fields:
            return None
        reason, metadata = self._special or ("VALIDATION_FAILED", {})
        first, more = self._fields[0], len(self._fields) - 1
        message = f"{first.field}: {first.description}" + (f" (and {more} more)" if more else "")
        return Refused(reason, message, metadata=metadata, fields=self._fields[:_SHOWN])

    def check(self) -> None:
        """Raise the refusal, if there is one."""
        error = self.error()
        if error is not None:
            raise error

    def text(self, field: str, text: str, limit: int, *, required: bool = False) -> None:
        """Text without control characters, at most *limit* bytes."""
        if not text:
            if required:
                self.add(field, "is required")
            return
        size = len(text.encode())
        if size > limit:
            self.add(field, f"is {size} bytes long, the limit is {limit}")
        control = _CONTROL.search(text)
        if control is not None:
            where = f"U+{ord(control[0]):04X} at position {control.start()}"
            self.add(field, f"contains the control character {where}")

    def id(self, field: str, text: str, *, required: bool = True) -> None:
        """A caller's id."""
        self.text(field, text, 256, required=required)

    def request_id(self, text: str, *, required: bool = False) -> None:
        """The id that makes a repeat recognisable."""
        self.text("request_id", text, 128, required=required)

    def name(self, field: str, text: str, *, required: bool = True) -> None:
        """A namespace, queue or type."""
        if not text:
            if required:
                self.add(field, "is required")
        elif _NAME.fullmatch(text) is None:
            self.add(field, "must match [a-z0-9][a-z0-9._-]{0,62}")

    def session_id(self, text: str) -> None:
        """A session id as OpenSession makes them."""
        if not text:
            self.add("session_id", "is required")
        elif _SESSION_ID.fullmatch(text) is None:
            self.add("session_id", "is not a session id: 16 lower-case hex digits, as OpenSession answered")

    def token(self, field: str, token: int) -> None:
        """A fencing token: above 0."""
        if token <= 0:
            self.add(field, f"must be greater than 0, is {token}; 0 or absent never means 'any'")

    def number(self, field: str, value: float, low: float, high: float) -> None:
        """A finite number within [low, high]."""
        if not math.isfinite(value):
            self.add(field, f"must be a finite number, is {value}")
        elif not low <= value <= high:
            self.add(field, f"must be from {low:g} to {high:g}, is {value:g}")

    def count(self, field: str, count: int, low: int, high: int) -> bool:
        """A number of items; says whether it is allowed."""
        if low <= count <= high:
            return True
        self.add(field, f"must have {low} to {high} items, has {count}")
        return False

    def size(self, reason: str, field: str, data: bytes, limit: int) -> None:
        """Bytes, at most *limit*."""
        size = len(data)
        if size > limit:
            self.add_special(reason, field, f"is {size} bytes, the limit is {limit}", size=size, limit=limit)

    def labels(self, field: str, labels: Mapping[str, str]) -> None:
        """At most 16 labels."""
        self.count(field, len(labels), 0, 16)
        for key, value in list(labels.items())[:16]:
            self.text(f"{field}[{key[:63]!r}] (key)", key, 63, required=True)
            self.text(f"{field}[{key[:63]!r}]", value, 255)

    def states(self, field: str, states: Iterable[int]) -> None:
        """Known job states."""
        for index, state in enumerate(states):
            if not 1 <= state <= 7:
                self.add(f"{field}[{index}]", f"{state} is not a job state")

    def well_formed(self, field: str, value: Duration) -> bool:
        """A Duration whose parts have one sign; says whether it is."""
        seconds, nanos = value.seconds, value.nanos
        if -_NANOS < nanos < _NANOS and not (seconds > 0 > nanos or seconds < 0 < nanos):
            return True
        self.add(field, f"is not a valid Duration: {seconds} s, {nanos} ns")
        return False

    def duration(self, field: str, value: Duration, high_ms: int, *, positive: bool = False) -> None:
        """A Duration of 0 (if *positive*: more) to *high_ms* milliseconds."""
        if not self.well_formed(field, value):
            return
        total = value.seconds * _NANOS + value.nanos
        if not 0 <= total <= high_ms * 1_000_000 or (positive and total == 0):
            low = "more than 0" if positive else "0 s"
            self.add(field, f"must be from {low} to {high_ms / 1000:.15g} s, is {total / _NANOS:.15g} s")

    def timestamp(self, field: str, value: Timestamp) -> None:
        """A Timestamp from 1970 to 3000."""
        if not 0 <= value.nanos < _NANOS or not 0 <= value.seconds <= _LAST_SECOND:
            told = f"{value.seconds} s, {value.nanos} ns"
            self.add(field, f"must be a valid time from 1970 to the year 3000, is {told}")


def duration_ms(value: Duration) -> int:
    """Milliseconds, rounded up, so that a positive span never becomes 0, which is none."""
    return value.seconds * 1000 - (-value.nanos // 1_000_000)


def timestamp_ms(value: Timestamp) -> int:
    """Unix milliseconds, at least 1: 0 is none."""
    return max(1, value.seconds * 1000 + value.nanos // 1_000_000)
