"""No priority starves: simulated with the pure rank alone, and judged by when a job starts."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.rank import Rank, rank

SERVICE_MS = 10
"""One worker, so 100 jobs a second; 110 of the highest priority arrive."""

Order = Callable[[int, int, int, tuple[int, ...]], tuple[int, ...]]
"""(ready time, priority, counter, target waits) → what is served first: the smallest."""


def by_rank(ready_ms: int, priority: int, counter: int, waits: tuple[int, ...]) -> Rank:
    return rank(
        ready_ms=ready_ms,
        submit_ms=ready_ms,
        due_ms=0,
        priority=priority,
        counter=counter,
        target_wait_ms=waits,
    )


def by_priority_alone(
    ready_ms: int, priority: int, counter: int, waits: tuple[int, ...]
) -> tuple[int, int, int]:
    """The bug that is looked for."""
    return (priority, ready_ms, counter)


def start_of_low(
    order: Order, waits: tuple[int, ...], priority: int, at_ms: int, until_ms: int
) -> int | None:
    """When a job of ``priority`` starts that comes at ``at_ms``, under an overload from 0 to ``until_ms``;
    None: not by then."""
    queue: list[tuple[tuple[int, ...], bool]] = []
    arrivals, low_is_in = 0, False
    for now_ms in range(0, until_ms, SERVICE_MS):
        while arrivals * 1_000 <= now_ms * 110:
            heapq.heappush(queue, (order(arrivals * 1_000 // 110, 1, arrivals, waits), False))
            arrivals += 1
        if not low_is_in and now_ms >= at_ms:
            heapq.heappush(queue, (order(at_ms, priority, arrivals, waits), True))
            low_is_in = True
        _, is_low = heapq.heappop(queue)
        if is_low:
            return now_ms
    return None


@st.composite
def target_waits(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(sorted(draw(st.lists(st.integers(1, 8_000), min_size=5, max_size=5))))


@settings(max_examples=60, deadline=None)
@given(waits=target_waits(), priority=st.integers(2, 5), share=st.floats(0, 1))
def test_a_low_priority_starts_within_twice_its_target_wait_under_110_percent_of_the_highest(
    waits: tuple[int, ...], priority: int, share: float
) -> None:
    """Whenever it comes within the first eight of its target waits of the overload. Later nobody can: the
    backlog of a lasting overload outgrows every wait, and all share it in the order of their deadlines."""
    wait = waits[priority - 1]
    at_ms = round(8 * wait * share)
    grain = 3 * SERVICE_MS  # a service under way, and the rounding of arrivals
    start = start_of_low(by_rank, waits, priority, at_ms, at_ms + 2 * wait + grain)
    assert start is not None, f"not started {2 * wait} ms after {at_ms}"


def test_an_order_by_priority_alone_would_be_found_out() -> None:
    waits = (100, 500, 1_000, 2_000, 4_000)
    assert start_of_low(by_priority_alone, waits, 2, 1_000, 1_000 + 2 * 500 + 30) is None
    assert start_of_low(by_rank, waits, 2, 1_000, 1_000 + 2 * 500 + 30) is not None
