"""What a late call tells: which run went on, and for how long others ran beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import commands as c
from coordinator.core.job import AttemptOutcome, Job
from coordinator.core.late_call import late_call
from coordinator.core.machine import decide
from tests.unit.core.jobs import NOW, after, claimed, pending

FIRST, SECOND, THIRD = 500, 600, 700


def lost(job: Job, token: int, *, at: int) -> Job:
    """``job`` after its holder's lease has ended, claimable again."""
    return after(decide(job, None, c.Lose(token=token), at))


def lost_once(*, token: int = FIRST) -> Job:
    """A job that waits again, its first holder gone."""
    job, _ = claimed(pending(), FIRST)
    return lost(job, token, at=NOW + 1_000)


def test_the_overlap_runs_from_the_newer_claim_to_the_late_call() -> None:
    job, claim = claimed(lost_once(), SECOND, now=NOW + 3_000)

    found = late_call(job, claim, FIRST, NOW + 10_500)

    assert found is not None
    assert (found.attempt.number, found.attempt.outcome) == (1, AttemptOutcome.LOST)
    assert found.newer is not None
    assert (found.newer.number, found.overlap_ms) == (2, 7_500)


def test_the_overlap_ends_with_the_newer_run() -> None:
    job, claim = claimed(lost_once(), SECOND, now=NOW + 3_000)
    job = after(decide(job, claim, c.Complete(token=SECOND, digest=b"d"), NOW + 4_000))

    found = late_call(job, None, FIRST, NOW + 60_000)

    assert found is not None
    assert found.overlap_ms == 1_000


def test_several_newer_runs_add_up_without_the_waits_between_them() -> None:
    job, _ = claimed(lost_once(), SECOND, now=NOW + 3_000)
    job = lost(job, SECOND, at=NOW + 5_000)
    job, claim = claimed(job, THIRD, now=NOW + 9_000)

    found = late_call(job, claim, FIRST, NOW + 10_000)

    assert found is not None
    assert found.overlap_ms == 2_000 + 1_000


def test_a_lost_run_without_a_newer_one_overlaps_with_nothing() -> None:
    found = late_call(lost_once(), None, FIRST, NOW + 60_000)

    assert found is not None
    assert (found.newer, found.overlap_ms) == (None, 0)


def test_the_holders_own_token_is_no_late_call() -> None:
    job, claim = claimed(lost_once(), SECOND)

    assert late_call(job, claim, SECOND, NOW) is None


@pytest.mark.parametrize(
    "settlement",
    [
        c.Complete(token=FIRST, digest=b"d"),
        c.Fail(token=FIRST, digest=b"d", failure_type="E"),
        c.Release(token=FIRST, digest=b"d"),
    ],
)
def test_a_run_that_its_worker_ended_itself_is_no_late_call(settlement: c.Settlement) -> None:
    job, claim = claimed(pending(), FIRST)
    job = after(decide(job, claim, settlement, NOW + 10))

    assert late_call(job, None, FIRST, NOW + 1_000) is None


@pytest.mark.parametrize("why", list(c.Taken))
def test_a_run_whose_claim_was_taken_away_is_one(why: c.Taken) -> None:
    job, claim = claimed(pending(), FIRST)
    if why is c.Taken.CANCELLED:
        job = after(decide(job, claim, c.Cancel(), NOW))
    job = after(decide(job, claim, c.TakeAway(token=FIRST, why=why, hold_ms=10), NOW + 10))

    found = late_call(job, None, FIRST, NOW + 1_000)

    assert found is not None
    assert found.attempt.outcome.value == why.value


def test_a_lost_attempt_recorded_without_its_token_is_found_by_its_place() -> None:
    job, claim = claimed(lost_once(token=0), SECOND, now=NOW + 3_000)

    found = late_call(job, claim, FIRST, NOW + 4_000)

    assert found is not None
    assert (found.attempt.number, found.overlap_ms) == (1, 1_000)


def test_a_token_that_fits_no_attempt_is_nobodys() -> None:
    job, claim = claimed(lost_once(), SECOND)

    assert late_call(job, claim, FIRST - 1, NOW) is None
    assert late_call(job, claim, FIRST + 1, NOW) is None
    assert late_call(job, claim, SECOND + 1, NOW) is None
    assert late_call(job, claim, 0, NOW) is None
    assert late_call(pending(), None, FIRST, NOW) is None


def test_a_lost_claim_that_nobody_has_recovered_yet_counts() -> None:
    job, _ = claimed(pending(), FIRST)

    found = late_call(job, None, FIRST, NOW + 20_000)

    assert found is not None
    assert (found.attempt.number, found.newer, found.overlap_ms) == (1, None, 0)


def test_an_attempt_that_the_record_has_forgotten_may_have_ended_either_way() -> None:
    job, claim = claimed(lost_once(token=0), SECOND)
    forgetful = replace(
        job, attempts=(replace(job.attempts[0], number=5), replace(job.attempts[1], number=6))
    )

    assert late_call(forgetful, claim, FIRST, NOW) is None


def test_clocks_that_disagree_make_no_overlap_negative() -> None:
    job, claim = claimed(lost_once(), SECOND, now=NOW + 30_000)

    found = late_call(job, claim, FIRST, NOW + 5_000)

    assert found is not None
    assert found.overlap_ms == 0
