"""The follow-up jobs that one attempt has asked for, until it is completed."""

from __future__ import annotations

import threading

from worker_sdk.errors import FieldViolation, PayloadTooLarge, ValidationFailed

__all__ = ["MAX_BYTES", "MAX_JOBS", "FollowUps"]

MAX_JOBS = 20
MAX_BYTES = 256 * 1024
"""Of all of them together, as encoded on the wire."""

_LOCK = threading.Lock()
"""One for all attempts: most of them submit nothing, and a lock for each would cost every job."""


class FollowUps:
    """Collects encoded jobs; safe to use from any thread."""

    __slots__ = ("_encoded", "_size")

    def __init__(self) -> None:
        self._encoded: tuple[bytes, ...] = ()
        self._size = 0

    @property
    def encoded(self) -> tuple[bytes, ...]:
        """The jobs as `JobSpec` messages, in their order."""
        return self._encoded

    def add(self, encoded: bytes) -> None:
        """Take an encoded job along; one that is refused changes nothing.

        Raises:
            ValidationFailed: a 21st job.
            PayloadTooLarge: over 256 KiB in all.
        """
        with _LOCK:
            if len(self._encoded) >= MAX_JOBS:
                text = f"an attempt submits at most {MAX_JOBS} follow-up jobs"
                raise ValidationFailed(
                    text, reason="VALIDATION_FAILED", fields=(FieldViolation("follow_ups", text),)
                )
            if self._size + len(encoded) > MAX_BYTES:
                raise PayloadTooLarge(
                    f"follow-up jobs have {self._size + len(encoded)} bytes in all, at most {MAX_BYTES}",
                    reason="PAYLOAD_TOO_LARGE",
                    metadata={"size": str(self._size + len(encoded)), "limit": str(MAX_BYTES)},
                )
            self._encoded = (*self._encoded, encoded)
            self._size += len(encoded)
