"""Circuits in the store: one shared record for each (queue, type) whose circuit is not closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.core.circuit import CLOSED, Circuit

__all__ = ["CircuitChanges", "CircuitStore", "CircuitSwap", "StoredCircuit"]


@dataclass(frozen=True, slots=True)
class StoredCircuit:
    """A circuit and the mod revision of its key; revision 0: there is no key, so it is closed.

    A record that cannot be decoded counts as closed, and a swap writes over it.
    """

    circuit: Circuit = CLOSED
    revision: int = 0


@dataclass(frozen=True, slots=True)
class CircuitSwap:
    """What became of a swap: ``stored`` is what stands now, ours or another's. ``revision``: as of when."""

    won: bool
    stored: StoredCircuit
    revision: int


class CircuitStore(Protocol):
    """The shared records. A closed circuit has none."""

    async def read(self, namespace: str, queue: str, type_: str, *, deadline: float) -> StoredCircuit:
        """What stands.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """

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
        """Put ``after`` if what stands is still ``before``; a closed one deletes the record.

        Raises:
            OutcomeUnknown: it may have been put; read again.
            NotApplied, EtcdUnavailable: nothing was written.
        """

    async def list_circuits(self, namespace: str, *, deadline: float) -> list[tuple[str, str, StoredCircuit]]:
        """(queue, type, circuit) of every record that can be decoded.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """


class CircuitChanges(Protocol):
    """What the watch of a namespace saw of its circuits."""

    async def relist(self, namespace: str, revision: int) -> None:
        """Start, or start again: list at ``revision`` or later, and expect changes after ``revision``."""

    def circuit_changed(
        self, namespace: str, queue: str, type_: str, stored: StoredCircuit, revision: int
    ) -> None:
        """It was put or deleted at ``revision``, and this stands now."""
