"""Order of waiting jobs: by virtual deadline, never below the submit time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.rank import TARGET_WAIT_MS, Rank, rank

T = 1_000_000


@pytest.mark.parametrize(
    ("priority", "wait"), [(1, 1_000), (2, 10_000), (3, 60_000), (4, 600_000), (5, 3_600_000)]
)
def test_each_priority_has_its_target_wait(priority: int, wait: int) -> None:
    assert rank(ready_ms=T, submit_ms=T, due_ms=0, priority=priority, counter=4) == Rank(T + wait, 4)


def test_a_due_time_brings_a_job_forward_and_never_back() -> None:
    sooner = rank(ready_ms=T, submit_ms=T, due_ms=T + 5, priority=3, counter=0)
    later = rank(ready_ms=T, submit_ms=T, due_ms=T + 10**9, priority=3, counter=0)

    assert (sooner.ms, later.ms) == (T + 5, T + 60_000)


def test_a_due_time_in_the_past_gains_nothing_over_the_submit_time() -> None:
    assert rank(ready_ms=T, submit_ms=T, due_ms=1, priority=1, counter=0).ms == T


def test_a_job_of_the_lowest_priority_overtakes_later_ones_of_the_highest() -> None:
    old = rank(ready_ms=T, submit_ms=T, due_ms=0, priority=5, counter=0)
    fresh = rank(ready_ms=T + TARGET_WAIT_MS[4], submit_ms=T, due_ms=0, priority=1, counter=1)

    assert old < fresh


def test_the_order_of_submission_breaks_ties() -> None:
    first, second = (rank(ready_ms=T, submit_ms=T, due_ms=0, priority=2, counter=n) for n in (1, 2))

    assert first < second


@given(
    ready=st.integers(0, 10**13),
    waited=st.integers(0, 10**9),
    due=st.integers(0, 10**13),
    priority=st.integers(1, 5),
)
def test_no_rank_is_below_the_submit_time_or_above_the_target(
    ready: int, waited: int, due: int, priority: int
) -> None:
    submit = max(0, ready - waited)

    assert submit <= rank(ready_ms=ready, submit_ms=submit, due_ms=due, priority=priority, counter=0).ms
    assert rank(ready_ms=ready, submit_ms=submit, due_ms=due, priority=priority, counter=0).ms <= (
        ready + TARGET_WAIT_MS[priority - 1]
    )
