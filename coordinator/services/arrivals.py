"""Who is woken when a job begins to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from coordinator.services.job_lines import JobLines
from coordinator.services.waiters import Pair, Waiters

__all__ = ["Arrivals"]


class Arrivals:
    """Wakes the first waiter for a job that this coordinator prefers at once, for another's job a little
    later.

    With several coordinators each job has a preferred one, so that they rarely propose the same job at the
    same moment. The preference only saves failed compares: after ``steal_delay`` anybody may take it.

    Args:
        waiters: who waits for a type.
        lines: who waits for one job by its id.
        members: the ids of the coordinators that are alive.
        preferred: (job id, members) → the preferred member.
        steal_delay: seconds.
    """

    def __init__(
        self,
        waiters: Waiters,
        lines: JobLines,
        *,
        own_id: str,
        members: Callable[[], Sequence[str]],
        preferred: Callable[[str, Sequence[str]], str],
        steal_delay: float = 0.01,
    ) -> None:
        self._waiters = waiters
        self._lines = lines
        self._own_id = own_id
        self._members = members
        self._preferred = preferred
        self.steal_delay = steal_delay

    def is_ours(self, job_id: str) -> bool:
        """Whether this coordinator is the preferred one."""
        members = self._members()
        return len(members) < 2 or self._preferred(job_id, members) == self._own_id

    @property
    def alone(self) -> bool:
        """Whether there is no other coordinator."""
        return len(self._members()) < 2

    def arrived(self, pair: Pair, job_id: str) -> None:
        """A job waits in the window of ``pair``."""
        waiters, lines = self._waiters, self._lines
        if lines and lines.has(pair[0], job_id):
            if self.is_ours(job_id):
                lines.arrived(pair[0], job_id)
            else:
                asyncio.get_running_loop().call_later(self.steal_delay, lines.arrived, pair[0], job_id)
        if not waiters.waiting_for(pair):
            return
        if self.is_ours(job_id):
            waiters.wake_one(pair)
        else:
            asyncio.get_running_loop().call_later(self.steal_delay, waiters.wake_one, pair)

    def look_again(self, pair: Pair) -> None:
        """A caller is about to wait although jobs lie in the window of ``pair``: others', too new to take.

        They arrived before it did, so no arrival wakes it any more.
        """
        asyncio.get_running_loop().call_later(self.steal_delay, self._waiters.wake_one, pair)
