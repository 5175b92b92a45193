"""docs/retries.md: its rows are those of the transition table, and each names a test that exists."""

from __future__ import annotations

import re

import pytest

from coordinator.core import commands as c
from coordinator.core.job import JobState
from coordinator.core.machine import TRANSITIONS
from coordinator.core.retry import RetryPolicy
from tests.architecture.source_tree import ROOT
from tests.architecture.test_guarantees_doc import missing

TEXT = (ROOT / "docs" / "retries.md").read_text()
STATES = (ROOT / "docs" / "states.md").read_text()
TESTS = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
ENDS = "How an attempt ends"
MOVES = "What ends or moves a job without an attempt"


def rows(text: str, title: str) -> list[list[str]]:
    """Rows of the table under the heading that begins with *title*, its head left out."""
    section = re.split(r"^## ", text[text.index(f"## {title}") + 3 :], flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_way_in_which_an_attempt_ends_is_told_as_it_is_computed() -> None:
    assert [row[:5] for row in rows(TEXT, ENDS)] == rows(STATES, ENDS)


@pytest.mark.parametrize("title", [ENDS, MOVES])
def test_every_row_names_a_test(title: str) -> None:
    assert [] == [row[0] for row in rows(TEXT, title) if not TESTS.fullmatch(row[-1])]


def test_every_test_that_the_document_names_exists() -> None:
    named = TESTS.findall(TEXT)

    assert named
    assert [] == [f"{path}::{test}" for path, test in named if missing(path, test)]


def test_what_moves_a_job_without_an_attempt_is_what_the_transition_table_says() -> None:
    told = {
        (JobState[state], command, JobState[target])
        for _, states, command, targets, _ in rows(TEXT, MOVES)
        for state in states.split(", ")
        for target in targets.split(", ")
    }
    table = {
        (state, command.__name__, target)
        for (state, command), row in TRANSITIONS.items()
        for target in row.targets
        if command in (c.FallDue, c.Cancel, c.Retry)
    }

    assert told == table


def test_the_defaults_are_those_of_the_code() -> None:
    policy = RetryPolicy()
    defaults = {row[0].strip("`"): row[1] for row in rows(TEXT, "The policy")}

    assert defaults == {
        "max_retries": str(policy.max_retries),
        "initial_delay": f"{policy.initial_ms // 1000} s",
        "multiplier": f"{policy.multiplier:g}",
        "max_delay": f"{policy.cap_ms // 60_000} min",
        "jitter": f"{policy.jitter:g}",
        "non_retryable_types": "none",
        "max_lease_losses": str(policy.max_lease_losses),
    }
