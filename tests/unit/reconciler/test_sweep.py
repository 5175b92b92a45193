"""The leader's round: every namespace, every pass, and nothing once it leads no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from coordinator.core.effects import Slot, Where
from coordinator.core.job import JobState
from coordinator.errors import EtcdUnavailable
from coordinator.reconciler.lost import LostPass
from coordinator.reconciler.repair import RepairPass
from coordinator.reconciler.retention import RetentionPass
from coordinator.reconciler.state_walk import StateWalk
from coordinator.reconciler.sweep import Sweep, SweptPasses
from tests.support.builders import a_job, store_job
from tests.support.fake_ports import StillFeeds
from tests.support.memory_upkeep import MemoryUpkeep
from tests.unit.services.conftest import World


def a_sweep(world: World, *namespaces: str, leads: Callable[[], bool] = lambda: True) -> Sweep:
    walk = StateWalk(world.store, world.clock)
    lost = LostPass(
        world.store, walk, world.present, world.members, world.clock, world.entropy, notices=world.notices
    )
    repair = RepairPass(
        world.store,
        MemoryUpkeep(world.store),
        walk,
        world.clock,
        notices=world.notices,
        suspect=lost.suspect,
    )
    retention = RetentionPass(world.store, walk, world.clock, keep_ms=1_000)
    passes = SweptPasses(lost=lost, repair=repair, retention=retention)
    feeds = StillFeeds(*(namespaces or ("default",)))
    return Sweep(passes, walk, feeds, leads=leads, meters=world.meters, clock=world.clock)


async def stepped(world: World, sweep: Sweep) -> None:
    running = asyncio.ensure_future(sweep.step())
    while not running.done():
        await world.clock.advance(0.05)
    assert running.result() is False


async def test_a_sweep_recovers_repairs_and_deletes_in_one_reading(world: World) -> None:
    await world.running("lost")
    world.etcd.write((), [Where(Slot.CLAIM, "default", "lost")])
    await store_job(world.store, a_job("broken"))
    [ready] = [w for w in world.etcd.keys_of("default", "broken") if w.slot is Slot.READY]
    world.etcd.write((), [ready])
    reads: list[str] = []
    list_jobs = world.store.list_jobs

    async def counted(namespace: str, **more: object) -> object:
        reads.append(namespace)
        return await list_jobs(namespace, **more)  # type: ignore[arg-type]

    world.store.list_jobs = counted  # type: ignore[method-assign,assignment]
    await stepped(world, a_sweep(world))
    assert world.stored("lost").job.state is JobState.PENDING
    assert ready in world.etcd.keys
    assert reads == ["default"]
    told = {name: counts for name, _, counts, _ in world.meters.passes}
    assert told == {"lost": {"recovered": 1}, "repair": {"ready-key-put": 1}, "retention": {}}


async def test_who_does_not_lead_sweeps_nothing(world: World) -> None:
    await world.running("lost")
    world.etcd.write((), [Where(Slot.CLAIM, "default", "lost")])
    reads = world.etcd.reads
    await stepped(world, a_sweep(world, leads=lambda: False))
    assert world.etcd.reads == reads
    assert world.stored("lost").job.state is JobState.RUNNING


async def test_a_leader_that_stood_still_and_lost_its_role_changes_nothing(world: World) -> None:
    """It believes that it leads; the store knows better."""
    await world.running("lost")
    world.etcd.write(
        (),
        [
            Where(Slot.CLAIM, "default", "lost"),
        ],
    )
    world.etcd.write([(Where(Slot.CANCEL, "default", "none"), "", None)])
    world.etcd.leads = False
    revision = world.etcd.revision
    sweep = a_sweep(world)
    await stepped(world, sweep)
    assert world.etcd.revision == revision
    world.etcd.leads = True
    await stepped(world, sweep)
    assert world.stored("lost").job.state is JobState.PENDING


async def test_it_stops_in_the_middle_once_it_leads_no_more(world: World) -> None:
    for number in range(450):
        await store_job(world.store, a_job(f"j{number:03}"))
    await world.running("lost")
    world.etcd.write((), [Where(Slot.CLAIM, "default", "lost")])
    leads = True
    sweep = a_sweep(world, leads=lambda: leads)
    running = asyncio.ensure_future(sweep.step())
    await world.clock.wait_for_sleepers()
    leads = False
    while not running.done():
        await world.clock.advance(0.05)
    assert world.stored("lost").job.state is JobState.RUNNING


async def test_a_namespace_that_cannot_be_swept_hinders_no_other(world: World) -> None:
    await world.running("lost")
    world.etcd.write((), [Where(Slot.CLAIM, "default", "lost")])
    list_jobs = world.store.list_jobs

    async def failing(namespace: str, **more: object) -> object:
        if namespace == "bad":
            raise EtcdUnavailable("planned by the test")
        return await list_jobs(namespace, **more)  # type: ignore[arg-type]

    world.store.list_jobs = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(EtcdUnavailable):
        await stepped(world, a_sweep(world, "bad", "default"))
    assert world.stored("lost").job.state is JobState.PENDING
    assert world.meters.failed_passes == {"sweep": 1}
