"""Which follow-ups of a completion are created, and what refuses all of them."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.core.commands import Submit
from coordinator.core.follow_ups import NOTHING, Standing, admit, follow_up_job_id
from coordinator.core.job import Job, JobState
from coordinator.core.machine import Refusal
from coordinator.errors import Reason
from tests.support.builders import NOW_MS, a_job, terms

PARENT = a_job("parent", unique_key="u")


def wish(job_id: str, **fields: Any) -> Submit:
    return Submit(namespace="default", job_id=job_id, terms=terms(**{"digest": job_id.encode(), **fields}))


def stands(job_id: str, **fields: Any) -> Job:
    return a_job(job_id, **{"digest": job_id.encode(), **fields})


def test_what_is_not_there_is_created() -> None:
    created = admit(PARENT, [wish("a"), wish("b")], [NOTHING, NOTHING], NOW_MS)
    assert isinstance(created, dict)
    jobs = [decision.job for decision in created.values() if decision.job is not None]
    assert [(job.job_id, job.state) for job in jobs] == [("a", JobState.PENDING), ("b", JobState.PENDING)]


def test_what_stands_with_the_same_content_counts_as_submitted() -> None:
    created = admit(PARENT, [wish("a"), wish("b")], [Standing(job=stands("a")), NOTHING], NOW_MS)
    assert isinstance(created, dict)
    assert list(created) == [1]


def test_another_job_with_its_id_refuses_all() -> None:
    found = [NOTHING, Standing(job=stands("b", digest=b"other"))]
    refusal = admit(PARENT, [wish("a"), wish("b")], found, NOW_MS)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.JOB_EXISTS
    assert refusal.metadata == {"job_id": "b", "state": "PENDING", "follow_up": "1"}


def test_another_owner_of_its_unique_key_refuses_all() -> None:
    refusal = admit(PARENT, [wish("a", unique_key="v")], [Standing(unique_owner="x")], NOW_MS)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.DUPLICATE_JOB
    assert refusal.metadata == {"job_id": "x", "unique_key": "v", "follow_up": "0"}


def test_the_key_that_the_parent_gives_up_is_free() -> None:
    created = admit(PARENT, [wish("a", unique_key="u")], [Standing(unique_owner="parent")], NOW_MS)
    assert isinstance(created, dict)
    assert list(created) == [0]


def test_a_repeat_that_owns_its_unique_key_is_no_duplicate() -> None:
    found = [Standing(job=stands("a"), unique_owner="a")]
    assert admit(PARENT, [wish("a", unique_key="v")], found, NOW_MS) == {}


@pytest.mark.parametrize(
    "other", [("ns", "p", 5, 1), ("ns", "p", 6, 0), ("ns", "q", 5, 0), ("other", "p", 5, 0)]
)
def test_a_made_id_is_of_one_parent_token_and_item(other: tuple[str, str, int, int]) -> None:
    made = follow_up_job_id("ns", "p", 5, 0)
    assert made == follow_up_job_id("ns", "p", 5, 0)
    assert len(made) == 26
    assert made != follow_up_job_id(*other)
