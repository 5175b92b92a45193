"""What callers are told who do not get a lock, or have lost it."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.core.lock_order import MAX_WAITERS, Line, LockEntry, LockMode
from coordinator.errors import Reason, RequestError
from coordinator.services.contention import Throttled

__all__ = ["draining", "line_full", "lock_held", "lock_lost", "permits_mismatch", "taken_out", "throttled"]


def lock_held(name: str, line: Line, token: Callable[[LockEntry], int]) -> RequestError:
    """LOCK_HELD: by whom, and with which token."""
    first = next(iter((*line.owners, *line.waiters, *line.misfits)), None)
    return RequestError(
        Reason.LOCK_HELD,
        "the lock is held",
        metadata={
            "name": name,
            "holder": first.session if first is not None else "",
            "token": str(token(first)) if first is not None else "0",
        },
    )


def lock_lost(name: str, held: int, current: int, message: str) -> RequestError:
    """LOCK_LOST. ``current``: the largest token that owns the lock now, 0 for none."""
    return RequestError(
        Reason.LOCK_LOST, message, metadata={"name": name, "held": str(held), "current": str(current)}
    )


def permits_mismatch(asked: LockEntry, present: LockEntry | None) -> RequestError:
    """PERMITS_MISMATCH: both sizes; 0 where the other entry has gone meanwhile."""
    current = present.permits if present is not None and present.mode is LockMode.SEMAPHORE else 0
    return RequestError(
        Reason.PERMITS_MISMATCH,
        f"this semaphore is used with {current} permits, not {asked.permits}",
        metadata={"name": asked.name, "asked": str(asked.permits), "current": str(current)},
    )


def line_full(name: str) -> RequestError:
    """TOO_MANY_REQUESTS: nobody else may wait."""
    return RequestError(
        Reason.TOO_MANY_REQUESTS,
        f"{MAX_WAITERS} wait for this lock already",
        metadata={"name": name},
        retry_after_ms=1_000,
    )


def throttled(name: str, why: Throttled) -> RequestError:
    """RELOCK_THROTTLED: the store was not asked."""
    if why.own:
        message = "this session was told to come later; nothing was looked at"
    else:
        message = "too many tries for this lock have failed of late; nothing was looked at"
    return RequestError(
        Reason.RELOCK_THROTTLED,
        message,
        metadata={"name": name, "limit_of": "session" if why.own else "lock"},
        retry_after_ms=why.delay_ms,
    )


def taken_out() -> RequestError:
    """OUTCOME_UNKNOWN: the entry has gone that another send of the same call had put or taken over."""
    return RequestError(
        Reason.OUTCOME_UNKNOWN,
        "another send of this call has given up, or has had the lock; repeat it with a higher `repeats`",
        retry_after_ms=100,
    )


def draining() -> RequestError:
    """DRAINING: a repeat at another coordinator keeps its place in the line."""
    return RequestError(
        Reason.DRAINING,
        "this coordinator is stopping; repeat at another, with the same request_id",
        retry_after_ms=100,
    )
