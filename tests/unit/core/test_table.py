"""Every pair of state and command: what it leads to, or why it is refused. All are listed."""

from __future__ import annotations

from typing import get_args

import pytest

from coordinator.core import commands as c
from coordinator.core.job import FAILED, TERMINAL, Claim, JobState
from coordinator.core.machine import TRANSITIONS, Decision, Guard, Refusal, Replay, Unchanged, decide
from tests.unit.core import jobs
from tests.unit.core.jobs import NOW, TOKEN

S = JobState
CLAIM = Claim(session="session-b", attempt=1, nonce=b"m", start_ms=NOW)

COMMANDS: dict[type, c.Command] = {
    c.Submit: c.Submit(namespace="default", job_id="j", terms=jobs.terms(digest=b"other content")),
    c.ClaimIt: c.ClaimIt(claim=CLAIM),
    c.Complete: c.Complete(token=TOKEN, digest=b"new"),
    c.Fail: c.Fail(token=TOKEN, digest=b"new"),
    c.Release: c.Release(token=TOKEN, digest=b"new"),
    c.Cancel: c.Cancel(),
    c.Lose: c.Lose(token=TOKEN),
    c.TakeAway: c.TakeAway(token=TOKEN, why=c.Taken.TIMED_OUT, hold_ms=2_000),
    c.FallDue: c.FallDue(),
    c.Update: c.Update(priority=1),
    c.Retry: c.Retry(),
    c.Delete: c.Delete(),
    c.Repair: c.Repair(),
}

LOST = "CLAIM_LOST"
OVER = "JOB_TERMINAL"
NOT_NOW = "NOT_CLAIMABLE"
SAME = "unchanged"

# columns: SCHEDULED, PENDING, RUNNING, SUCCEEDED, DEAD, CANCELLED, QUARANTINED
EXPECTED: dict[type, tuple[str, ...]] = {
    c.Submit: ("JOB_EXISTS",) * 7,
    c.ClaimIt: (NOT_NOW, "RUNNING", "CLAIM_HELD", OVER, OVER, OVER, OVER),
    c.Complete: (LOST, LOST, "SUCCEEDED", LOST, LOST, LOST, LOST),
    c.Fail: (LOST, LOST, "SCHEDULED", LOST, LOST, LOST, LOST),
    c.Release: (LOST, LOST, "PENDING", LOST, LOST, LOST, LOST),
    c.Cancel: ("CANCELLED", "CANCELLED", "RUNNING", OVER, OVER, SAME, OVER),
    c.Lose: (SAME, SAME, SAME, SAME, SAME, SAME, SAME),
    c.TakeAway: (LOST, LOST, "SCHEDULED", LOST, LOST, LOST, LOST),
    c.FallDue: (SAME, SAME, SAME, SAME, SAME, SAME, SAME),
    c.Update: ("SCHEDULED", "PENDING", NOT_NOW, OVER, OVER, OVER, OVER),
    c.Retry: (SAME, SAME, SAME, OVER, "PENDING", OVER, "PENDING"),
    c.Delete: (NOT_NOW, NOT_NOW, NOT_NOW, "deleted", "deleted", "deleted", "deleted"),
    c.Repair: ("SCHEDULED", "PENDING", "RUNNING", SAME, SAME, SAME, SAME),
}

PAIRS = [
    pytest.param(state, kind, expected, id=f"{state.name}-{kind.__name__}")
    for kind, row in EXPECTED.items()
    for state, expected in zip(S, row, strict=True)
]


def test_the_list_of_pairs_is_complete() -> None:
    assert set(EXPECTED) == set(COMMANDS) == set(get_args(c.Command))
    assert len(PAIRS) == len(S) * len(get_args(c.Command))


@pytest.mark.parametrize(("state", "kind", "expected"), PAIRS)
def test_a_pair_leads_where_the_table_says_or_is_refused(state: S, kind: type, expected: str) -> None:
    job, claim = jobs.in_state(state)

    outcome = decide(job, claim, COMMANDS[kind], NOW)

    match outcome:
        case Decision(after, guard, _):
            assert expected == (after.state.name if after is not None else "deleted")
            row = TRANSITIONS[state, kind]
            assert (after.state if after is not None else None) in row.targets
            assert guard is row.guard
        case Unchanged(same):
            assert expected == SAME
            assert same is job
        case Refusal(reason, message, facts):
            assert expected == reason
            assert message
            assert facts["job_id"] == "j"
            assert facts["state"] == state.name
        case Replay():
            pytest.fail("nothing was said before")


@pytest.mark.parametrize("kind", [kind for kind in COMMANDS if kind is not c.Submit])
def test_a_job_that_does_not_exist_is_not_found(kind: type) -> None:
    assert jobs.reason(decide(None, None, COMMANDS[kind], NOW)) == "JOB_NOT_FOUND"


def test_every_row_of_the_table_is_one_of_the_pairs() -> None:
    assert all(kind in EXPECTED and state in S for state, kind in TRANSITIONS)


@pytest.mark.parametrize("kind", [c.Complete, c.Fail, c.Release, c.TakeAway])
def test_what_ends_a_claim_by_token_compares_the_claim(kind: type) -> None:
    assert TRANSITIONS[S.RUNNING, kind].guard is Guard.HELD


def test_a_loss_compares_that_the_claim_is_absent() -> None:
    assert TRANSITIONS[S.RUNNING, c.Lose].guard is Guard.UNHELD


def test_a_claim_compares_ready_key_and_witness() -> None:
    assert TRANSITIONS[S.PENDING, c.ClaimIt].guard is Guard.READY


def test_no_terminal_state_is_left_but_by_deletion_and_failed_ones_by_a_retry() -> None:
    left = {(state, kind) for state, kind in TRANSITIONS if state in TERMINAL}

    assert left == {(state, c.Delete) for state in TERMINAL} | {(state, c.Retry) for state in FAILED}


def test_a_retry_compares_that_nobody_has_taken_the_unique_key() -> None:
    assert {TRANSITIONS[state, c.Retry].guard for state in FAILED} == {Guard.REVIVE}


def test_submission_compares_absence() -> None:
    outcome = decide(None, None, COMMANDS[c.Submit], NOW)

    assert isinstance(outcome, Decision)
    assert outcome.guard is Guard.ABSENT


class TestSubmittingAgain:
    """The same id once more."""

    def test_with_the_same_content_is_the_same_job(self) -> None:
        job = jobs.succeeded()

        outcome = decide(job, None, c.Submit(namespace="default", job_id="j", terms=jobs.terms()), NOW + 5)

        assert isinstance(outcome, Unchanged)

    def test_with_the_same_request_and_other_content_names_the_request(self) -> None:
        job = jobs.pending(request_digest=b"request")
        terms = jobs.terms(request_digest=b"request", digest=b"other content")

        outcome = decide(job, None, c.Submit(namespace="default", job_id="j", terms=terms), NOW)

        assert jobs.reason(outcome) == "REQUEST_ID_REUSED"


class TestTime:
    """What time alone does."""

    def test_a_scheduled_job_becomes_pending_at_its_time_and_not_before(self) -> None:
        job = jobs.scheduled(run_in=5_000)

        assert isinstance(decide(job, None, c.FallDue(), NOW + 4_999), Unchanged)
        assert jobs.after(decide(job, None, c.FallDue(), NOW + 5_000)).state is S.PENDING

    def test_a_run_at_in_the_past_is_now(self) -> None:
        assert jobs.scheduled(run_in=-5_000).state is S.PENDING
        assert jobs.scheduled(run_in=-5_000).ready_ms == NOW

    def test_a_queue_timeout_ends_in_dead_and_says_so(self) -> None:
        job = jobs.pending(queue_timeout_ms=1_000)

        assert isinstance(decide(job, None, c.FallDue(), NOW + 999), Unchanged)
        ended = jobs.after(decide(job, None, c.FallDue(), NOW + 1_000))
        assert (ended.state, ended.end_reason) == (S.DEAD, "queue timeout")

    def test_a_total_timeout_ends_a_job_that_backs_off(self) -> None:
        job, claim = jobs.running(total_timeout_ms=3_000)
        waiting = jobs.after(decide(job, claim, c.Fail(token=TOKEN, digest=b"d", retry_delay_ms=9_000), NOW))

        assert waiting.due_key_ms == NOW + 3_000
        ended = jobs.after(decide(waiting, None, c.FallDue(), NOW + 3_000))
        assert (ended.state, ended.end_reason) == (S.DEAD, "total timeout")

    def test_a_job_out_of_time_is_not_claimed(self) -> None:
        job = jobs.pending(queue_timeout_ms=1_000)

        assert isinstance(decide(job, None, c.ClaimIt(claim=CLAIM), NOW + 1_000), Unchanged)

    def test_a_job_without_timeouts_has_a_due_key_only_while_scheduled(self) -> None:
        assert jobs.scheduled(run_in=5_000).due_key_ms == NOW + 5_000
        assert jobs.pending().due_key_ms == 0
        assert jobs.running(queue_timeout_ms=5, total_timeout_ms=5)[0].due_key_ms == 0

    def test_the_due_key_stands_at_the_earliest_moment(self) -> None:
        both = {"queue_timeout_ms": 4_000, "total_timeout_ms": 3_000}

        assert jobs.pending(queue_timeout_ms=4_000).due_key_ms == NOW + 4_000
        assert jobs.pending(**both).due_key_ms == NOW + 3_000
        assert jobs.scheduled(run_in=2_000, **both).due_key_ms == NOW + 2_000
        assert jobs.scheduled(run_in=9_000, **both).due_key_ms == NOW + 3_000


class TestUpdate:
    """What may change while a job waits."""

    def test_a_new_priority_moves_the_rank(self) -> None:
        job = jobs.pending(priority=5)

        assert jobs.after(decide(job, None, c.Update(priority=1), NOW)).rank.ms == NOW + 1_000

    def test_run_at_in_the_future_schedules_a_waiting_job(self) -> None:
        moved = jobs.after(decide(jobs.pending(), None, c.Update(run_at_ms=NOW + 9), NOW))

        assert (moved.state, moved.ready_ms, moved.due_key_ms) == (S.SCHEDULED, NOW + 9, NOW + 9)

    def test_run_at_now_makes_a_scheduled_job_claimable(self) -> None:
        assert jobs.after(decide(jobs.scheduled(), None, c.Update(run_at_ms=NOW), NOW)).state is S.PENDING

    def test_run_at_now_does_not_cost_a_waiting_job_its_place(self) -> None:
        assert isinstance(decide(jobs.pending(), None, c.Update(run_at_ms=0), NOW + 7_000), Unchanged)

    def test_what_is_so_already_is_not_written(self) -> None:
        assert isinstance(decide(jobs.pending(), None, c.Update(priority=3), NOW), Unchanged)
