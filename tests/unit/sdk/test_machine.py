"""The pure arithmetic of sessions and claims."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_sdk._machine import (
    BeatLog,
    BeatPlan,
    backoff_delay,
    beat_interval,
    beat_timeout,
    poll_size,
)

NEVER = float("-inf")


@pytest.mark.parametrize(("ttl", "interval"), [(2, 2 / 3), (3, 1), (10, 10 / 3), (15, 5), (3600, 5)])
def test_the_interval_is_a_third_of_the_granted_ttl_and_at_most_five_seconds(
    ttl: float, interval: float
) -> None:
    assert beat_interval(ttl) == pytest.approx(interval)


@given(ttl=st.floats(2, 3600))
def test_two_beats_that_time_out_fit_into_the_safe_time(ttl: float) -> None:
    safe = ttl - max(1.0, ttl / 5)
    interval = beat_interval(ttl)
    # One interval of rest, one beat that hangs, and the next is sent before the deadline.
    assert interval + beat_timeout(interval) < max(safe, 1.2)


@given(
    attempt=st.sampled_from([0, 1, 31, 32, 53, 63, 64, 1023, 1024, 10**6]),
    initial=st.floats(0.001, 3600),
    multiplier=st.floats(1, 10),
    maximum=st.floats(0.001, 30 * 86400),
    jitter=st.floats(0, 1),
    fraction=st.floats(0, 1),
)
def test_backoff_lies_above_zero_and_at_most_at_its_cap(
    attempt: int, initial: float, multiplier: float, maximum: float, jitter: float, fraction: float
) -> None:
    def delay(attempt: int, jitter: float) -> float:
        return backoff_delay(
            attempt,
            initial=initial,
            maximum=maximum,
            multiplier=multiplier,
            jitter=jitter,
            fraction=fraction,
        )

    assert 0 < delay(attempt, jitter) <= maximum
    assert delay(attempt, 0) <= delay(attempt + 1, 0)


def test_a_beat_counts_from_its_send_time() -> None:
    log = BeatLog()
    assert log.confirm(sent=100.0, safe_duration=8.0, revision=5) == 108.0
    assert log.deadline == 108.0


def test_a_claim_takes_the_last_beat_below_its_token() -> None:
    log = BeatLog()
    log.confirm(sent=100.0, safe_duration=8.0, revision=5)
    log.confirm(sent=103.0, safe_duration=8.0, revision=10)
    assert log.deadline_for(11) == 111.0
    # The beat at revision 10 did not list the claim, which was there already: it proves nothing.
    assert log.deadline_for(10) == 108.0
    assert log.deadline_for(6) == 108.0
    assert log.deadline_for(5) == NEVER


def test_before_the_first_beat_nothing_vouches() -> None:
    assert BeatLog().deadline_for(10**15) == NEVER
    assert BeatLog().deadline == NEVER


@given(
    beats=st.lists(st.tuples(st.floats(0.1, 5), st.integers(0, 50)), min_size=1, max_size=40),
    token=st.integers(1, 2000),
)
def test_no_claim_ever_rests_on_a_beat_at_or_above_its_token(
    beats: list[tuple[float, int]], token: int
) -> None:
    log, sent, revision = BeatLog(), 0.0, 1
    below = [NEVER]
    for gap, step in beats:
        sent += gap
        revision += step
        deadline = log.confirm(sent=sent, safe_duration=8.0, revision=revision)
        if revision < token:
            below.append(deadline)
    # Old beats may be forgotten, which only makes a claim wait; a later deadline must never be invented.
    assert log.deadline_for(token) <= max(below)
    if revision < token:
        assert log.deadline_for(token) == sent + 8.0


def test_a_failed_beat_is_repeated_at_once_elsewhere_then_with_short_pauses() -> None:
    plan = BeatPlan(now=0.0, interval=3.0, endpoints=3)
    plan.confirmed(sent=0.0)
    assert plan.due == 3.0
    plan.failed(now=3.5, fraction=0.5)
    assert plan.due == 3.5
    plan.failed(now=3.6, fraction=0.5)
    assert plan.due == 3.6
    for _ in range(100):
        plan.failed(now=4.0, fraction=0.0)
        assert 4.0 < plan.due <= 4.0 + 3.0 / 4
    plan.confirmed(sent=5.0)
    assert plan.due == 8.0
    assert plan.failures == 0


def test_a_claim_that_waits_hurries_the_next_beat() -> None:
    plan = BeatPlan(now=0.0, interval=3.0, endpoints=1)
    plan.confirmed(sent=0.0)
    plan.hurry(1.0)
    assert plan.due == 1.0


@given(
    limit=st.integers(1, 480),
    busy=st.integers(0, 480),
    promised=st.integers(0, 480),
    loops=st.integers(1, 16),
    held=st.integers(0, 600),
)
def test_a_poll_never_asks_for_more_than_there_are_free_slots(
    limit: int, busy: int, promised: int, loops: int, held: int
) -> None:
    size = poll_size(
        limit=limit, busy=busy, promised=promised, loops=loops, batch=100, held=held, capacity=480
    )
    assert 0 <= size <= 100
    assert size == 0 or size + busy + promised <= limit
    assert size == 0 or size + held + promised <= 480
    if busy == promised == held == 0:
        assert size == min(100, math.ceil(limit / loops))
