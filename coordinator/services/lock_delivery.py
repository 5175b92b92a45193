"""Entries of locks that nobody seems to know of: what a session's beats leave out is taken out of the lines.

An answer of AcquireLock may be lost, a caller may die while its process lives, a coordinator may go before it
has cleaned up. Only beats of the session itself decide, and only over a span of its TTL.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.core.lock_order import LockEntry, session_waiter
from coordinator.services.api import Beat, BeatLock
from coordinator.services.digests import request_digest
from coordinator.services.lock_lines import LockLines

__all__ = ["LockDelivery", "waiter_of"]

_log = logging.getLogger(__name__)

_SESSIONS: Final = 20_000
"""Sessions with missed entries that are remembered; those that died without a last beat go first."""


def waiter_of(session_id: str, lock: BeatLock) -> str:
    """The last part of the key of the entry that a beat lists."""
    return session_waiter(session_id, request_digest(lock.request_id))


@dataclass(slots=True)
class _Missed:
    since: float  # monotonic seconds here
    sent_ms: int  # the sender's
    beats: int = 1


class LockDelivery:
    """What beats leave out.

    Args:
        lines: what is known of locks.
        take_away: takes in entries to delete, by their versions; it must not block.
    """

    def __init__(self, lines: LockLines, take_away: Callable[[str, Sequence[LockEntry]], object]) -> None:
        self._lines = lines
        self._take_away = take_away
        self._missed: OrderedDict[tuple[str, str], dict[tuple[str, str, int], _Missed]] = OrderedDict()

    def beaten(self, namespace: str, beat: Beat, *, ttl_ms: int, now: float) -> None:
        """Take in a confirmed beat.

        A span counts only if it has passed on this clock and between the beats' send times. An entry that was
        given to ``take_away`` begins a new span: what could not be deleted is reported again.
        """
        key = (namespace, beat.session_id)
        before = self._missed.pop(key, {})
        held = self._lines.of_session(namespace, beat.session_id)
        if not held:
            return
        listed = {(lock.name, waiter_of(beat.session_id, lock)) for lock in beat.locks}
        missed: dict[tuple[str, str, int], _Missed] = {}
        overdue: list[LockEntry] = []
        for entry in held:
            if entry.job_id or (entry.name, entry.waiter) in listed:
                continue
            # By version: an entry that a repeat of its call has taken over begins anew.
            place = (entry.name, entry.waiter, entry.version)
            one = before.get(place)
            if one is None:
                missed[place] = _Missed(now, beat.sent_ms)
                continue
            one.beats += 1
            if min((now - one.since) * 1000.0, float(beat.sent_ms - one.sent_ms)) < ttl_ms:
                missed[place] = one
            else:
                overdue.append(entry)
        if missed:
            self._missed[key] = missed
            if len(self._missed) > _SESSIONS:
                self._missed.popitem(last=False)
        if overdue:
            _log.warning(
                "locks are taken away: the beats of their session left them out",
                extra={"namespace": namespace, "session": beat.session_id, "locks": len(overdue)},
            )
            self._take_away(namespace, overdue)

    def forget(self, namespace: str, session_id: str) -> None:
        """The session has ended."""
        self._missed.pop((namespace, session_id), None)
