"""Takes the claim of a job away whose lock an operator revokes: its locks and its claim are one hold."""

from __future__ import annotations

from typing import Final

from coordinator.core.commands import TakeAway, Taken
from coordinator.core.machine import Decision, decide
from coordinator.errors import LeasekeeperError, Reason, RequestError, StorageError
from coordinator.ports import Clock, JobStore, SessionStore
from coordinator.services.commits import commit_each, operation_of
from coordinator.services.storage_errors import refused

__all__ = ["ClaimRevocation"]

_ROUNDS: Final = 10
"""Tries against others who change the record meanwhile; each means that somebody else came through."""


class ClaimRevocation:
    """Ends claims by hand.

    Args:
        jobs: where jobs are.
        sessions: for the TTL that the job waits, so that its holder hears of it first.
        clock: time.
    """

    def __init__(self, jobs: JobStore, sessions: SessionStore, clock: Clock) -> None:
        self._jobs = jobs
        self._sessions = sessions
        self._clock = clock

    async def take(self, namespace: str, job_id: str, token: int, *, reason: str, deadline: float) -> bool:
        """Take the claim away, uncharged, and its locks with it. False: the job has no claim of this token.

        Raises:
            RequestError: ETCD_UNAVAILABLE, OUTCOME_UNKNOWN, TOO_MANY_REQUESTS.
        """
        try:
            for _ in range(_ROUNDS):
                found = await self._jobs.read(namespace, job_id, deadline=deadline)
                stored, claim = found.stored, found.claim
                if stored is None or claim is None or claim.token != token:
                    return False
                session = await self._sessions.read(namespace, claim.session, deadline=deadline)
                command = TakeAway(
                    token=token,
                    why=Taken.UNDELIVERED,
                    hold_ms=session.ttl_ms if session is not None else 1,
                    reason=reason,
                )
                outcome = decide(stored.job, claim, command, self._clock.now_ms())
                if not isinstance(outcome, Decision):
                    return False
                operation = operation_of(stored, outcome, deadline, token=token)
                [result] = await commit_each(self._jobs, [operation])
                if isinstance(result, LeasekeeperError):
                    raise refused(result)
                if result.won:
                    return True
                if result.resent and (result.claim is None or result.claim.token != token):
                    return True  # gone by an earlier send of this one, or by another end
        except StorageError as error:
            raise refused(error) from error
        raise RequestError(Reason.TOO_MANY_REQUESTS, "the job changes too fast", retry_after_ms=100)
