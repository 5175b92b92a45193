"""The claim that a session would hold, and how many it may."""

from __future__ import annotations

from typing import Final

from coordinator.core.job import Claim, Job
from worker_sdk.testing._refusals import Refused
from worker_sdk.testing._world import Session

__all__ = ["claim_for", "room_of"]

_SESSION_KEYS: Final = 500


def room_of(session: Session) -> int:
    """How many more claims the session may have.

    Raises:
        Refused: SESSION_FULL, none.
    """
    room = _SESSION_KEYS - len(session.claims)
    if room <= 0:
        raise Refused(
            "SESSION_FULL",
            f"the session holds {_SESSION_KEYS} keys already; open another",
            metadata={"limit": str(_SESSION_KEYS)},
        )
    return room


def claim_for(job: Job, session_id: str, nonce: bytes, now_ms: int) -> Claim:
    """The claim as the session would hold it from *now_ms* on."""
    terms, run = job.terms, job.terms.run_timeout_ms
    if terms.total_timeout_ms:
        left = max(1, job.total_end_ms - now_ms)
        run = min(run, left) if run else left
    return Claim(
        session=session_id,
        attempt=job.attempt + 1,
        nonce=nonce,
        start_ms=now_ms,
        queue=terms.queue,
        type=terms.type,
        run_timeout_ms=run,
        heartbeat_timeout_ms=terms.heartbeat_timeout_ms,
    )
