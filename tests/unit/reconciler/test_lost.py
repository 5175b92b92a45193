"""A dead holder's job goes on; a live one's is never touched (fault cases 009, 045, 067, 075)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from coordinator.core.commands import Cancel, Complete
from coordinator.core.effects import Slot, Where
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import AttemptOutcome, JobState
from coordinator.core.machine import Decision, decide
from coordinator.core.notice import NoticeKind
from coordinator.core.rendezvous import preferred
from coordinator.core.retry import RetryPolicy
from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.ports import Commit, Entropy, Operation
from coordinator.reconciler.lost import RECOVERED, LostConfig, LostPass
from coordinator.reconciler.report import Report
from coordinator.reconciler.state_walk import PaceConfig, Run, StateWalk
from coordinator.services.api import Settle
from coordinator.services.commits import operation_of
from coordinator.services.holders import Suspect
from coordinator.services.job_changes import JobChanges
from coordinator.services.redelivery import Redelivery
from tests.support.builders import NOW_MS, a_job, a_session, claim_job, open_session, store_job
from tests.support.fake_ports import FixedMembers
from tests.support.memory_etcd import Fault
from tests.unit.services.conftest import World

SESSION = "00000000000000a1"


def a_pass(
    world: World,
    members: FixedMembers | None = None,
    *,
    pace: PaceConfig | None = None,
    entropy: Entropy | None = None,
    **config: int | float,
) -> LostPass:
    return LostPass(
        world.store,
        StateWalk(world.store, world.clock, pace),
        world.present,
        members or world.members,
        world.clock,
        entropy or world.entropy,
        LostConfig(**config),  # type: ignore[arg-type]
        notices=world.notices,
    )


def tally(report: Report) -> tuple[int, int, int]:
    """Examined, recovered, tried in vain; the others were sound."""
    return report.examined, report.counts[RECOVERED], report.failed


def suspicion(claimed: Commit) -> Suspect:
    assert claimed.stored is not None
    return Suspect("default", claimed.stored.job.job_id, SESSION, claimed.token)


def assert_sound(world: World, job_id: str = "j1") -> None:
    job = world.stored(job_id).job
    assert check_job(job, world.etcd.claim("default", job_id)) == []
    assert check_keys(job, world.etcd.keys_of("default", job_id)) == []


async def test_a_dead_holders_job_is_claimable_again_at_once_and_its_end_is_kept(world: World) -> None:
    claimed = await world.running()
    await world.clock.advance(10.5)
    world.etcd.expire()
    lost = a_pass(world)
    lost.suspect(suspicion(claimed))
    assert tally(await lost.judge_queued()) == (1, 1, 0)
    job = world.stored().job
    assert job.state is JobState.PENDING
    assert (job.lease_losses, job.failures) == (1, 0)
    assert job.attempts[-1].outcome is AttemptOutcome.LOST
    assert job.attempts[-1].token == claimed.token
    assert lost.queued == 0
    assert_sound(world)


async def test_a_loss_keeps_the_token_of_a_claim_that_was_handed_out_again(world: World) -> None:
    """The record was written once more since the claim, so its revision is not the claim's."""
    claimed = await world.running()
    handed = Redelivery(world.store, world.sessions)
    again = await handed.of_request("default", "00000000000000a1", b"nonce", world.deadline)
    assert [one.claim.token for one in again] == [claimed.token]
    await world.clock.advance(10.5)
    lost = a_pass(world)
    assert (await lost.run_once("default")).counts[RECOVERED] == 1
    assert world.stored().job.attempts[-1].token == claimed.token
    assert_sound(world)


async def test_a_live_job_is_never_recovered_whatever_is_suspected(world: World) -> None:
    claimed = await world.running()
    lost = a_pass(world)
    lost.suspect(suspicion(claimed))
    groups = world.etcd.groups
    assert tally(await lost.judge_queued()) == (1, 0, 0)
    assert (await lost.run_once("default")).counts[RECOVERED] == 0
    assert world.etcd.groups == groups, "nothing is even tried"
    assert world.stored() == claimed.stored


async def test_a_claim_that_was_settled_is_no_loss(world: World) -> None:
    claimed = await world.running()
    done = Settle("j1", Complete(token=claimed.token, digest=b""))
    await world.settlement.settle("default", [done], world.deadline)
    lost = a_pass(world)
    lost.suspect(suspicion(claimed))
    assert tally(await lost.judge_queued()) == (1, 0, 0)
    assert world.stored().job.state is JobState.SUCCEEDED


async def test_of_two_recoverers_one_wins_and_a_new_holder_keeps_its_claim(world: World) -> None:
    claimed = await world.running()
    await world.clock.advance(10.5)
    slow, fast = a_pass(world), a_pass(world)
    taken: list[Commit] = []

    async def recover_and_claim() -> None:
        fast.suspect(suspicion(claimed))
        assert (await fast.judge_queued()).counts[RECOVERED] == 1
        await open_session(world.sessions, a_session("00000000000000b2"))
        taken.append(await claim_job(world.store, world.stored(), "00000000000000b2"))

    read_many = world.store.read_many

    async def paused(*args: object, **kwargs: object) -> object:
        found = await read_many(*args, **kwargs)  # type: ignore[arg-type]
        world.store.read_many = read_many  # type: ignore[method-assign]
        await recover_and_claim()
        return found

    world.store.read_many = paused  # type: ignore[method-assign,assignment]
    slow.suspect(suspicion(claimed))
    counts = await slow.judge_queued()
    assert tally(counts) == (1, 0, 0)
    job = world.stored().job
    assert (job.state, job.attempt, job.lease_losses) == (JobState.RUNNING, 2, 1)
    claim = world.etcd.claim("default", "j1")
    assert claim is not None
    assert claim.token == taken[0].token


async def test_a_job_that_was_to_stop_becomes_cancelled_and_stays_so(world: World) -> None:
    claimed = await world.running(unique_key="k")
    await JobChanges(world.store, world.holders, world.clock).cancel(
        "default", "j1", "stop", "me", world.deadline
    )
    await world.clock.advance(10.5)
    lost = a_pass(world)
    lost.suspect(suspicion(claimed))
    assert (await lost.judge_queued()).counts[RECOVERED] == 1
    assert world.stored().job.state is JobState.CANCELLED
    assert not list(world.etcd.of_slot(Slot.UNIQUE, "default"))
    assert (await lost.run_once("default")).counts[RECOVERED] == 0
    assert_sound(world)


async def test_a_job_whose_holders_keep_dying_is_quarantined(world: World) -> None:
    claimed = await world.running(retry=RetryPolicy(max_lease_losses=1))
    for _ in range(2):
        await world.clock.advance(10.5)
        lost = a_pass(world)
        lost.suspect(suspicion(claimed))
        assert (await lost.judge_queued()).counts[RECOVERED] == 1
        if world.stored().job.state is JobState.PENDING:
            await open_session(world.sessions)
            claimed = await claim_job(world.store, world.stored())
    assert world.stored().job.state is JobState.QUARANTINED
    assert_sound(world)


async def test_a_session_with_many_claims_is_recovered_in_few_groups(world: World) -> None:
    await open_session(world.sessions)
    claims = [
        await claim_job(world.store, await store_job(world.store, a_job(f"j{n:03}"))) for n in range(300)
    ]
    await world.clock.advance(10.5)
    lost = a_pass(world)
    for claimed in claims:
        lost.suspect(suspicion(claimed))
    groups = world.etcd.groups
    assert (await lost.judge_queued()).counts[RECOVERED] == 300
    assert world.etcd.groups - groups == 2
    assert all(world.stored(f"j{n:03}").job.lease_losses == 1 for n in range(300))


async def test_the_sweep_finds_a_claim_deleted_by_hand_and_its_old_token_is_stale(world: World) -> None:
    claimed = await world.running()
    await world.running("alive", session=a_session("00000000000000b2"))
    world.etcd.write((), [Where(Slot.CLAIM, "default", "j1")])
    counts = await a_pass(world).run_once("default")
    assert tally(counts) == (2, 1, 0)
    job = world.stored().job
    assert job.attempts[-1].token == claimed.token
    assert world.stored("alive").job.state is JobState.RUNNING
    late = Settle("j1", Complete(token=claimed.token, digest=b""))
    [refused] = await world.settlement.settle("default", [late], world.deadline)
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.CLAIM_LOST
    assert refused.metadata["ended_as"] == "LOST"


async def test_the_sweep_goes_in_paced_pages(world: World) -> None:
    for n in range(25):
        await store_job(world.store, a_job(f"w{n:02}"))
    claimed = await world.running("x")
    await world.clock.advance(10.5)
    world.etcd.expire()
    sweeping = asyncio.ensure_future(a_pass(world, pace=PaceConfig(page=10, rest_s=1.0)).run_once("default"))
    await world.clock.wait_for_sleepers()
    assert not sweeping.done()
    await world.clock.advance(3)
    assert (await sweeping).counts[RECOVERED] == 1
    assert world.stored("x").job.attempts[-1].token == claimed.token


async def test_another_coordinators_suspicion_waits_for_it_and_is_taken_up_if_it_does_not_act(
    world: World,
) -> None:
    claimed = await world.running()
    await world.clock.advance(10.5)
    other = next(name for name in (f"c{n}" for n in range(2, 99)) if preferred("j1", ("c1", name)) == name)
    lost = a_pass(world, FixedMembers("c1", other))
    lost.suspect(suspicion(claimed))
    assert tally(await lost.judge_queued()) == (0, 0, 0)
    await world.clock.advance(1.0)
    assert (await lost.judge_queued()).counts[RECOVERED] == 1


async def test_what_fails_is_tried_again_later_each_time_and_recovered_in_the_end(world: World) -> None:
    claimed = await world.running()
    await world.clock.advance(10.5)
    lost = a_pass(world)
    running = asyncio.create_task(lost.run())
    world.etcd.read_error = EtcdUnavailable("planned")
    lost.suspect(suspicion(claimed))
    await world.clock.advance(0.7)
    reads = world.etcd.reads
    await world.clock.advance(0.5)
    assert world.etcd.reads - reads <= 1, "it backs off"
    world.etcd.read_error = None
    world.etcd.faults += [Fault.REFUSED, Fault.LOST_REPLY]
    await world.clock.advance(20)
    assert world.stored().job.state is JobState.PENDING
    assert world.stored().job.lease_losses == 1
    assert lost.queued == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_record_that_changed_meanwhile_and_is_still_lost_is_tried_again(world: World) -> None:
    claimed = await world.running()
    await world.clock.advance(10.5)
    world.etcd.expire()

    def touch_once(operation: Operation) -> None:
        world.etcd.interfere.clear()
        world.etcd.write([(Where(Slot.STATE, "default", "j1"), world.stored().job, None)])

    world.etcd.interfere.append(touch_once)
    lost = a_pass(world)
    lost.suspect(suspicion(claimed))
    assert (await lost.judge_queued()).failed == 1
    await world.clock.advance(0.3)
    assert (await lost.judge_queued()).counts[RECOVERED] == 1


async def test_more_suspicions_than_are_kept_are_left_to_a_sweep(world: World) -> None:
    await open_session(world.sessions)
    claims = [await claim_job(world.store, await store_job(world.store, a_job(f"j{n}"))) for n in range(5)]
    await world.clock.advance(10.5)
    lost = a_pass(world, max_queued=2, others_s=0.0)
    for claimed in claims:
        lost.suspect(suspicion(claimed))
    assert (lost.queued, lost.overflowed) == (2, 3)
    assert (await lost.judge_queued()).counts[RECOVERED] == 2
    await lost.run_once("default")
    assert {world.stored(f"j{n}").job.state for n in range(5)} == {JobState.PENDING}


async def test_a_sweep_that_could_not_recover_leaves_nothing_behind_for_when_it_leads_no_more(
    world: World,
) -> None:
    await world.running()
    await world.clock.advance(10.5)
    lost = a_pass(world)
    world.etcd.leads = False
    run = Run(namespace="default", report=Report("lost"), as_leader=True)
    await lost.visit([world.stored()], run)
    assert (run.report.failed, lost.queued) == (1, 0)
    await lost.judge_queued()
    assert world.stored().job.state is JobState.RUNNING


class Spread:
    """``ports.Entropy`` that goes evenly through [0, 1)."""

    def __init__(self) -> None:
        self._count = 0

    def fraction(self) -> float:
        self._count += 1
        return self._count * 0.618033988749895 % 1

    def identifier(self) -> str:
        raise AssertionError("not wanted")

    def counter(self) -> int:
        raise AssertionError("not wanted")


async def many_running(world: World, count: int) -> list[Commit]:
    await open_session(world.sessions)
    return [
        await claim_job(world.store, await store_job(world.store, a_job(f"j{n:04}"))) for n in range(count)
    ]


def delays(world: World, count: int) -> list[int]:
    now = world.clock.now_ms()
    jobs = [world.stored(f"j{n:04}").job for n in range(count)]
    assert all(job.attempts[-1].outcome is AttemptOutcome.LOST for job in jobs)
    return [job.ready_ms - now if job.state is JobState.SCHEDULED else 0 for job in jobs]


@pytest.mark.parametrize("told", [True, False], ids=["by the watch", "found by a sweep"])
async def test_many_that_are_lost_together_come_back_one_after_the_other(world: World, told: bool) -> None:
    """Fault case 051: what ran at once before does not fall upon the next worker at once."""
    claims = await many_running(world, 400)
    await world.clock.advance(10.5)
    world.etcd.expire()
    lost = a_pass(world, entropy=Spread(), pace=PaceConfig(page=400))
    if told:
        for claimed in claims:
            lost.suspect(suspicion(claimed))
        await lost.judge_queued()
    else:
        await lost.run_once("default")
    after = delays(world, 400)
    assert max(after) <= 800
    for start in range(0, 800, 200):
        assert 30 <= sum(start <= delay < start + 200 for delay in after) <= 150
    for n in (0, 399):
        assert_sound(world, f"j{n:04}")


async def test_nobody_waits_longer_than_five_seconds_however_many_were_lost(world: World) -> None:
    claims = await many_running(world, 30)
    await world.clock.advance(10.5)
    world.etcd.expire()
    lost = a_pass(world, entropy=Spread(), spread_ms=10_000)
    for claimed in claims:
        lost.suspect(suspicion(claimed))
    await lost.judge_queued()
    assert 4_000 < max(delays(world, 30)) <= 5_000


async def test_a_few_that_are_lost_together_or_many_one_by_one_wait_for_nothing(world: World) -> None:
    claims = await many_running(world, 150)
    await world.clock.advance(10.5)
    world.etcd.expire()
    lost = a_pass(world, entropy=Spread())
    for start in range(0, 150, 50):
        for claimed in claims[start : start + 50]:
            lost.suspect(suspicion(claimed))
        await lost.judge_queued()
        await world.clock.advance(1.1)
    assert set(delays(world, 150)) == {0}


async def test_what_is_lost_again_waits_longer_each_time_and_each_for_itself(world: World) -> None:
    """Fault case 046: else it is claimed again and again beside the job that kills its holders."""
    await open_session(world.sessions)
    claims = [
        await claim_job(
            world.store, await store_job(world.store, replace(a_job(f"j{n:04}"), lease_losses=n // 10))
        )
        for n in range(40)
    ]
    await world.clock.advance(10.5)
    world.etcd.expire()
    lost = a_pass(world, entropy=Spread())
    for claimed in claims:
        lost.suspect(suspicion(claimed))
    await lost.judge_queued()
    jobs = [world.stored(f"j{n:04}").job for n in range(40)]
    assert {job.state for job in jobs[30:]} == {JobState.QUARANTINED}
    first, second, third = (
        [max(0, job.ready_ms - world.clock.now_ms()) for job in jobs[start : start + 10]]
        for start in (0, 10, 20)
    )
    assert first == [0] * 10
    assert 1_000 < max(second) <= 2_000
    assert 3_000 < max(third) <= 4_000
    assert len({*second, *third}) == 20


async def test_a_request_to_stop_keeps_the_token_that_its_record_no_longer_tells(world: World) -> None:
    claimed = await world.running()
    changes = JobChanges(world.store, world.holders, world.clock)
    await changes.cancel("default", "j1", "stop", "me", world.deadline)
    await world.clock.advance(10.5)
    world.etcd.expire()
    assert (await a_pass(world).run_once("default")).counts[RECOVERED] == 1
    assert world.stored().job.attempts[-1].token == claimed.token


async def test_a_token_that_is_not_known_is_not_made_up(world: World) -> None:
    """The record was written again since the claim, by somebody who did not see it."""
    await world.running()
    before = world.stored()
    outcome = decide(before.job, None, Cancel(reason="stop"), NOW_MS)
    assert isinstance(outcome, Decision)
    assert (await world.store.commit(operation_of(before, outcome, world.deadline))).won
    await world.clock.advance(10.5)
    assert (await a_pass(world).run_once("default")).counts[RECOVERED] == 1
    assert world.stored().job.attempts[-1].token == 0


async def test_a_dry_run_says_who_is_lost_and_recovers_nobody(world: World) -> None:
    await world.running()
    await world.clock.advance(10.5)
    lost = a_pass(world)
    assert tally(await lost.run_once("default", dry_run=True)) == (1, 1, 0)
    assert world.stored().job.state is JobState.RUNNING
    assert not world.notices.notices
    assert tally(await lost.run_once("default")) == (1, 1, 0)


async def test_a_loss_is_told_of_and_so_is_the_quarantine_that_it_ends_in(world: World) -> None:
    claimed = await world.running(retry=RetryPolicy(max_lease_losses=0))
    await world.clock.advance(10.5)
    lost = a_pass(world)
    lost.suspect(suspicion(claimed))
    await lost.judge_queued()
    first, second = world.notices.notices
    assert (first.kind, first.token, first.session_id) == (NoticeKind.LOST, claimed.token, SESSION)
    assert (first.state_before, first.state_after) == (JobState.RUNNING, JobState.QUARANTINED)
    assert (second.kind, second.reason) == (NoticeKind.QUARANTINED, "its holders died 1 times")
