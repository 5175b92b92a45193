"""What every claim needs, by queue and by id: the claim, its operation, and the delivery of what was won."""

from __future__ import annotations

import logging

from coordinator.core.job import Claim
from coordinator.core.machine import Decision
from coordinator.errors import LeasekeeperError, Reason, RequestError, StorageError
from coordinator.ports import Clock, Commit, JobStore, Operation, SessionStore, Snapshot, Spec, Stored
from coordinator.services.abandoned import Abandoned
from coordinator.services.api import ClaimedJob
from coordinator.services.commits import operation_of
from coordinator.services.redelivery import Redelivery
from coordinator.services.storage_errors import refused

__all__ = ["Delivery", "claim_operation", "require_session", "session_full", "session_not_found"]

_log = logging.getLogger(__name__)


class Delivery:
    """Hands over what a commit has won, and gives back what cannot be handed over.

    Args:
        jobs: where jobs are.
        redelivery: claims of earlier calls of the same request.
        abandoned: takes what is to be given back.
        clock: deadlines.
        timeout: seconds that a read may take.
    """

    def __init__(
        self, jobs: JobStore, redelivery: Redelivery, abandoned: Abandoned, clock: Clock, *, timeout: float
    ) -> None:
        self._jobs = jobs
        self._redelivery = redelivery
        self._abandoned = abandoned
        self._clock = clock
        self._timeout = timeout

    async def deliver(
        self, namespace: str, stored: Stored | None, claim: Claim | None, spec: Spec | None, commit: Commit
    ) -> ClaimedJob | None:
        """The claimed job, None if it goes back."""
        assert stored is not None, "a claim leaves a record"
        assert claim is not None, "a claim leaves a claim"
        if spec is not None and not commit.resent:
            return ClaimedJob(stored=stored, claim=claim, spec=spec, checkpoint=commit.checkpoint)
        kept: list[ClaimedJob] = []
        try:
            deadline = self._clock.monotonic() + self._timeout
            found = await self._jobs.read(
                namespace, stored.job.job_id, deadline=deadline, spec=True, checkpoint=True
            )
            if found.claim is not None and found.claim.token == claim.token:
                # Not won by this very call: another call of the same request may be gone, and its claim
                # on its way back.
                kept = [_delivered(found)] if commit.won else await self._redelivery.keep([found], deadline)
        except LeasekeeperError as error:
            _log.warning(
                "a claimed job could not be read and goes back: %s", error, extra={"job": stored.job.job_id}
            )
        if kept:
            return kept[0]
        self._abandoned.release(stored, claim)
        return None


def claim_operation(
    stored: Stored,
    decision: Decision,
    claim: Claim,
    commit_by: float,
    *,
    want_spec: bool,
    lock_revisions: tuple[int, ...] = (),
) -> Operation:
    """The operation that makes the claim. See ``ports.Operation``."""
    return operation_of(
        stored,
        decision,
        commit_by,
        claim=claim,
        want_spec=want_spec,
        want_checkpoint=stored.job.attempt > 0,
        lock_revisions=lock_revisions,
    )


def session_full(limit: int) -> RequestError:
    """SESSION_FULL."""
    return RequestError(
        Reason.SESSION_FULL,
        f"the session holds {limit} keys already; open another",
        metadata={"limit": str(limit)},
    )


async def require_session(sessions: SessionStore, namespace: str, session_id: str, deadline: float) -> None:
    """Return if the session is open, as the store says.

    Raises:
        RequestError: SESSION_NOT_FOUND; ETCD_UNAVAILABLE.
    """
    try:
        session = await sessions.read(namespace, session_id, deadline=deadline)
    except StorageError as error:
        raise refused(error) from error
    if session is None:
        raise session_not_found(session_id)


def session_not_found(session_id: str) -> RequestError:
    """SESSION_NOT_FOUND."""
    return RequestError(
        Reason.SESSION_NOT_FOUND, "the session has ended, or never was", metadata={"session_id": session_id}
    )


def _delivered(found: Snapshot) -> ClaimedJob:
    if found.stored is None or found.claim is None or found.spec is None:
        raise RequestError(Reason.INTERNAL, "a claimed job has no record or no spec")
    return ClaimedJob(stored=found.stored, claim=found.claim, spec=found.spec, checkpoint=found.checkpoint)
