"""Promises P1 to P4 over random histories of a fleet, judged by an oracle of its own."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from coordinator.core import commands as c
from coordinator.core.machine import TRANSITIONS
from tests.property.fleet import Fleet

RUN = settings(max_examples=400, stateful_step_count=50, deadline=None, derandomize=True, database=None)

REFUSED = {
    (c.ClaimIt, "CLAIM_HELD"),
    (c.ClaimIt, "JOB_TERMINAL"),
    (c.ClaimIt, "NOT_CLAIMABLE"),
    (c.ClaimIt, "unchanged"),
    *((kind, answer) for kind in (c.Complete, c.Fail, c.Release) for answer in ("CLAIM_LOST", "replay")),
    (c.TakeAway, "unchanged"),
    (c.Lose, "unchanged"),
    (c.FallDue, "unchanged"),
    (c.Update, "unchanged"),
    (c.Retry, "unchanged"),
    (c.Retry, "JOB_TERMINAL"),
}


@pytest.fixture(scope="module")
def run() -> type[Fleet]:
    """The fleet, run once for all tests of this module."""
    Fleet.reached.clear()
    Fleet.answers.clear()
    run_state_machine_as_test(Fleet, settings=RUN)
    return Fleet


def test_a_fleet_keeps_its_promises_whatever_happens(run: type[Fleet]) -> None:
    assert run.reached


def test_the_run_takes_every_transition_of_the_table(run: type[Fleet]) -> None:
    rows = {
        (state, command, target) for (state, command), row in TRANSITIONS.items() for target in row.targets
    }

    assert rows - set(run.reached) == set()


def test_the_run_meets_every_answer_that_writes_nothing(run: type[Fleet]) -> None:
    assert set(run.answers) >= REFUSED
