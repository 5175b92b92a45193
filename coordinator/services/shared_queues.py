"""This coordinator's copy of the queues' records: it follows their watch, and changes them by swaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.core.queue_settings import QueueSettings, QueueState
from coordinator.errors import Reason, RequestError
from coordinator.ports import Clock, QueueStore, StoredQueue

__all__ = ["QueueName", "SharedQueues"]

_ROUNDS: Final = 10
"""Swaps of one change at most; each that loses has learned what another swapped in."""

_ABSENT: Final = StoredQueue()

QueueName = tuple[str, str]
"""(namespace, queue)."""


class SharedQueues:
    """Implements ``ports.QueueChanges``.

    Args:
        store: the shared records.
        clock: deadlines.
        call_timeout: seconds for a list.

    ``paused`` has the queues that are paused: dispatch looks nowhere else. ``resumed`` is called with a queue
    that was paused and is not any more; it must not block.
    """

    def __init__(self, store: QueueStore, clock: Clock, *, call_timeout: float = 2.0) -> None:
        self._store = store
        self._clock = clock
        self._call_timeout = call_timeout
        self.paused: dict[QueueName, QueueState] = {}
        self.resumed: Callable[[QueueName], None] = lambda name: None
        self._known: dict[QueueName, StoredQueue] = {}
        self._seen: dict[QueueName, int] = {}  # the revision as of which a queue is known

    def known(self, name: QueueName) -> StoredQueue:
        """What stands, as far as the watch has come."""
        return self._known.get(name, _ABSENT)

    def settings(self, namespace: str, queue: str) -> QueueSettings | None:
        """What is set for a queue; None: nothing."""
        stored = self._known.get((namespace, queue))
        return stored.state.settings if stored is not None else None

    def names(self, namespace: str) -> set[str]:
        """Queues of a namespace that have a record."""
        return {queue for where, queue in self._known if where == namespace}

    async def read(self, name: QueueName, deadline: float) -> StoredQueue:
        """What stands, as the store says, where the watch may be behind.

        Raises:
            StorageError: it did not answer.
        """
        before = self._seen.get(name, 0)
        stored = await self._store.read(*name, deadline=deadline)
        if self._seen.get(name, 0) == before:
            self._learn(name, stored, max(stored.revision, before))
        return stored

    async def change(
        self, name: QueueName, make: Callable[[StoredQueue], QueueState], deadline: float
    ) -> StoredQueue:
        """Swap in what ``make`` makes of what stands, unless that is the same object; answers what stands
        then.

        Raises:
            StorageError: nothing is known to have changed.
            RequestError: TOO_MANY_REQUESTS, others change it too fast; or what ``make`` raises.
        """
        before = await self.read(name, deadline)
        for _ in range(_ROUNDS):
            after = make(before)
            if after is before.state:
                return before
            swap = await self._store.swap(*name, before=before, after=after, deadline=deadline)
            self._learn(name, swap.stored, swap.revision)
            if swap.won:
                return swap.stored
            before = swap.stored
        raise RequestError(Reason.TOO_MANY_REQUESTS, "others change this queue too fast", retry_after_ms=200)

    async def relist(self, namespace: str, revision: int) -> None:
        """See ``ports.QueueChanges``. The list replaces what was known before it was asked for."""
        before = {name: seen for name, seen in self._seen.items() if name[0] == namespace}
        deadline = self._clock.monotonic() + self._call_timeout
        listed = {
            (namespace, queue): stored
            for queue, stored in await self._store.list_queues(namespace, deadline=deadline)
        }
        for name in {*before, *listed}:
            if self._seen.get(name, 0) == before.get(name, 0):
                stored = listed.get(name, _ABSENT)
                self._seen[name] = 0  # revisions may have gone back with the store
                self._learn(name, stored, max(stored.revision, revision))

    def queue_changed(self, namespace: str, queue: str, stored: StoredQueue, revision: int) -> None:
        """See ``ports.QueueChanges``."""
        self._learn((namespace, queue), stored, revision)

    def _learn(self, name: QueueName, stored: StoredQueue, revision: int) -> None:
        """This stands as of ``revision``; what is older than what is known changes nothing."""
        if revision < self._seen.get(name, 0):
            return
        if stored.revision:
            self._seen[name] = revision
            self._known[name] = stored
        else:
            self._known.pop(name, None)
            if name in self._seen:
                self._seen[name] = revision  # else every name that is asked for would be remembered
        if stored.state.paused:
            self.paused[name] = stored.state
        elif self.paused.pop(name, None) is not None:
            self.resumed(name)
