"""Locks that jobs name, over random histories; each bug that is put in is found."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from coordinator.core import commands as c
from tests.property.job_lock_world import Bugs, JobLockWorld

RUN = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None)
HUNT = settings(RUN, max_examples=400, phases=[Phase.generate], print_blob=False)


def test_no_two_runs_hold_one_lock_and_every_end_gives_back() -> None:
    JobLockWorld.met.clear()
    run_state_machine_as_test(JobLockWorld, settings=RUN)

    ends = {"complete", "fail", "release", "take", "cancel", "cancel-fail", "lose"}
    assert {what for what in (*ends, "parked", "lost", "claimed") if not JobLockWorld.met[what]} == set()


@pytest.mark.parametrize(
    "bugs",
    [
        pytest.param(Bugs(blind=True), id="a claim that compares nothing"),
        pytest.param(Bugs(together=True), id="two additions to one lock in one transaction"),
        *(
            pytest.param(Bugs(keeps=command), id=f"{command.__name__} keeps the locks")
            for command in (c.Complete, c.Fail, c.Release, c.TakeAway)
        ),
    ],
)
def test_a_bug_that_is_put_in_is_found(bugs: Bugs) -> None:
    class Broken(JobLockWorld):
        """With a bug."""

    Broken.bugs = bugs
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=HUNT)
