"""The invariants object to what must not be; they are worth nothing if they never do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.effects import Slot, Where, keys_of, ready_key
from coordinator.core.invariants import check_history, check_job, check_keys
from coordinator.core.job import JobState
from tests.unit.core import jobs
from tests.unit.core.jobs import TOKEN


@pytest.mark.parametrize("state", JobState)
def test_a_job_made_by_the_core_violates_nothing(state: JobState) -> None:
    job, claim = jobs.in_state(state)

    assert check_job(job, claim) == []
    assert check_keys(job, list(keys_of(job))) == []
    assert check_history([job]) == []


def test_objections_to_a_job_and_its_claim() -> None:
    job, claim = jobs.running()
    past = replace(job.attempts[0], token=TOKEN + 1)

    assert "held by other" in check_job(job, replace(claim, session="other"))[0]
    assert "claim is for attempt 2" in check_job(job, replace(claim, attempt=2))[0]
    assert "0 attempts under way" in check_job(replace(job, attempts=()), claim)[0]
    assert "after one of 501" in check_job(replace(job, attempts=(past, job.attempts[0])), claim)[0]
    assert "the record says 501" in check_job(replace(job, attempts=(past,)), claim)[0]
    assert "PENDING beside a claim" in check_job(jobs.pending(), claim)[0]
    assert "still asked to stop" in check_job(replace(jobs.pending(), cancel_requested=True), None)[0]
    assert "without a time of its end" in check_job(replace(jobs.dead(), settle_ms=0), None)[0]
    assert "with an attempt under way" in check_job(replace(job, state=JobState.PENDING), None)[0]


def test_a_claim_that_is_gone_is_no_violation() -> None:
    job, _ = jobs.running()

    assert check_job(job, None) == []
    assert check_keys(job, [where for where in keys_of(job) if where.slot is not Slot.CLAIM]) == []


def test_objections_to_attempts_remembered() -> None:
    dead = jobs.dead()
    older = replace(dead.attempts[0], token=TOKEN)

    assert "do not grow" in check_job(replace(dead, attempt=2, attempts=(older, older)), None)[0]
    assert "remembers 2 of 1" in check_job(replace(dead, attempts=(replace(older, token=0), older)), None)[0]


def test_objections_to_keys() -> None:
    job = jobs.pending()
    stray = Where(Slot.CANCEL, "default", "j")

    assert "without its ready key" in check_keys(job, [w for w in keys_of(job) if w != ready_key(job)])[0]
    assert "with a cancel key" in check_keys(job, [*keys_of(job), stray])[0]


def test_objections_to_a_history() -> None:
    pending, (running, _) = jobs.pending(), jobs.running()

    assert "SUCCEEDED was followed by" in check_history([jobs.succeeded(), running])[0]
    assert "attempt fell from 1 to 0" in check_history([running, pending])[0]
    assert "failures fell" in check_history([replace(pending, failures=2), pending])[0]
    assert "began before attempt 1 had ended" in check_history([running, replace(running, attempt=2)])[0]
