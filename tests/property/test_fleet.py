"""Promises P1 to P4 over random histories of a fleet, judged by an oracle of its own."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.fleet import Fleet

RUN = settings(max_examples=300, stateful_step_count=50, deadline=None, derandomize=True, database=None)


def test_a_fleet_keeps_its_promises_whatever_happens() -> None:
    run_state_machine_as_test(Fleet, settings=RUN)
