"""What a transition writes, for every pair of states before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.core.effects import (
    Slot,
    Usual,
    Where,
    Write,
    effects,
    keys_of,
    ready_key,
    repair_effects,
    usual,
)
from coordinator.core.job import RETAINED, TERMINAL, Job, JobLock, JobState
from tests.unit.core import jobs
from tests.unit.core.jobs import NOW

S = JobState
LOCKS = (JobLock(name="a"), JobLock(name="b"))
FREE = {Slot.CHECKPOINT, Slot.RESULT}


def in_state(state: S, **changes: Any) -> Job:
    job, _ = jobs.in_state(state)
    terms = replace(job.terms, unique_key="u", total_timeout_ms=60_000, locks=LOCKS)
    return replace(job, terms=terms, **changes)


KINDS = {
    S.SCHEDULED: {Slot.SPEC, Slot.STATE, Slot.DUE, Slot.UNIQUE},
    S.PENDING: {Slot.SPEC, Slot.STATE, Slot.READY, Slot.DUE, Slot.UNIQUE},
    S.RUNNING: {Slot.SPEC, Slot.STATE, Slot.CLAIM, Slot.UNIQUE, Slot.LOCK},
    S.SUCCEEDED: {Slot.STATE},
    S.DEAD: {Slot.SPEC, Slot.STATE},
    S.CANCELLED: {Slot.STATE},
    S.QUARANTINED: {Slot.SPEC, Slot.STATE},
}


@pytest.mark.parametrize("state", S)
def test_the_keys_of_a_job_are_those_of_its_state(state: S) -> None:
    assert {where.slot for where in keys_of(in_state(state))} == KINDS[state]


@pytest.mark.parametrize(
    ("before", "after"), [(b, a) for b in (None, *S) for a in (None, *S) if (b, a) != (None, None)]
)
def test_the_writes_lead_from_the_keys_before_to_the_keys_after(before: S | None, after: S | None) -> None:
    old = in_state(before) if before is not None else None
    new = in_state(after, ready_ms=NOW + 9, rank=jobs.pending().rank._replace(counter=8)) if after else None

    writes = effects(old, new)

    where = [write.where for write in writes]
    assert len(where) == len(set(where)), "etcd refuses two writes of one key"
    keys = set(keys_of(old)) if old is not None else set()
    for write in writes:
        keys = keys | {write.where} if write.put else keys - {write.where}
    assert {key for key in keys if key.slot not in FREE} == (set(keys_of(new)) if new is not None else set())


@pytest.mark.parametrize("before", S)
@pytest.mark.parametrize("after", S)
def test_the_record_is_written_with_every_change_and_the_spec_never_again(before: S, after: S) -> None:
    writes = effects(in_state(before), in_state(after))

    assert [w.put for w in writes if w.where.slot is Slot.STATE] == [True]
    put_again = [w for w in writes if w.where.slot is Slot.SPEC and w.put]
    assert bool(put_again) == (before in RETAINED and after not in RETAINED)


def test_a_ready_key_is_put_again_so_that_it_shares_the_revision_of_the_record() -> None:
    job = in_state(S.PENDING)

    assert Write(ready_key(job), True) in effects(job, job)


@pytest.mark.parametrize("after", sorted(TERMINAL))
def test_only_what_is_kept_for_a_while_goes_on_a_retention_lease(after: S) -> None:
    writes = effects(in_state(S.RUNNING), in_state(after), big_result=after is S.SUCCEEDED)

    puts = {write.where.slot: write.retained for write in writes if write.put}
    assert puts.pop(Slot.STATE) is (after in RETAINED)
    assert puts == ({Slot.RESULT: True} if after is S.SUCCEEDED else {})


@pytest.mark.parametrize(
    ("after", "dropped"),
    [(S.SUCCEEDED, True), (S.CANCELLED, True), (S.PENDING, False), (S.SCHEDULED, False), (S.DEAD, False)],
)
def test_the_checkpoint_goes_to_the_next_attempt_and_is_dropped_at_the_end(after: S, dropped: bool) -> None:
    writes = effects(in_state(S.RUNNING), in_state(after, attempt=1))

    assert (Write(Where(Slot.CHECKPOINT, "default", "j"), False) in writes) is dropped


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_deletion_leaves_nothing(state: S) -> None:
    job = in_state(state, result=b"", result_size=2_000)

    writes = effects(job, None)

    assert not any(write.put for write in writes)
    gone = {write.where.slot for write in writes}
    assert gone == KINDS[state] | {Slot.CHECKPOINT, Slot.RESULT}


@pytest.mark.parametrize("after", [state for state in S if state is not S.RUNNING])
def test_every_end_of_a_claim_gives_back_the_locks_that_it_took(after: S) -> None:
    held = {where for where in keys_of(in_state(S.RUNNING)) if where.slot is Slot.LOCK}

    gone = {write.where for write in effects(in_state(S.RUNNING), in_state(after)) if not write.put}

    assert {where.lock_name for where in held} == {"a", "b"}
    assert held <= gone


def test_a_claim_puts_its_locks_and_a_rewritten_record_leaves_them_alone() -> None:
    running = in_state(S.RUNNING)

    puts = [w for w in effects(in_state(S.PENDING), running) if w.where.slot is Slot.LOCK]

    assert [(w.where.lock_name, w.put) for w in puts] == [("a", True), ("b", True)]
    again = effects(running, replace(running, cancel_requested=True))
    assert not [w for w in again if w.where.slot is Slot.LOCK]


def test_a_request_to_stop_puts_the_cancel_key_and_the_end_deletes_it() -> None:
    running = in_state(S.RUNNING)
    asked = replace(running, cancel_requested=True)
    key = Where(Slot.CANCEL, "default", "j")

    assert Write(key, True) in effects(running, asked)
    assert Write(key, False) in effects(asked, in_state(S.CANCELLED))


def test_a_moved_job_leaves_no_ready_or_due_key_behind() -> None:
    before = in_state(S.SCHEDULED)
    after = replace(before, ready_ms=NOW + 1)

    moved = [(w.put, w.where.ms) for w in effects(before, after) if w.where.slot is Slot.DUE]

    assert sorted(moved) == [(False, before.due_key_ms), (True, NOW + 1)]


def test_a_repair_writes_only_what_the_record_alone_can_tell() -> None:
    slots = {write.where.slot for write in repair_effects(in_state(S.RUNNING, cancel_requested=True))}

    assert slots == {Slot.STATE, Slot.UNIQUE}
    assert Slot.READY in {write.where.slot for write in repair_effects(in_state(S.PENDING))}


USUAL = {
    Usual.SUBMISSION: [(Slot.STATE, True, False), (Slot.SPEC, True, False), (Slot.READY, True, False)],
    Usual.CLAIM: [(Slot.READY, False, False), (Slot.STATE, True, False), (Slot.CLAIM, True, False)],
    Usual.END: [
        (Slot.CLAIM, False, False),
        (Slot.SPEC, False, False),
        (Slot.STATE, True, True),
        (Slot.CHECKPOINT, False, False),
    ],
}


def variants(state: S | None) -> list[Job | None]:
    """Jobs of one state that differ in all that a key may hang on."""
    if state is None:
        return [None]
    plain, _ = jobs.in_state(state)
    found: list[Job | None] = []
    for terms in (
        plain.terms,
        replace(plain.terms, unique_key="u"),
        replace(plain.terms, queue_timeout_ms=5_000),
        replace(plain.terms, total_timeout_ms=5_000),
        replace(plain.terms, locks=LOCKS),
    ):
        for attempt in (0, 1, 2):
            found += [
                replace(plain, terms=terms, attempt=attempt, cancel_requested=asked)
                for asked in (False, True)
            ]
    return found


@pytest.mark.parametrize("big_result", [False, True])
@pytest.mark.parametrize("before", [None, *S])
@pytest.mark.parametrize("after", [None, *S])
def test_a_usual_transition_writes_what_its_name_says_and_nothing_else(
    before: S | None, after: S | None, big_result: bool
) -> None:
    for old in variants(before):
        for new in variants(after):
            if old is None and new is None:
                continue
            shared = replace(new, terms=old.terms) if old is not None and new is not None else new
            for job in (new, shared):
                which = usual(old, job, big_result=big_result)
                if which is None:
                    continue
                writes = effects(old, job, big_result=big_result)
                assert [(w.where.slot, w.put, w.retained) for w in writes] == USUAL[which]
                ready = [w.where for w in writes if w.where.slot is Slot.READY]
                line = old if which is Usual.CLAIM else job
                assert line is not None
                assert ready == ([] if which is Usual.END else [ready_key(line)])


def test_the_way_that_most_jobs_go_is_usual() -> None:
    submitted, claimed, done = (jobs.in_state(state)[0] for state in (S.PENDING, S.RUNNING, S.SUCCEEDED))
    terms = submitted.terms
    claimed, done = replace(claimed, terms=terms), replace(done, terms=terms)

    assert usual(None, submitted) is Usual.SUBMISSION
    assert usual(submitted, claimed) is Usual.CLAIM
    assert usual(claimed, done) is Usual.END
