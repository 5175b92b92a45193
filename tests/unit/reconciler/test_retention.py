"""DEAD and QUARANTINED jobs are kept for their time and not for ever."""

from __future__ import annotations

import asyncio

from coordinator.core.commands import Fail
from coordinator.core.job import JobState
from coordinator.core.retry import RetryPolicy
from coordinator.ports import Operation
from coordinator.reconciler.report import Report
from coordinator.reconciler.retention import DELETED, RetentionPass
from coordinator.reconciler.state_walk import Run, StateWalk
from coordinator.services.api import Settle
from tests.support.builders import a_job, store_job
from tests.unit.services.conftest import World

DAY_MS = 86_400_000


def a_pass(world: World) -> RetentionPass:
    walk = StateWalk(world.store, world.clock)
    return RetentionPass(world.store, walk, world.clock, keep_ms=7 * DAY_MS)


async def dead(world: World, job_id: str = "j1") -> None:
    claimed = await world.running(job_id, retry=RetryPolicy(max_retries=0))
    failed = Settle(job_id, Fail(token=claimed.token, digest=b"", no_retry=True))
    await world.settlement.settle("default", [failed], world.deadline)
    assert world.stored(job_id).job.state is JobState.DEAD


async def test_a_dead_job_goes_with_all_its_keys_when_its_time_is_over_and_not_before(world: World) -> None:
    await dead(world)
    await store_job(world.store, a_job("waits"))
    kept = a_pass(world)
    world.clock.jump_wall(7 * 86_400 - 1)
    assert (await kept.run_once("default")).changed == 0
    world.clock.jump_wall(1)
    assert (await kept.run_once("default", dry_run=True)).counts == {DELETED: 1}
    assert world.etcd.keys_of("default", "j1")
    assert (await kept.run_once("default")).counts == {DELETED: 1}
    assert not world.etcd.keys_of("default", "j1")
    assert world.stored("waits").job.state is JobState.PENDING


async def test_a_job_that_an_operator_brings_back_meanwhile_stays(world: World) -> None:
    await dead(world)
    world.clock.jump_wall(8 * 86_400)

    def touched(operation: Operation) -> None:
        stored = world.stored()
        where = next(w for w in world.etcd.keys_of("default", "j1") if w.slot.value == "state")
        world.etcd.write([(where, stored.job, None)])

    world.etcd.interfere.append(touched)
    report = await a_pass(world).run_once("default")
    assert (report.changed, report.failed) == (0, 0)
    assert world.stored().job.state is JobState.DEAD


async def test_a_leader_that_leads_no_more_deletes_nothing(world: World) -> None:
    await dead(world)
    world.clock.jump_wall(8 * 86_400)
    world.etcd.leads = False
    run = Run(namespace="default", report=Report("retention"), as_leader=True)
    await a_pass(world).visit([world.stored()], run)
    assert (run.report.changed, run.report.failed) == (0, 1)
    assert world.stored().job.state is JobState.DEAD


async def test_many_are_deleted_page_by_page(world: World) -> None:
    for number in range(450):
        await dead(world, f"j{number:03}")
    world.clock.jump_wall(8 * 86_400)
    running = asyncio.ensure_future(a_pass(world).run_once("default"))
    await world.clock.wait_for_sleepers()
    assert not running.done(), "it rests after a page"
    while not running.done():
        await world.clock.advance(0.05)
    assert running.result().counts == {DELETED: 450}
