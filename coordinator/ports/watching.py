"""What the watches tell, and who is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coordinator.core.job import Claim
from coordinator.core.rank import Rank
from coordinator.ports.sessions import Session
from coordinator.ports.values import Stored

__all__ = [
    "Changes",
    "NamespaceFeeds",
    "Present",
]


class Changes(Protocol):
    """What the watch of a namespace saw, decoded, in the order of revisions per kind of key. All calls are
    synchronous.

    Own commits are reported here too; ``CommitObserver`` and this meet in the index, which drops what it
    knows.
    """

    async def relist(self, namespace: str, revision: int) -> None:
        """Start, or start again: forget, list at ``revision`` or later, and expect changes after
        ``revision``."""

    def ready_put(self, namespace: str, stored: Stored, *, created: bool) -> None:
        """A job waits; ``created``: the key was not there before."""

    def ready_deleted(
        self, namespace: str, queue: str, type_: str, rank: Rank, job_id: str, revision: int
    ) -> None:
        """It waits no more."""

    def claim_put(self, namespace: str, job_id: str, claim: Claim, revision: int) -> None:
        """A claim was made (or, by hand, overwritten)."""

    def claim_deleted(self, namespace: str, job_id: str, revision: int) -> None:
        """A claim has ended: settled, lost, or deleted by hand."""

    def session_put(self, session: Session, revision: int) -> None:
        """A session opened or changed."""

    def session_deleted(self, namespace: str, session_id: str, revision: int) -> None:
        """A session has ended."""

    def cancel_put(self, namespace: str, job_id: str, revision: int) -> None:
        """A running job is asked to stop."""

    def passed(self, namespace: str, kind: str, revision: int) -> None:
        """The watch of ``kind`` (ready, claim, session, cancel) has delivered everything up to
        ``revision``."""

    def freshness(self, namespace: str, fresh: bool) -> None:
        """Whether the watch is known to be alive."""


class NamespaceFeeds(Protocol):
    """Watches of namespaces; one set per namespace, whatever the number of callers."""

    async def ensure(self, namespace: str, *, deadline: float) -> None:
        """Make sure that the namespace is registered, listed and watched.

        Raises:
            RequestError: NOT_READY (listing is not done by the deadline), RATE_LIMITED (too many namespaces).
        """

    def namespaces(self) -> Sequence[str]:
        """Those that are watched."""


class Present(Protocol):
    """Where the store's history stands, as far as this process knows."""

    @property
    def epoch(self) -> int:
        """The epoch that every Txn compares."""

    def token(self) -> int:
        """Highest position seen, on the token scale."""

    async def refresh(self, *, deadline: float) -> int:
        """Ask the store, then as ``token``."""

    @property
    def regressed(self) -> bool:
        """The store was seen to go back: nothing is granted or settled until the epoch is bumped."""
