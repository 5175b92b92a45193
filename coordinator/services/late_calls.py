"""Notices runs that went on after their claim was lost: by their settlements, checkpoints and heartbeats.

The call itself is refused before, by its token; here is only told that it came. What to tell stands in the
job's record, which is read a little later and in batches, so that no call waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.core.job import JobState
from coordinator.core.late_call import LateCall, late_call
from coordinator.core.notice import Notice, NoticeKind
from coordinator.errors import StorageError
from coordinator.ports import Clock, JobStore, Meters, Notices, Snapshot

__all__ = ["CHECKPOINT", "HEARTBEAT", "SETTLEMENT", "LateCalls", "LateCallsConfig"]

_logger = logging.getLogger(__name__)

SETTLEMENT: Final = "settlement"
CHECKPOINT: Final = "checkpoint"
HEARTBEAT: Final = "heartbeat"


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCallsConfig:
    """``remembered``: (token, call) pairs that are not told again. ``timeout_s``: seconds for one batch.

    ``pause_s``: seconds after a batch that could not be read, which is then dropped: notices are hints.
    """

    max_queued: int = 10_000
    batch: int = 100
    remembered: int = 10_000
    timeout_s: float = 5.0
    pause_s: float = 1.0


@dataclass(frozen=True, slots=True)
class _Sight:
    namespace: str
    job_id: str
    token: int
    call: str
    at_ms: int


class LateCalls:
    """A queue of refused calls, and the task that looks up what they were.

    Args:
        jobs: where records are.
        notices: told of each late run, once for each token and kind of call.
        meters: counts every refused call.
        clock: when calls came.
        config: bounds.
    """

    def __init__(
        self,
        jobs: JobStore,
        notices: Notices,
        meters: Meters,
        clock: Clock,
        config: LateCallsConfig | None = None,
    ) -> None:
        self._jobs = jobs
        self._notices = notices
        self._meters = meters
        self._clock = clock
        self._config = config or LateCallsConfig()
        self._queue: deque[_Sight] = deque()
        self._seen: OrderedDict[tuple[str, str, int, str], None] = OrderedDict()
        self._wake = asyncio.Event()
        self.dropped = 0

    @property
    def queued(self) -> int:
        """Calls not yet looked up."""
        return len(self._queue)

    def add(self, namespace: str, job_id: str, token: int, call: str) -> None:
        """A call with a token that stands for no claim (any more) was refused. Never blocks.

        Args:
            call: SETTLEMENT, CHECKPOINT or HEARTBEAT.
        """
        self._meters.late_call(call)
        key = (namespace, job_id, token, call)
        if key in self._seen:
            self._seen.move_to_end(key)
            return
        if len(self._queue) >= self._config.max_queued:
            self.dropped += 1
            return
        self._seen[key] = None
        if len(self._seen) > self._config.remembered:
            self._seen.popitem(last=False)
        self._queue.append(_Sight(namespace, job_id, token, call, self._clock.now_ms()))
        self._wake.set()

    async def run(self) -> None:
        """Look up what comes, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                try:
                    await self.run_once()
                except StorageError as error:
                    _logger.debug("late calls could not be looked up: %s", error)
                    await self._clock.sleep(self._config.pause_s)
                except Exception:
                    _logger.exception("late calls could not be looked up")
                    await self._clock.sleep(self._config.pause_s)

    async def run_once(self) -> int:
        """Look up one batch, of one namespace; answers how many late runs it told of.

        Raises:
            StorageError: records could not be read; the batch is dropped and counted.
        """
        if not self._queue:
            return 0
        namespace = self._queue[0].namespace
        batch: list[_Sight] = []
        while self._queue and self._queue[0].namespace == namespace and len(batch) < self._config.batch:
            batch.append(self._queue.popleft())
        deadline = self._clock.monotonic() + self._config.timeout_s
        try:
            job_ids = list(dict.fromkeys(sight.job_id for sight in batch))
            found = await self._jobs.read_many(namespace, job_ids, deadline=deadline)
        except StorageError:
            self.dropped += len(batch)
            raise
        return self._tell(batch, dict(zip(job_ids, found, strict=True)))

    def _tell(self, batch: Sequence[_Sight], found: dict[str, Snapshot]) -> int:
        told = 0
        for sight in batch:
            snapshot = found[sight.job_id]
            if snapshot.stored is None:
                continue
            late = late_call(snapshot.stored.job, snapshot.claim, sight.token, sight.at_ms)
            if late is not None:
                told += 1
                self._notices.publish(_notice(sight, snapshot, late))
        return told


def _notice(sight: _Sight, snapshot: Snapshot, late: LateCall) -> Notice:
    assert snapshot.stored is not None, "only records make late calls"
    job = snapshot.stored.job
    attempt, newer = late.attempt, late.newer
    recovered = job.state is not JobState.RUNNING or newer is not None
    ended = f"had ended as {attempt.outcome.name}" if recovered else "had lost its claim"
    beside = f", while attempt {newer.number} had begun" if newer is not None else ""
    facts = {"call": sight.call, "ended_as": attempt.outcome.name if recovered else "LOST"}
    if newer is not None:
        facts |= {"newer_attempt": str(newer.number), "newer_session": newer.session}
    return Notice(
        kind=NoticeKind.DUPLICATE_RUN,
        reason=f"a {sight.call} came of attempt {attempt.number}, which {ended}{beside}",
        namespace=job.namespace,
        queue=job.terms.queue,
        type=job.terms.type,
        job_id=job.job_id,
        session_id=attempt.session,
        attempt=attempt.number,
        token=sight.token,
        state_before=job.state,
        state_after=job.state,
        overlap_ms=late.overlap_ms,
        facts=facts,
    )
