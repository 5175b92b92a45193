"""Claims that take locks, as Txns on a real etcd."""

from __future__ import annotations

import uuid

from coordinator.core.fencing import make_token
from coordinator.core.job import JobLock
from coordinator.core.lock_order import LockEntry, LockMode
from coordinator.ports import Session, Stored
from coordinator.services.commits import commit_each
from tests.integration.store.conftest import Harness
from tests.support.builders import a_job, a_session, claim_operation, store_job


async def _waiting(harness: Harness, name: str, *locks: JobLock) -> Stored:
    return await store_job(harness.jobs, a_job(name, namespace=harness.namespace, locks=locks))


async def _session(harness: Harness) -> Session:
    session = a_session(f"{uuid.uuid4().int >> 65:016x}", namespace=harness.namespace)
    return await harness.sessions.open(session, deadline=harness.deadline())


async def _entries(harness: Harness, *names: str) -> dict[str, list[str]]:
    read = await harness.store.locks.read(harness.namespace, names, deadline=harness.deadline())
    return {name: sorted(entry.job_id for entry in read.entries[name]) for name in names}


async def test_of_two_claims_of_one_lock_that_travel_together_one_wins(harness: Harness) -> None:
    session = await _session(harness)
    jobs = [await _waiting(harness, f"j{n}", JobLock(name="l")) for n in range(6)]
    commits = await commit_each(harness.jobs, [claim_operation(job, session) for job in jobs])
    won = [one for one in commits if not isinstance(one, Exception) and one.won]
    assert len(won) == 1
    assert won[0].claim is not None
    [owner] = (await _entries(harness, "l"))["l"]
    for one in commits:
        assert not isinstance(one, Exception)
        if not one.won:
            assert one.lines is not None
            [entry] = one.lines["l"]
            assert entry.job_id == owner
            assert make_token(harness.store.present.epoch, entry.revision) == won[0].token


async def test_a_claim_takes_eight_locks_or_none(harness: Harness) -> None:
    session = await _session(harness)
    names = [f"l{n}" for n in range(8)]
    many = await _waiting(harness, "many", *(JobLock(name=name) for name in names))
    one = await _waiting(harness, "one", JobLock(name="l7"))
    held = await harness.jobs.commit(claim_operation(one, session))
    assert held.won
    assert not (await harness.jobs.commit(claim_operation(many, session))).won
    assert await _entries(harness, *names[:7]) == {name: [] for name in names[:7]}
    fresh = claim_operation(many, session, lock_revisions=(0,) * 7 + (held.revision,))
    again = await harness.jobs.commit(fresh)
    assert again.won, "it is the caller who judges; the Txn compares that nothing was added since"


async def test_an_entry_that_comes_after_the_look_keeps_the_claim_out_and_one_that_goes_does_not(
    harness: Harness,
) -> None:
    session = await _session(harness)
    wish = LockEntry(name="l", waiter="w", session=session.session_id, mode=LockMode.EXCLUSIVE)
    taken = await harness.store.locks.acquire(
        harness.namespace, [wish], after=None, deadline=harness.deadline()
    )
    job = await _waiting(harness, "j", JobLock(name="l"))
    assert not (await harness.jobs.commit(claim_operation(job, session))).won
    read = await harness.store.locks.read(harness.namespace, ["l"], deadline=harness.deadline())
    await harness.store.locks.delete(harness.namespace, read.entries["l"], deadline=harness.deadline())
    claim = claim_operation(job, session, lock_revisions=(taken.revision,))
    assert (await harness.jobs.commit(claim)).won


async def test_a_claim_for_a_session_that_has_ended_puts_no_entry(harness: Harness) -> None:
    session = await _session(harness)
    job = await _waiting(harness, "j", JobLock(name="l"))
    await harness.sessions.close(harness.namespace, session.session_id, deadline=harness.deadline())
    lost = await harness.jobs.commit(claim_operation(job, session))
    assert (lost.won, lost.session_gone) == (False, True)
    assert await _entries(harness, "l") == {"l": []}


async def test_the_end_of_a_session_takes_claim_and_entries_in_one_revision(harness: Harness) -> None:
    session = await _session(harness)
    job = await _waiting(harness, "j", JobLock(name="l"), JobLock(name="m"))
    assert (await harness.jobs.commit(claim_operation(job, session))).won
    await harness.sessions.close(harness.namespace, session.session_id, deadline=harness.deadline())
    assert await _entries(harness, "l", "m") == {"l": [], "m": []}
    found = await harness.jobs.read(harness.namespace, "j", deadline=harness.deadline())
    assert found.claim is None
