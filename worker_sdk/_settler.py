"""Reports how attempts ended: batches what has gathered, and repeats each report until it is answered.

Natural batching: what ends while a call is under way goes with the next one; no timer. A report is sent
again with the same token and content, so that an answer lost on the way can do no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from worker_sdk._claims import HeldClaim
from worker_sdk._convert.work import SettlementMessage, settlement_to
from worker_sdk._machine import retry_delay
from worker_sdk._seams import Seams
from worker_sdk._transport.channel import repeatable
from worker_sdk._work import Failed, Outcome
from worker_sdk.config import RetryConfig
from worker_sdk.errors import (
    ClaimLost,
    DeadlineExceeded,
    DuplicateJob,
    InvalidRequest,
    JobExists,
    JobNotFound,
    LeasekeeperError,
    RequestError,
)

__all__ = ["Settler", "SettlerConfig"]

_log = logging.getLogger("worker_sdk.settlements")
_BATCH = 100
_BATCH_BYTES = 3 * 1024 * 1024 - 64 * 1024
_IN_FLIGHT = 4


class SettleCall(Protocol):
    """Sends one batch, once; `WorkerCalls.settle`."""

    async def __call__(
        self, settlements: Sequence[SettlementMessage], *, timeout: float
    ) -> Sequence[RequestError | None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SettlerConfig:
    """Seconds: of one try, and after the claim's safe deadline until a report is given up."""

    attempt_timeout: float
    give_up: float
    retry: RetryConfig


class _Report:
    """One settlement under way."""

    __slots__ = ("claim", "message", "rewritten", "size", "until")

    def __init__(self, claim: HeldClaim, message: SettlementMessage, until: float) -> None:
        self.claim = claim
        self.message = message
        self.size: int = message.ByteSize() + 8
        self.until = until
        self.rewritten = False


class Settler:
    """Owner of all settlements of one worker, on one event loop; `run` must be running.

    Args:
        call: sends a batch.
        answered: told of claims whose settlement needs no more listing.
        refused: told of each claim that was lost before its settlement.
    """

    def __init__(
        self,
        call: SettleCall,
        *,
        answered: Callable[[Sequence[HeldClaim]], None],
        refused: Callable[[HeldClaim], None],
        config: SettlerConfig,
        seams: Seams,
    ) -> None:
        self._call = call
        self._answered = answered
        self._refused = refused
        self._config = config
        self._seams = seams
        self._waiting: deque[_Report] = deque()
        self._batches: dict[asyncio.Task[None], list[_Report]] = {}
        self._in_flight = 0
        self._kick_due = False
        self._group: asyncio.TaskGroup | None = None
        self._stopped = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()

    def put(self, claim: HeldClaim, outcome: Outcome) -> None:
        """Report *outcome* as soon as may be."""
        job = claim.job
        message = settlement_to(job.job_id, job.fencing_token, outcome)
        until = max(claim.deadline, self._seams.now()) + self._config.give_up
        self._waiting.append(_Report(claim, message, until))
        self._quiet.clear()
        if not self._kick_due:
            # Everything that ends in this turn of the loop goes together.
            self._kick_due = True
            asyncio.get_running_loop().call_soon(self._kick)

    async def run(self) -> None:
        """Send what is put, until `stop`; owns the calls under way."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._kick()
            await self._stopped.wait()
            # What is left now is left behind on purpose, see `flush`.
            for task in self._tasks:
                task.cancel()

    async def flush(self, timeout: float) -> int:
        """Wait until everything is answered, at most *timeout* seconds; return how much is not."""
        try:
            async with asyncio.timeout(timeout):
                await self._quiet.wait()
        except TimeoutError:
            pass
        return len(self._waiting) + sum(len(batch) for batch in self._batches.values())

    def stop(self) -> None:
        """End `run`; unanswered reports are logged and left to the session's end."""
        left = [report.claim.job.job_id for report in self._waiting]
        left += [report.claim.job.job_id for batch in self._batches.values() for report in batch]
        if left:
            _log.error(
                "%d settlements were never answered, their jobs may run again: %s", len(left), left[:20]
            )
        self._stopped.set()

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        return list(self._batches)

    def _kick(self) -> None:
        self._kick_due = False
        group = self._group
        if group is None or self._stopped.is_set():
            return
        while self._waiting and (
            self._in_flight == 0 or (len(self._waiting) >= _BATCH and self._in_flight < _IN_FLIGHT)
        ):
            batch = self._take()
            self._in_flight += 1
            self._batches[group.create_task(self._send(batch))] = batch

    def _take(self) -> list[_Report]:
        batch: list[_Report] = []
        size = 0
        while self._waiting and len(batch) < _BATCH:
            report = self._waiting[0]
            if batch and size + report.size > _BATCH_BYTES:
                break
            size += report.size
            batch.append(self._waiting.popleft())
        return batch

    async def _send(self, batch: list[_Report]) -> None:
        failures = 0
        while batch:
            pause = await self._try(batch, failures + 1)
            if pause is None:
                failures = 0
                continue
            failures += 1
            await self._seams.sleep(pause)
            self._drop_old(batch)
        # Not in a `finally`: a cancelled call leaves its batch for `stop` to name.
        self._in_flight -= 1
        task = asyncio.current_task()
        if task is not None:
            self._batches.pop(task, None)
        self._kick()
        if not self._waiting and self._in_flight == 0:
            self._quiet.set()

    async def _try(self, batch: list[_Report], attempt: int) -> float | None:
        """Send what is left of a batch.

        Take out what is answered. Return the pause before the next try, or None.
        """
        try:
            results: Sequence[LeasekeeperError | None] = await self._call(
                [report.message for report in batch], timeout=self._config.attempt_timeout
            )
        except InvalidRequest as error:
            if len(batch) > 1:
                # The call as a whole is refused: find the culprit by sending each alone.
                for report in batch[1:]:
                    self._waiting.appendleft(report)
                del batch[1:]
                return None
            results = [error]
        except (RequestError, DeadlineExceeded) as error:
            if attempt in (3, 10) or attempt % 50 == 0 or not repeatable(error):
                _log.warning("%d settlements not answered after %d tries: %s", len(batch), attempt, error)
            return self._pause(attempt, [error])
        done: list[HeldClaim] = []
        left: list[_Report] = []
        again: list[LeasekeeperError] = []
        for report, refusal in zip(batch, results, strict=True):
            if refusal is None:
                done.append(report.claim)
            elif self._keep(report, refusal):
                left.append(report)
                again.append(refusal)
            else:
                done.append(report.claim)
        batch[:] = left
        self._answered(done)
        return self._pause(attempt, again) if left else None

    def _keep(self, report: _Report, error: LeasekeeperError) -> bool:
        """Return whether a refused report is to be sent again."""
        job = report.claim.job
        if isinstance(error, ClaimLost | JobNotFound):
            _log.warning(
                "job %s, token %d: settled by somebody else: %s", job.job_id, job.fencing_token, error
            )
            self._refused(report.claim)
            return False
        if isinstance(error, InvalidRequest | JobExists | DuplicateJob):
            if report.rewritten:
                _log.error("job %s cannot be settled: %s", job.job_id, error)
                return False
            # A report that the coordinator can never take, or whose follow-ups cannot be submitted, becomes
            # a failure that says so.
            report.rewritten = True
            outcome = Failed(type(error).__name__, str(error))
            report.message = settlement_to(job.job_id, job.fencing_token, outcome)
            return True
        if not repeatable(error):
            _log.error("job %s, token %d: not settled: %s", job.job_id, job.fencing_token, error)
        return True

    def _pause(self, attempt: int, errors: Sequence[LeasekeeperError]) -> float:
        retry = self._config.retry
        pause = retry_delay(retry, attempt, self._seams.fraction())
        asked = max((getattr(error, "retry_after", None) or 0.0 for error in errors), default=0.0)
        return max(pause, min(asked, retry.maximum))

    def _drop_old(self, batch: list[_Report]) -> None:
        now = self._seams.now()
        for report in list(batch):
            # Beats may still confirm the claim: then nobody else can have it, and there is time.
            if now <= max(report.until, report.claim.deadline + self._config.give_up):
                continue
            batch.remove(report)
            job = report.claim.job
            _log.error(
                "job %s, token %d: its settlement was not answered for %.0f s after its claim's deadline;"
                " the job may run again",
                job.job_id,
                job.fencing_token,
                self._config.give_up,
            )
            self._answered([report.claim])
