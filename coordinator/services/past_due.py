"""Finds waiting jobs that miss their due time, among those at hand, and tells of each once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.due_time import is_past_due
from coordinator.core.notice import Notice, NoticeKind
from coordinator.ports import Clock, Notices
from coordinator.services.waiters import Pair
from coordinator.services.window import Entry

__all__ = ["Line", "PastDue", "PastDueConfig"]


class Line(Protocol):
    """The first waiting jobs of a type, in rank order."""

    def peek(self, limit: int) -> Sequence[Entry]:
        """The first ``limit`` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastDueConfig:
    """``interval``: seconds between looks. ``looked_at``: jobs of one line that a look goes through at most;
    ``budget``: of all lines, some milliseconds' worth; the next look goes on with the next line.
    ``remembered``: jobs that are not told of again."""

    interval: float = 1.0
    looked_at: int = 2_000
    budget: int = 10_000
    remembered: int = 20_000


class PastDue:
    """A rank is never later than a due time that has passed, so late jobs stand at the head of their line.

    Args:
        lines: by (namespace, queue, type).
        is_ours: whether this coordinator is the one to tell of a job: each has its own.
        notices: told of each job once, and again if its due time was changed.
        clock: time.
        config: times and bounds.
    """

    def __init__(
        self,
        lines: Callable[[], Mapping[Pair, Line]],
        is_ours: Callable[[str], bool],
        notices: Notices,
        clock: Clock,
        config: PastDueConfig | None = None,
    ) -> None:
        self._lines = lines
        self._is_ours = is_ours
        self._notices = notices
        self._clock = clock
        self._config = config or PastDueConfig()
        self._told: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._late: dict[Pair, int] = {}
        self._next = 0  # the place of the line at which the next look begins

    @property
    def waiting(self) -> int:
        """Late jobs that were seen waiting, whosever they are to tell of."""
        return sum(self._late.values())

    def look_once(self) -> int:
        """Go through the heads of lines, as far as the budget goes; answers how many jobs were told of."""
        now_ms, budget = self._clock.now_ms(), self._config.budget
        lines = list(self._lines().items())
        told = 0
        for _ in range(len(lines)):
            self._next %= len(lines)
            pair, line = lines[self._next]
            self._next += 1
            late = 0
            for entry in line.peek(self._config.looked_at):
                job = entry.stored.job
                if job.rank.ms > now_ms:
                    break
                budget -= 1
                if is_past_due(job, now_ms):
                    late += 1
                    told += self._tell(pair, entry, now_ms)
            self._late[pair] = late
            if budget <= 0:
                break
        return told

    def _tell(self, pair: Pair, entry: Entry, now_ms: int) -> int:
        job = entry.stored.job
        key = (pair[0], job.job_id, job.terms.due_ms)
        if key in self._told or not self._is_ours(job.job_id):
            return 0
        self._told[key] = None
        if len(self._told) > self._config.remembered:
            self._told.popitem(last=False)
        namespace, queue, type_ = pair
        late_ms = now_ms - job.terms.due_ms
        self._notices.publish(
            Notice(
                kind=NoticeKind.PAST_DUE,
                reason=f"it waits, and should have begun {late_ms} ms ago",
                namespace=namespace,
                queue=queue,
                type=type_,
                job_id=job.job_id,
                state_before=job.state,
                state_after=job.state,
                facts={"due_ms": str(job.terms.due_ms), "late_ms": str(late_ms)},
            )
        )
        return 1

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look_once()
            await self._clock.sleep(self._config.interval)
