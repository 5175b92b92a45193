"""What a handler receives that runs in a child process: its job, its token, and a line to the worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from worker_sdk._convert.jobs import spec_to
from worker_sdk._follow_ups import FollowUps
from worker_sdk._seams import boottime
from worker_sdk.jobs import JobSpec

__all__ = ["ProcessContext"]

_MAX_NOTE_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessContext:
    """The job as a child process sees it.

    There is no `lost` and no `cancelled`: when the job is to stop, the worker kills the process, and whatever
    processes the handler has started.

    Attributes:
        fencing_token: give it to every store that can check it: it grows with each new holder of the job.
        checkpoint: what an earlier attempt saved last; empty if nothing.
        failures, max_retries: charged failures of earlier attempts, and how many charged retries there are.
        run_until: the end of the run timeout on the SDK's clock; None: there is none. See `remaining`.
    """

    job_id: str
    fencing_token: int
    queue: str
    type: str
    attempt: int
    payload: bytes
    content_type: str
    labels: Mapping[str, str]
    checkpoint: bytes
    failures: int
    max_retries: int
    run_until: float | None
    # Sends (ratio, note), or None for a sign of life; stores a checkpoint and waits for the answer.
    tell: Callable[[tuple[float, str] | None], None]
    save: Callable[[bytes, float | None], None]
    follow_ups: FollowUps = field(default_factory=FollowUps)

    def remaining(self) -> float | None:
        """Return the seconds left of the run timeout, 0 at its end; None: there is none."""
        return None if self.run_until is None else max(0.0, self.run_until - boottime())

    @property
    def deadline(self) -> datetime | None:
        """When the run timeout ends, by this machine's wall clock; None: there is none."""
        left = self.remaining()
        return None if left is None else datetime.now(UTC) + timedelta(seconds=left)

    def check(self) -> None:
        """Give a sign of life, for jobs with a heartbeat timeout; a job that is to stop is killed instead."""
        self.tell(None)

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def progress(self, ratio: float, note: str = "") -> None:
        """Say how far the work is; goes along with the next beat, and is stored at most every 10 s.

        Args:
            ratio: 0 to 1.
            note: for people; at most about 4 KiB.

        Raises:
            ValueError: a ratio or note that cannot be stored.
        """
        if not (math.isfinite(ratio) and 0 <= ratio <= 1):
            raise ValueError(f"ratio is {ratio}: must lie in 0-1")
        size = len(note.encode("utf-8", "replace"))
        if size > _MAX_NOTE_BYTES:
            raise ValueError(f"the note has {size} bytes: at most {_MAX_NOTE_BYTES}")
        self.tell((ratio, note))

    def save_checkpoint(self, data: bytes, *, timeout: float | None = None) -> None:
        """Store *data* (at most 256 KiB) for the next attempt, at once; blocks until it is stored.

        Raises:
            LeasekeeperError: it was not stored, or that is not known; the class says which.
        """
        self.save(bytes(data), timeout)

    def submit(self, job: JobSpec) -> None:
        """Submit *job* together with this one's success, all follow-ups or none; see `Context.submit`.

        Raises:
            ValidationFailed: a 21st job, or a time that no message can hold.
            PayloadTooLarge: over 256 KiB in all.
        """
        self.tell(None)
        self.follow_ups.add(spec_to(job).SerializeToString())
