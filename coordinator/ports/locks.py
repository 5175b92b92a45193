"""Named locks in the store: entries on session leases. ``core.lock_order`` says who owns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.lock_order import LockEntry
from coordinator.errors import LeasekeeperError

__all__ = ["LockChanges", "LockCommit", "LockDeletion", "LockStore", "LocksRead"]


@dataclass(frozen=True, slots=True)
class LocksRead:
    """The entries of some locks, by name, in no particular order, as of ``revision``.

    An entry that cannot be decoded stands as an exclusive one of no session: it blocks, and never lets a
    second owner in.
    """

    revision: int
    entries: Mapping[str, tuple[LockEntry, ...]]


@dataclass(frozen=True, slots=True)
class LockCommit:
    """What became of new entries. Won: all stand, created at ``revision``. Else none was put by this try: the
    session has gone, or an entry stands in the way, perhaps one of an earlier try of the same call."""

    won: bool
    revision: int
    session_gone: bool = False


@dataclass(frozen=True, slots=True)
class LockDeletion:
    """What became of a deletion. Not ``deleted``: no such entry stood; with ``resent`` an earlier send of the
    same deletion may be why. ``session_open``: as of then, where it was not deleted."""

    deleted: bool
    revision: int
    session_open: bool = True
    resent: bool = False


class LockStore(Protocol):
    """The entries of named locks. Revisions are etcd's own."""

    async def acquire(
        self,
        namespace: str,
        asked: Sequence[LockEntry],
        *,
        after: int | None,
        deadline: float,
        orphaned: Callable[[Awaitable[LockCommit]], None] = lambda pending: None,
    ) -> LockCommit:
        """Put entries for one session, all or none, while that session is open.

        Args:
            namespace: where.
            asked: one entry for each name, all of one session and waiter; their revisions are 0.
            after: nothing may have been added to any of the locks after this revision (0: they have no
                entry); None: the entries may wait, whatever stands there.
            deadline: of the whole.
            orphaned: if the caller is cancelled, it is given what the commit comes to, which goes on.

        Raises:
            OutcomeUnknown: they may stand; a repeat under the same waiter finds them.
            NotApplied, EtcdUnavailable: nothing was put.
        """

    async def adopt(self, namespace: str, found: Sequence[LockEntry], *, deadline: float) -> int:
        """Take over the entries of an earlier try: put again, so that its clean-up leaves them alone.

        Returns:
            Their new version; 0: one of them has changed or gone, and nothing was put.

        Raises:
            OutcomeUnknown, NotApplied, EtcdUnavailable: as of ``acquire``.
        """

    async def delete(
        self, namespace: str, entries: Sequence[LockEntry], *, untouched: bool = False, deadline: float
    ) -> list[LockDeletion | LeasekeeperError]:
        """Delete each entry by its create revision; ``untouched``: by its version, so not if it was adopted.

        Each stands for itself, results in their order.
        """

    async def read(self, namespace: str, names: Sequence[str], *, deadline: float) -> LocksRead:
        """The locks of these names, all of one revision if there are at most 64.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """

    async def of_session(self, namespace: str, session_id: str, *, deadline: float) -> list[LockEntry]:
        """Entries on the session's lease: owned and waiting, its own and its claims'.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """

    async def list_entries(self, namespace: str, *, deadline: float) -> tuple[int, list[LockEntry]]:
        """Every entry, and the revision that they are of.

        Raises:
            EtcdUnavailable: no answer by the deadline.
            Compacted: history was compacted meanwhile; begin again.
        """


class LockChanges(Protocol):
    """What the watch of a namespace saw of its locks, in the order of revisions."""

    async def relist(self, namespace: str, revision: int) -> None:
        """Start, or start again: list at ``revision`` or later, and expect changes after ``revision``."""

    def own_put(self, namespace: str, name: str, waiter: str, revision: int) -> LockEntry | None:
        """The entry that a put at ``revision`` has made, if it is this process's own and known already: the
        watch then need not decode its echo."""

    def lock_put(self, namespace: str, entry: LockEntry) -> None:
        """An entry was made, or adopted."""

    def lock_deleted(self, namespace: str, name: str, waiter: str, revision: int) -> None:
        """An entry has gone: given back, or with its session, or by hand."""

    def locks_passed(self, namespace: str, revision: int) -> None:
        """Everything up to ``revision`` has been told."""
