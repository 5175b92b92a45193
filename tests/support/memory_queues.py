"""Records of queues in memory, on the revisions of a ``MemoryEtcd``, and those that watch them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.core.queue_settings import QueueState
from coordinator.errors import LeasekeeperError
from coordinator.ports import QueueChanges, QueueSwap, StoredQueue
from tests.support.memory_etcd import MemoryEtcd

__all__ = ["MemoryQueues"]

ABSENT = StoredQueue()


class MemoryQueues:
    """``ports.QueueStore`` for any number of coordinators.

    ``failures`` are raised by the next calls, one each. ``before_swap`` runs once, before the next swap:
    another coordinator that is faster.
    """

    def __init__(self, etcd: MemoryEtcd) -> None:
        self._etcd = etcd
        self.stored: dict[tuple[str, str], StoredQueue] = {}
        self.watchers: list[QueueChanges] = []
        self.failures: list[LeasekeeperError] = []
        self.before_swap: Callable[[], object] | None = None
        self.swaps = 0

    def put(self, name: tuple[str, str], state: QueueState | None) -> StoredQueue:
        """What another coordinator, or a hand, does; None deletes."""
        self._etcd.revision += 1
        revision = self._etcd.revision
        stored = StoredQueue(state, revision) if state is not None else ABSENT
        self.stored[name] = stored
        for watcher in self.watchers:
            watcher.queue_changed(*name, stored, revision)
        return stored

    async def read(self, namespace: str, queue: str, *, deadline: float) -> StoredQueue:
        """What stands."""
        self._fail()
        return self.stored.get((namespace, queue), ABSENT)

    async def swap(
        self, namespace: str, queue: str, *, before: StoredQueue, after: QueueState, deadline: float
    ) -> QueueSwap:
        """Compare and put."""
        self._fail()
        await asyncio.sleep(0)
        faster, self.before_swap = self.before_swap, None
        if faster is not None:
            faster()
        self.swaps += 1
        stands = self.stored.get((namespace, queue), ABSENT)
        if stands.revision != before.revision:
            return QueueSwap(won=False, stored=stands, revision=self._etcd.revision)
        stored = self.put((namespace, queue), after)
        await asyncio.sleep(0)
        return QueueSwap(won=True, stored=stored, revision=stored.revision)

    async def list_queues(self, namespace: str, *, deadline: float) -> list[tuple[str, StoredQueue]]:
        """All of a namespace."""
        self._fail()
        return [
            (queue, one) for (where, queue), one in self.stored.items() if where == namespace and one.revision
        ]

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
