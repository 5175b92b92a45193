"""Judge a presented token against the present of the store, before anything else is done with it.

Three notices of a store that was set back exist (docs/guarantees.md). Two make this process stop granting
and settling; the third is here: a token above the present can only come from a future that the store has
lost.
"""

from __future__ import annotations

from typing import Final

from coordinator.core.fencing import split_token
from coordinator.core.notice import Notice, NoticeKind
from coordinator.errors import Reason, RequestError, StorageError
from coordinator.ports import Clock, Notices, Present
from coordinator.services.storage_errors import refused

__all__ = ["FutureTokens", "check_present", "check_token", "is_foreign"]

_TOLD_EVERY_S: Final = 1.0


def check_present(present: Present) -> None:
    """Refuse to grant or settle while the store is known to have gone back.

    Raises:
        RequestError: EPOCH_REGRESSED.
    """
    if present.regressed:
        raise RequestError(
            Reason.EPOCH_REGRESSED,
            "etcd's history went back (a restore?); nothing is granted or settled until the epoch is bumped",
            metadata={"epoch": str(present.epoch)},
        )


async def check_token(
    present: Present, token: int, subject: str, *, deadline: float, kind: str = "job_id"
) -> RequestError | None:
    """Refuse a token from a lost future; the refusal is for this call alone.

    The present that this process knows may be behind, so a token above it is judged only after asking the
    store.

    Args:
        present: where history stands.
        token: as presented.
        subject: what it is for, told as metadata ``kind``.
        deadline: of asking the store.
        kind: ``job_id``, or ``name`` of a lock.

    Returns:
        EPOCH_REGRESSED, or what the store said instead of its present; None: the token is of the past.
    """
    if token <= present.token():
        return None
    try:
        known = await present.refresh(deadline=deadline)
    except StorageError as error:
        return refused(error, {kind: subject})
    if token <= known:
        return None
    return RequestError(
        Reason.EPOCH_REGRESSED,
        "this token lies in the future of the store; it was set back, or the token belongs to another one",
        metadata={kind: subject, "held": str(token), "present": str(known)},
    )


def is_foreign(present: Present, token: int) -> bool:
    """Whether the token is of another epoch, and so stale everywhere."""
    return split_token(token).epoch != present.epoch


class FutureTokens:
    """Tells of tokens above the store's present, at most once a second: callers make them up at will.

    Args:
        notices: told.
        clock: the second.
    """

    def __init__(self, notices: Notices, clock: Clock) -> None:
        self._notices = notices
        self._clock = clock
        self._told_at = -float("inf")
        self._untold = 0

    def refused(self, namespace: str, job_id: str, token: int, error: RequestError) -> None:
        """``check_token`` answered ``error``; others than EPOCH_REGRESSED are none of this."""
        if error.reason is not Reason.EPOCH_REGRESSED:
            return
        now = self._clock.monotonic()
        if now - self._told_at < _TOLD_EVERY_S:
            self._untold += 1
            return
        self._told_at, untold, self._untold = now, self._untold, 0
        facts = {"present": error.metadata.get("present", "")}
        if untold:
            facts["more_before"] = str(untold)
        self._notices.publish(
            Notice(
                kind=NoticeKind.EPOCH,
                reason="a caller's token lies above the present of the store: was etcd restored?",
                namespace=namespace,
                job_id=job_id,
                token=token,
                facts=facts,
            )
        )
