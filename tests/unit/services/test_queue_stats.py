"""What is told of a queue is what is known of it, and is not told while it is not known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from coordinator.core.circuit import CLOSED, CircuitState
from coordinator.errors import Reason, RequestError
from coordinator.services.line_rates import LineRates
from coordinator.services.queue_stats import QueueStats, TypeStats
from tests.support.builders import FAR, a_job, store_job
from tests.unit.services.circuit_bench import bench, fail, opened
from tests.unit.services.workbench import NS, Coordinator


@dataclass
class Known:
    listed: bool = True


def stats(c: Coordinator, known: Known | None = None) -> QueueStats:
    c.etcd.observers.remove(c.index) if c.index in c.etcd.observers else None
    rates = LineRates(lambda: {pair: window.line for pair, window in c.index.windows().items()}, c.clock)
    rates.sample()
    return QueueStats(
        c.index, c.holders, c.circuits, known or Known(), c.clock, paused={(NS, "asleep"): 0}, rates=rates
    )


async def test_each_type_tells_what_waits_and_what_is_held() -> None:
    c = await bench()
    of_queue = stats(c).of_queue
    await c.submit("a", "b", "c")
    await c.jobs.register_type(NS, "other", "t", deadline=FAR)
    await store_job(c.jobs, a_job("elsewhere", queue="other"))
    await store_job(c.jobs, a_job("u", type="u"))
    claims = await c.claim(n=2)
    found = of_queue(NS, "q")
    assert [(one.type, one.pending, one.running, one.circuit) for one in found] == [
        ("t", 1, 2, CLOSED),
        ("u", 1, 0, CLOSED),
    ]
    await fail(c, claims[0])
    [t, _] = of_queue(NS, "q")
    assert (t.running, t.counts.failures) == (1, 1)
    assert of_queue(NS, "none") == of_queue("nowhere", "q") == []


async def test_an_open_circuit_is_told_also_of_a_type_without_jobs() -> None:
    c = await bench()
    await opened(c, "held")
    [one] = stats(c).of_queue(NS, "q")
    assert isinstance(one, TypeStats)
    assert one.circuit.state is CircuitState.OPEN


async def test_nothing_is_told_before_all_is_listed_or_while_the_watch_is_dead() -> None:
    c = await bench()
    await c.submit("a")
    known = Known(listed=False)
    of_queue = stats(c, known).of_queue
    with pytest.raises(RequestError) as caught:
        of_queue(NS, "q")
    assert caught.value.reason is Reason.NOT_READY
    known.listed = True
    assert of_queue(NS, "q")
    c.index.freshness(NS, False)
    with pytest.raises(RequestError):
        of_queue(NS, "q")
