"""What a reconciler without dispatch knows of a namespace: who holds what, and which sessions are open.

It takes the place of ``services.index`` there. What waits is not watched and not remembered: passes read it.
"""

from __future__ import annotations

from typing import Final

from coordinator.core.job import Claim, JobState
from coordinator.core.rank import Rank
from coordinator.ports import Clock, Commit, JobStore, Operation, Session, SessionStore, Stored
from coordinator.services.holders import Holders

__all__ = ["ClaimWatch"]

_CALL_SECONDS: Final = 5.0


class ClaimWatch:
    """Implements ``ports.Changes`` and ``ports.CommitObserver``.

    Args:
        jobs: the store, for the list of claims.
        sessions: the store of sessions, for their list.
        holders: what is known of claims; it tells losses from settlements.
        clock: deadlines.
    """

    def __init__(self, jobs: JobStore, sessions: SessionStore, holders: Holders, clock: Clock) -> None:
        self._jobs = jobs
        self._sessions = sessions
        self._holders = holders
        self._clock = clock
        self._listed: set[str] = set()
        self._fresh: dict[str, bool] = {}

    def ready(self, namespace: str) -> bool:
        """Whether the namespace is listed and its watch is alive."""
        return namespace in self._listed and self._fresh.get(namespace, False)

    # -- CommitObserver

    def applied(self, operation: Operation, commit: Commit) -> None:
        """Take in an own commit: the echo of a claim that was ended here is not told."""
        before, after = operation.before, commit.stored
        if before is None or before.job.state is not JobState.RUNNING or not operation.token:
            return
        if after is None or after.job.state is not JobState.RUNNING:
            self._holders.ended(before.job.namespace, before.job.job_id, operation.token)

    # -- Changes

    async def relist(self, namespace: str, revision: int) -> None:
        """List claims and sessions."""
        self._listed.discard(namespace)
        claims = await self._jobs.list_claims(namespace, deadline=self._deadline())
        sessions = await self._sessions.list_sessions(namespace, deadline=self._deadline())
        self._holders.reset(namespace, claims, sessions)
        self._listed.add(namespace)

    def ready_put(self, namespace: str, stored: Stored, *, created: bool) -> None:
        """Not watched."""

    def ready_deleted(
        self, namespace: str, queue: str, type_: str, rank: Rank, job_id: str, revision: int
    ) -> None:
        """Not watched."""

    def claim_put(self, namespace: str, job_id: str, claim: Claim, revision: int) -> None:
        """A claim stands."""
        self._holders.claimed(namespace, job_id, claim, None)

    def claim_deleted(self, namespace: str, job_id: str, revision: int) -> None:
        """A claim has ended."""
        self._holders.claim_deleted(namespace, job_id, revision)

    def session_put(self, session: Session, revision: int) -> None:
        """A session is open."""
        self._holders.session_seen(session)

    def session_deleted(self, namespace: str, session_id: str, revision: int) -> None:
        """A session has ended."""
        self._holders.session_deleted(namespace, session_id, revision)

    def cancel_put(self, namespace: str, job_id: str, revision: int) -> None:
        """A running job is asked to stop; its record is not remembered here."""

    def passed(self, namespace: str, kind: str, revision: int) -> None:
        """Nothing waits for it here."""

    def freshness(self, namespace: str, fresh: bool) -> None:
        """Whether the watch is alive."""
        self._fresh[namespace] = fresh

    def _deadline(self) -> float:
        return self._clock.monotonic() + _CALL_SECONDS
