"""Keys beside the jobs' records, one by one: for repair alone, nothing else needs to know of single keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.effects import Slot, Where
from coordinator.core.job import Claim
from coordinator.core.upkeep import KeySeen
from coordinator.ports.values import Stored

__all__ = ["Beside", "KeyWalk", "LockSeen", "LockWalk", "Sight", "Upkeep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A record, and which of its keys exist, at one revision. ``keys`` is by the place that was looked at."""

    stored: Stored
    claim: Claim | None
    keys: Mapping[Where, KeySeen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One key, the record that it belongs to and the claim of that job, all at one revision.

    ``key`` is None if it is gone. ``revision`` is the record's, 0 if there is none; ``stored`` is None then,
    and also where it cannot be decoded, which ``readable`` tells. ``session_open``: of a claim key, whether
    its session has a witness.
    """

    key: KeySeen | None
    stored: Stored | None
    revision: int
    readable: bool
    session_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LockSeen:
    """An entry of a named lock. ``session_open``: it lies on the lease of an open session.

    ``job_id``: the job whose claim put it; then ``claim`` is the create revision of that job's claim as it
    stands now, 0 for none. The entry's own, ``created``, is the same: one Txn makes both.
    """

    name: str
    waiter: str
    modified: int
    lease: int
    session_open: bool
    created: int = 0
    job_id: str = ""
    claim: int | None = None


class KeyWalk(Protocol):
    """All keys of one kind, page by page, each read with a tight end."""

    async def page(self, *, deadline: float) -> Sequence[KeySeen] | None:
        """The next keys, maybe none; None at the end. Keys of no form of ours are set aside and left out.

        Raises:
            EtcdUnavailable: no answer; the same page may be asked for again.
        """


class LockWalk(Protocol):
    """All entries of named locks, as ``KeyWalk``."""

    async def page(self, *, deadline: float) -> Sequence[LockSeen] | None:
        """The next entries, maybe none; None at the end.

        Raises:
            EtcdUnavailable: as of ``KeyWalk.page``.
        """


class Upkeep(Protocol):
    """What repair needs of the store."""

    def walk(self, namespace: str, slot: Slot) -> KeyWalk:
        """Start a walk over READY, DUE, UNIQUE, CANCEL, CHECKPOINT, RESULT, SPEC or CLAIM."""

    async def suspects(self, namespace: str, keys: Sequence[KeySeen], *, deadline: float) -> list[KeySeen]:
        """Those of one page that their records do not seem to want, or may not; the others are sound.

        Record and key were not read at one revision, so ``sight`` decides.
        """

    async def sight(self, namespace: str, where: Where, *, deadline: float) -> Sight:
        """One key and its record, at one revision."""

    async def remove(self, namespace: str, sight: Sight, *, as_leader: bool, deadline: float) -> bool:
        """Delete the key if it, its record and, of a claim, its session are as seen; True if it went by this.

        Raises:
            NotApplied, OutcomeUnknown: see ``JobStore.commit``; ``as_leader``: this process does not lead the
                sweeps any more.
        """

    async def look(self, namespace: str, stored: Sequence[Stored], *, deadline: float) -> list[Beside | None]:
        """What lies beside each record; None where it has changed since."""

    def walk_locks(self, namespace: str) -> LockWalk:
        """Start a walk over the entries of named locks."""

    async def remove_lock(self, namespace: str, lock: LockSeen, *, as_leader: bool, deadline: float) -> bool:
        """Delete an entry that is as seen, and whose lease still is no open session's, or whose job's claim
        is as seen."""
