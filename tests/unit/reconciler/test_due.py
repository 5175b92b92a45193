"""What time does to waiting jobs: promotion, timeouts, holds, strays."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.core.commands import Fail, TakeAway, Taken
from coordinator.core.effects import Slot, Where, effects
from coordinator.core.invariants import check_keys
from coordinator.core.job import JobState
from coordinator.core.machine import Decision, decide
from coordinator.core.notice import NoticeKind
from coordinator.core.rendezvous import preferred
from coordinator.errors import EtcdUnavailable
from coordinator.ports import Operation
from coordinator.reconciler.due import ENDED, PROMOTED, STRAY_REMOVED, DueConfig, DuePass
from coordinator.services.api import Settle
from coordinator.services.job_changes import JobChanges
from tests.support.builders import FAR, NOW_MS, a_job, store_job
from tests.support.fake_ports import FixedMembers
from tests.support.memory_etcd import Fault
from tests.unit.services.conftest import World


def a_pass(world: World, members: FixedMembers | None = None, **config: int) -> DuePass:
    return DuePass(
        world.store,
        members or world.members,
        world.clock,
        DueConfig(**config),
        notices=world.notices,
    )


def assert_sound(world: World, job_id: str = "j1") -> None:
    assert check_keys(world.stored(job_id).job, world.etcd.keys_of("default", job_id)) == []


def _spans(field: str, ms: int) -> dict[str, Any]:
    return {field: ms}


async def take_away(world: World, hold_ms: int = 10_000) -> None:
    """Take the running job from its live session."""
    before, claim = world.stored(), world.etcd.claim("default", "j1")
    assert claim is not None
    command = TakeAway(token=claim.token, why=Taken.UNDELIVERED, hold_ms=hold_ms)
    outcome = decide(before.job, claim, command, world.clock.now_ms())
    assert isinstance(outcome, Decision)
    commit = await world.store.commit(
        Operation(
            guard=outcome.guard,
            before=before,
            after=outcome.job,
            writes=effects(before.job, outcome.job),
            deadline=FAR,
            token=claim.token,
        )
    )
    assert commit.won


async def test_a_job_becomes_claimable_when_its_time_comes_and_not_before(world: World) -> None:
    await store_job(world.store, a_job(run_at_ms=NOW_MS + 500))
    due = a_pass(world)
    await world.clock.advance(0.4)
    assert (await due.run_once("default")).changed == 0
    await world.clock.advance(0.2)
    assert (await due.run_once("default")).counts[PROMOTED] == 1
    assert world.stored().job.state is JobState.PENDING
    assert_sound(world)


async def test_a_failed_job_comes_back_after_its_backoff(world: World) -> None:
    claimed = await world.running()
    failed = Settle("j1", Fail(token=claimed.token, digest=b"", retry_delay_ms=2_000))
    await world.settlement.settle("default", [failed], world.deadline)
    due = a_pass(world)
    await world.clock.advance(2.1)
    assert (await due.run_once("default")).counts[PROMOTED] == 1
    assert_sound(world)


@pytest.mark.parametrize(
    ("field", "reason"), [("queue_timeout_ms", "queue timeout"), ("total_timeout_ms", "total timeout")]
)
async def test_a_job_whose_time_is_over_ends_with_that_reason(world: World, field: str, reason: str) -> None:
    await store_job(world.store, a_job(unique_key="k", **_spans(field, 1_000)))
    await world.clock.advance(1.1)
    report = await a_pass(world).run_once("default")
    assert (report.counts[ENDED], report.counts[PROMOTED]) == (1, 0)
    assert world.stored().job.state is JobState.DEAD
    assert world.stored().job.end_reason == reason
    assert not list(world.etcd.of_slot(Slot.UNIQUE, "default"))
    assert_sound(world)


async def test_a_cancelled_job_does_not_come_back_even_through_a_due_key_left_behind(world: World) -> None:
    await store_job(world.store, a_job(run_at_ms=NOW_MS + 500))
    changes = JobChanges(world.store, world.holders, world.clock)
    await changes.cancel("default", "j1", "", "me", world.deadline)
    world.etcd.write([(Where(Slot.DUE, "default", "j1", ms=NOW_MS + 500), 0, None)])
    await world.clock.advance(1)
    assert (await a_pass(world).run_once("default")).counts[STRAY_REMOVED] == 1
    assert world.stored().job.state is JobState.CANCELLED
    assert not list(world.etcd.of_slot(Slot.DUE, "default"))


async def test_a_due_key_without_a_job_is_cleared_and_one_that_changed_is_not(world: World) -> None:
    where = Where(Slot.DUE, "default", "ghost", ms=NOW_MS - 1)
    world.etcd.write([(where, 0, None)])
    [listed] = await world.store.list_due("default", until_ms=NOW_MS, limit=9, deadline=FAR)
    world.etcd.write([(where, 0, None)])
    assert not await world.store.delete_stray("default", listed, deadline=FAR)
    assert (await a_pass(world).run_once("default")).counts[STRAY_REMOVED] == 1
    assert where not in world.etcd.keys


async def test_a_job_taken_away_waits_a_ttl_that_its_promoter_has_itself_seen(world: World) -> None:
    await world.running()
    await take_away(world)
    due = a_pass(world)
    world.clock.jump_wall(3_600)  # a wall clock that is wrong hastens nothing
    assert (await due.run_once("default")).waiting == 1
    await world.clock.advance(9.9)
    assert (await due.run_once("default")).counts[PROMOTED] == 0
    await world.clock.advance(0.2)
    assert (await due.run_once("default")).counts[PROMOTED] == 1
    assert world.stored().job.hold_ms == 0
    assert_sound(world)


async def test_who_took_the_job_away_has_seen_it_from_then_on(world: World) -> None:
    await world.running()
    due = a_pass(world)
    world.etcd.observers.append(due)
    await take_away(world)
    await world.clock.advance(10.01)
    assert (await due.run_once("default")).counts[PROMOTED] == 1


async def test_others_jobs_are_left_to_them_for_a_second(world: World) -> None:
    other = next(name for name in (f"c{n}" for n in range(2, 99)) if preferred("j1", ("c1", name)) == name)
    await store_job(world.store, a_job(run_at_ms=NOW_MS + 500))
    due = a_pass(world, FixedMembers("c1", other))
    await world.clock.advance(0.6)
    report = await due.run_once("default")
    assert (report.counts[PROMOTED], report.waiting) == (0, 1)
    await world.clock.advance(1)
    assert (await due.run_once("default")).counts[PROMOTED] == 1


async def test_two_coordinators_promote_a_job_once(world: World) -> None:
    await store_job(world.store, a_job(run_at_ms=NOW_MS + 500))
    await world.clock.advance(2)
    first, second = a_pass(world), a_pass(world)
    read_many = world.store.read_many

    async def paused(*args: object, **kwargs: object) -> object:
        found = await read_many(*args, **kwargs)  # type: ignore[arg-type]
        world.store.read_many = read_many  # type: ignore[method-assign]
        assert (await second.run_once("default")).counts[PROMOTED] == 1
        return found

    world.store.read_many = paused  # type: ignore[method-assign,assignment]
    assert (await first.run_once("default")).counts[PROMOTED] == 0
    assert world.etcd.commits == 2
    assert_sound(world)


async def test_a_crowd_that_has_to_wait_does_not_hide_what_is_due_behind_it(world: World) -> None:
    for n in range(30):
        world.etcd.write([(Where(Slot.DUE, "default", f"held{n:02}", ms=NOW_MS + n), 10_000, None)])
    await store_job(world.store, a_job(run_at_ms=NOW_MS + 400))
    await world.clock.advance(0.5)
    assert (await a_pass(world, page=10).run_once("default")).counts[PROMOTED] == 1


async def test_a_large_crowd_is_worked_off_page_by_page_and_says_that_there_is_more(world: World) -> None:
    for n in range(50):
        await store_job(world.store, a_job(f"j{n:02}", run_at_ms=NOW_MS + 100))
    await world.clock.advance(0.5)
    due = a_pass(world, page=10, max_rounds=3)
    first = await due.run_once("default")
    assert (first.counts[PROMOTED], first.more) == (30, True)
    assert (await due.run_once("default")).more is False
    assert {world.stored(f"j{n:02}").job.state for n in range(50)} == {JobState.PENDING}


async def test_failures_leave_the_job_for_the_next_run(world: World) -> None:
    await store_job(world.store, a_job(run_at_ms=NOW_MS + 100))
    await world.clock.advance(0.5)
    due = a_pass(world)
    world.etcd.faults.append(Fault.REFUSED)
    assert (await due.run_once("default")).failed == 1
    world.etcd.read_error = EtcdUnavailable("planned")
    with pytest.raises(EtcdUnavailable):
        await due.run_once("default")
    world.etcd.read_error = None
    assert (await due.run_once("default")).counts[PROMOTED] == 1


async def test_a_job_that_cannot_be_decoded_keeps_its_due_key(world: World) -> None:
    await store_job(world.store, a_job(run_at_ms=NOW_MS + 100))
    await world.clock.advance(0.5)
    world.store.garbled.add("j1")
    due = a_pass(world)
    report = await due.run_once("default")
    assert (report.counts[STRAY_REMOVED], report.waiting) == (0, 1)
    world.store.garbled.clear()
    assert (await due.run_once("default")).counts[PROMOTED] == 1


async def test_what_is_remembered_of_a_hold_ends_with_the_hold(world: World) -> None:
    await world.running()
    due = a_pass(world)
    world.etcd.observers.append(due)
    await take_away(world)
    assert due.sightings == 1
    await JobChanges(world.store, world.holders, world.clock).cancel(
        "default", "j1", "", "me", world.deadline
    )
    await world.clock.advance(10.01)
    await due.run_once("default")
    assert due.sightings == 0


async def test_a_dry_run_says_what_is_due_and_moves_nothing(world: World) -> None:
    await store_job(world.store, a_job(run_at_ms=NOW_MS + 100))
    await store_job(world.store, a_job("j2", run_at_ms=NOW_MS + 50, **_spans("total_timeout_ms", 80)))
    world.etcd.write([(Where(Slot.DUE, "default", "j3", ms=NOW_MS + 10), 0, None)])
    await world.clock.advance(0.5)
    due, before = a_pass(world), dict(world.etcd.keys)
    report = await due.run_once("default", dry_run=True)
    assert world.etcd.keys == before
    assert report.counts == {PROMOTED: 1, ENDED: 1, STRAY_REMOVED: 1}
    assert (await due.run_once("default")).counts == report.counts
    assert (await due.run_once("default", dry_run=True)).changed == 0


async def test_a_job_whose_time_is_over_is_told_of(world: World) -> None:
    await store_job(world.store, a_job(**_spans("queue_timeout_ms", 1_000)))
    await world.clock.advance(1.5)
    await a_pass(world).run_once("default")
    [notice] = world.notices.notices
    assert (notice.kind, notice.reason) == (NoticeKind.DEAD, "queue timeout")
    assert (notice.state_before, notice.state_after) == (JobState.PENDING, JobState.DEAD)
