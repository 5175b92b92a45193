"""Cancel, update, delete: repeatable, and never against what stands (fault cases 066, 073, 074, 075, 078)."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core.commands import Complete
from coordinator.core.effects import Slot, Where
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import JobState
from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.ports import Operation
from coordinator.services.api import JobView, Settle, Settled
from coordinator.services.job_changes import JobChanges
from tests.support.builders import NOW_MS, a_job, a_new_job, claim_job, open_session, store_job
from tests.support.memory_etcd import Fault
from tests.unit.services.conftest import World


@pytest.fixture
def changes(world: World) -> JobChanges:
    return JobChanges(world.store, world.holders, world.clock)


async def refused(awaitable: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await awaitable  # type: ignore[misc]
    return caught.value


def assert_sound(world: World, job_id: str = "j1") -> None:
    job = world.stored(job_id).job
    assert check_job(job, world.etcd.claim("default", job_id)) == []
    assert check_keys(job, world.etcd.keys_of("default", job_id)) == []


async def test_a_waiting_job_is_cancelled_at_once_and_its_unique_key_is_free(
    world: World, changes: JobChanges
) -> None:
    await store_job(world.store, a_job(unique_key="k"))
    view = await changes.cancel("default", "j1", "not needed", "me", world.deadline)
    assert view.stored.job.state is JobState.CANCELLED
    assert view.stored.job.end_reason == "not needed"
    assert_sound(world)
    await store_job(world.store, a_job("j2", unique_key="k"))


async def test_a_running_job_is_asked_to_stop_and_keeps_its_holder(world: World, changes: JobChanges) -> None:
    claimed = await world.running()
    view = await changes.cancel("default", "j1", "stop", "me", world.deadline)
    assert view.stored.job.state is JobState.RUNNING
    assert view.stored.job.cancel_requested
    assert view.token == claimed.token
    assert Where(Slot.CANCEL, "default", "j1") in world.etcd.keys
    assert_sound(world)


async def test_twenty_cancels_at_once_agree(world: World, changes: JobChanges) -> None:
    await world.running("running")
    await store_job(world.store, a_job("waiting"))
    for job_id, wanted in (("running", JobState.RUNNING), ("waiting", JobState.CANCELLED)):
        calls = [changes.cancel("default", job_id, "", "me", world.deadline) for _ in range(20)]
        views = await asyncio.gather(*calls)
        assert {view.stored.job.state for view in views} == {wanted}
        assert len({view.stored.revision for view in views}) == 1


async def test_cancelling_what_ended_otherwise_or_never_was_says_so(
    world: World, changes: JobChanges
) -> None:
    claimed = await world.running()
    done = Settle("j1", Complete(token=claimed.token, digest=b""))
    assert isinstance((await world.settlement.settle("default", [done], world.deadline))[0], Settled)
    terminal = await refused(changes.cancel("default", "j1", "", "me", world.deadline))
    assert terminal.reason is Reason.JOB_TERMINAL
    assert terminal.metadata["state"] == "SUCCEEDED"
    unknown = await refused(changes.cancel("default", "nobody", "", "me", world.deadline))
    assert unknown.reason is Reason.JOB_NOT_FOUND


async def test_cancel_and_claim_race_to_a_stop_or_to_a_request_to_stop(
    world: World, changes: JobChanges
) -> None:
    await open_session(world.sessions)
    stored = await store_job(world.store, a_job())
    world.etcd.hold()
    claiming = asyncio.ensure_future(claim_job(world.store, stored))
    await asyncio.sleep(0)
    cancelling = asyncio.ensure_future(changes.cancel("default", "j1", "", "me", world.deadline))
    await asyncio.sleep(0)
    world.etcd.go()
    assert (await claiming).won
    view = await cancelling
    assert view.stored.job.cancel_requested
    assert_sound(world)


async def test_a_job_cancelled_while_backing_off_never_comes_back(world: World, changes: JobChanges) -> None:
    await store_job(world.store, a_job(run_at_ms=NOW_MS + 5_000, unique_key="k"))
    await changes.cancel("default", "j1", "", "me", world.deadline)
    assert not list(world.etcd.of_slot(Slot.DUE, "default"))
    assert not list(world.etcd.of_slot(Slot.UNIQUE, "default"))
    assert_sound(world)


async def test_our_own_cancel_found_after_a_lost_reply_is_the_answer(
    world: World, changes: JobChanges
) -> None:
    await store_job(world.store, a_job())
    world.etcd.faults.append(Fault.LOST_REPLY)
    unknown = await refused(changes.cancel("default", "j1", "", "me", world.deadline))
    assert unknown.reason is Reason.OUTCOME_UNKNOWN
    view = await changes.cancel("default", "j1", "", "me", world.deadline)
    assert view.stored.job.state is JobState.CANCELLED

    await store_job(world.store, a_job("j2"))
    world.etcd.faults.append(Fault.RESENT)
    assert isinstance(await changes.cancel("default", "j2", "", "me", world.deadline), JobView)


async def test_an_update_moves_the_job_in_its_queue(world: World, changes: JobChanges) -> None:
    before = await store_job(world.store, a_job(priority=5))
    view = await changes.update("default", "j1", str(before.revision), 1, None, None, world.deadline)
    assert view.stored.job.terms.priority == 1
    assert view.stored.job.rank < before.job.rank
    assert len(list(world.etcd.of_slot(Slot.READY, "default"))) == 1
    assert_sound(world)


async def test_an_etag_of_the_past_refuses_the_change(world: World, changes: JobChanges) -> None:
    before = await store_job(world.store, a_job(priority=5))
    etag = str(before.revision)
    await changes.update("default", "j1", etag, 1, None, None, world.deadline)
    stale = await refused(changes.update("default", "j1", etag, 2, None, None, world.deadline))
    assert stale.reason is Reason.ETAG_MISMATCH
    assert stale.metadata["etag"] == str(world.stored().revision)
    assert world.stored().job.terms.priority == 1


async def test_a_repeated_update_with_its_first_etag_finds_its_own_change(
    world: World, changes: JobChanges
) -> None:
    before = await store_job(world.store, a_job(priority=5))
    world.etcd.faults.append(Fault.LOST_REPLY)
    unknown = await refused(
        changes.update("default", "j1", str(before.revision), 1, None, None, world.deadline)
    )
    assert unknown.reason is Reason.OUTCOME_UNKNOWN
    again = await changes.update("default", "j1", str(before.revision), 1, None, None, world.deadline)
    assert again.stored == world.stored()


async def test_without_an_etag_a_conflict_is_decided_again(world: World, changes: JobChanges) -> None:
    await store_job(world.store, a_job(priority=5))

    def touch_once(operation: Operation) -> None:
        world.etcd.interfere.clear()
        world.etcd.write(
            [
                (where, world.stored().job, None)
                for where in world.etcd.keys_of("default", "j1")
                if where.slot in (Slot.STATE, Slot.READY)
            ]
        )

    world.etcd.interfere.append(touch_once)
    view = await changes.update("default", "j1", "", 1, None, None, world.deadline)
    assert view.stored.job.terms.priority == 1
    assert_sound(world)


async def test_a_running_job_cannot_be_updated_nor_deleted(world: World, changes: JobChanges) -> None:
    await world.running()
    for call in (
        changes.update("default", "j1", "", 1, None, None, world.deadline),
        changes.delete("default", "j1", "", world.deadline),
    ):
        assert (await refused(call)).reason is Reason.NOT_CLAIMABLE


async def test_deleting_leaves_nothing_and_the_id_can_be_used_again(
    world: World, changes: JobChanges
) -> None:
    claimed = await world.running()
    await world.settlement.checkpoint("default", "j1", claimed.token, 1, b"c", None, world.deadline)
    big = Complete(token=claimed.token, digest=b"", result=b"x" * 2_000)
    await world.settlement.settle("default", [Settle("j1", big)], world.deadline)
    await changes.delete("default", "j1", "", world.deadline)
    assert world.etcd.keys_of("default", "j1") == []
    missing = await refused(changes.delete("default", "j1", "", world.deadline))
    assert missing.reason is Reason.JOB_NOT_FOUND
    [again] = await world.submission.submit("default", "r2", [a_new_job("j1")], world.deadline)
    assert not isinstance(again, RequestError)


async def test_a_deletion_that_was_sent_twice_does_not_take_a_new_job_with_it(
    world: World, changes: JobChanges
) -> None:
    await store_job(world.store, a_job())
    await changes.cancel("default", "j1", "", "me", world.deadline)
    world.etcd.faults.append(Fault.RESENT)
    await changes.delete("default", "j1", "", world.deadline)
    assert world.etcd.stored("default", "j1") is None


async def test_a_store_that_does_not_answer_is_told_as_that(world: World, changes: JobChanges) -> None:
    world.etcd.read_error = EtcdUnavailable("planned")
    error = await refused(changes.cancel("default", "j1", "", "me", world.deadline))
    assert error.reason is Reason.ETCD_UNAVAILABLE
