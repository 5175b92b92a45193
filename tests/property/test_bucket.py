"""The leaky bucket over random histories, judged by `bucket_oracle`; and bugs that they must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.bucket import EMPTY, UNTRIED, Bucket, BucketPolicy, Tries
from tests.property.bucket_oracle import Book, Entry, Meter

RUN = settings(max_examples=300, deadline=None, derandomize=True, database=None)
Patch = pytest.MonkeyPatch

SMALL = BucketPolicy(first_ms=2, cap_ms=25, tries=3, window_ms=20, reserved=1)
"""Small numbers, so that a history of a few hundred milliseconds meets every corner."""

policies = st.builds(
    BucketPolicy,
    first_ms=st.integers(1, 5),
    cap_ms=st.integers(5, 60),
    tries=st.integers(1, 5),
    window_ms=st.integers(1, 30),
    reserved=st.just(0),
)
# (milliseconds that pass first, what then happens)
visits = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 130), st.just(-1)),
        st.sampled_from(["look", "fail", "fail", "fail", "fail longer"]),
    ),
    max_size=40,
)
attempts = st.lists(
    st.tuples(
        st.integers(0, 12), st.sampled_from(["begin", "begin", "begin in line", "fail", "fail", "win"])
    ),
    max_size=60,
)


def run_bucket(policy: BucketPolicy, history: list[tuple[int, str]]) -> None:
    """One caller that comes, early or not; a pause of -1 is one of exactly what it was told."""
    meter, bucket, now = Meter(policy.first_ms, policy.cap_ms), EMPTY, 1_000
    for pause, what in history:
        for _ in range(bucket.wait_ms(now) if pause < 0 else pause):
            now += 1
            meter.tick()
        assert bucket.wait_ms(now) == meter.penalty
        assert bucket.leaked(policy, now).level == meter.level
        assert bucket.forgotten(policy, now) == (meter.level == 0 and meter.penalty == 0)
        if meter.penalty or what == "look":
            continue
        extra = 7 if what == "fail longer" else 0
        bucket = bucket.failed(policy, now, at_least_ms=extra)
        told = meter.fail(extra)
        assert bucket.wait_ms(now) == told
        assert told <= max(policy.cap_ms, extra)


def run_tries(policy: BucketPolicy, history: list[tuple[int, str]], *, line: bool) -> None:
    """Callers that begin whenever they may, and end in any order."""
    book, tries, now = Book(policy.window_ms), UNTRIED, 1_000
    for pause, what in history:
        now += pause
        under_way = [one for one in book.entries if one.end is None]
        if what.startswith("begin"):
            in_line = what == "begin in line"
            places = policy.tries - (policy.reserved if line and not in_line else 0)
            wait = tries.wait_ms(policy, now, in_line=in_line, line=line)
            assert (wait == 0) == (book.counted(now) < places)
            if wait == 0:
                tries = tries.begun()
                book.entries.append(Entry(now))
            elif len(under_way) < places:
                # Nobody else moves: not before that moment, and at it.
                assert book.counted(now + wait) < places <= book.counted(now + wait - 1)
        elif under_way:
            one = under_way[len(book.entries) % len(under_way)]
            one.end, one.failed = now, what == "fail"
            tries = tries.ended(policy, now, failed=one.failed)
        assert tries.forgotten(policy, now) == (book.counted(now) == 0)
        assert len(tries.failed) <= policy.tries
    assert book.most_seen() <= policy.tries


@RUN
@given(policies, visits)
def test_a_bucket_does_as_the_meter_does(policy: BucketPolicy, history: list[tuple[int, str]]) -> None:
    run_bucket(policy, history)


@RUN
@given(policies, attempts)
def test_no_window_sees_more_failing_tries_than_the_limit(
    policy: BucketPolicy, history: list[tuple[int, str]]
) -> None:
    run_tries(policy, history, line=False)


@RUN
@given(attempts)
def test_with_a_line_some_places_are_kept_for_it(history: list[tuple[int, str]]) -> None:
    run_tries(SMALL, history, line=True)


# -- bugs ----------------------------------------------------------------------------------------------------

BUGS: dict[str, Callable[[Patch], None]] = {}


def _bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[plant.__name__] = plant
    return plant


@_bug
def a_failure_does_not_raise_the_level(patch: Patch) -> None:
    original = Bucket.failed

    def failed(self: Bucket, policy: BucketPolicy, now_ms: int, **more: int) -> Bucket:
        return Bucket(self.leaked(policy, now_ms).level, original(self, policy, now_ms, **more).open_ms)

    patch.setattr(Bucket, "failed", failed)


@_bug
def the_level_leaks_while_the_caller_may_not_come(patch: Patch) -> None:
    """Who obeys never climbs."""

    def leaked(self: Bucket, policy: BucketPolicy, now_ms: int) -> Bucket:
        level, since = self.level, self.open_ms - policy.delay_ms(max(0, self.level - 1))
        while level > 0 and now_ms - since >= policy.delay_ms(level - 1):
            since += policy.delay_ms(level - 1)
            level -= 1
        return Bucket(level, self.open_ms)

    patch.setattr(Bucket, "leaked", leaked)


@_bug
def a_visit_empties_the_bucket(patch: Patch) -> None:
    def leaked(self: Bucket, policy: BucketPolicy, now_ms: int) -> Bucket:
        away = now_ms - self.open_ms
        return Bucket(0, self.open_ms) if away >= policy.delay_ms(self.level) else self

    patch.setattr(Bucket, "leaked", leaked)


@_bug
def nothing_leaks(patch: Patch) -> None:
    patch.setattr(Bucket, "leaked", lambda self, policy, now_ms: self)


@_bug
def the_delay_has_no_cap(patch: Patch) -> None:
    patch.setattr(BucketPolicy, "delay_ms", lambda self, level: self.first_ms << level)


@_bug
def the_level_rises_past_the_cap(patch: Patch) -> None:
    """It would leak for minutes."""
    patch.setattr(BucketPolicy, "highest", property(lambda self: 40))


@_bug
def who_comes_early_is_let_in(patch: Patch) -> None:
    patch.setattr(Bucket, "wait_ms", lambda self, now_ms: 0)


@_bug
def a_failed_try_gives_its_place_back(patch: Patch) -> None:
    original = Tries.ended
    patch.setattr(Tries, "ended", lambda self, policy, now, failed: original(self, policy, now, failed=False))


@_bug
def a_try_that_won_keeps_its_place(patch: Patch) -> None:
    original = Tries.ended
    patch.setattr(Tries, "ended", lambda self, policy, now, failed: original(self, policy, now, failed=True))


@_bug
def a_try_counts_only_once_it_has_failed(patch: Patch) -> None:
    """A storm of callers begins at once."""
    patch.setattr(Tries, "begun", lambda self: self)


@_bug
def the_window_is_a_millisecond_short(patch: Patch) -> None:
    def recent(self: Tries, policy: BucketPolicy, now_ms: int) -> tuple[int, ...]:
        return tuple(ended for ended in self.failed if now_ms - ended < policy.window_ms)

    patch.setattr(Tries, "_recent", recent)


@_bug
def a_fixed_window_is_counted_in_place_of_a_sliding_one(patch: Patch) -> None:
    def recent(self: Tries, policy: BucketPolicy, now_ms: int) -> tuple[int, ...]:
        start = now_ms - now_ms % policy.window_ms
        return tuple(ended for ended in self.failed if ended >= start)

    patch.setattr(Tries, "_recent", recent)


@_bug
def the_places_of_the_line_are_given_to_others(patch: Patch) -> None:
    original = Tries.wait_ms

    def wait_ms(self: Tries, policy: BucketPolicy, now_ms: int, *, in_line: bool, line: bool) -> int:
        return original(self, policy, now_ms, in_line=in_line, line=False)

    patch.setattr(Tries, "wait_ms", wait_ms)


@_bug
def who_waits_in_line_gets_only_what_others_get(patch: Patch) -> None:
    original = Tries.wait_ms

    def wait_ms(self: Tries, policy: BucketPolicy, now_ms: int, *, in_line: bool, line: bool) -> int:
        return original(self, policy, now_ms, in_line=False, line=line)

    patch.setattr(Tries, "wait_ms", wait_ms)


GENERATE_ONLY = settings(RUN, phases=[p for p in RUN.phases if p.name == "generate"])


def run_all() -> None:
    def run(check: Any) -> None:
        settings(GENERATE_ONLY)(check)()

    run(given(visits)(lambda history: run_bucket(SMALL, history)))
    run(given(attempts)(lambda history: run_tries(SMALL, history, line=False)))
    run(given(attempts)(lambda history: run_tries(SMALL, history, line=True)))


def test_the_histories_pass_without_a_bug() -> None:
    run_all()


@pytest.mark.parametrize("bug", BUGS)
def test_the_histories_catch(bug: str, monkeypatch: Patch) -> None:
    BUGS[bug](monkeypatch)

    with pytest.raises(AssertionError):
        run_all()


def test_the_delays_are_those_of_the_design() -> None:
    policy, bucket, now, told = BucketPolicy(), EMPTY, 0, []
    for _ in range(10):
        bucket = bucket.failed(policy, now)
        told.append(bucket.wait_ms(now))
        now = bucket.open_ms
    assert told == [50, 100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000, 5_000]
    assert (policy.tries, policy.window_ms) == (4, 1_000)
