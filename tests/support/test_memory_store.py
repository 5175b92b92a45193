"""The fake store keeps the promises of its ports."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core.commands import Complete
from coordinator.core.effects import effects
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import JobState
from coordinator.core.machine import Decision, Guard, decide
from coordinator.errors import OutcomeUnknown
from coordinator.ports import JobStore, Operation, SessionStore, Spec, Stored
from tests.support.builders import FAR, NOW_MS, a_job, claim_job, open_session, store_job
from tests.support.clock import SteppingClock
from tests.support.memory_etcd import Fault, MemoryEtcd
from tests.support.memory_job_store import MemoryJobStore, MemorySessionStore


@pytest.fixture
def clock() -> SteppingClock:
    return SteppingClock()


@pytest.fixture
def etcd(clock: SteppingClock) -> MemoryEtcd:
    return MemoryEtcd(clock)


def test_the_fakes_are_the_ports(etcd: MemoryEtcd) -> None:
    store: JobStore = MemoryJobStore(etcd)
    sessions: SessionStore = MemorySessionStore(etcd)
    assert store is not None
    assert sessions is not None


async def test_a_lifecycle_leaves_the_keys_that_the_record_implies(etcd: MemoryEtcd) -> None:
    store, sessions = MemoryJobStore(etcd), MemorySessionStore(etcd)
    await open_session(sessions)
    claimed = await claim_job(store, await store_job(store, a_job(unique_key="k")))
    assert claimed.stored is not None
    assert claimed.claim is not None
    assert claimed.spec is not None
    command = Complete(token=claimed.token, digest=b"d")
    outcome = decide(claimed.stored.job, claimed.claim, command, NOW_MS + 5)
    assert isinstance(outcome, Decision)
    done = await store.commit(
        Operation(
            guard=outcome.guard,
            before=claimed.stored,
            after=outcome.job,
            writes=effects(claimed.stored.job, outcome.job),
            deadline=FAR,
            token=claimed.token,
        )
    )
    assert done.won
    stored = etcd.stored("default", "j1")
    assert stored is not None
    assert stored.job.state is JobState.SUCCEEDED
    assert check_job(stored.job, etcd.claim("default", "j1")) == []
    assert check_keys(stored.job, etcd.keys_of("default", "j1")) == []


async def test_a_leases_end_takes_witness_and_claims_in_one_revision(
    etcd: MemoryEtcd, clock: SteppingClock
) -> None:
    store, sessions = MemoryJobStore(etcd), MemorySessionStore(etcd)
    await open_session(sessions)
    for name in ("a", "b"):
        await claim_job(store, await store_job(store, a_job(name)))
    before = etcd.revision
    await clock.advance(10.1)
    assert await sessions.read("default", "00000000000000a1", deadline=FAR) is None
    assert etcd.revision == before + 1
    assert await store.list_claims("default", deadline=FAR) == []


async def test_operations_queued_together_share_a_revision_and_two_of_one_job_do_not(
    etcd: MemoryEtcd,
) -> None:
    store = MemoryJobStore(etcd)
    jobs = [a_job("a"), a_job("b"), a_job("a")]
    commits = await asyncio.gather(
        *(
            store.commit(
                Operation(
                    guard=Guard.ABSENT,
                    before=None,
                    after=job,
                    writes=effects(None, job),
                    deadline=FAR,
                    spec=Spec(payload=b""),
                )
            )
            for job in jobs
        )
    )
    assert [c.won for c in commits] == [True, True, False]
    assert commits[0].revision == commits[1].revision
    assert isinstance(commits[2].stored, Stored)


@pytest.mark.parametrize(("fault", "there"), [(Fault.LOST_REPLY, True), (Fault.LOST_REQUEST, False)])
async def test_an_unknown_outcome_may_be_either(etcd: MemoryEtcd, fault: Fault, there: bool) -> None:
    etcd.faults.append(fault)
    with pytest.raises(OutcomeUnknown):
        await store_job(MemoryJobStore(etcd), a_job())
    assert (etcd.stored("default", "j1") is not None) is there
