"""Sessions in the store as operators see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.job import Claim
from coordinator.core.lock_order import LockEntry
from coordinator.ports.sessions import Session

__all__ = ["HeldBySession", "SessionAdminStore", "StoredSession"]


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session and the mod revision of its witness."""

    session: Session
    version: int


@dataclass(frozen=True, slots=True)
class HeldBySession:
    """What lies on a session's lease: claims with their jobs' ids, and entries of locks with their tokens,
    waiting ones too."""

    claims: Sequence[tuple[str, Claim]] = ()
    locks: Sequence[tuple[LockEntry, int]] = ()


class SessionAdminStore(Protocol):
    """Looks at sessions, and asks something of their workers."""

    async def read(self, namespace: str, session_id: str, *, deadline: float) -> StoredSession | None:
        """The session, None if it has ended.

        Raises:
            CodecError: its record is none.
            EtcdUnavailable: no answer by the deadline.
        """

    async def held(self, namespace: str, session_id: str, *, deadline: float) -> HeldBySession:
        """What it holds, read in pieces: no snapshot.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """

    async def swap(
        self, before: StoredSession, after: Session, *, deadline: float
    ) -> tuple[bool, StoredSession | None]:
        """Put ``after`` on the lease that the session has, if what stands is still ``before``.

        Returns:
            Whether it was put; and what stands now, None if the session has ended.

        Raises:
            CodecError: what stands is no session's record.
            OutcomeUnknown: it may have been put; read again.
            NotApplied, EtcdUnavailable: nothing was written.
        """
