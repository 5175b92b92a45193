"""Runs that went on after their claim was lost are told once, counted each time, and never made up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from coordinator.core.commands import Complete, Fail
from coordinator.core.effects import Slot, Where
from coordinator.core.job import JobState
from coordinator.core.notice import NoticeKind
from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.ports import Commit
from coordinator.reconciler.lost import LostPass
from coordinator.reconciler.state_walk import StateWalk
from coordinator.services.api import Beat, HeldClaim, Settle
from coordinator.services.holders import Suspect
from coordinator.services.late_calls import SETTLEMENT, LateCalls, LateCallsConfig
from tests.support.builders import FAR, a_session, claim_job, open_session
from tests.support.fake_ports import RecordedNotices
from tests.unit.services.conftest import World
from tests.unit.services.workbench import NS, S, bench_with

OTHER_SESSION = "00000000000000b2"


async def lose(world: World, token: int) -> None:
    """The claim's key goes with its lease, and the job is recovered."""
    world.etcd.write((), [Where(Slot.CLAIM, "default", "j1")])
    lost = LostPass(
        world.store,
        StateWalk(world.store, world.clock),
        world.present,
        world.members,
        world.clock,
        world.entropy,
        notices=RecordedNotices(),
    )
    lost.suspect(Suspect("default", "j1", a_session().session_id, token))
    await lost.judge_queued()


async def lost_and_claimed_again(world: World, *, after_s: float = 0) -> Commit:
    """Its first claim, which somebody else's has followed."""
    first = await world.running()
    await lose(world, first.token)
    await open_session(world.sessions, a_session(OTHER_SESSION))
    await world.clock.advance(after_s)
    await claim_job(world.store, world.stored(), OTHER_SESSION, now_ms=world.clock.now_ms())
    return first


async def settle(world: World, *commands: Complete | Fail) -> None:
    for command in commands:
        await world.settlement.settle("default", [Settle("j1", command)], world.deadline)


async def test_a_late_settlement_is_told_with_the_overlap_of_both_runs(world: World) -> None:
    first = await lost_and_claimed_again(world, after_s=3)
    await world.clock.advance(7.5)

    await settle(world, Complete(token=first.token, digest=b"", result=b"late"))
    await world.late_calls.run_once()

    [notice] = world.notices.of(NoticeKind.DUPLICATE_RUN)
    assert (notice.namespace, notice.queue, notice.type, notice.job_id) == ("default", "q", "t", "j1")
    assert (notice.session_id, notice.attempt) == (a_session().session_id, 1)
    assert (notice.token, notice.overlap_ms) == (first.token, 7_500)
    assert (notice.state_before, notice.state_after) == (JobState.RUNNING, JobState.RUNNING)
    assert notice.facts == {
        "call": "settlement",
        "ended_as": "LOST",
        "newer_attempt": "2",
        "newer_session": OTHER_SESSION,
    }


async def test_a_late_run_is_told_once_and_each_of_its_calls_is_counted(world: World) -> None:
    first = await lost_and_claimed_again(world)

    for content in (b"1", b"2", b"3"):
        await settle(world, Complete(token=first.token, digest=b"", result=content))
        await world.late_calls.run_once()

    assert len(world.notices.of(NoticeKind.DUPLICATE_RUN)) == 1
    assert world.meters.late_calls == {"settlement": 3}


async def test_a_late_checkpoint_is_told(world: World) -> None:
    first = await lost_and_claimed_again(world)

    with pytest.raises(RequestError) as refused:
        await world.settlement.checkpoint("default", "j1", first.token, 1, b"x", None, world.deadline)
    await world.late_calls.run_once()

    assert refused.value.reason is Reason.CLAIM_LOST
    [notice] = world.notices.of(NoticeKind.DUPLICATE_RUN)
    assert notice.facts["call"] == "checkpoint"


async def test_a_late_checkpoint_of_a_remembered_claim_is_told(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    await lose(world, claimed.token)

    with pytest.raises(RequestError):
        await world.settlement.checkpoint("default", "j1", claimed.token, 1, b"x", None, world.deadline)
    await world.late_calls.run_once()

    [notice] = world.notices.of(NoticeKind.DUPLICATE_RUN)
    assert (notice.facts["call"], notice.overlap_ms) == ("checkpoint", 0)


async def test_a_replay_and_a_second_settlement_of_ones_own_are_no_duplicate_run(world: World) -> None:
    claimed = await world.running()
    done = Complete(token=claimed.token, digest=b"", result=b"ok")

    await settle(world, done, done, replace(done, result=b"another"), Fail(token=claimed.token, digest=b""))
    await world.late_calls.run_once()

    assert world.notices.of(NoticeKind.DUPLICATE_RUN) == []
    assert world.meters.late_calls == {"settlement": 2}


async def test_a_beat_that_lists_a_lost_claim_is_told_and_one_that_crossed_its_settlement_is_not() -> None:
    c = await bench_with()
    await c.submit("lost", "done")
    claimed = {one.stored.job.job_id: one.claim for one in await c.claim(n=2)}
    c.etcd.write((), [Where(Slot.CLAIM, NS, "lost")])
    listed = [HeldClaim(job_id=name, token=claim.token, sequence=1) for name, claim in claimed.items()]
    world = World()
    settlement = type(world.settlement)(
        c.jobs, c.holders, c.present, c.clock, world.entropy, notices=c.notices, late=c.late_calls.add
    )
    await settlement.settle(NS, [Settle("done", Complete(token=claimed["done"].token, digest=b""))], FAR)

    await c.sessions.beat(NS, Beat(session_id=S, number=1, sent_ms=0, claims=listed), FAR)
    await c.late_calls.run_once()

    [notice] = c.notices.of(NoticeKind.DUPLICATE_RUN)
    assert (notice.job_id, notice.facts["call"], notice.facts["ended_as"]) == ("lost", "heartbeat", "LOST")
    assert c.meters.late_calls == {"heartbeat": 2}


async def test_the_beat_of_a_session_that_has_ended_is_told_for_all_that_it_lists() -> None:
    c = await bench_with()
    await c.submit("a", "b")
    listed = [
        HeldClaim(job_id=one.stored.job.job_id, token=one.claim.token, sequence=1)
        for one in await c.claim(n=2)
    ]
    await c.clock.advance(60)

    with pytest.raises(RequestError) as gone:
        await c.sessions.beat(NS, Beat(session_id=S, number=1, sent_ms=0, claims=listed), FAR)
    await c.late_calls.run_once()

    assert gone.value.reason is Reason.SESSION_NOT_FOUND
    assert {notice.job_id for notice in c.notices.of(NoticeKind.DUPLICATE_RUN)} == {"a", "b"}


async def test_what_cannot_be_read_is_dropped_and_counted_and_the_next_is_told(world: World) -> None:
    first = await lost_and_claimed_again(world)
    world.late_calls.add("default", "j1", first.token, SETTLEMENT)
    world.etcd.read_error = EtcdUnavailable("down")
    running = asyncio.ensure_future(world.late_calls.run())
    try:
        await world.clock.wait_for_sleepers()
        assert (world.late_calls.dropped, world.late_calls.queued) == (1, 0)
        world.etcd.read_error = None
        world.late_calls.add("default", "j1", first.token, "checkpoint")
        await world.clock.advance(2)
    finally:
        running.cancel()

    assert [notice.facts["call"] for notice in world.notices.of(NoticeKind.DUPLICATE_RUN)] == ["checkpoint"]


async def test_a_storm_of_late_calls_is_bounded(world: World) -> None:
    late = LateCalls(
        world.store,
        world.notices,
        world.meters,
        world.clock,
        LateCallsConfig(max_queued=10, batch=4, remembered=10),
    )
    for number in range(100):
        late.add("default", f"j{number}", 1, SETTLEMENT)

    assert (late.queued, late.dropped) == (10, 90)
    reads = world.etcd.reads
    while late.queued:
        await late.run_once()
    assert world.etcd.reads - reads <= 10
    assert world.meters.late_calls == {"settlement": 100}
