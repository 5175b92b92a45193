"""A fast copy is the copy that ``dataclasses.replace`` makes, a quick class one like its dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from coordinator.core import commands as c
from coordinator.core.copying import changed, quick
from coordinator.core.job import Attempt, Job, JobState, Terms
from tests.unit.core import jobs


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("name", [member.name for member in fields(Job)])
def test_a_copy_is_that_of_replace(state: JobState, name: str) -> None:
    job, _ = jobs.in_state(state)
    before = replace(job)
    change: dict[str, Any] = {name: object()}

    assert changed(job, **change) == replace(job, **change)
    assert job == before


@pytest.mark.parametrize("value", [jobs.terms(), Attempt(number=1, session="s", start_ms=1)])
def test_a_copy_without_changes_is_equal_and_another(value: Terms | Attempt) -> None:
    copy = changed(value)

    assert copy == value
    assert copy is not value
    assert type(copy) is type(value)


def test_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(TypeError):
        changed(jobs.pending(), sate=JobState.DEAD)  # type: ignore[call-arg]


def test_the_copied_values_run_no_code_when_they_are_made() -> None:
    assert not any(hasattr(kind, "__post_init__") for kind in (Job, Attempt, Terms))


@pytest.mark.parametrize("wrong", [{}, {"token": 1, "digest": b"", "no_such": 2}, {"token": 1, "token ": 1}])
def test_a_quick_class_refuses_the_arguments_that_its_dataclass_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        c.Complete(**wrong)


def test_a_quick_class_makes_a_default_of_its_own_for_each_value() -> None:
    @quick
    @dataclass(frozen=True, slots=True)
    class Basket:
        owner: str
        things: list[str] = field(default_factory=list, kw_only=True)
        size: int = 1

    assert Basket("a").things is not Basket("b").things
    assert Basket("a", 2, things=["x"]) == Basket("a", things=["x"], size=2)


def test_a_class_that_checks_its_fields_or_has_no_slots_is_not_made_quick() -> None:
    @dataclass(frozen=True)
    class Loose:
        size: int

    with pytest.raises(TypeError, match="slot"):
        quick(Loose)
    with pytest.raises(TypeError, match="__post_init__"):
        quick(Checked)


@dataclass(frozen=True, slots=True)
class Checked:
    size: int

    def __post_init__(self) -> None:
        assert self.size
