"""When a server that may be away is asked."""

from __future__ import annotations

from coordinator.cache.breaker import Breaker, BreakerConfig


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(time: Time) -> Breaker:
    breaker = Breaker(time, BreakerConfig(failures=2, pause_s=1.0, pause_max_s=3.0))
    assert breaker.allows()
    assert not breaker.failed()
    assert breaker.allows()
    assert breaker.failed()
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(Time(), BreakerConfig(failures=2))
    breaker.failed()
    breaker.succeeded()
    assert not breaker.failed()
    assert not breaker.open


def test_an_open_one_lets_a_single_probe_through_after_its_pause() -> None:
    time = Time()
    breaker = opened(time)
    assert not breaker.allows()
    time.now += 1.0
    assert breaker.allows()
    assert not breaker.allows(), "one probe at a time"
    breaker.succeeded()
    assert not breaker.open
    assert breaker.allows()


def test_a_probe_that_fails_doubles_the_pause_up_to_its_bound() -> None:
    time = Time()
    breaker = opened(time)
    for pause in (1.0, 2.0, 3.0, 3.0):
        time.now += pause - 0.01
        assert not breaker.allows()
        time.now += 0.01
        assert breaker.allows()
        breaker.failed()


def test_a_caller_that_leaves_gives_its_probe_to_the_next() -> None:
    time = Time()
    breaker = opened(time)
    time.now += 1.0
    assert breaker.allows()
    breaker.left()
    assert breaker.allows()


def test_failures_of_calls_that_were_under_way_do_not_lengthen_the_pause() -> None:
    time = Time()
    breaker = opened(time)
    for _ in range(20):
        breaker.failed()
    time.now += 1.0
    assert breaker.allows()
