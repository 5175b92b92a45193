"""Bugs of retries by hand and of rollback jobs, to be planted in the core; see ``seeded_bugs``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coordinator.core import commands as c
from coordinator.core import rollback, rules
from coordinator.core.job import Job, JobState
from coordinator.core.machine import Guard
from tests.fault.seeded_bugs import Patch, Rule, bug, change_rows, change_rule


def _after_retry(patch: Patch, change: Callable[[Job, Job, int], Job]) -> None:
    """Change what a retry makes of a job: (before, after, now)."""

    def wrap(rule: Rule) -> Rule:
        def retry(job: Job, command: Any, now_ms: int) -> Job | None:
            after = rule(job, command, now_ms)
            return after if after is None or after is job else change(job, after, now_ms)

        return retry

    change_rule(patch, c.Retry, wrap)


@bug
def a_retry_keeps_the_counters(patch: Patch) -> None:
    _after_retry(
        patch,
        lambda job, after, now: replace(
            after, failures=job.failures, lease_losses=job.lease_losses, uncharged=job.uncharged
        ),
    )


@bug
def a_retry_forgets_the_attempts(patch: Patch) -> None:
    _after_retry(patch, lambda job, after, now: replace(after, attempt=0, attempts=()))


@bug
def a_retried_job_still_says_why_it_ended(patch: Patch) -> None:
    _after_retry(patch, lambda job, after, now: replace(after, end_reason=job.end_reason))


@bug
def a_retry_overrides_the_hold(patch: Patch) -> None:
    change_rule(
        patch, c.Retry, lambda rule: lambda job, command, now: rule(replace(job, hold_ms=0), command, now)
    )


@bug
def a_job_that_dies_forgets_its_hold(patch: Patch) -> None:
    original = rules._dead
    patch.setattr(rules, "_dead", lambda job, now, why: replace(original(job, now, why), hold_ms=0))


@bug
def a_retry_takes_the_unique_key_of_another_job(patch: Patch) -> None:
    change_rows(patch, (c.Retry,), lambda row: replace(row, guard=Guard.STATE))


@bug
def a_repeated_retry_revives_a_job_that_died_again(patch: Patch) -> None:
    _after_retry(patch, lambda job, after, now: replace(after, retry_digest=b""))


@bug
def the_total_timeout_goes_on_over_a_retry(patch: Patch) -> None:
    late = property(
        lambda job: job.terms.total_timeout_ms and job.terms.submit_ms + job.terms.total_timeout_ms
    )
    patch.setattr(Job, "total_end_ms", late)


Enqueue = Callable[[Job, Job, int], tuple[Job, Job] | None]


def _change_rollback(patch: Patch, wrap: Callable[[Enqueue], Enqueue]) -> None:
    patch.setattr(rollback, "enqueue_rollback", wrap(rollback.enqueue_rollback))


@bug
def the_rollback_job_of_a_quarantined_job_is_lost(patch: Patch) -> None:
    def careless(original: Enqueue) -> Enqueue:
        return lambda before, after, revision: (
            None if after.state is JobState.QUARANTINED else original(before, after, revision)
        )

    _change_rollback(patch, careless)


@bug
def the_rollback_job_is_enqueued_and_not_named(patch: Patch) -> None:
    def silent(original: Enqueue) -> Enqueue:
        def enqueue(before: Job, after: Job, revision: int) -> tuple[Job, Job] | None:
            enqueued = original(before, after, revision)
            return enqueued and (after, enqueued[1])

        return enqueue

    _change_rollback(patch, silent)


@bug
def a_retry_rolls_back_once_more(patch: Patch) -> None:
    def twice(original: Enqueue) -> Enqueue:
        def enqueue(before: Job, after: Job, revision: int) -> tuple[Job, Job] | None:
            if before.state in (JobState.DEAD, JobState.QUARANTINED) and not after.terminal:
                running, ended = replace(before, state=JobState.RUNNING), replace(after, state=before.state)
                enqueued = original(running, ended, revision)
                return enqueued and (after, enqueued[1])
            return original(before, after, revision)

        return enqueue

    _change_rollback(patch, twice)


@bug
def all_rollback_jobs_of_a_job_have_one_id(patch: Patch) -> None:
    original = rollback.rollback_job_id
    patch.setattr(rollback, "rollback_job_id", lambda job, revision: original(job, 0))


@bug
def a_cancelled_job_is_rolled_back(patch: Patch) -> None:
    patch.setattr(rollback, "FAILED", frozenset({JobState.DEAD, JobState.QUARANTINED, JobState.CANCELLED}))
