"""How attempts end: fencing, replays, counting, cancellation, holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import commands as c
from coordinator.core.job import ATTEMPTS_KEPT, AttemptOutcome, Claim, Job, JobState
from coordinator.core.machine import Decision, Guard, Replay, Unchanged, decide
from coordinator.core.retry import MAX_DELAY_MS
from coordinator.core.rules import FREE_RETURNS
from tests.unit.core import jobs
from tests.unit.core.jobs import NOW, PLAIN, TOKEN

S = JobState
SETTLEMENTS = [
    pytest.param(c.Complete(token=TOKEN, digest=b"d"), id="complete"),
    pytest.param(c.Fail(token=TOKEN, digest=b"d"), id="fail"),
    pytest.param(c.Release(token=TOKEN, digest=b"d"), id="release"),
]
TAKEN = c.TakeAway(token=TOKEN, why=c.Taken.UNDELIVERED, hold_ms=10_000)


def settled(job: Job, claim: Claim | None, command: c.Command, now: int = NOW) -> Job:
    return jobs.after(decide(job, claim, command, now))


class TestFencing:
    """P2: only the token of the present claim settles."""

    @pytest.mark.parametrize("command", SETTLEMENTS)
    @pytest.mark.parametrize("token", [0, 1, TOKEN - 1, TOKEN + 1, 2**44 + TOKEN])
    def test_any_other_token_changes_nothing(self, command: c.Settlement, token: int) -> None:
        job, claim = jobs.running()

        outcome = decide(job, claim, replace(command, token=token), NOW)

        assert jobs.reason(outcome) == "CLAIM_LOST"
        assert jobs.facts(outcome)["held"] == str(token)
        assert jobs.facts(outcome)["current"] == str(TOKEN)

    @pytest.mark.parametrize("command", SETTLEMENTS)
    def test_a_claim_that_has_vanished_settles_nothing(self, command: c.Settlement) -> None:
        job, _ = jobs.running()

        assert jobs.reason(decide(job, None, command, NOW)) == "CLAIM_LOST"

    @pytest.mark.parametrize("command", SETTLEMENTS)
    def test_token_0_matches_no_claim_and_no_attempt(self, command: c.Settlement) -> None:
        job, claim = jobs.running()
        lost = settled(job, None, c.Lose(token=0))
        bare = replace(command, token=0, digest=b"")

        assert jobs.reason(decide(job, replace(claim, token=0), bare, NOW)) == "CLAIM_LOST"
        assert jobs.reason(decide(lost, None, bare, NOW)) == "CLAIM_LOST"

    @pytest.mark.parametrize("command", SETTLEMENTS)
    def test_the_old_holder_cannot_settle_the_next_attempt(self, command: c.Settlement) -> None:
        job, _ = jobs.running()
        again, claim = jobs.claimed(settled(job, None, c.Lose(token=TOKEN)), TOKEN + 9)

        assert jobs.reason(decide(again, claim, command, NOW)) == "CLAIM_LOST"

    def test_a_taking_away_needs_the_token_too(self) -> None:
        job, claim = jobs.running()

        assert jobs.reason(decide(job, claim, replace(TAKEN, token=TOKEN - 1), NOW)) == "CLAIM_LOST"


class TestReplay:
    """P2: the same settlement again is answered as the first time."""

    @pytest.mark.parametrize("command", SETTLEMENTS)
    def test_the_same_content_is_answered_as_before(self, command: c.Settlement) -> None:
        job, claim = jobs.running()
        once = settled(job, claim, command)

        again = decide(once, None, command, NOW + 60_000)

        assert isinstance(again, Replay)
        assert again.attempt.state_after is once.state
        assert again.attempt.ready_ms_after == (0 if once.terminal else once.ready_ms)

    @pytest.mark.parametrize("command", SETTLEMENTS)
    def test_other_content_is_refused_and_the_first_stands(self, command: c.Settlement) -> None:
        job, claim = jobs.running()
        once = settled(job, claim, command)

        assert jobs.reason(decide(once, None, replace(command, digest=b"other"), NOW)) == "CLAIM_LOST"

    def test_another_kind_of_settlement_is_other_content(self) -> None:
        job, claim = jobs.running()
        once = settled(job, claim, c.Fail(token=TOKEN, digest=b"d"))

        assert jobs.reason(decide(once, None, c.Release(token=TOKEN, digest=b"d"), NOW)) == "CLAIM_LOST"

    @pytest.mark.parametrize("command", SETTLEMENTS)
    def test_an_attempt_that_was_lost_or_taken_has_nothing_to_replay(self, command: c.Settlement) -> None:
        job, claim = jobs.running()

        for ended in (settled(job, None, c.Lose(token=TOKEN)), settled(job, claim, TAKEN)):
            assert jobs.reason(decide(ended, None, replace(command, digest=b""), NOW)) == "CLAIM_LOST"

    def test_a_replay_works_while_somebody_else_runs_the_job(self) -> None:
        job, claim = jobs.running()
        fail = c.Fail(token=TOKEN, digest=b"d", retry_delay_ms=0)
        again, other = jobs.claimed(settled(job, claim, fail), TOKEN + 9)

        assert isinstance(decide(again, other, fail, NOW), Replay)

    def test_the_last_eight_attempts_are_remembered_and_no_more(self) -> None:
        job, release = jobs.pending(), c.Release(token=0, digest=b"d")
        for number in range(1, ATTEMPTS_KEPT + 2):
            held, claim = jobs.claimed(job, TOKEN + number)
            job = settled(held, claim, replace(release, token=TOKEN + number))

        assert [attempt.number for attempt in job.attempts] == [2, 3, 4, 5, 6, 7, 8, 9]
        assert jobs.reason(decide(job, None, replace(release, token=TOKEN + 1), NOW)) == "CLAIM_LOST"
        assert isinstance(decide(job, None, replace(release, token=TOKEN + 2), NOW), Replay)


class TestCounting:
    """Failures, lease losses and free returns are counted apart."""

    def test_retries_are_used_up_after_max_retries_plus_one_failures(self) -> None:
        job = jobs.pending(retry=replace(PLAIN, max_retries=2))
        for number in range(1, 4):
            held, claim = jobs.claimed(job, TOKEN + number)
            job = settled(held, claim, c.Fail(token=TOKEN + number, digest=b"d", retry_delay_ms=0))
            assert job.failures == number

        assert (job.state, job.end_reason) == (S.DEAD, "retries used up")

    def test_a_crash_burns_no_retry(self) -> None:
        job, _ = jobs.running(retry=replace(PLAIN, max_retries=0))

        lost = settled(job, None, c.Lose(token=TOKEN))

        assert (lost.state, lost.failures, lost.lease_losses) == (S.PENDING, 0, 1)

    def test_a_holder_too_many_dies_and_the_job_is_quarantined(self) -> None:
        job = jobs.pending(retry=replace(PLAIN, max_lease_losses=1))
        for number in (1, 2):
            held, _ = jobs.claimed(job, TOKEN + number)
            job = settled(held, None, c.Lose(token=TOKEN + number))

        assert job.state is S.QUARANTINED

    @pytest.mark.parametrize("command", [c.Release(token=TOKEN, digest=b"d"), TAKEN])
    def test_the_21st_return_counts_as_a_lease_loss(self, command: c.Command) -> None:
        job, claim = jobs.running()

        last_free = settled(replace(job, uncharged=FREE_RETURNS - 1), claim, command)
        charged = settled(replace(job, uncharged=FREE_RETURNS), claim, command)

        assert (last_free.uncharged, last_free.lease_losses) == (20, 0)
        assert (charged.uncharged, charged.lease_losses) == (21, 1)

    def test_a_job_that_circles_is_quarantined_in_the_end(self) -> None:
        job, claim = jobs.running()
        circling = replace(job, uncharged=FREE_RETURNS, lease_losses=PLAIN.max_lease_losses)

        ended = settled(circling, claim, c.Release(token=TOKEN, digest=b"d"))

        assert ended.state is S.QUARANTINED
        assert "21 times" in ended.end_reason

    def test_a_return_is_free_though_many_holders_have_died(self) -> None:
        job, claim = jobs.running()

        assert settled(replace(job, lease_losses=3), claim, TAKEN).state is S.SCHEDULED

    @pytest.mark.parametrize(("failure", "policy"), [("Bad", PLAIN), ("Fatal", PLAIN)])
    def test_a_type_that_is_not_retryable_ends_the_job(self, failure: str, policy: object) -> None:
        job, claim = jobs.running(retry=replace(PLAIN, non_retryable_types=("Fatal",)))

        ended = settled(job, claim, c.Fail(token=TOKEN, digest=b"d", failure_type=failure))

        assert ended.state is (S.DEAD if failure == "Fatal" else S.SCHEDULED)


class TestDelay:
    """When it runs again."""

    def test_retry_later_of_zero_is_pending_at_once(self) -> None:
        """Fault case 057."""
        job, claim = jobs.running()

        released = settled(job, claim, c.Release(token=TOKEN, digest=b"d", delay_ms=0))

        assert (released.state, released.failures, released.attempt) == (S.PENDING, 0, 1)

    @pytest.mark.parametrize(("asked", "given"), [(-1, 0), (0, 0), (700, 700), (10**15, MAX_DELAY_MS)])
    def test_a_delay_is_neither_negative_nor_endless(self, asked: int, given: int) -> None:
        job, claim = jobs.running()

        for command in (
            c.Release(token=TOKEN, digest=b"d", delay_ms=asked),
            c.Fail(token=TOKEN, digest=b"d", retry_delay_ms=asked),
        ):
            waiting = settled(job, claim, command)
            assert waiting.ready_ms == NOW + given
            assert waiting.state is (S.SCHEDULED if given else S.PENDING)

    def test_a_lost_job_is_claimable_at_once(self) -> None:
        job, _ = jobs.running()

        assert settled(job, None, c.Lose(token=TOKEN)).state is S.PENDING


class TestHold:
    """P8: what is taken from a live session waits for its holder to hear of it."""

    @pytest.mark.parametrize("why", [c.Taken.UNDELIVERED, c.Taken.TIMED_OUT])
    def test_a_job_taken_away_waits_one_ttl(self, why: c.Taken) -> None:
        job, claim = jobs.running()

        held = settled(job, claim, replace(TAKEN, why=why))

        assert (held.state, held.hold_ms, held.ready_ms) == (S.SCHEDULED, 10_000, NOW + 10_000)

    def test_a_longer_backoff_stands(self) -> None:
        job, claim = jobs.running(retry=replace(PLAIN, initial_ms=60_000))

        assert settled(job, claim, replace(TAKEN, why=c.Taken.TIMED_OUT)).ready_ms == NOW + 60_000

    def test_run_at_does_not_shorten_the_hold(self) -> None:
        job, claim = jobs.running()
        held = settled(job, claim, TAKEN)

        assert isinstance(decide(held, None, c.Update(run_at_ms=NOW), NOW + 1), Unchanged)
        later = settled(held, None, c.Update(run_at_ms=NOW + 20_000), NOW + 1)
        assert (later.state, later.ready_ms, later.hold_ms) == (S.SCHEDULED, NOW + 20_000, 10_000)

    def test_a_hold_ends_when_it_falls_due(self) -> None:
        job, claim = jobs.running()
        held = settled(job, claim, TAKEN)

        assert isinstance(decide(held, None, c.FallDue(), NOW + 9_999), Unchanged)
        free = settled(held, None, c.FallDue(), NOW + 10_000)
        assert (free.state, free.hold_ms) == (S.PENDING, 0)

    def test_a_ttl_of_0_still_holds(self) -> None:
        job, claim = jobs.running()

        assert settled(job, claim, replace(TAKEN, hold_ms=0)).state is S.SCHEDULED


class TestCancellation:
    """A job that is asked to stop is CANCELLED however its attempt ends, unless it succeeds."""

    ENDS = (
        pytest.param(c.Fail(token=TOKEN, digest=b"d"), True, id="fails"),
        pytest.param(c.Fail(token=TOKEN, digest=b"d", no_retry=True), True, id="fails for good"),
        pytest.param(c.Release(token=TOKEN, digest=b"d"), True, id="is released"),
        pytest.param(c.Lose(token=TOKEN), False, id="is lost"),
        pytest.param(TAKEN, True, id="is undelivered"),
        pytest.param(replace(TAKEN, why=c.Taken.TIMED_OUT), True, id="times out"),
        pytest.param(replace(TAKEN, why=c.Taken.CANCELLED), True, id="does not stop in its grace"),
    )

    @pytest.mark.parametrize(("command", "claim_there"), ENDS)
    def test_it_ends_cancelled_when_it(self, command: c.Command, claim_there: bool) -> None:
        job, claim = jobs.running(stop=True)

        ended = settled(job, claim if claim_there else None, command)

        assert (ended.state, ended.end_reason) == (S.CANCELLED, "enough")
        assert not ended.cancel_requested
        assert ended.settle_ms == NOW
        assert ended.attempts[-1].state_after is S.CANCELLED

    def test_success_in_spite_of_it_is_success(self) -> None:
        job, claim = jobs.running(stop=True)

        assert settled(job, claim, c.Complete(token=TOKEN, digest=b"d")).state is S.SUCCEEDED

    def test_asking_twice_changes_nothing(self) -> None:
        job, claim = jobs.running(stop=True)

        assert isinstance(decide(job, claim, c.Cancel(reason="again"), NOW), Unchanged)

    def test_a_forced_cancel_that_nobody_asked_for_takes_nothing(self) -> None:
        job, claim = jobs.running()

        assert isinstance(decide(job, claim, replace(TAKEN, why=c.Taken.CANCELLED), NOW), Unchanged)

    def test_three_endings_have_three_stored_reasons(self) -> None:
        """Fault case 053: a timeout is not a cancellation, nor is a worker that stops."""
        job, claim = jobs.running()
        stopping, same = jobs.running(stop=True)

        outcomes = [
            settled(job, claim, replace(TAKEN, why=c.Taken.TIMED_OUT)).attempts[-1].outcome,
            settled(stopping, same, replace(TAKEN, why=c.Taken.CANCELLED)).attempts[-1].outcome,
            settled(job, claim, c.Release(token=TOKEN, digest=b"d", reason="stopping")).attempts[-1].outcome,
        ]

        assert outcomes == [AttemptOutcome.TIMED_OUT, AttemptOutcome.CANCELLED, AttemptOutcome.RELEASED]


class TestLoss:
    """A loss is what it is only while the claim is gone."""

    def test_a_loss_of_a_held_claim_is_not_believed(self) -> None:
        job, claim = jobs.running()

        assert isinstance(decide(job, claim, c.Lose(token=TOKEN), NOW), Unchanged)

    def test_a_loss_decided_without_the_claim_is_guarded(self) -> None:
        job, _ = jobs.running()

        outcome = decide(job, None, c.Lose(token=TOKEN), NOW)

        assert isinstance(outcome, Decision)
        assert outcome.guard is Guard.UNHELD


class TestClaiming:
    """A claim starts the next attempt."""

    def test_attempts_are_numbered_from_1_and_name_their_session(self) -> None:
        job, _ = jobs.running()
        again, _ = jobs.claimed(settled(job, None, c.Lose(token=TOKEN)))

        assert [(a.number, a.session) for a in again.attempts] == [(1, jobs.SESSION), (2, jobs.SESSION)]
        assert again.attempt == 2
        assert again.current == again.attempts[-1]

    def test_a_held_job_names_its_holder(self) -> None:
        job, claim = jobs.running()

        outcome = decide(job, claim, c.ClaimIt(claim=replace(claim, session="other")), NOW)

        assert jobs.reason(outcome) == "CLAIM_HELD"
        assert jobs.facts(outcome)["holder"] == jobs.SESSION


class TestResult:
    """Small results lie in the record, larger ones beside it."""

    @pytest.mark.parametrize(("size", "inline"), [(0, True), (1_024, True), (1_025, False)])
    def test_a_result_of(self, size: int, inline: bool) -> None:
        job, claim = jobs.running()

        outcome = decide(job, claim, c.Complete(token=TOKEN, digest=b"d", result=b"r" * size), NOW)

        assert isinstance(outcome, Decision)
        ended = jobs.after(outcome)
        assert ended.result_size == size
        assert len(ended.result) == (size if inline else 0)
        assert len(outcome.big_result) == (0 if inline else size)
