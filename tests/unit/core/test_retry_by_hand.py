"""What a retry by hand makes of a job that has failed for good."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import commands as c
from coordinator.core.invariants import check_history, check_job
from coordinator.core.job import Job, JobState
from coordinator.core.machine import Replay, Unchanged, decide
from coordinator.core.rules import FREE_RETURNS
from tests.unit.core import jobs
from tests.unit.core.jobs import NOW, PLAIN, TOKEN

S = JobState
LATER = NOW + 60_000


def retried(job: Job, now: int = LATER, **fields: object) -> Job:
    return jobs.after(decide(job, None, c.Retry(**fields), now))  # type: ignore[arg-type]


def taken_away(why: c.Taken, **fields: object) -> Job:
    """A job that a take-away has ended, while its session may be alive."""
    job, claim = jobs.running(retry=replace(PLAIN, max_retries=0, max_lease_losses=0))
    command = c.TakeAway(token=TOKEN, why=why, hold_ms=7_000)
    return jobs.after(decide(replace(job, **fields), claim, command, NOW))  # type: ignore[arg-type]


@pytest.mark.parametrize("job", [jobs.dead(), jobs.quarantined()], ids=lambda job: job.state.name)
def test_all_that_counts_towards_an_end_is_0_again_and_attempts_go_on(job: Job) -> None:
    worn = replace(job, failures=4, lease_losses=3, uncharged=20)

    after = retried(worn)

    assert (after.failures, after.lease_losses, after.uncharged) == (0, 0, 0)
    assert (after.attempt, after.attempts) == (job.attempt, job.attempts)
    assert (after.end_reason, after.settle_ms) == ("", 0)
    assert (after.state, after.ready_ms) == (S.PENDING, LATER)
    assert check_job(after, None) == []
    assert check_history([worn, after]) == []


def test_a_retried_job_has_all_its_attempts_again() -> None:
    job = retried(replace(jobs.dead(), failures=6))

    held, claim = jobs.claimed(job, TOKEN + 1)
    failed = jobs.after(decide(held, claim, c.Fail(token=TOKEN + 1, digest=b"d"), LATER))

    assert (failed.state, failed.failures, failed.attempt) == (S.SCHEDULED, 1, job.attempt + 1)
    assert failed.ready_ms == LATER + 1_000


def test_run_at_schedules_it_and_the_past_is_now() -> None:
    later = retried(jobs.dead(), run_at_ms=LATER + 5_000)

    assert (later.state, later.ready_ms, later.due_key_ms) == (S.SCHEDULED, LATER + 5_000, LATER + 5_000)
    assert later.terms.run_at_ms == LATER + 5_000
    assert retried(jobs.dead(), run_at_ms=1).state is S.PENDING
    assert retried(jobs.dead(), run_at_ms=1).ready_ms == LATER


@pytest.mark.parametrize("state", [S.SCHEDULED, S.PENDING, S.RUNNING])
def test_a_repeat_finds_the_job_waiting_or_running(state: S) -> None:
    job, claim = jobs.in_state(state)

    assert isinstance(decide(job, claim, c.Retry(), NOW), Unchanged)


def test_one_request_retries_a_job_once_even_if_it_died_again() -> None:
    again = jobs.claimed(retried(jobs.dead(), digest=b"request"), TOKEN + 1)
    died = jobs.after(decide(*again, c.Fail(token=TOKEN + 1, digest=b"d", no_retry=True), LATER))

    assert isinstance(decide(died, None, c.Retry(digest=b"request"), LATER), Unchanged)
    assert retried(died, digest=b"another").state is S.PENDING
    assert retried(died).state is S.PENDING


def test_a_repeat_that_comes_after_the_job_succeeded_is_no_error() -> None:
    held, claim = jobs.claimed(retried(jobs.dead(), digest=b"request"), TOKEN + 1)
    done = jobs.after(decide(held, claim, c.Complete(token=TOKEN + 1, digest=b"d"), LATER))

    assert isinstance(decide(done, None, c.Retry(digest=b"request"), LATER), Unchanged)
    assert jobs.reason(decide(done, None, c.Retry(digest=b"another"), LATER)) == "JOB_TERMINAL"
    assert jobs.reason(decide(done, None, c.Retry(), LATER)) == "JOB_TERMINAL"


def test_retries_within_a_millisecond_are_told_apart() -> None:
    first = retried(jobs.dead())
    second = retried(replace(first, state=S.DEAD, settle_ms=LATER))

    assert second.retry_ms > first.retry_ms


@pytest.mark.parametrize(
    ("why", "fields", "state"),
    [
        (c.Taken.TIMED_OUT, {}, S.DEAD),
        (c.Taken.UNDELIVERED, {"uncharged": FREE_RETURNS}, S.QUARANTINED),
    ],
)
def test_a_job_taken_away_waits_for_its_old_holder_after_a_retry_too(
    why: c.Taken, fields: dict[str, int], state: S
) -> None:
    """P8: the session may be alive; whoever promotes the job must have seen it waiting one TTL."""
    job = taken_away(why, **fields)

    after = retried(job, NOW + 1)

    assert job.state is state
    assert (after.state, after.hold_ms, after.ready_ms) == (S.SCHEDULED, 7_000, NOW + 7_001)
    assert after.due_key_ms == NOW + 7_001
    at_once = decide(after, None, c.Update(run_at_ms=NOW + 2), NOW + 2)
    assert isinstance(at_once, Unchanged) or jobs.after(at_once).state is S.SCHEDULED


def test_a_job_that_ran_out_of_time_while_on_hold_keeps_its_hold() -> None:
    job, claim = jobs.running(total_timeout_ms=3_000)
    command = c.TakeAway(token=TOKEN, why=c.Taken.UNDELIVERED, hold_ms=7_000)
    waiting = jobs.after(decide(job, claim, command, NOW))
    dead = jobs.after(decide(waiting, None, c.FallDue(), NOW + 3_000))

    assert dead.state is S.DEAD
    assert retried(dead, NOW + 3_001).hold_ms == 7_000


def test_a_job_whose_lease_ended_waits_for_nothing() -> None:
    assert retried(jobs.quarantined(), NOW).state is S.PENDING


def test_the_total_timeout_counts_from_the_retry() -> None:
    dead = jobs.after(decide(jobs.pending(total_timeout_ms=3_000), None, c.FallDue(), NOW + 3_000))

    after = retried(dead)

    assert after.due_key_ms == after.total_end_ms == LATER + 3_000
    assert isinstance(decide(after, None, c.FallDue(), LATER + 2_999), Unchanged)
    assert jobs.after(decide(after, None, c.FallDue(), LATER + 3_000)).end_reason == "total timeout"


def test_settlements_of_before_are_answered_as_they_were() -> None:
    job = retried(jobs.dead())

    replay = decide(job, None, c.Fail(token=TOKEN, digest=b"d", no_retry=True), LATER)

    assert isinstance(replay, Replay)
    assert replay.attempt.state_after is S.DEAD
    assert jobs.reason(decide(job, None, c.Complete(token=TOKEN, digest=b"d"), LATER)) == "CLAIM_LOST"


def test_a_dead_job_does_not_come_back_without_a_retry() -> None:
    dead, alive = jobs.dead(), retried(jobs.dead())

    assert check_history([dead, replace(alive, retry_ms=0)]) != []
    assert check_history([jobs.succeeded(), alive]) != []
