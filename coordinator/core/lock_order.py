"""Who owns a named lock: a pure function of its entries, in the order in which etcd created them.

An entry owns iff every earlier entry has its mode and permits, and fewer than its permits are earlier
(exclusive 1, shared without bound). So a deletion can only add owners: nobody who owns is displaced by it,
readers that come behind a waiting writer wait, and nobody starves. A semaphore's entry behind one of other
permits is a contradiction between callers, and is removed with PERMITS_MISMATCH. Until it is, whoever comes
behind it waits: were the entry that it contradicts to go first, the contradiction would turn round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

__all__ = [
    "MAX_PERMITS",
    "MAX_WAITERS",
    "Line",
    "LockEntry",
    "LockMode",
    "job_waiter",
    "line_of",
    "session_waiter",
]

MAX_WAITERS: Final = 1_000
"""Entries that may wait for one lock; one more is refused."""

MAX_PERMITS: Final = 1_000


class LockMode(IntEnum):
    """How a lock is shared; the numbers are those of ``leasekeeper.v1.LockMode``."""

    EXCLUSIVE = 1
    SHARED = 2
    SEMAPHORE = 3


def session_waiter(session: str, digest: bytes) -> str:
    """Last part of the key of an entry that a call of a session puts. ``digest``: of its request id."""
    return f"{session}-{digest.hex()}"


def job_waiter(job_id: str) -> str:
    """Last part of the key of an entry that the claim of a job puts; no session's begins so."""
    return f"job-{hashlib.sha256(job_id.encode()).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockEntry:
    """One ``lock/`` key. ``waiter`` is its last part: session and request digest, or a job.

    ``permits`` count for SEMAPHORE alone. ``revision``: create revision; 0 before the entry is there.
    ``version``: mod revision; above ``revision`` once a repeat of its call has taken it over, and 0 in a call
    that it does not belong to. ``repeats``: which send of its call it belongs to.
    """

    name: str
    waiter: str
    session: str
    mode: LockMode
    permits: int = 1
    job_id: str = ""
    nonce: bytes = b""
    value: bytes = b""
    since_ms: int = 0
    revision: int = 0
    version: int = 0
    repeats: int = 0

    def standing(self, revision: int, version: int) -> LockEntry:
        """The same entry as it stands in the store."""
        return LockEntry(
            name=self.name,
            waiter=self.waiter,
            session=self.session,
            mode=self.mode,
            permits=self.permits,
            job_id=self.job_id,
            nonce=self.nonce,
            value=self.value,
            since_ms=self.since_ms,
            revision=revision,
            version=version,
            repeats=self.repeats,
        )

    @property
    def places(self) -> int | None:
        """How many may own beside each other; None: any number."""
        if self.mode is LockMode.SHARED:
            return None
        return 1 if self.mode is LockMode.EXCLUSIVE else self.permits


@dataclass(frozen=True, slots=True)
class Line:
    """A lock's entries in order: those that own it, those that wait, and those to be removed."""

    owners: tuple[LockEntry, ...]
    waiters: tuple[LockEntry, ...]
    misfits: tuple[LockEntry, ...]

    def admits(self, entry: LockEntry) -> bool:
        """Whether a new entry, behind all of these, would own at once."""
        if self.waiters or self.misfits:
            return False
        return not self.owners or (_alike(self.owners[0], entry) and _room(entry, len(self.owners)))

    def disagrees(self, entry: LockEntry) -> LockEntry | None:
        """The present entry whose permits a new semaphore entry contradicts."""
        if entry.mode is not LockMode.SEMAPHORE:
            return None
        for present in (*self.owners, *self.waiters):
            if present.mode is LockMode.SEMAPHORE and present.permits != entry.permits:
                return present
        return None


def line_of(entries: Sequence[LockEntry]) -> Line:
    """Sort and judge the entries of one lock.

    Entries of one revision came in one Txn; their names decide among them.
    """
    if len(entries) == 1:
        return Line((entries[0],), (), ())
    owners: list[LockEntry] = []
    waiters: list[LockEntry] = []
    misfits: list[LockEntry] = []
    permits = 0
    for entry in sorted(entries, key=lambda one: (one.revision, one.waiter)):
        if entry.mode is LockMode.SEMAPHORE:
            if permits and entry.permits != permits:
                misfits.append(entry)
                continue
            permits = entry.permits
        if (
            not waiters
            and not misfits
            and (not owners or _alike(owners[0], entry))
            and _room(entry, len(owners))
        ):
            owners.append(entry)
        else:
            waiters.append(entry)
    return Line(tuple(owners), tuple(waiters), tuple(misfits))


def _alike(one: LockEntry, other: LockEntry) -> bool:
    return one.mode is other.mode and one.places == other.places


def _room(entry: LockEntry, earlier: int) -> bool:
    return entry.places is None or earlier < entry.places
