"""The parts of a coordinator that operate queues."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.app.foundation import Foundation
from coordinator.app.readings import queue_readings
from coordinator.rpc.queue_servicer import QueueServicer, QueueUseCases
from coordinator.services.arrivals import Arrivals
from coordinator.services.holders import Holders
from coordinator.services.index import Index
from coordinator.services.line_rates import LineRates
from coordinator.services.past_due import PastDue
from coordinator.services.queue_stats import QueueStats
from coordinator.services.queues import Queues
from coordinator.services.shared_queues import QueueName
from coordinator.services.waiters import Waiters

__all__ = ["QueueParts", "compose_queues"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueParts:
    """What came of it; ``background`` as of ``Parts``."""

    servicer: QueueServicer
    background: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]


def compose_queues(
    base: Foundation, index: Index, holders: Holders, waiters: Waiters, arrivals: Arrivals
) -> QueueParts:
    """Make them, and let whoever waits for a paused queue hear of its end."""
    store, clock = base.store, base.clock

    def resumed(name: QueueName) -> None:
        for pair in index.windows():
            if pair[:2] == name:
                waiters.wake_one(pair)

    base.queues.resumed = resumed
    rates = LineRates(lambda: {pair: window.line for pair, window in index.windows().items()}, clock)
    stats = QueueStats(
        index,
        holders,
        base.circuits,
        store.namespaces,
        clock,
        paused=base.queues.paused,
        rates=rates,
    )
    past_due = PastDue(index.windows, arrivals.is_ours, base.notices, clock)
    base.metrics.expose(queue_readings(past_due, base.queues))
    queues = Queues(base.queues, index, store.namespaces, clock)
    return QueueParts(
        servicer=QueueServicer(QueueUseCases(stats=stats, circuits=base.circuits, queues=queues)),
        background={"rates of lines": rates.run, "past due": past_due.run},
    )
