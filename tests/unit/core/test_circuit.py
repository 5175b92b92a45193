"""What the end of an attempt says of its type, and what ends a probe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import commands as c
from coordinator.core.circuit import CircuitPolicy, Counts, Outcome, Probe, outcome_of, verdict_of, why_open
from coordinator.core.job import Job
from coordinator.core.machine import decide
from tests.unit.core.jobs import NOW, PLAIN, TOKEN, after, claimed, pending, quarantined, running, succeeded

DONE, BAD, LOST, NEITHER = Outcome.SUCCESS, Outcome.FAILURE, Outcome.LEASE_LOSS, Outcome.NEITHER
PROBE = Probe(job_id="j", attempt=1)

ENDS: list[tuple[c.Command, Outcome, Outcome]] = [
    (c.Complete(token=TOKEN, digest=b""), DONE, DONE),
    (c.Fail(token=TOKEN, digest=b""), BAD, BAD),
    (c.Fail(token=TOKEN, digest=b"", no_retry=True), BAD, BAD),
    (c.TakeAway(token=TOKEN, why=c.Taken.TIMED_OUT, hold_ms=1), BAD, BAD),
    (c.TakeAway(token=TOKEN, why=c.Taken.UNDELIVERED, hold_ms=1), NEITHER, NEITHER),
    (c.Release(token=TOKEN, digest=b""), NEITHER, NEITHER),
    (c.Lose(token=TOKEN), NEITHER, BAD),
]


def ended(command: c.Command, *, stop: bool = False) -> Job:
    job, claim = running(stop=stop)
    held = None if isinstance(command, c.Lose) else claim
    return after(decide(job, held, command, NOW))


@pytest.mark.parametrize(("command", "counts", "of_a_probe"), ENDS)
def test_an_end_counts_for_the_window_and_for_a_probe(
    command: c.Command, counts: Outcome, of_a_probe: Outcome
) -> None:
    job = ended(command)

    assert outcome_of(job) is counts
    assert verdict_of(job, PROBE) is of_a_probe


@pytest.mark.parametrize("command", [c.Fail(token=TOKEN, digest=b""), c.Lose(token=TOKEN)])
def test_a_job_that_was_asked_to_stop_says_nothing_of_its_type(command: c.Command) -> None:
    job = ended(command, stop=True)

    assert outcome_of(job) is NEITHER
    assert verdict_of(job, PROBE) is NEITHER


def test_a_loss_counts_from_the_second_of_a_job_on_or_if_it_quarantines() -> None:
    again, _ = claimed(ended(c.Lose(token=TOKEN)))

    assert outcome_of(after(decide(again, None, c.Lose(token=TOKEN + 1), NOW))) is LOST
    assert outcome_of(quarantined()) is LOST


def test_a_probe_is_judged_by_its_own_attempt_alone() -> None:
    failed_first, _ = claimed(ended(c.Lose(token=TOKEN)))
    done = succeeded()

    assert verdict_of(failed_first, PROBE) is BAD
    assert verdict_of(failed_first, Probe(job_id="j", attempt=2)) is None, "it runs"
    assert verdict_of(done, Probe(job_id="j", attempt=2)) is NEITHER, "it never began"
    assert verdict_of(pending(), PROBE) is NEITHER
    assert verdict_of(None, PROBE) is NEITHER


def test_one_bad_job_opens_nothing_by_the_defaults_and_two_do() -> None:
    """A job is quarantined by the loss after ``max_lease_losses``, and its first does not count."""
    policy, each = CircuitPolicy(), PLAIN.max_lease_losses
    one = Counts(attempts=each + 1, lease_losses=each, lost_sessions=each)
    two = Counts(attempts=2 * (each + 1), lease_losses=2 * each, lost_sessions=2 * each)

    assert why_open(one, policy) == ""
    assert "were lost" in why_open(two, policy)
    assert why_open(replace(two, lost_sessions=1), policy) == "", "one worker that loses many"


def test_a_fleet_that_is_killed_once_opens_nothing() -> None:
    job = ended(c.Lose(token=TOKEN))

    assert outcome_of(job) is NEITHER
    assert why_open(Counts(attempts=5_000), CircuitPolicy()) == ""
