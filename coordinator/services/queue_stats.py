"""What is known of a queue, type by type, without asking the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.core.circuit import Circuit, Counts
from coordinator.errors import Reason, RequestError
from coordinator.services.circuits import Circuits
from coordinator.services.holders import Holders
from coordinator.services.index import Index

__all__ = ["Namespaces", "QueueStats", "TypeStats"]


class Namespaces(Protocol):
    """Which namespaces there are."""

    @property
    def listed(self) -> bool:
        """Whether that is known, and each is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeStats:
    """One type: jobs that wait and that are held, its circuit, and what is counted for it here."""

    type: str
    pending: int
    running: int
    circuit: Circuit
    counts: Counts


class QueueStats:
    """GetQueueStats.

    Args:
        index: what waits.
        holders: what is held.
        circuits: circuits, and what is counted for them.
        namespaces: whether all of them are known; asking for one does not make it.
    """

    def __init__(self, index: Index, holders: Holders, circuits: Circuits, namespaces: Namespaces) -> None:
        self._index = index
        self._holders = holders
        self._circuits = circuits
        self._namespaces = namespaces

    def of_queue(self, namespace: str, queue: str) -> list[TypeStats]:
        """Each type that ever had a job, or that has a circuit, by name.

        Raises:
            RequestError: NOT_READY: not all is listed, or the watch is not alive.
        """
        windows = {
            pair[2]: window
            for pair, window in self._index.windows().items()
            if pair[:2] == (namespace, queue)
        }
        stale = bool(windows) and not self._index.ready(namespace)
        if stale or not self._namespaces.listed:
            raise RequestError(
                Reason.NOT_READY,
                f"namespace {namespace} is being listed",
                metadata={"namespace": namespace},
                retry_after_ms=200,
            )
        running = self._holders.running_of(namespace, queue)
        held_back = {pair[2] for pair in self._circuits.shared.not_closed() if pair[:2] == (namespace, queue)}
        found = []
        for type_ in sorted({*windows, *running, *held_back}):
            pair = (namespace, queue, type_)
            window = windows.get(type_)
            found.append(
                TypeStats(
                    type=type_,
                    pending=int(window.line) if window is not None else 0,
                    running=running[type_],
                    circuit=self._circuits.shared.circuit(pair),
                    counts=self._circuits.outcomes.counts(pair),
                )
            )
        return found
