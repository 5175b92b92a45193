"""What a worker's stream may still be sent: jobs and bytes, on top of each other. Pure arithmetic."""

from __future__ import annotations

from typing import Final

from coordinator.errors import FieldViolation, Reason, RequestError

__all__ = ["LARGEST_BYTES", "LARGEST_JOBS", "Credit"]

LARGEST_JOBS: Final = 1_000
LARGEST_BYTES: Final = 64 << 20
"""Outstanding in one lane."""

_BYTES_A_JOB: Final = 1 << 20


class Credit:
    """The credit of one lane.

    A claim call reserves what it asks for and hands back what it did not use, so that several calls of one
    lane together never take more than there is.

    Args:
        path: the field that a refusal names.
    """

    __slots__ = ("_path", "_promised_bytes", "_promised_jobs", "bytes", "jobs")

    def __init__(self, path: str) -> None:
        self._path = path
        self.jobs = 0
        self.bytes = 0
        self._promised_jobs = 0
        self._promised_bytes = 0

    def add(self, jobs: int, size: int) -> None:
        """More leave; ``size`` 0 with ``jobs``: enough for them, within the limit.

        Raises:
            RequestError: VALIDATION_FAILED: negative, or more outstanding than is allowed; nothing is added.
        """
        if jobs < 0 or size < 0:
            raise self._refused("must not be negative")
        if self.jobs + self._promised_jobs + jobs > LARGEST_JOBS:
            outstanding = self.jobs + self._promised_jobs
            raise self._refused(
                f"{jobs} more jobs on top of {outstanding}: at most {LARGEST_JOBS} outstanding"
            )
        room = LARGEST_BYTES - self.bytes - self._promised_bytes
        if size > room:
            raise self._refused(
                f"{size} more bytes on top of {LARGEST_BYTES - room}: at most {LARGEST_BYTES}"
            )
        self.jobs += jobs
        self.bytes += size or max(0, min(room, jobs * _BYTES_A_JOB))

    def reserve(self, most_jobs: int, most_bytes: int) -> tuple[int, int]:
        """Jobs and bytes for one call; (0, 0) if there are not both."""
        if self.jobs <= 0 or self.bytes <= 0:
            return 0, 0
        jobs, size = min(self.jobs, most_jobs), min(self.bytes, most_bytes)
        self.jobs -= jobs
        self.bytes -= size
        self._promised_jobs += jobs
        self._promised_bytes += size
        return jobs, size

    def spend(self, reserved: tuple[int, int], jobs: int, size: int) -> None:
        """A call has ended that reserved so much and took ``jobs`` with ``size`` bytes.

        A job is sent whole: bytes may fall below zero, and then more must come first.
        """
        self._promised_jobs -= reserved[0]
        self._promised_bytes -= reserved[1]
        self.jobs += reserved[0] - jobs
        self.bytes += reserved[1] - size

    def _refused(self, text: str) -> RequestError:
        return RequestError(
            Reason.VALIDATION_FAILED, f"{self._path}: {text}", fields=(FieldViolation(self._path, text),)
        )
