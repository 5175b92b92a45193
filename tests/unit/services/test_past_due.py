"""A late job is told of once, while it waits, by the coordinator that prefers it; and it can be listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.due_time import is_past_due
from coordinator.core.job import Attempt, Job, JobState
from coordinator.core.notice import NoticeKind
from coordinator.ports import Stored
from coordinator.services.api import JobFilter
from coordinator.services.past_due import PastDue, PastDueConfig
from coordinator.services.window import Entry
from tests.support.builders import a_job
from tests.unit.services.workbench import Coordinator, bench_with


def begun(at_ms: int) -> tuple[Attempt, ...]:
    return (Attempt(number=1, session="s", start_ms=at_ms),)


JOB = a_job("j", due_ms=10_000)
STORED = Stored(JOB, 1)


@pytest.mark.parametrize(
    ("job", "now_ms", "late"),
    [
        (JOB, 10_000, False),
        (JOB, 10_001, True),
        (replace(JOB, state=JobState.SCHEDULED, ready_ms=10_001), 1, True),
        (replace(JOB, state=JobState.SCHEDULED, ready_ms=10_000), 1, False),
        (replace(JOB, state=JobState.RUNNING, attempts=begun(10_000)), 99_999, False),
        (replace(JOB, state=JobState.RUNNING, attempts=begun(10_001)), 99_999, True),
        (replace(JOB, state=JobState.SCHEDULED, ready_ms=20_000, attempts=begun(9_000)), 99_999, False),
        (replace(JOB, state=JobState.SUCCEEDED, attempts=begun(10_001), settle_ms=10_005), 99_999, True),
        (replace(JOB, state=JobState.CANCELLED, settle_ms=9_000), 99_999, False),
        (replace(JOB, state=JobState.DEAD, settle_ms=10_001), 99_999, True),
        (a_job("j"), 99_999, False),
    ],
)
def test_late_is_what_begins_after_its_due_time_or_cannot_begin_before(
    job: Job, now_ms: int, late: bool
) -> None:
    assert is_past_due(job, now_ms) is late
    assert JobFilter(past_due_at_ms=now_ms).matches(job) is late
    assert JobFilter().matches(job)


def finder(c: Coordinator, *, ours: bool = True) -> PastDue:
    return PastDue(c.index.windows, lambda job_id: ours, c.notices, c.clock)


async def test_each_late_job_is_told_of_once_and_again_for_another_due_time() -> None:
    c = await bench_with()
    now_ms = c.clock.now_ms()
    await c.submit("claimed", "waits", due_ms=now_ms + 500)
    look = finder(c)
    assert (look.look_once(), look.waiting) == (0, 0)
    await c.clock.advance(1)
    await c.claim()
    assert (look.look_once(), look.waiting) == (1, 1)
    [notice] = c.notices.of(NoticeKind.PAST_DUE)
    assert (notice.job_id, notice.queue, notice.facts["late_ms"]) == ("waits", "q", "500")
    assert (look.look_once(), look.waiting) == (0, 1)


async def test_another_coordinators_job_is_counted_and_not_told_of() -> None:
    c = await bench_with()
    await c.submit("late", due_ms=c.clock.now_ms() + 500)
    await c.clock.advance(1)
    look = finder(c, ours=False)
    assert (look.look_once(), look.waiting) == (0, 1)


async def test_a_look_ends_with_its_budget_and_the_next_one_goes_on_from_there() -> None:
    c = await bench_with()
    await c.clock.advance(60)  # beyond the rank that its submit time gives it
    entries = [Entry(replace(STORED, job=replace(JOB, job_id=f"j{n}")), None, 0.0) for n in range(4)]
    looked: list[str] = []

    class Line:
        def __init__(self, name: str) -> None:
            self.name = name

        def peek(self, limit: int) -> list[Entry]:
            looked.append(self.name)
            return entries[:limit]

    lines = {("n", "q", name): Line(name) for name in "abc"}
    config = PastDueConfig(looked_at=2, budget=3)
    look = PastDue(lambda: lines, lambda job_id: True, c.notices, c.clock, config)
    look.look_once()
    assert (looked, look.waiting) == (["a", "b"], 4)
    look.look_once()
    assert (looked, look.waiting) == (["a", "b", "c", "a"], 6)


async def test_a_backlog_that_is_not_late_is_not_gone_through() -> None:
    c = await bench_with()
    await c.submit(*(f"j{number}" for number in range(50)))
    looked: list[int] = []

    class Counted:
        def peek(self, limit: int) -> list[object]:
            looked.append(limit)
            return []

    look = PastDue(lambda: {("n", "q", "t"): Counted()}, lambda job_id: True, c.notices, c.clock)  # type: ignore[dict-item,return-value]
    look.look_once()
    assert looked == [2_000]
