"""This coordinator's copy of the shared circuits: it follows their watch, and changes them by swaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.core.circuit import CLOSED, Circuit, CircuitState
from coordinator.ports import CircuitStore, Clock, StoredCircuit
from coordinator.services.waiters import Pair

__all__ = ["SharedCircuits"]

_ROUNDS: Final = 10
"""Swaps of one change at most; each that loses has learned what another swapped in."""

_ABSENT: Final = StoredCircuit()


class SharedCircuits:
    """Implements ``ports.CircuitChanges``.

    Args:
        store: the shared records.
        clock: deadlines.
        heeded: False: ``barred`` stays empty, whatever others have opened.
        call_timeout: seconds for a list.

    ``barred`` has the pairs whose circuit is not closed: dispatch looks nowhere else. ``learned`` is called
    with a pair, what was known and what is, after each change.
    """

    def __init__(
        self, store: CircuitStore, clock: Clock, *, heeded: bool = True, call_timeout: float = 2.0
    ) -> None:
        self._store = store
        self._clock = clock
        self._heeded = heeded
        self._call_timeout = call_timeout
        self.barred: dict[Pair, StoredCircuit] = {}
        self.learned: Callable[[Pair, Circuit, Circuit], None] = lambda pair, before, now: None
        self._known: dict[Pair, StoredCircuit] = {}
        self._seen: dict[Pair, int] = {}  # the revision as of which a pair is known

    def circuit(self, pair: Pair) -> Circuit:
        """As it is known here, also where it is not heeded."""
        return self._known.get(pair, _ABSENT).circuit

    def not_closed(self) -> dict[Pair, Circuit]:
        """All that are known here and not closed."""
        return {
            pair: stored.circuit
            for pair, stored in self._known.items()
            if stored.circuit.state is not CircuitState.CLOSED
        }

    async def refresh(self, pair: Pair, deadline: float) -> None:
        """Ask the store, where the watch may be behind.

        Raises:
            StorageError: it did not answer.
        """
        before = self._seen.get(pair, 0)
        stored = await self._store.read(*pair, deadline=deadline)
        if self._seen.get(pair, 0) == before:
            self._learn(pair, stored, max(stored.revision, before))

    async def change(
        self, pair: Pair, make: Callable[[StoredCircuit], Circuit | None], deadline: float
    ) -> tuple[Circuit, Circuit] | None:
        """Swap in what ``make`` makes of what stands; answers what was and what is, None if nothing changed.

        Raises:
            StorageError: nothing is known to have changed.
        """
        for _ in range(_ROUNDS):
            before = self._known.get(pair, _ABSENT)
            after = make(before)
            if after is None:
                return None
            swap = await self._store.swap(*pair, before=before, after=after, deadline=deadline)
            self._learn(pair, swap.stored, swap.revision)
            if swap.won:
                return before.circuit, after
        return None

    async def relist(self, namespace: str, revision: int) -> None:
        """See ``ports.CircuitChanges``. The list replaces what was known before it was asked for."""
        before = {pair: seen for pair, seen in self._seen.items() if pair[0] == namespace}
        deadline = self._clock.monotonic() + self._call_timeout
        listed = {
            (namespace, queue, type_): stored
            for queue, type_, stored in await self._store.list_circuits(namespace, deadline=deadline)
        }
        for pair in {*before, *listed}:
            if self._seen.get(pair, 0) == before.get(pair, 0):
                stored = listed.get(pair, _ABSENT)
                self._seen[pair] = 0  # revisions may have gone back with the store
                self._learn(pair, stored, max(stored.revision, revision))

    def circuit_changed(
        self, namespace: str, queue: str, type_: str, stored: StoredCircuit, revision: int
    ) -> None:
        """See ``ports.CircuitChanges``."""
        self._learn((namespace, queue, type_), stored, revision)

    def _learn(self, pair: Pair, stored: StoredCircuit, revision: int) -> None:
        """This stands as of ``revision``; what is older than what is known changes nothing."""
        if revision < self._seen.get(pair, 0):
            return
        self._seen[pair] = revision
        before, now = self.circuit(pair), stored.circuit
        if stored.revision:
            self._known[pair] = stored
        else:
            self._known.pop(pair, None)
        if now == CLOSED or not self._heeded:
            self.barred.pop(pair, None)
        else:
            self.barred[pair] = stored
        if before != now:
            self.learned(pair, before, now)
