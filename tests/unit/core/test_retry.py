"""Backoff: bounded, growing, and safe at any number of attempts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.retry import MAX_DELAY_MS, RetryPolicy, delay_ms

LADDER = (0, 1, 31, 32, 53, 63, 64, 1_023, 1_024, 10**6)
BASES_MS = (1, 100, 1_000, 60_000, 3_600_000)
FACTORS = (1.0, 1.000_001, 1.5, 2.0, 10.0)


@pytest.mark.parametrize("base", BASES_MS)
@pytest.mark.parametrize("factor", FACTORS)
def test_no_attempt_overflows_and_delays_never_shrink(base: int, factor: float) -> None:
    """Fault case 050."""
    policy = RetryPolicy(initial_ms=base, multiplier=factor, cap_ms=86_400_000, jitter=0.0)

    delays = [delay_ms(policy, attempts, 0.5) for attempts in LADDER]

    assert all(0 < delay <= policy.cap_ms for delay in delays)
    assert all(earlier <= later for earlier, later in itertools.pairwise(delays))


@pytest.mark.parametrize(
    ("failures", "expected"), [(1, 1_000), (2, 2_000), (3, 4_000), (9, 256_000), (10, 300_000)]
)
def test_the_default_policy_doubles_up_to_five_minutes(failures: int, expected: int) -> None:
    assert delay_ms(RetryPolicy(), failures, 0.5) == expected


@pytest.mark.parametrize("multiplier", [float("inf"), float("nan"), 0.0, -3.0, 1e308])
def test_a_strange_multiplier_stays_within_the_bounds(multiplier: float) -> None:
    policy = RetryPolicy(multiplier=multiplier)

    assert all(0 < delay_ms(policy, attempts, 0.999) <= policy.cap_ms for attempts in LADDER)


@given(
    base=st.integers(0, 10**12),
    cap=st.integers(0, 10**12),
    factor=st.floats(1, 10),
    jitter=st.floats(0, 1),
    failures=st.integers(0, 2_000),
    number=st.floats(0, 1, exclude_max=True),
)
def test_a_delay_is_positive_capped_and_moved_by_no_more_than_half_its_jitter(
    base: int, cap: int, factor: float, jitter: float, failures: int, number: float
) -> None:
    policy = RetryPolicy(initial_ms=base, cap_ms=cap, multiplier=factor, jitter=jitter)
    plain = delay_ms(RetryPolicy(initial_ms=base, cap_ms=cap, multiplier=factor, jitter=0.0), failures, 0.5)

    moved = delay_ms(policy, failures, number)

    assert 0 < moved <= max(1, min(cap, MAX_DELAY_MS))
    assert abs(moved - plain) <= plain * jitter / 2 + 2


def test_a_spread_is_really_spread() -> None:
    policy = RetryPolicy(initial_ms=10_000, jitter=0.2)

    assert [delay_ms(policy, 1, number) for number in (0.0, 0.5, 0.999)] == [9_000, 10_000, 10_998]
