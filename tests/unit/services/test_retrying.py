"""RetryJob: once per request, never beside another owner of the unique key, and only what has failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.core.commands import Fail
from coordinator.core.effects import Slot
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import JobState, Rollback
from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.ports import Checkpoint
from coordinator.services.api import JobView, Settle, Settled
from coordinator.services.job_changes import JobChanges
from coordinator.services.queries import Queries
from coordinator.services.retrying import Retrying
from tests.support.builders import FAR, NOW_MS, a_job, a_new_job, claim_job, store_job
from tests.support.memory_etcd import Fault
from tests.unit.services.conftest import World

S = JobState


@pytest.fixture
def retrying(world: World) -> Retrying:
    return Retrying(world.store, world.holders, world.gauge, world.clock)


async def dies(world: World, job_id: str = "j1", *, failure: str = "", **terms: Any) -> None:
    """A job that failed for good."""
    claimed = await world.running(job_id, **terms)
    await fails(world, claimed.token, job_id, failure=failure)


async def fails(world: World, token: int, job_id: str = "j1", *, failure: str = "") -> None:
    command = Fail(token=token, digest=b"", failure_type=failure, no_retry=True)
    [settled] = await world.settlement.settle("default", [Settle(job_id, command)], world.deadline)
    assert isinstance(settled, Settled)
    assert settled.state is S.DEAD


async def retry(
    retrying: Retrying, job_id: str = "j1", *, etag: str = "", run_at: int = 0, request: str = ""
) -> JobView:
    return await retrying.retry(
        "default", job_id, etag=etag, run_at_ms=run_at, request_id=request, deadline=FAR
    )


async def refused(awaitable: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await awaitable
    return caught.value


def assert_sound(world: World, job_id: str = "j1") -> None:
    job = world.stored(job_id).job
    assert check_job(job, world.etcd.claim("default", job_id)) == []
    assert check_keys(job, world.etcd.keys_of("default", job_id)) == []


async def test_a_dead_job_waits_again_with_payload_checkpoint_and_attempts(
    world: World, retrying: Retrying
) -> None:
    claimed = await world.running(unique_key="k")
    saved = Checkpoint(attempt=1, sequence=1, data=b"half")
    await world.store.save_checkpoint("default", "j1", claimed.token, saved, deadline=FAR)
    await fails(world, claimed.token)

    view = await retry(retrying)

    job = view.stored.job
    assert (job.state, job.failures, job.attempt, view.token) == (S.PENDING, 0, 1, claimed.token)
    assert world.stored().revision == view.stored.revision
    assert_sound(world)
    again = await claim_job(world.store, view.stored)
    assert again.spec is not None
    assert again.checkpoint is not None
    assert again.checkpoint.data == b"half"
    assert again.token > claimed.token


async def test_run_at_delays_the_retry(world: World, retrying: Retrying) -> None:
    await dies(world)

    view = await retry(retrying, run_at=NOW_MS + 90_000)

    assert (view.stored.job.state, view.stored.job.ready_ms) == (S.SCHEDULED, NOW_MS + 90_000)
    assert_sound(world)


async def test_twenty_retries_at_once_make_one(world: World, retrying: Retrying) -> None:
    await dies(world)

    views = await asyncio.gather(*(retry(retrying) for _ in range(20)))

    assert len({view.stored.revision for view in views}) == 1
    assert {view.stored.job.state for view in views} == {S.PENDING}


async def test_a_repeat_finds_the_job_running_and_changes_nothing(world: World, retrying: Retrying) -> None:
    await dies(world)
    first = await retry(retrying, etag=str(world.stored().revision))
    claimed = await claim_job(world.store, first.stored)

    again = await retry(retrying, etag="1")

    assert again.stored == claimed.stored
    assert again.token == claimed.token


async def test_a_request_retries_a_job_that_died_again_only_once(world: World, retrying: Retrying) -> None:
    await dies(world)
    view = await retry(retrying, request="r1")
    await fails(world, (await claim_job(world.store, view.stored)).token)
    dead = world.stored()

    assert (await retry(retrying, request="r1")).stored == dead
    assert (await refused(retry(retrying, etag=str(view.stored.revision)))).reason is Reason.ETAG_MISMATCH
    assert (await retry(retrying, request="r2", etag=str(dead.revision))).stored.job.state is S.PENDING


async def test_an_old_etag_retries_nothing(world: World, retrying: Retrying) -> None:
    await dies(world)
    dead = world.stored()

    error = await refused(retry(retrying, etag="1"))

    assert (error.reason, error.metadata["etag"]) == (Reason.ETAG_MISMATCH, str(dead.revision))
    assert world.stored() == dead


async def test_what_ended_well_or_was_cancelled_or_never_was_is_not_retried(
    world: World, retrying: Retrying
) -> None:
    await store_job(world.store, a_job())
    await JobChanges(world.store, world.holders, world.clock).cancel("default", "j1", "", "me", FAR)

    error = await refused(retry(retrying))

    assert (error.reason, error.metadata["state"]) == (Reason.JOB_TERMINAL, "CANCELLED")
    assert (await refused(retry(retrying, "nobody"))).reason is Reason.JOB_NOT_FOUND


async def test_a_unique_key_that_another_job_has_by_now_is_named(world: World, retrying: Retrying) -> None:
    await dies(world, unique_key="k")
    await store_job(world.store, a_job("j2", unique_key="k"))
    dead = world.stored()

    error = await refused(retry(retrying))

    assert error.reason is Reason.DUPLICATE_JOB
    assert error.metadata == {"job_id": "j2", "unique_key": "k"}
    assert world.stored() == dead
    assert_sound(world)


async def test_a_full_store_retries_nothing_but_answers_repeats(world: World, retrying: Retrying) -> None:
    await dies(world)
    await dies(world, "j2")
    await retry(retrying, "j2")
    world.gauge.accepts_submissions = False

    error = await refused(retry(retrying))

    assert error.reason is Reason.STORAGE_FULL
    assert error.retry_after_ms
    assert world.stored().job.state is S.DEAD
    assert (await retry(retrying, "j2")).stored.job.state is S.PENDING


@pytest.mark.parametrize("fault", [Fault.RESENT, Fault.LOST_REPLY])
async def test_an_unknown_outcome_is_found_again(world: World, retrying: Retrying, fault: Fault) -> None:
    await dies(world)
    world.etcd.faults.append(fault)
    if fault is Fault.LOST_REPLY:
        assert (await refused(retry(retrying, request="r"))).reason is Reason.OUTCOME_UNKNOWN

    view = await retry(retrying, request="r")

    assert view.stored == world.stored()
    assert view.stored.job.state is S.PENDING


async def test_an_unreadable_store_is_told(world: World, retrying: Retrying) -> None:
    world.etcd.read_error = EtcdUnavailable("planned by the test")

    assert (await refused(retry(retrying))).reason is Reason.ETCD_UNAVAILABLE


async def test_a_death_enqueues_the_rollback_job_with_it_and_names_it(
    world: World, retrying: Retrying
) -> None:
    undo = Rollback(queue="undo", type="refund", payload=b"{}")
    await dies(world, rollback=undo)

    parent = world.stored()
    child = world.stored(parent.job.rollback_job)

    assert child.revision == parent.revision
    assert_sound(world, child.job.job_id)
    view = await retry(retrying)
    await fails(world, (await claim_job(world.store, view.stored)).token)
    second = world.stored().job.rollback_job
    assert second != child.job.job_id
    assert world.stored(second).job.state is S.PENDING


async def test_a_settlement_that_is_sent_again_rolls_back_once(world: World) -> None:
    undo = Rollback(queue="undo", type="refund")
    claimed = await world.running(rollback=undo)
    world.etcd.faults.append(Fault.RESENT)

    await fails(world, claimed.token)

    records = [where.job_id for where, _ in world.etcd.of_slot(Slot.STATE, "default")]
    assert sorted(records) == sorted(["j1", world.stored().job.rollback_job])


async def test_the_type_of_a_rollback_job_is_listed_before_there_is_one(world: World) -> None:
    job = a_new_job(rollback=Rollback(queue="undo", type="refund"))

    await world.submission.submit("default", "r", [job], world.deadline)

    assert ("default", "undo", "refund") in world.etcd.types
    assert world.stored().job.terms.rollback == job.rollback


async def test_attempts_are_told_with_who_when_and_how(world: World, retrying: Retrying) -> None:
    await dies(world, failure="Broken")
    claimed = await claim_job(world.store, (await retry(retrying)).stored)
    queries = Queries(world.store, world.holders)

    view = await queries.attempts("default", "j1", FAR)

    assert [attempt.number for attempt in view.stored.job.attempts] == [1, 2]
    assert view.stored.job.attempts[0].failure_type == "Broken"
    assert view.token == claimed.token
    assert (await refused(queries.attempts("default", "nobody", FAR))).reason is Reason.JOB_NOT_FOUND
