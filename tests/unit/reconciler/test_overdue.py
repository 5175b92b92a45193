"""Runs whose time is over end although their session lives; what runs for very long is told (fault cases 029,
053, 077)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from coordinator.core.commands import Complete
from coordinator.core.effects import Slot, Where
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import AttemptOutcome, Claim, JobState
from coordinator.core.notice import NoticeKind
from coordinator.core.retry import RetryPolicy
from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.ports import Commit, Session
from coordinator.reconciler.due import DuePass
from coordinator.reconciler.overdue import OverdueConfig, OverduePass
from coordinator.services.api import Settle
from coordinator.services.job_changes import JobChanges
from tests.support.builders import a_session
from tests.support.memory_etcd import Fault
from tests.support.memory_upkeep import MemoryUpkeep
from tests.unit.services.conftest import World

TTL_S = 60


@dataclass
class Watched:
    """What the watch has told: everything, unless a test says otherwise."""

    world: World
    hidden: set[str] = field(default_factory=set)
    knows_sessions: bool = True

    def claims(self) -> list[tuple[str, str, Claim]]:
        found = []
        for where, _ in self.world.etcd.of_slot(Slot.CLAIM, "default"):
            claim = self.world.etcd.claim("default", where.job_id)
            if claim is not None and where.job_id not in self.hidden:
                found.append(("default", where.job_id, claim))
        return found

    def session(self, namespace: str, session_id: str) -> Session | None:
        return a_session(session_id, ttl_ms=TTL_S * 1000) if self.knows_sessions else None


@dataclass
class Bench:
    world: World
    watched: Watched
    leads: bool = True

    def overdue(self, **config: float) -> OverduePass:
        world = self.world
        return OverduePass(
            world.store,
            world.sessions,
            MemoryUpkeep(world.store),
            self.watched,
            world.clock,
            world.entropy,
            notices=world.notices,
            meters=world.meters,
            leads=lambda: self.leads,
            config=OverdueConfig(**config),  # type: ignore[arg-type]
        )

    async def running(self, job_id: str = "j1", **terms: Any) -> Commit:
        return await self.world.running(job_id, session=a_session(ttl_ms=TTL_S * 1000), **terms)

    async def cancel(self, job_id: str = "j1") -> None:
        changes = JobChanges(self.world.store, self.world.holders, self.world.clock)
        await changes.cancel("default", job_id, "stop", "me", self.world.deadline)

    def assert_sound(self, job_id: str = "j1") -> None:
        job = self.world.stored(job_id).job
        assert check_job(job, self.world.etcd.claim("default", job_id)) == []
        assert check_keys(job, self.world.etcd.keys_of("default", job_id)) == []


@pytest.fixture
def bench(world: World) -> Bench:
    return Bench(world, Watched(world))


async def test_a_run_ends_at_its_timeout_and_its_late_completion_is_refused(bench: Bench) -> None:
    """Fault case 029: a session that lives on holds no job beyond its time."""
    world = bench.world
    claimed = await bench.running(run_timeout_ms=5_000)
    overdue = bench.overdue()
    await overdue.step()
    await world.clock.advance(4.9)
    await overdue.step()
    assert world.stored().job.state is JobState.RUNNING
    await world.clock.advance(0.1)
    await overdue.step()
    job = world.stored().job
    assert (job.state, job.failures, job.lease_losses) == (JobState.SCHEDULED, 1, 0)
    assert job.hold_ms == TTL_S * 1000, "its holder hears of it first"
    last = job.attempts[-1]
    assert (last.outcome, last.token) == (AttemptOutcome.TIMED_OUT, claimed.token)
    assert last.failure_message == "run timeout: it ran for 5000 ms"
    bench.assert_sound()
    late = Settle("j1", Complete(token=claimed.token, digest=b""))
    [refused] = await world.settlement.settle("default", [late], world.deadline)
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.CLAIM_LOST
    [notice] = world.notices.notices
    assert (notice.kind, notice.token) == (NoticeKind.TAKEN_AWAY, claimed.token)
    assert notice.facts == {"why": "timed_out"}
    assert world.meters.passes[-1][2] == {"timed-out": 1}


async def test_time_counts_from_the_first_sight_of_this_very_claim(bench: Bench) -> None:
    world = bench.world
    claimed = await bench.running(run_timeout_ms=5_000)
    world.clock.jump_wall(3_600)
    overdue = bench.overdue()
    await overdue.step()
    assert world.stored().job.state is JobState.RUNNING, "whatever the wall clock says"
    await world.clock.advance(4)
    done = Settle("j1", Complete(token=claimed.token, digest=b""))
    await world.settlement.settle("default", [done], world.deadline)
    world.etcd.write((), [Where(Slot.STATE, "default", "j1")])
    await bench.running(run_timeout_ms=5_000)
    await overdue.step()
    await world.clock.advance(4)
    await overdue.step()
    assert world.stored().job.state is JobState.RUNNING, "another claim of the same id is another run"
    await world.clock.advance(1)
    await overdue.step()
    assert world.stored().job.state is JobState.SCHEDULED


async def test_who_does_not_lead_only_looks_and_then_knows_since_when(bench: Bench) -> None:
    await bench.running(run_timeout_ms=5_000)
    overdue = bench.overdue()
    bench.leads = False
    await overdue.step()
    await bench.world.clock.advance(6)
    await overdue.step()
    assert bench.world.stored().job.state is JobState.RUNNING
    bench.leads = True
    await overdue.step()
    assert bench.world.stored().job.state is JobState.SCHEDULED


async def test_what_a_leader_decided_is_void_once_it_leads_no_more(bench: Bench) -> None:
    await bench.running(run_timeout_ms=1_000)
    overdue = bench.overdue()
    await overdue.step()
    await bench.world.clock.advance(2)
    bench.world.etcd.leads = False
    await overdue.step()
    assert bench.world.stored().job.state is JobState.RUNNING
    assert bench.world.meters.passes[-1][3] == 1, "tried in vain"
    bench.world.etcd.leads = True
    await overdue.step()
    assert bench.world.stored().job.state is JobState.SCHEDULED


async def test_a_run_that_outlasts_the_total_timeout_ends_and_its_job_is_dead(bench: Bench) -> None:
    world = bench.world
    await bench.running(total_timeout_ms=5_000)
    entry = world.etcd.keys[Where(Slot.CLAIM, "default", "j1")]
    entry.value = replace(entry.value, run_timeout_ms=5_000)  # as dispatch reckons it
    overdue = bench.overdue()
    await overdue.step()
    await world.clock.advance(5)
    await overdue.step()
    job = world.stored().job
    assert job.attempts[-1].failure_message == "total timeout: its time ended 5000 ms after its claim"
    due = DuePass(world.store, world.members, world.clock, notices=world.notices)
    await due.run_once("default")
    await world.clock.advance(TTL_S)
    await due.run_once("default")
    job = world.stored().job
    assert (job.state, job.end_reason) == (JobState.DEAD, "total timeout")
    bench.assert_sound()


async def test_the_last_timeout_ends_in_dead_and_is_told(bench: Bench) -> None:
    await bench.running(run_timeout_ms=1_000, retry=RetryPolicy(max_retries=0))
    overdue = bench.overdue()
    await overdue.step()
    await bench.world.clock.advance(1)
    await overdue.step()
    kinds = [notice.kind for notice in bench.world.notices.notices]
    assert kinds == [NoticeKind.TAKEN_AWAY, NoticeKind.DEAD]


async def test_a_handler_that_does_not_stop_loses_its_claim_after_the_grace(bench: Bench) -> None:
    """Fault case 077."""
    world = bench.world
    claimed = await bench.running(unique_key="u")
    await bench.cancel()
    overdue = bench.overdue(cancel_grace_s=3.0)
    await overdue.step()
    await world.clock.advance(2.9)
    await overdue.step()
    assert world.stored().job.state is JobState.RUNNING
    await world.clock.advance(0.1)
    await overdue.step()
    job = world.stored().job
    assert (job.state, job.end_reason, job.failures) == (JobState.CANCELLED, "stop", 0)
    assert job.attempts[-1].outcome is AttemptOutcome.CANCELLED
    bench.assert_sound()
    late = Settle("j1", Complete(token=claimed.token, digest=b""))
    [refused] = await world.settlement.settle("default", [late], world.deadline)
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.CLAIM_LOST
    [notice] = world.notices.notices
    assert (notice.kind, notice.facts["why"]) == (NoticeKind.TAKEN_AWAY, "cancelled")


async def test_the_grace_of_a_cancellation_does_not_begin_anew_with_the_next_leader(bench: Bench) -> None:
    await bench.running()
    await bench.cancel()
    overdue = bench.overdue(cancel_grace_s=30.0)
    bench.leads = False
    for _ in range(6):
        await overdue.step()
        await bench.world.clock.advance(5)
    assert bench.world.stored().job.state is JobState.RUNNING, "who does not lead only looks"
    bench.leads = True
    await overdue.step()
    assert bench.world.stored().job.state is JobState.CANCELLED


async def test_a_stray_request_to_stop_ends_no_claim(bench: Bench) -> None:
    await bench.running()
    bench.world.etcd.write([(Where(Slot.CANCEL, "default", "j1"), "", None)])
    overdue = bench.overdue(cancel_grace_s=1.0)
    await overdue.step()
    await bench.world.clock.advance(5)
    await overdue.step()
    assert bench.world.stored().job.state is JobState.RUNNING


async def test_a_job_that_runs_for_very_long_is_told_once_for_each_claim(bench: Bench) -> None:
    world = bench.world
    claimed = await bench.running()
    await bench.running("patient", run_timeout_ms=20_000)
    overdue = bench.overdue(stuck_after_s=10.0)
    for _ in range(5):
        await overdue.step()
        await world.clock.advance(3)
    [notice] = world.notices.of(NoticeKind.STUCK)
    assert (notice.job_id, notice.token, notice.reason) == (
        "j1",
        claimed.token,
        "RUNNING for longer than 10 s",
    )
    world.etcd.write((), [Where(Slot.CLAIM, "default", "j1")])
    await overdue.step()
    assert len(world.notices.of(NoticeKind.STUCK)) == 1


async def test_a_job_that_has_run_for_long_is_told_also_by_a_coordinator_that_has_just_started(
    bench: Bench,
) -> None:
    await bench.running()
    await bench.running("patient", run_timeout_ms=20_000)
    await bench.world.clock.advance(9)
    overdue = bench.overdue(stuck_after_s=10.0)
    await overdue.step()
    assert bench.world.notices.of(NoticeKind.STUCK) == []
    await bench.world.clock.advance(1)
    await overdue.step()
    [notice] = bench.world.notices.of(NoticeKind.STUCK)
    assert (notice.job_id, notice.facts["running_s"]) == ("j1", "10")
    bench.world.clock.jump_wall(3_600)
    await overdue.step()
    assert len(bench.world.notices.of(NoticeKind.STUCK)) == 1, "a clock that jumps makes no run longer"


async def test_a_run_beyond_its_timeout_that_cannot_be_ended_is_stuck(bench: Bench) -> None:
    world = bench.world
    await bench.running(run_timeout_ms=12_000)
    overdue = bench.overdue(stuck_after_s=10.0)
    await overdue.step()
    await world.clock.advance(12)
    world.etcd.faults.append(Fault.REFUSED)
    await overdue.step()
    [notice] = world.notices.notices
    assert (notice.kind, notice.reason) == (NoticeKind.STUCK, "RUNNING for longer than 12 s")
    await overdue.step()
    assert world.stored().job.state is JobState.SCHEDULED


async def test_a_run_that_was_ended_at_its_timeout_is_not_stuck(bench: Bench) -> None:
    await bench.running(run_timeout_ms=5_000)
    overdue = bench.overdue(stuck_after_s=1.0)
    await overdue.step()
    await bench.world.clock.advance(5)
    await overdue.step()
    assert [notice.kind for notice in bench.world.notices.notices] == [NoticeKind.TAKEN_AWAY]


async def test_the_hold_is_the_ttl_of_the_session_even_if_the_watch_has_not_brought_it(bench: Bench) -> None:
    await bench.running(run_timeout_ms=1_000)
    bench.watched.knows_sessions = False
    overdue = bench.overdue()
    await overdue.step()
    await bench.world.clock.advance(2)
    await overdue.step()
    assert bench.world.stored().job.hold_ms == TTL_S * 1000


async def test_a_claim_whose_session_has_ended_is_left_to_the_loss(bench: Bench) -> None:
    await bench.running(run_timeout_ms=1_000)
    bench.watched.knows_sessions = False
    overdue = bench.overdue()
    await overdue.step()
    await bench.world.clock.advance(2)
    await bench.world.sessions.shut("default", a_session().session_id, deadline=bench.world.deadline)
    await overdue.step()
    assert bench.world.stored().job.state is JobState.RUNNING


async def test_a_dry_run_says_what_is_overdue_and_ends_nothing(bench: Bench) -> None:
    await bench.running(run_timeout_ms=1_000)
    await bench.running("j2")
    await bench.cancel("j2")
    overdue = bench.overdue(cancel_grace_s=1.0)
    await overdue.run_once("default", dry_run=True)
    await bench.world.clock.advance(2)
    report = await overdue.run_once("default", dry_run=True)
    assert report.counts == {"timed-out": 1, "cancelled-by-force": 1}
    assert not bench.world.notices.notices
    assert bench.world.stored().job.state is bench.world.stored("j2").job.state is JobState.RUNNING
    bench.leads = False
    assert (await overdue.run_once("default")).counts == report.counts, "by hand whoever is asked acts"


async def test_a_store_that_does_not_answer_makes_the_step_fail_and_the_next_one_acts(bench: Bench) -> None:
    await bench.running(run_timeout_ms=1_000)
    overdue = bench.overdue()
    await overdue.step()
    await bench.world.clock.advance(2)
    bench.world.etcd.read_error = EtcdUnavailable("planned by the test")
    with pytest.raises(EtcdUnavailable):
        await overdue.step()
    assert bench.world.meters.failed_passes == {"overdue": 1}
    bench.world.etcd.read_error = None
    await overdue.step()
    assert bench.world.stored().job.state is JobState.SCHEDULED


async def test_claims_of_other_namespaces_are_none_of_its_business(bench: Bench) -> None:
    await bench.running(run_timeout_ms=1_000)
    overdue = bench.overdue()
    await overdue.run_once("other")
    await bench.world.clock.advance(2)
    report = await overdue.run_once("other")
    assert (report.examined, report.changed) == (0, 0)
    assert bench.world.stored().job.state is JobState.RUNNING
