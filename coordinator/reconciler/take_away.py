"""Takes claims away that their own session's beats speak against: never delivered, or a handler that does
not move.

Only a beat of the session itself leads here, never silence: a silent session ends with its lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator import failpoints
from coordinator.core.commands import TakeAway, Taken
from coordinator.core.machine import Decision, decide
from coordinator.core.notice import NoticeKind
from coordinator.errors import LeasekeeperError
from coordinator.ports import Clock, Entropy, JobStore, Notices, Operation, Snapshot
from coordinator.reconciler.telling import end_of, notice_of
from coordinator.services.commits import commit_each, operation_of
from coordinator.services.holders import Overdue

__all__ = ["TakeAwayCounts", "TakeAwayPass"]

_log = logging.getLogger(__name__)

_BATCH = 60


@dataclass(slots=True)
class TakeAwayCounts:
    """What one pass did."""

    taken: int = 0
    outdated: int = 0
    failed: int = 0


class TakeAwayPass:
    """A queue of overdue claims and the pass that ends them, by token, guarded by what it read.

    Args:
        again: called with those that could not be taken away yet, so that a later beat may report them again.
        notices: told of each claim that was taken, and of each job that it ended.
        timeout: seconds for one batch.
    """

    def __init__(
        self,
        jobs: JobStore,
        clock: Clock,
        entropy: Entropy,
        *,
        again: Callable[[Sequence[Overdue]], None],
        notices: Notices,
        timeout: float = 5.0,
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._entropy = entropy
        self._again = again
        self._notices = notices
        self._timeout = timeout
        self._queue: deque[Overdue] = deque()
        self._wake = asyncio.Event()

    def add(self, overdue: Sequence[Overdue]) -> None:
        """Queue claims to take away."""
        self._queue.extend(overdue)
        self._wake.set()

    async def run(self) -> None:
        """Run a pass whenever something is queued, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.run_once()

    async def run_once(self) -> TakeAwayCounts:
        """One pass over everything that is queued now."""
        counts = TakeAwayCounts()
        left = len(self._queue)
        while left > 0:
            batch = [self._queue.popleft() for _ in range(min(left, _BATCH))]
            left -= len(batch)
            for namespace in {one.namespace for one in batch}:
                await self._take(namespace, [one for one in batch if one.namespace == namespace], counts)
        return counts

    async def _take(self, namespace: str, batch: list[Overdue], counts: TakeAwayCounts) -> None:
        deadline = self._clock.monotonic() + self._timeout
        try:
            found = await self._jobs.read_many(namespace, [one.job_id for one in batch], deadline=deadline)
        except LeasekeeperError as error:
            _log.warning("claims that should be taken away could not be read: %s", error)
            counts.failed += len(batch)
            self._again(batch)
            return
        pending: list[tuple[Overdue, Operation]] = []
        for one, snapshot in zip(batch, found, strict=True):
            operation = self._operation(one, snapshot, deadline)
            if operation is None:
                counts.outdated += 1
            else:
                pending.append((one, operation))
        await failpoints.reached("take-away.before-commit")
        results = await commit_each(self._jobs, [operation for _, operation in pending])
        await failpoints.reached("take-away.after-commit")
        for (one, operation), result in zip(pending, results, strict=True):
            if isinstance(result, LeasekeeperError):
                counts.failed += 1
                self._again([one])
            elif result.won:
                counts.taken += 1
                self._tell(one, operation)
            else:
                counts.outdated += 1
                self._again([one])

    def _tell(self, one: Overdue, operation: Operation) -> None:
        assert operation.before is not None, "only what is there is taken away"
        assert operation.after is not None, "the record stays"
        before, after = operation.before.job, operation.after
        facts = {"why": _why(one).name.lower()}
        taken = notice_of(NoticeKind.TAKEN_AWAY, before, after, one.reason, facts=facts, token=one.token)
        self._notices.publish(taken)
        end = end_of(before, after)
        if end is not None:
            self._notices.publish(end)

    def _operation(self, one: Overdue, found: Snapshot, deadline: float) -> Operation | None:
        if found.stored is None or found.claim is None or found.claim.token != one.token:
            return None
        command = TakeAway(
            token=one.token,
            why=_why(one),
            hold_ms=one.hold_ms,
            reason=one.reason,
            jitter_number=self._entropy.fraction(),
        )
        outcome = decide(found.stored.job, found.claim, command, self._clock.now_ms())
        if not isinstance(outcome, Decision):
            return None
        return operation_of(found.stored, outcome, deadline, token=one.token)


def _why(one: Overdue) -> Taken:
    return Taken.UNDELIVERED if one.undelivered else Taken.TIMED_OUT
