"""Gives back what was claimed for nobody: a caller went away while its claims were being committed.

Best effort and bounded: what it cannot give back, the session's beats will speak against (``holders``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from coordinator.core.commands import Release
from coordinator.core.job import Claim
from coordinator.core.machine import Decision, decide
from coordinator.errors import LeasekeeperError
from coordinator.ports import Clock, Commit, JobStore, Stored
from coordinator.services.commits import operation_of
from coordinator.services.waiters import Pair
from coordinator.services.window import Entry, Window

__all__ = ["Abandoned"]

_log = logging.getLogger(__name__)

_DIGEST = b"abandoned"


class Abandoned:
    """A queue of claims to give back, and the one task that works it off.

    Args:
        arrived: called with (pair, job id) for a job that was proposed in vain and waits again.
        timeout: seconds that one release may take.
    """

    def __init__(
        self, jobs: JobStore, clock: Clock, *, arrived: Callable[[Pair, str], None], timeout: float = 5.0
    ) -> None:
        self._jobs = jobs
        self._arrived = arrived
        self._clock = clock
        self._timeout = timeout
        self._pending: deque[
            tuple[asyncio.Future[list[Commit | LeasekeeperError]], list[tuple[Window, Entry]]]
        ] = deque()
        self._claims: deque[tuple[Stored, Claim]] = deque()
        self._wake = asyncio.Event()
        self.released = 0

    def later(
        self,
        pending: asyncio.Future[list[Commit | LeasekeeperError]],
        proposed: Sequence[tuple[Window, Entry]],
    ) -> None:
        """Commits under way whose caller is gone."""
        self._pending.append((pending, list(proposed)))
        self._wake.set()

    def release(self, stored: Stored, claim: Claim) -> None:
        """One claim to give back."""
        self._claims.append((stored, claim))
        self._wake.set()

    async def run(self) -> None:
        """Work the queue off, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.run_once()

    async def run_once(self) -> int:
        """Everything that is queued now; answers how many claims were given back."""
        while self._pending:
            pending, proposed = self._pending.popleft()
            for (window, entry), result in zip(proposed, await pending, strict=True):
                if isinstance(result, Commit) and result.won:
                    assert result.stored is not None, "a claim leaves a record"
                    assert result.claim is not None, "a claim leaves a claim"
                    self._claims.append((result.stored, result.claim))
                elif isinstance(result, Commit) and not result.session_gone:
                    window.drop(entry)
                elif window.give_back(entry):
                    job = entry.stored.job
                    self._arrived((job.namespace, job.terms.queue, job.terms.type), job.job_id)
        before = self.released
        waiting = [self._release(*self._claims.popleft()) for _ in range(len(self._claims))]
        await asyncio.gather(*waiting)
        return self.released - before

    async def _release(self, stored: Stored, claim: Claim) -> None:
        outcome = decide(stored.job, claim, Release(token=claim.token, digest=_DIGEST), self._clock.now_ms())
        if not isinstance(outcome, Decision):
            return
        deadline = self._clock.monotonic() + self._timeout
        operation = operation_of(stored, outcome, deadline, token=claim.token)
        try:
            commit = await self._jobs.commit(operation)
        except LeasekeeperError as error:
            _log.warning("an undelivered claim could not be given back yet: %s", error)
            return
        self.released += commit.won
