"""Shared circuits in memory, on the revisions of a ``MemoryEtcd``, and those that watch them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.core.circuit import CLOSED, Circuit
from coordinator.errors import LeasekeeperError
from coordinator.ports import CircuitChanges, CircuitSwap, StoredCircuit
from tests.support.memory_etcd import MemoryEtcd

__all__ = ["MemoryCircuits"]

ABSENT = StoredCircuit()


class MemoryCircuits:
    """``ports.CircuitStore`` for any number of coordinators.

    ``failures`` are raised by the next calls, one each. ``before_swap`` runs once, before the next swap:
    another coordinator that is faster. ``silent``: watchers hear nothing until ``tell``.
    """

    def __init__(self, etcd: MemoryEtcd) -> None:
        self._etcd = etcd
        self.stored: dict[tuple[str, str, str], StoredCircuit] = {}
        self.watchers: list[CircuitChanges] = []
        self.failures: list[LeasekeeperError] = []
        self.before_swap: Callable[[], None] | None = None
        self.silent = False
        self.swaps = 0
        self._untold: list[tuple[str, str, str, StoredCircuit, int]] = []

    def put(self, pair: tuple[str, str, str], circuit: Circuit) -> StoredCircuit:
        """What another coordinator, or a hand, does."""
        self._etcd.revision += 1
        revision = self._etcd.revision
        stored = ABSENT if circuit == CLOSED else StoredCircuit(circuit, revision)
        self.stored[pair] = stored
        self._untold.append((*pair, stored, revision))
        if not self.silent:
            self.tell()
        return stored

    def tell(self) -> None:
        """Let the watchers hear what they have not heard."""
        untold, self._untold = self._untold, []
        for change in untold:
            for watcher in self.watchers:
                watcher.circuit_changed(*change)

    async def read(self, namespace: str, queue: str, type_: str, *, deadline: float) -> StoredCircuit:
        """What stands."""
        self._fail()
        return self.stored.get((namespace, queue, type_), ABSENT)

    async def swap(
        self,
        namespace: str,
        queue: str,
        type_: str,
        *,
        before: StoredCircuit,
        after: Circuit,
        deadline: float,
    ) -> CircuitSwap:
        """Compare and put."""
        self._fail()
        await asyncio.sleep(0)
        faster, self.before_swap = self.before_swap, None
        if faster is not None:
            faster()
        self.swaps += 1
        pair = (namespace, queue, type_)
        stands = self.stored.get(pair, ABSENT)
        if stands.revision != before.revision:
            return CircuitSwap(won=False, stored=stands, revision=self._etcd.revision)
        stored = self.put(pair, after)
        revision = self._etcd.revision
        await asyncio.sleep(0)
        return CircuitSwap(won=True, stored=stored, revision=revision)

    async def list_circuits(self, namespace: str, *, deadline: float) -> list[tuple[str, str, StoredCircuit]]:
        """All of a namespace."""
        self._fail()
        return [
            (*pair[1:], one) for pair, one in self.stored.items() if pair[0] == namespace and one.revision
        ]

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
