"""What is known of a queue, as a whole and type by type, without asking the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.circuit import Circuit, Counts
from coordinator.ports import Clock
from coordinator.services.circuits import Circuits
from coordinator.services.holders import Holders
from coordinator.services.index import Index
from coordinator.services.line_rates import LineRates, Rates
from coordinator.services.queues import check_listed
from coordinator.services.shared_queues import QueueName

__all__ = ["Namespaces", "PriorityFigures", "QueueFigures", "QueueStats", "TypeStats"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityFigures:
    """Jobs at hand of one priority, and how long the one that waits longest has been claimable."""

    priority: int
    pending: int
    oldest_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFigures:
    """A queue as a whole.

    ``oldest_ms`` (None: none waits) and ``priorities`` are those of the jobs at hand; ``all_at_hand``: these
    are all. ``rates``: jobs a second that began to wait and that left, over all coordinators.
    """

    types: Sequence[TypeStats]
    paused: bool
    oldest_ms: int | None
    priorities: Sequence[PriorityFigures]
    all_at_hand: bool
    rates: Rates

    @property
    def pending(self) -> int:
        """Jobs that wait."""
        return sum(one.pending for one in self.types)

    @property
    def running(self) -> int:
        """Jobs that are held."""
        return sum(one.running for one in self.types)


class QueueStats:
    """GetQueueStats.

    Args:
        index: what waits.
        holders: what is held.
        circuits: circuits, and what is counted for them.
        namespaces: whether all of them are known; asking for one does not make it.
        clock: how long jobs have waited.
        paused: the queues that are paused, by (namespace, queue).
        rates: how fast lines move.
    """

    def __init__(
        self,
        index: Index,
        holders: Holders,
        circuits: Circuits,
        namespaces: Namespaces,
        clock: Clock,
        *,
        paused: Container[QueueName],
        rates: LineRates,
    ) -> None:
        self._index = index
        self._holders = holders
        self._circuits = circuits
        self._namespaces = namespaces
        self._clock = clock
        self._paused = paused
        self._rates = rates

    def figures(self, namespace: str, queue: str) -> QueueFigures:
        """The queue as a whole. It looks at each job at hand: at most some ten thousand of a type.

        Raises:
            RequestError: NOT_READY: not all is listed, or the watch is not alive.
        """
        types = self.of_queue(namespace, queue)
        now_ms = self._clock.now_ms()
        counts: Counter[int] = Counter()
        oldest: dict[int, int] = {}
        all_at_hand = True
        for pair, window in self._index.windows().items():
            if pair[:2] != (namespace, queue):
                continue
            all_at_hand = all_at_hand and window.all_at_hand
            for entry in window.at_hand():
                job = entry.stored.job
                counts[job.terms.priority] += 1
                age = max(0, now_ms - job.ready_ms)
                oldest[job.terms.priority] = max(oldest.get(job.terms.priority, 0), age)
        return QueueFigures(
            types=types,
            paused=(namespace, queue) in self._paused,
            oldest_ms=max(oldest.values(), default=None),
            priorities=[
                PriorityFigures(priority=priority, pending=counts[priority], oldest_ms=oldest[priority])
                for priority in sorted(counts)
            ],
            all_at_hand=all_at_hand,
            rates=self._rates.of_queue(namespace, queue),
        )

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
        check_listed(namespace, self._namespaces.listed, not stale)
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
