"""The rollback job: enqueued once, by whichever transition ends its parent for good."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import commands as c
from coordinator.core.effects import Slot, effects
from coordinator.core.invariants import check_job
from coordinator.core.job import Claim, Job, JobState, Rollback
from coordinator.core.machine import decide
from coordinator.core.rollback import REASON_LABEL, ROLLBACK_OF_LABEL, enqueue_rollback, rollback_job_id
from coordinator.core.rules import FREE_RETURNS
from tests.unit.core import jobs
from tests.unit.core.jobs import NOW, PLAIN, TOKEN

S = JobState
UNDO = Rollback(queue="undo", type="refund", payload=b"p", content_type="text/plain")
NONE_LEFT = replace(PLAIN, max_retries=0, max_lease_losses=0)


def running(**fields: object) -> tuple[Job, Claim]:
    terms = {"rollback": UNDO, "retry": NONE_LEFT, "priority": 2, "unique_key": "u", **fields}
    return jobs.running(**terms)


def enqueued(before: Job, after: Job, revision: int = 9) -> tuple[Job, Job]:
    found = enqueue_rollback(before, after, revision)
    assert found is not None
    return found


def fails() -> tuple[Job, Job]:
    job, claim = running()
    return job, jobs.after(decide(job, claim, c.Fail(token=TOKEN, digest=b"d"), NOW + 5))


def is_lost() -> tuple[Job, Job]:
    job, _ = running()
    return job, jobs.after(decide(job, None, c.Lose(token=TOKEN), NOW + 5))


def is_taken_away() -> tuple[Job, Job]:
    job, claim = running()
    taken = c.TakeAway(token=TOKEN, why=c.Taken.TIMED_OUT, hold_ms=1)
    return job, jobs.after(decide(job, claim, taken, NOW + 5))


def is_returned_too_often() -> tuple[Job, Job]:
    job, claim = running()
    job = replace(job, uncharged=FREE_RETURNS)
    return job, jobs.after(decide(job, claim, c.Release(token=TOKEN, digest=b"d"), NOW + 5))


def runs_out_of_time() -> tuple[Job, Job]:
    job = jobs.pending(rollback=UNDO, queue_timeout_ms=5, priority=2)
    return job, jobs.after(decide(job, None, c.FallDue(), NOW + 5))


@pytest.mark.parametrize("ends", [fails, is_lost, is_taken_away, is_returned_too_often, runs_out_of_time])
def test_whatever_ends_a_job_for_good_enqueues_its_rollback_job(ends: object) -> None:
    before, after = ends()  # type: ignore[operator]

    parent, child = enqueued(before, after)

    assert parent == replace(after, rollback_job=child.job_id)
    assert (child.state, child.ready_ms, child.terms.submit_ms) == (S.PENDING, NOW + 5, NOW + 5)
    terms = child.terms
    assert (terms.queue, terms.type, terms.payload_size, terms.priority) == ("undo", "refund", 1, 2)
    assert terms.labels == {ROLLBACK_OF_LABEL: "j", REASON_LABEL: after.state.name}
    assert (terms.unique_key, terms.rollback) == ("", None)
    assert check_job(parent, None) == check_job(child, None) == []
    assert check_job(after, None) != [], "a record without its rollback job is noticed"


def test_a_rollback_job_has_the_keys_of_a_submitted_one() -> None:
    _, child = enqueued(*fails())

    assert {(write.where.slot, write.put) for write in effects(None, child)} == {
        (Slot.STATE, True),
        (Slot.SPEC, True),
        (Slot.READY, True),
    }


def test_its_own_priority_goes_before_that_of_the_parent() -> None:
    before, after = fails()
    terms = replace(after.terms, rollback=replace(UNDO, priority=1))

    _, child = enqueued(before, replace(after, terms=terms))

    assert (child.terms.priority, child.rank.ms) == (1, NOW + 5 + 1_000)


@pytest.mark.parametrize("command", [c.Cancel(), c.Complete(token=TOKEN, digest=b"d")])
def test_a_job_that_ends_otherwise_needs_no_rollback(command: c.Command) -> None:
    job, claim = running()

    after = jobs.after(decide(job, claim, command, NOW))

    assert enqueue_rollback(job, after, 9) is None


def test_a_retry_and_a_second_death_enqueue_another_one() -> None:
    before, after = fails()
    parent, first = enqueued(before, after, 9)
    again, claim = jobs.claimed(jobs.after(decide(parent, None, c.Retry(), NOW + 6)), TOKEN + 1)
    assert enqueue_rollback(parent, again, 10) is None
    died = jobs.after(decide(again, claim, c.Fail(token=TOKEN + 1, digest=b"d"), NOW + 7))

    parent, second = enqueued(again, died, 11)

    assert second.job_id != first.job_id
    assert parent.rollback_job == second.job_id


def test_the_id_follows_from_the_parent_and_the_revision_it_was_read_at() -> None:
    job = jobs.pending()
    ids = {
        rollback_job_id(job, 9),
        rollback_job_id(job, 10),
        rollback_job_id(replace(job, job_id="k"), 9),
        rollback_job_id(replace(job, namespace="other"), 9),
    }

    assert len(ids) == 4
    assert {len(one) for one in ids} == {26}
    assert rollback_job_id(job, 9) == rollback_job_id(jobs.pending(priority=1), 9)
