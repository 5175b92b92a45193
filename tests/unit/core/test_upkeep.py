"""Which key no record wants, and which key a record misses, for every state and every kind of key."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.effects import Slot, Where, keys_of
from coordinator.core.job import RETAINED, Claim, Job, JobState
from coordinator.core.upkeep import KeySeen, lacks, repair_writes, wanted, why_stray
from tests.unit.core.jobs import TOKEN, in_state

S = JobState
UNIQUE = {"unique_key": "u", "queue_timeout_ms": 9_000}
PLACES = {
    Slot.SPEC: {},
    Slot.CANCEL: {},
    Slot.CHECKPOINT: {},
    Slot.RESULT: {},
    Slot.CLAIM: {},
    Slot.DUE: {"ms": 77},
    Slot.UNIQUE: {"queue": "q", "unique_key": "other"},
}


def job_in(state: S, **terms: object) -> Job:
    job, _ = in_state(state)
    return replace(job, terms=replace(job.terms, **{**UNIQUE, **terms}))  # type: ignore[arg-type]


def seen(where: Where, **fields: object) -> KeySeen:
    return KeySeen(where=where, modified=5, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", S)
def test_no_key_that_follows_from_the_record_is_a_stray(state: S) -> None:
    job = job_in(state)
    for where in keys_of(job):
        if where.slot is not Slot.CLAIM:
            assert why_stray(seen(where), job) == "", where
        assert why_stray(seen(where), None) == "there is no such job"


@pytest.mark.parametrize("slot", PLACES)
@pytest.mark.parametrize("state", S)
def test_a_key_that_does_not_follow_from_the_record_is_a_stray(state: S, slot: Slot) -> None:
    job = job_in(state)
    where = Where(slot, job.namespace, job.job_id, **PLACES[slot])  # type: ignore[arg-type]
    kept = slot is Slot.CHECKPOINT and state not in RETAINED and bool(job.attempt)
    follows = where in keys_of(job) or kept
    held = slot is Slot.CLAIM and state is S.RUNNING
    if not held:
        assert bool(why_stray(seen(where), job)) is not follows


def test_a_ready_key_in_another_place_is_a_stray_and_one_of_another_revision_is_not() -> None:
    job = job_in(S.PENDING)
    [ready] = [where for where in keys_of(job) if where.slot is Slot.READY]
    assert why_stray(seen(ready._replace(rank=ready.rank._replace(ms=1))), job)
    assert why_stray(seen(ready._replace(type="another")), job)
    assert not why_stray(seen(ready), job)
    assert [lack.reason for lack in lacks(job, 6, {where: seen(where) for where in wanted(job)})] == [
        "its ready key is of another revision"
    ]


@pytest.mark.parametrize(
    ("change", "orphan"),
    [
        ({}, False),
        ({"session": "00000000000000b2"}, True),
        ({"attempt": 7}, True),
        ({"token": TOKEN + 1}, True),
    ],
)
def test_a_claim_is_an_orphan_unless_its_job_runs_under_it(change: dict[str, object], orphan: bool) -> None:
    job = job_in(S.RUNNING)
    assert job.current is not None
    known = replace(job, attempts=(*job.attempts[:-1], replace(job.current, token=TOKEN)))
    mine = Claim(session=job.current.session, attempt=job.current.number, nonce=b"", start_ms=0, token=TOKEN)
    where = Where(Slot.CLAIM, job.namespace, job.job_id)
    claim = replace(mine, **change)  # type: ignore[arg-type]
    assert bool(why_stray(seen(where, claim=claim), known)) is orphan
    assert bool(why_stray(seen(where, claim=claim), job)) is (orphan and "token" not in change)
    assert not why_stray(seen(where), job), "nobody can say whose it is"
    assert why_stray(seen(where), job_in(S.PENDING)), "nobody may hold this job"


def test_a_result_is_kept_by_the_job_that_has_one() -> None:
    job = job_in(S.SUCCEEDED)
    where = Where(Slot.RESULT, job.namespace, job.job_id)
    assert not why_stray(seen(where), replace(job, result=b"", result_size=5_000))
    assert why_stray(seen(where), replace(job, result=b"r", result_size=1))


def test_a_checkpoint_of_a_job_that_never_ran_is_a_stray() -> None:
    job = job_in(S.PENDING)
    where = Where(Slot.CHECKPOINT, job.namespace, job.job_id)
    assert why_stray(seen(where), job)
    assert not why_stray(seen(where), replace(job, attempt=1))


@pytest.mark.parametrize("state", S)
def test_every_key_that_is_missing_is_missed_and_put_again_but_for_the_spec(state: S) -> None:
    job = job_in(state)
    there = {where: seen(where, hold_ms=job.hold_ms) for where in wanted(job)}
    assert lacks(job, 5, there) == ()
    for gone in wanted(job):
        missing = lacks(job, 5, {where: key for where, key in there.items() if where != gone})
        assert [lack.where for lack in missing] == [gone]
        writes = repair_writes(job, missing)
        assert all(write.put for write in writes)
        again = {Slot.STATE} | ({Slot.READY} if state is S.PENDING else set())
        expected = again | ({gone.slot} - {Slot.SPEC})
        assert {write.where.slot for write in writes} == expected


def test_a_unique_key_that_names_another_job_is_never_put() -> None:
    job = job_in(S.RUNNING)
    [unique] = [where for where in keys_of(job) if where.slot is Slot.UNIQUE]
    there = {where: seen(where) for where in wanted(job)}
    there[unique] = seen(unique._replace(job_id="rival"))
    [lack] = lacks(job, 5, there)
    assert lack.rival == "rival"
    assert unique not in {write.where for write in repair_writes(job, (lack,))}
    there[unique] = seen(unique, readable=False)
    [lack] = lacks(job, 5, there)
    assert lack.rival


def test_a_due_key_with_another_hold_or_none_that_can_be_read_is_put_again() -> None:
    job = replace(job_in(S.SCHEDULED), hold_ms=10_000)
    there = {where: seen(where, hold_ms=10_000) for where in wanted(job)}
    [due] = [where for where in there if where.slot is Slot.DUE]
    assert lacks(job, 5, there) == ()
    for other in (seen(due), seen(due, hold_ms=10_000, readable=False)):
        [lack] = lacks(job, 5, {**there, due: other})
        assert lack.where == due
