"""What a handler receives: its job, its fencing token, and how it learns that it must stop."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from worker_sdk._claims import ClaimBook, HeldClaim
from worker_sdk._convert.jobs import spec_to
from worker_sdk._latch import Latch
from worker_sdk._outcome import Result
from worker_sdk._work import StopReason
from worker_sdk.errors import ClaimLost, DeadlineExceeded, ForkedProcess, JobCancelled
from worker_sdk.jobs import JobSpec

__all__ = ["Context", "Latch", "Result", "SyncContext"]

_MAX_NOTE_BYTES = 4000
_CHECKPOINT_SLACK = 2.0


@dataclass(frozen=True, slots=True)
class ContextHost:
    """What a context needs of its worker: the book, the clock, the loop, a way to store checkpoints."""

    book: ClaimBook
    now: Callable[[], float]
    loop: asyncio.AbstractEventLoop
    pid: int
    save_checkpoint: Callable[[HeldClaim, bytes, float], Awaitable[None]]
    call_timeout: float


class _BaseContext:
    """The parts that do not wait, the same for both kinds of handler. Safe to use from any thread."""

    __slots__ = ("_claim", "_host", "_job", "attempt", "fencing_token", "job_id", "payload")

    def __init__(self, claim: HeldClaim, host: ContextHost) -> None:
        job = claim.job
        self._claim = claim
        self._host = host
        self._job = job
        self.job_id = job.job_id
        self.payload = job.payload
        self.attempt = job.attempt
        # Give it to every store that can check it: it grows with each new holder of the job.
        self.fencing_token = job.fencing_token

    @property
    def queue(self) -> str:
        """The queue that the job came from."""
        return self._job.queue

    @property
    def type(self) -> str:
        """The job's type."""
        return self._job.type

    @property
    def content_type(self) -> str:
        """Media type of the payload, as its producer said."""
        return self._job.content_type

    @property
    def labels(self) -> Mapping[str, str]:
        """The job's labels."""
        return self._job.labels

    @property
    def checkpoint(self) -> bytes:
        """What an earlier attempt saved last; empty if nothing."""
        return self._job.checkpoint

    @property
    def failures(self) -> int:
        """Charged failures of earlier attempts."""
        return self._job.failures

    @property
    def max_retries(self) -> int:
        """How many charged retries the job has in all."""
        return self._job.max_retries

    @property
    def priority(self) -> int:
        """1 (first) to 5 (last)."""
        return self._job.priority

    @property
    def submit_time(self) -> datetime | None:
        """When the job was submitted."""
        return self._job.submit_time

    @property
    def due_time(self) -> datetime | None:
        """By when the job should have started; None: it does not matter."""
        return self._job.due_time

    @property
    def lost(self) -> Latch:
        """Set when somebody else may hold the job. Whatever runs on must write nothing without its token."""
        return self._claim.lost

    @property
    def cancelled(self) -> Latch:
        """Set when the job is to stop: cancelled, out of time, or the worker ends. See `stop_reason`."""
        return self._claim.cancelled

    @property
    def stop_reason(self) -> str:
        """Why the handler is to stop.

        ``lost``, ``cancelled``, ``run_timeout``, ``worker_shutdown``, or empty.
        """
        if self._claim.lost.is_set():
            return StopReason.LOST.value
        reason = self._claim.stop_reason
        return reason.value if reason is not None else ""

    def remaining(self) -> float | None:
        """Return the seconds left of the run timeout, 0 at its end; None: there is none."""
        until = self._claim.run_until
        return None if until is None else max(0.0, until - self._host.now())

    @property
    def deadline(self) -> datetime | None:
        """When the run timeout ends, by this machine's wall clock; None: there is none."""
        left = self.remaining()
        return None if left is None else datetime.now(UTC) + timedelta(seconds=left)

    def lease_remaining(self) -> float:
        """Return the seconds for which the claim is certainly held if no beat comes through any more."""
        return max(0.0, self._claim.deadline - self._host.now())

    def check(self) -> None:
        """Return if the work may go on. Also a sign of life, for jobs with a heartbeat timeout.

        Raises:
            ClaimLost: somebody else may hold the job; stop at once.
            JobCancelled: the job was asked to stop.
            ForkedProcess: this is a child of the worker, which holds no claim.
        """
        claim = self._claim
        if os.getpid() != self._host.pid:
            raise ForkedProcess("a forked child holds no claim: only its parent may act for the job")
        if claim.lost.is_set() or self._host.book.lost_now(claim, self._host.now()):
            raise ClaimLost(
                f"the claim on job {self.job_id!r} with token {self.fencing_token} is lost",
                reason="CLAIM_LOST",
                metadata={"held": str(self.fencing_token), "current": "0"},
            )
        claim.advances += 1
        if claim.cancelled.is_set():
            raise JobCancelled(f"job {self.job_id!r} is asked to stop: {self.stop_reason}")

    def progress(self, ratio: float, note: str = "") -> None:
        """Say how far the work is; goes along with the next beat, and is stored at most every 10 s.

        Args:
            ratio: 0 to 1.
            note: for people; at most about 4 KiB.

        Raises: as `check`, and ValueError for a ratio or note that cannot be stored.
        """
        if not (math.isfinite(ratio) and 0 <= ratio <= 1):
            raise ValueError(f"ratio is {ratio}: must lie in 0-1")
        size = len(note.encode("utf-8", "replace"))
        if size > _MAX_NOTE_BYTES:
            raise ValueError(f"the note has {size} bytes: at most {_MAX_NOTE_BYTES}")
        self.check()
        self._claim.progress = (ratio, note)

    def submit(self, job: JobSpec) -> None:
        """Submit *job* together with this one's success, in one transaction: all follow-ups or none.

        Nothing is sent yet, so there is nothing to await; an attempt that fails, is released or is lost
        submits nothing. A job without ``job_id`` gets one that is the same however often the settlement is
        repeated. One that stands already with the same content counts as submitted; another with its id or
        its unique key makes the attempt fail with ``JobExists`` or ``DuplicateJob``. It may take this job's
        own unique key.

        Raises: as `check`; ValidationFailed for a 21st job; PayloadTooLarge over 256 KiB in all.
        """
        self.check()
        self._claim.follow_ups.add(spec_to(job).SerializeToString())


class Context(_BaseContext):
    """What an ``async def`` handler receives.

    When the job is to stop, the handler's task is cancelled too.
    """

    __slots__ = ()

    async def save_checkpoint(self, data: bytes, *, timeout: float | None = None) -> None:
        """Store *data* (at most 256 KiB) for the next attempt, at once.

        Raises: as `check`; PayloadTooLarge; OutcomeUnknown if it was not answered within *timeout* seconds.
        """
        self.check()
        await self._host.save_checkpoint(self._claim, data, timeout or self._host.call_timeout)


class SyncContext(_BaseContext):
    """What a plain function receives, in its thread.

    Nothing stops it but itself: call `check` now and then.
    """

    __slots__ = ()

    def save_checkpoint(self, data: bytes, *, timeout: float | None = None) -> None:
        """Store *data* (at most 256 KiB) for the next attempt, at once; blocks until it is stored.

        Raises: as `check`; PayloadTooLarge; OutcomeUnknown if it was not answered within *timeout* seconds;
            DeadlineExceeded if the worker's event loop did not come round to it.
        """
        self.check()
        limit = timeout or self._host.call_timeout
        done = asyncio.run_coroutine_threadsafe(self._save(data, limit), self._host.loop)
        try:
            done.result(limit + _CHECKPOINT_SLACK)
        except FutureTimeoutError:
            done.cancel()
            raise DeadlineExceeded(f"the event loop is blocked: no checkpoint within {limit} s") from None

    async def _save(self, data: bytes, limit: float) -> None:
        await self._host.save_checkpoint(self._claim, data, limit)

    def sleep(self, seconds: float) -> None:
        """Sleep, but wake and raise as `check` does when the job is to stop."""
        self._claim.cancelled.wait_blocking(seconds)
        self.check()
