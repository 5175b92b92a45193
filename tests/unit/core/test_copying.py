"""A fast copy is the copy that ``dataclasses.replace`` makes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from coordinator.core.copying import changed
from coordinator.core.job import Attempt, Job, JobState, Terms
from tests.unit.core import jobs


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("field", [field.name for field in fields(Job)])
def test_a_copy_is_that_of_replace(state: JobState, field: str) -> None:
    job, _ = jobs.in_state(state)
    before = replace(job)
    change: dict[str, Any] = {field: object()}

    assert changed(job, **change) == replace(job, **change)
    assert job == before


@pytest.mark.parametrize("value", [jobs.terms(), Attempt(number=1, session="s", start_ms=1)])
def test_a_copy_without_changes_is_equal_and_another(value: Terms | Attempt) -> None:
    copy = changed(value)

    assert copy == value
    assert copy is not value


def test_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError):
        changed(jobs.pending(), sate=JobState.DEAD)  # type: ignore[call-arg]


def test_the_copied_values_run_no_code_when_they_are_made() -> None:
    assert not any(hasattr(kind, "__post_init__") for kind in (Job, Attempt, Terms))
