"""Keys that do not follow from their record are set right; what is held or undecodable is left alone.

Fault cases 025, 145 and 155.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from coordinator.core.commands import Complete
from coordinator.core.effects import Slot, Where, keys_of
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import JobState
from coordinator.core.notice import NoticeKind
from coordinator.core.rank import Rank
from coordinator.errors import EtcdUnavailable
from coordinator.ports import Commit, Operation
from coordinator.ports.upkeep import LockSeen
from coordinator.reconciler.repair import RepairConfig, RepairPass
from coordinator.reconciler.report import Report
from coordinator.reconciler.state_walk import Run, StateWalk
from coordinator.services.api import Settle
from coordinator.services.holders import Suspect
from coordinator.services.job_changes import JobChanges
from tests.support.builders import (
    FAR,
    NOW_MS,
    a_claim,
    a_job,
    a_session,
    claim_operation,
    open_session,
    store_job,
)
from tests.support.memory_etcd import Fault, Lease
from tests.support.memory_upkeep import MemoryUpkeep
from tests.unit.services.conftest import World

OTHER = "00000000000000b2"


@dataclass
class Bench:
    world: World
    suspects: list[Suspect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.upkeep = MemoryUpkeep(self.world.store)
        self.repair = RepairPass(
            self.world.store,
            self.upkeep,
            StateWalk(self.world.store, self.world.clock),
            self.world.clock,
            notices=self.world.notices,
            suspect=self.suspects.append,
            config=RepairConfig(orphan_after_s=60.0),
        )

    async def run(self, *, dry_run: bool = False) -> Report:
        """One run by hand; the clock moves along, for it rests after each page."""
        running = asyncio.ensure_future(self.repair.run_once("default", dry_run=dry_run))
        while not running.done():
            await self.world.clock.advance(0.01)
        return running.result()

    async def submit(self, job_id: str = "j1", **terms: Any) -> None:
        await store_job(self.world.store, a_job(job_id, **terms))

    def at(self, slot: Slot, job_id: str = "j1") -> Where:
        """The key of this kind that the record wants."""
        job = self.world.stored(job_id).job
        [where] = [where for where in keys_of(job) if where.slot is slot]
        return where._replace(job_id="") if slot is Slot.UNIQUE else where

    def edit(self, where: Where, value: Any = "", lease: Lease | None = None) -> None:
        self.world.etcd.write([(where, value, lease)])

    def delete(self, *wheres: Where) -> None:
        self.world.etcd.write((), wheres)

    def assert_sound(self, job_id: str = "j1") -> None:
        job = self.world.stored(job_id).job
        assert check_job(job, self.world.etcd.claim("default", job_id)) == []
        assert check_keys(job, self.world.etcd.keys_of("default", job_id)) == []
        for where, entry in self.world.etcd.of_slot(Slot.READY, "default"):
            if where.job_id == job_id:
                assert (entry.value, entry.mod) == (job, self.world.stored(job_id).revision)


@pytest.fixture
def bench(world: World) -> Bench:
    return Bench(world)


WISHES: dict[str, Any] = {"unique_key": "u", "queue_timeout_ms": 60_000}


async def cancelled_while_running(bench: Bench) -> None:
    await bench.world.running(**WISHES)
    changes = JobChanges(bench.world.store, bench.world.holders, bench.world.clock)
    await changes.cancel("default", "j1", "stop", "me", bench.world.deadline)


async def test_a_sound_namespace_is_looked_at_and_not_written(bench: Bench) -> None:
    await cancelled_while_running(bench)
    await bench.submit("j2", **{**WISHES, "unique_key": "v"})
    await bench.submit("j3", run_at_ms=NOW_MS + 60_000)
    revision = bench.world.etcd.revision
    report = await bench.run()
    assert (report.changed, report.failed) == (0, 0)
    assert report.examined > 6
    assert bench.world.etcd.revision == revision
    assert not bench.world.notices.notices


@pytest.mark.parametrize("slot", [Slot.READY, Slot.DUE, Slot.UNIQUE])
async def test_a_missing_key_of_a_waiting_job_is_put_again(bench: Bench, slot: Slot) -> None:
    await bench.submit(**WISHES)
    bench.delete(bench.at(slot))
    assert (await bench.run(dry_run=True)).counts == {f"{slot.value}-key-put": 1}
    assert (await bench.run()).counts == {f"{slot.value}-key-put": 1}
    bench.assert_sound()
    [notice] = bench.world.notices.notices
    assert notice.kind is NoticeKind.REPAIRED
    assert (await bench.run()).changed == 0


@pytest.mark.parametrize("slot", [Slot.UNIQUE, Slot.CANCEL])
async def test_a_missing_key_of_a_running_job_is_put_again_and_its_holder_completes(
    bench: Bench, slot: Slot
) -> None:
    await cancelled_while_running(bench)
    claim = bench.world.etcd.claim("default", "j1")
    assert claim is not None
    bench.delete(bench.at(slot))
    assert (await bench.run()).counts == {f"{slot.value}-key-put": 1}
    bench.assert_sound()
    assert bench.world.etcd.claim("default", "j1") == claim
    done = Settle("j1", Complete(token=claim.token, digest=b""))
    await bench.world.settlement.settle("default", [done], bench.world.deadline)
    assert bench.world.stored().job.state is JobState.SUCCEEDED


async def test_a_ready_key_of_another_revision_becomes_claimable(bench: Bench) -> None:
    await bench.submit()
    bench.edit(bench.at(Slot.READY), bench.world.stored().job)
    await open_session(bench.world.sessions)
    blocked = await bench.world.store.commit(claim_operation(bench.world.stored()))
    assert not blocked.won
    assert (await bench.run()).counts == {"ready-key-put": 1}
    bench.assert_sound()
    assert (await bench.world.store.commit(claim_operation(bench.world.stored()))).won


STRAYS: dict[str, tuple[Where, Any]] = {
    "ready of no job": (Where(Slot.READY, "default", "none", "q", "t", Rank(1, 1)), a_job("none")),
    "ready in another place": (Where(Slot.READY, "default", "j1", "q", "t", Rank(1, 1)), a_job("j1")),
    "ready of a running job": (Where(Slot.READY, "default", "held", "q", "t", Rank(1, 1)), a_job("held")),
    "due of no job": (Where(Slot.DUE, "default", "none", ms=NOW_MS + 5), 0),
    "due at another time": (Where(Slot.DUE, "default", "j1", ms=NOW_MS + 5), 0),
    "unique of no job": (Where(Slot.UNIQUE, "default", "", "q", unique_key="x"), "none"),
    "unique that its job does not have": (Where(Slot.UNIQUE, "default", "", "q", unique_key="x"), "j1"),
    "unique of an ended job": (Where(Slot.UNIQUE, "default", "", "q", unique_key="x"), "over"),
    "cancel of a waiting job": (Where(Slot.CANCEL, "default", "j1"), ""),
    "cancel of a running job that is not to stop": (Where(Slot.CANCEL, "default", "held"), ""),
    "checkpoint of no job": (Where(Slot.CHECKPOINT, "default", "none"), None),
    "checkpoint of an ended job": (Where(Slot.CHECKPOINT, "default", "over"), None),
    "result of a job without one": (Where(Slot.RESULT, "default", "j1"), b""),
    "spec of no job": (Where(Slot.SPEC, "default", "none"), None),
    "spec of an ended job": (Where(Slot.SPEC, "default", "over"), None),
}


async def fleet(bench: Bench) -> None:
    await bench.submit(**WISHES)
    await bench.world.running("held")
    over = await bench.world.running("over")
    done = Settle("over", Complete(token=over.token, digest=b""))
    await bench.world.settlement.settle("default", [done], bench.world.deadline)


@pytest.mark.parametrize("stray", STRAYS)
async def test_a_key_that_no_record_wants_goes(bench: Bench, stray: str) -> None:
    await fleet(bench)
    before = {where: entry.mod for where, entry in bench.world.etcd.keys.items()}
    where, value = STRAYS[stray]
    bench.edit(where, value)
    kind = {f"{where.slot.value}-key-removed": 1}
    assert (await bench.run(dry_run=True)).counts == kind
    assert where in bench.world.etcd.keys
    assert (await bench.run()).counts == kind
    assert {where: entry.mod for where, entry in bench.world.etcd.keys.items()} == before
    assert [notice.kind for notice in bench.world.notices.notices] == [NoticeKind.REPAIRED]
    assert not bench.suspects


async def test_a_unique_key_goes_from_an_ended_job_to_the_live_one_that_lacks_it(bench: Bench) -> None:
    await fleet(bench)
    bench.edit(bench.at(Slot.UNIQUE), "over")
    assert (await bench.run()).counts == {"unique-key-removed": 1, "unique-key-put": 1}
    bench.assert_sound()


async def test_a_unique_key_that_another_live_job_has_is_told_and_never_taken(bench: Bench) -> None:
    await bench.submit(**WISHES)
    bench.delete(bench.at(Slot.UNIQUE))
    await bench.submit("j2", **WISHES)
    report = await bench.run()
    assert report.counts == {"unique-key-conflict": 1}
    assert bench.world.etcd.keys[bench.at(Slot.UNIQUE)].value == "j2"
    [notice] = bench.world.notices.notices
    assert "not repaired" in notice.reason
    assert "j2" in notice.reason


async def test_a_payload_that_is_gone_is_told(bench: Bench) -> None:
    await bench.submit()
    bench.delete(bench.at(Slot.SPEC))
    assert (await bench.run()).counts == {"spec-missing": 1}
    assert bench.world.stored().job.state is JobState.PENDING


@pytest.mark.parametrize("state", ["none", "waiting", "held by another"])
async def test_a_claim_that_its_record_does_not_run_under_goes(bench: Bench, state: str) -> None:
    world = bench.world
    session = a_session(OTHER)
    await open_session(world.sessions, session)
    if state == "waiting":
        await bench.submit()
    elif state == "held by another":
        await world.running()
    lease = world.etcd.sessions["default", OTHER]
    bench.edit(Where(Slot.CLAIM, "default", "j1"), a_claim(a_job(), OTHER), lease)
    await bench.submit("j2")
    assert (await bench.run(dry_run=True)).counts == {"claim-key-removed": 1}
    assert (await bench.run()).counts == {"claim-key-removed": 1}
    assert world.etcd.claim("default", "j1") is None
    assert bool(bench.suspects) is (state == "held by another"), "its job is recovered"
    if state == "waiting":
        assert (await world.store.commit(claim_operation(world.stored(), OTHER))).won


async def test_a_claim_on_a_foreign_lease_goes_once_its_session_is_not_open(bench: Bench) -> None:
    """Fault case 025: a lease that never ends holds no job for ever, and a live holder is not touched."""
    world = bench.world
    await world.running()
    live = await world.running("alive", session=a_session(OTHER))
    forever = Lease(1e9, 1e12)
    claim = world.etcd.keys[Where(Slot.CLAIM, "default", "j1")].value
    bench.edit(Where(Slot.CLAIM, "default", "j1"), claim, forever)
    assert (await bench.run()).counts == {"claim-on-foreign-lease": 1}
    assert world.etcd.claim("default", "j1") is not None, "its session is open: told, and left"
    await world.sessions.close("default", a_session().session_id, deadline=world.deadline)
    world.notices.notices.clear()
    assert (await bench.run()).counts == {"claim-key-removed": 1}
    [notice] = world.notices.notices
    assert int(notice.facts["lease"], 16) == id(forever)
    assert [one.job_id for one in bench.suspects] == ["j1"]
    assert world.etcd.claim("default", "alive") == live.claim


async def test_a_claim_whose_session_is_closing_is_left_until_its_lease_had_time_to_end(bench: Bench) -> None:
    world = bench.world
    await world.running(session=a_session(ttl_ms=3_600_000))
    await world.sessions.shut("default", a_session().session_id, deadline=world.deadline)
    assert (await bench.run()).changed == 0
    await world.clock.advance(59)
    assert (await bench.run()).changed == 0
    await world.clock.advance(2)
    assert (await bench.run()).counts == {"claim-key-removed": 1}
    assert [one.job_id for one in bench.suspects] == ["j1"]


async def test_a_lock_entry_that_no_session_ends_goes_by_the_same_rule(bench: Bench) -> None:
    entry = LockSeen(name="l", waiter="w", modified=3, lease=0, session_open=False)
    held = replace(entry, waiter="x", lease=7, session_open=True)
    closing = replace(entry, waiter="y", lease=8)
    bench.upkeep.locks = [entry, held, closing]
    assert (await bench.run(dry_run=True)).counts == {"lock-entry-removed": 1}
    assert (await bench.run()).counts == {"lock-entry-removed": 1}
    assert bench.upkeep.locks == [held, closing]
    await bench.world.clock.advance(61)
    await bench.run()
    assert bench.upkeep.locks == [held]


async def test_what_cannot_be_decoded_is_left_alone_and_stops_nothing(bench: Bench) -> None:
    await bench.submit(**WISHES)
    await bench.submit("j2")
    bench.delete(bench.at(Slot.READY, "j2"))
    bench.world.store.garbled.add("j1")
    bench.edit(Where(Slot.CANCEL, "default", "j1"))
    assert (await bench.run()).counts == {"ready-key-put": 1}
    assert Where(Slot.CANCEL, "default", "j1") in bench.world.etcd.keys


async def test_a_repair_that_comes_late_changes_nothing(bench: Bench) -> None:
    """Between what it read and what it writes somebody claims the job."""
    await bench.submit(**WISHES)
    bench.delete(bench.at(Slot.UNIQUE))
    await open_session(bench.world.sessions)
    claimed: list[Commit] = []

    def claim(operation: Operation) -> None:
        if not claimed and operation.writes and not operation.claim:
            bench.world.etcd.interfere.clear()
            stored = bench.world.stored()
            one = claim_operation(stored)
            puts: list[Any] = []
            deletes: list[Where] = []
            bench.world.etcd._collect(one, puts, deletes)
            bench.world.etcd.write(puts, deletes)
            claimed.append(Commit(won=True, revision=bench.world.etcd.revision))

    bench.world.etcd.interfere.append(claim)
    report = await bench.run()
    assert claimed
    assert (report.changed, report.failed) == (0, 0)
    assert bench.world.stored().job.state is JobState.RUNNING
    assert (await bench.run()).counts == {"unique-key-put": 1}
    bench.assert_sound()


async def test_what_a_leader_found_is_void_once_it_leads_no_more(bench: Bench) -> None:
    await bench.submit()
    bench.delete(bench.at(Slot.READY))
    bench.edit(Where(Slot.CANCEL, "default", "j1"))
    bench.world.etcd.leads = False
    revision = bench.world.etcd.revision
    run = Run(namespace="default", report=Report("repair"), as_leader=True, hurry=True)
    await bench.repair.visit([bench.world.stored()], run)
    sight = await bench.upkeep.sight("default", Where(Slot.CANCEL, "default", "j1"), deadline=FAR)
    await bench.repair._look_at(sight, run, FAR)
    assert (run.report.changed, run.report.failed) == (0, 2)
    assert bench.world.etcd.revision == revision


async def test_a_refused_repair_is_counted_and_the_next_run_repairs(bench: Bench) -> None:
    await bench.submit()
    bench.delete(bench.at(Slot.READY))
    bench.world.etcd.faults.append(Fault.REFUSED)
    report = await bench.run()
    assert (report.changed, report.failed) == (0, 1)
    assert (await bench.run()).counts == {"ready-key-put": 1}


async def test_a_store_that_does_not_answer_makes_the_run_fail(bench: Bench) -> None:
    bench.world.etcd.read_error = EtcdUnavailable("planned by the test")
    with pytest.raises(EtcdUnavailable):
        await bench.run()


async def test_a_job_that_changes_meanwhile_is_no_find(bench: Bench) -> None:
    await bench.submit()
    stored = bench.world.stored()
    changes = JobChanges(bench.world.store, bench.world.holders, bench.world.clock)
    await changes.update("default", "j1", "", 1, None, None, bench.world.deadline)
    run = Run(namespace="default", report=Report("repair"))
    await bench.repair.visit([stored], run)
    assert run.report.changed == 0
