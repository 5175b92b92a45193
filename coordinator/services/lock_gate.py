"""What dispatch asks of the locks that jobs name, and the answer where there are none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from coordinator.core.job import Job
from coordinator.errors import RequestError
from coordinator.ports import Commit
from coordinator.services.waiters import Pair
from coordinator.services.window import Entry, Window

__all__ = ["NO_LOCKS", "LockGate"]


class LockGate(Protocol):
    """What dispatch and claims by id ask. Only jobs that name locks are asked about, but by ``ready``."""

    def ready(self, pair: Pair, window: Window, count: int) -> list[Entry]:
        """The first ``count`` jobs of the window that no lock keeps from being claimed; the others before
        them are parked."""

    def admits(self, pair: Pair, window: Window, entry: Entry) -> bool:
        """Whether no lock keeps a job from being claimed beside those proposed since; else it is parked."""

    def refusal(self, job: Job) -> RequestError | None:
        """LOCK_HELD or PERMITS_MISMATCH, if a lock keeps a job from being claimed."""

    def revisions(self, job: Job) -> tuple[int, ...]:
        """Of each lock of a job, up to where every entry that stands is known."""

    def begin(self, job: Job) -> None:
        """A claim of it is proposed; whoever says so says ``landed`` too."""

    def landed(self, jobs: Iterable[Job]) -> None:
        """These are under way no more."""

    def met(self, namespace: str, commit: Commit) -> None:
        """A claim lost: take in what it read of the locks."""

    async def look(self, job: Job, deadline: float) -> None:
        """Ask the store how the locks of a job stand.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """

    def wanted(self, namespace: str, job_id: str, lock: str) -> None:
        """Somebody waits for this very job, which waits for this lock."""


class _NoLocks:
    """No job names a lock: implements ``LockGate``."""

    def ready(self, pair: Pair, window: Window, count: int) -> list[Entry]:
        return window.peek(count)

    def admits(self, pair: Pair, window: Window, entry: Entry) -> bool:
        return True

    def refusal(self, job: Job) -> RequestError | None:
        return None

    def revisions(self, job: Job) -> tuple[int, ...]:
        return ()

    def begin(self, job: Job) -> None:
        """Nothing to count."""

    def landed(self, jobs: Iterable[Job]) -> None:
        """Nothing was counted."""

    def met(self, namespace: str, commit: Commit) -> None:
        """There is nothing to learn."""

    async def look(self, job: Job, deadline: float) -> None:
        """There is nothing to ask."""

    def wanted(self, namespace: str, job_id: str, lock: str) -> None:
        """It waits for none."""


NO_LOCKS: Final = _NoLocks()
"""Where no job names a lock."""
