"""Queues in the store: one shared record for each queue that something was set for, or that was paused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.core.queue_settings import UNSET, QueueState

__all__ = ["QueueChanges", "QueueStore", "QueueSwap", "StoredQueue"]


@dataclass(frozen=True, slots=True)
class StoredQueue:
    """A queue and the mod revision of its key; revision 0: there is no key, so all is at its default.

    A record that cannot be decoded counts as the default, and a swap writes over it.
    """

    state: QueueState = UNSET
    revision: int = 0


@dataclass(frozen=True, slots=True)
class QueueSwap:
    """What became of a swap: ``stored`` is what stands now, ours or another's. ``revision``: as of when."""

    won: bool
    stored: StoredQueue
    revision: int


class QueueStore(Protocol):
    """The shared records. Once there, a record stays."""

    async def read(self, namespace: str, queue: str, *, deadline: float) -> StoredQueue:
        """What stands.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """

    async def swap(
        self, namespace: str, queue: str, *, before: StoredQueue, after: QueueState, deadline: float
    ) -> QueueSwap:
        """Put ``after`` if what stands is still ``before``.

        Raises:
            OutcomeUnknown: it may have been put; read again.
            NotApplied, EtcdUnavailable: nothing was written.
        """

    async def list_queues(self, namespace: str, *, deadline: float) -> list[tuple[str, StoredQueue]]:
        """(queue, record) of every record that can be decoded.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """


class QueueChanges(Protocol):
    """What the watch of a namespace saw of its queues."""

    async def relist(self, namespace: str, revision: int) -> None:
        """Start, or start again: list at ``revision`` or later, and expect changes after ``revision``."""

    def queue_changed(self, namespace: str, queue: str, stored: StoredQueue, revision: int) -> None:
        """It was put or deleted at ``revision``, and this stands now."""
