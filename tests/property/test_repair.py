"""Whatever is broken by hand among the keys of a fleet, one sweep sets right, and touches nothing else.

The oracle are the invariants, which look at records and keys alone, and what the test itself remembers of the
fleet before it broke something.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core import upkeep
from coordinator.core.commands import Complete, Fail
from coordinator.core.effects import Slot, Where
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import Claim, Job, JobState
from coordinator.core.rank import Rank
from coordinator.core.retry import RetryPolicy
from coordinator.reconciler.lost import LostPass
from coordinator.reconciler.repair import RepairPass
from coordinator.reconciler.state_walk import PaceConfig, StateWalk
from coordinator.services.api import Settle
from coordinator.services.job_changes import JobChanges
from tests.support.builders import NOW_MS, a_claim, a_job, a_session, claim_job, open_session, store_job
from tests.support.memory_etcd import Entry, Lease
from tests.support.memory_upkeep import MemoryUpkeep
from tests.unit.services.conftest import World

NS = "default"
ALIVE = "00000000000000a1"
GONE = "00000000000000b2"
FATES = ("waits", "waits", "scheduled", "runs", "runs", "stops", "dead", "done")
DERIVED = (Slot.READY, Slot.DUE, Slot.UNIQUE, Slot.CANCEL)


@dataclass
class Fleet:
    """Jobs in many states, what was done to them, and the passes that set it right."""

    world: World
    chance: random.Random
    jobs: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    rivals: set[str] = field(default_factory=set)

    async def build(self, count: int) -> None:
        world = self.world
        await open_session(world.sessions, a_session(ALIVE, ttl_ms=3_600_000))
        for number in range(count):
            fate = self.chance.choice(FATES)
            job_id = f"{fate}-{number}"
            self.jobs.append(job_id)
            terms: dict[str, Any] = {"retry": RetryPolicy(max_retries=0)}
            if self.chance.random() < 0.6:
                terms["unique_key"] = f"u{number}"
            if self.chance.random() < 0.4:
                terms["queue_timeout_ms"] = 3_600_000
            if fate == "scheduled":
                terms["run_at_ms"] = NOW_MS + 60_000 + number
            stored = await store_job(world.store, a_job(job_id, **terms))
            if fate in ("waits", "scheduled"):
                continue
            claimed = await claim_job(world.store, stored, ALIVE)
            if fate == "stops":
                changes = JobChanges(world.store, world.holders, world.clock)
                await changes.cancel(NS, job_id, "stop", "me", world.deadline)
            if fate in ("dead", "done"):
                big = b"r" * self.chance.choice((1, 4_000))
                how = Complete(token=claimed.token, digest=b"", result=big)
                ill = Fail(token=claimed.token, digest=b"")
                await world.settlement.settle(
                    NS, [Settle(job_id, how if fate == "done" else ill)], world.deadline
                )

    # -- breaking it

    def break_something(self) -> None:
        self.chance.choice(
            (self.delete_a_key, self.put_a_stray, self.put_again, self.end_a_claim, self.misplace_a_claim)
        )()

    def delete_a_key(self) -> None:
        keys = [where for where in self.world.etcd.keys if where.slot in DERIVED]
        if keys:
            self.world.etcd.write((), [self.chance.choice(sorted(keys, key=repr))])

    def put_again(self) -> None:
        """The same value by another hand: revisions part."""
        keys = sorted((where for where in self.world.etcd.keys if where.slot in DERIVED), key=repr)
        if keys:
            where = self.chance.choice(keys)
            self.world.etcd.write([(where, self.world.etcd.keys[where].value, None)])

    def put_a_stray(self) -> None:
        job_id = self.chance.choice((*self.jobs, "nobody"))
        slot = self.chance.choice((*DERIVED, Slot.CHECKPOINT, Slot.RESULT, Slot.SPEC))
        if slot is Slot.SPEC and self.world.etcd.stored(NS, job_id) is not None:
            return  # the payload of a job is not ours to tell from another
        stored = self.world.etcd.stored(NS, job_id)
        record = stored.job if stored is not None else a_job(job_id)
        number = self.chance.randrange(5)
        where = {
            Slot.READY: Where(slot, NS, job_id, "q", self.chance.choice(("t", "s")), Rank(number, 1)),
            Slot.DUE: Where(slot, NS, job_id, ms=NOW_MS + number),
            Slot.UNIQUE: Where(slot, NS, "", "q", unique_key=f"u{number}"),
        }.get(slot, Where(slot, NS, job_id))
        value = {Slot.READY: record, Slot.DUE: 0, Slot.UNIQUE: job_id}.get(slot, "")
        self.world.etcd.write([(where, value, None)])

    def end_a_claim(self) -> None:
        held = self._held()
        if held:
            job_id = self.chance.choice(held)
            self.world.etcd.write((), [Where(Slot.CLAIM, NS, job_id)])
            self.lost.add(job_id)

    def misplace_a_claim(self) -> None:
        """A claim that nobody keeps alive: of a session that is gone, on a lease that never ends."""
        job_id = self.chance.choice((*self.jobs, "nobody"))
        stored = self.world.etcd.stored(NS, job_id)
        claim: Claim = a_claim(stored.job if stored is not None else a_job(job_id), GONE)
        if job_id in self._held():
            self.lost.add(job_id)
            if self.chance.random() < 0.5 and stored is not None:
                claim = replace(claim, attempt=stored.job.attempt)
        self.world.etcd.write((), [Where(Slot.CLAIM, NS, job_id)])
        self.world.etcd.write([(Where(Slot.CLAIM, NS, job_id), claim, Lease(1e9, 1e12))])

    def _held(self) -> list[str]:
        return [
            job_id
            for job_id in self.jobs
            if job_id.split("-")[0] in ("runs", "stops")
            and (claim := self.world.etcd.claim(NS, job_id)) is not None
            and claim.session == ALIVE
        ]

    # -- setting it right, and judging

    async def sweep(self) -> int:
        world = self.world
        walk = StateWalk(world.store, world.clock, PaceConfig(page=3))
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

        async def all_passes() -> int:
            changed = (await repair.run_once(NS)).changed
            await lost.judge_queued()
            return changed + (await lost.run_once(NS)).changed

        running = asyncio.ensure_future(all_passes())
        while not running.done():
            await world.clock.advance(0.05)
        return running.result()

    def records(self) -> dict[str, Job]:
        found = ((job_id, self.world.etcd.stored(NS, job_id)) for job_id in self.jobs)
        return {job_id: stored.job for job_id, stored in found if stored is not None}

    def live_claims(self) -> dict[str, Claim]:
        return {
            job_id: claim
            for job_id in self._held()
            if job_id not in self.lost and (claim := self.world.etcd.claim(NS, job_id)) is not None
        }

    def wrong(self) -> list[str]:
        """All that is wrong with keys and records, by the invariants."""
        found: list[str] = []
        records = self.records()
        for job_id, job in records.items():
            found += check_job(job, self.world.etcd.claim(NS, job_id))
            found += check_keys(job, self.world.etcd.keys_of(NS, job_id))
            ready = [
                entry for where, entry in self.world.etcd.of_slot(Slot.READY, NS) if where.job_id == job_id
            ]
            found += [
                f"{job_id}: ready of another revision" for entry in ready if self._parted(job_id, entry)
            ]
        for slot in Slot:
            for where, entry in self.world.etcd.of_slot(slot, NS):
                owner = entry.value if slot is Slot.UNIQUE else where.job_id
                if owner not in records:
                    found.append(f"{where}: of no job")
        return found

    def _parted(self, job_id: str, entry: Entry) -> bool:
        stored = self.world.etcd.stored(NS, job_id)
        return stored is None or entry.mod != stored.revision or entry.value != stored.job


def plain(job: Job) -> Job:
    """A record but for the token of its claim, which a repair adds."""
    attempts = tuple(replace(attempt, token=0) for attempt in job.attempts)
    return replace(job, attempts=attempts)


async def scenario(seed: int, size: int, breakages: int) -> None:
    fleet = Fleet(World(), random.Random(seed))
    await fleet.build(size)
    assert fleet.wrong() == []
    assert await fleet.sweep() == 0, "a sound fleet is left alone"
    before = fleet.records()
    for _ in range(breakages):
        fleet.break_something()
    live = fleet.live_claims()
    await fleet.sweep()
    assert fleet.wrong() == []
    assert fleet.live_claims() == live, "a live holder keeps its claim"
    after = fleet.records()
    assert after.keys() == before.keys()
    for job_id, job in after.items():
        if job_id in fleet.lost:
            wanted = (JobState.CANCELLED,) if job_id.startswith("stops") else (JobState.PENDING,)
            assert job.state in wanted
            assert job.lease_losses == before[job_id].lease_losses + 1
        else:
            assert plain(job) == plain(before[job_id]), "repair changes keys and no record"
    revision = fleet.world.etcd.revision
    assert await fleet.sweep() == 0, "it has nothing left to do"
    assert fleet.world.etcd.revision == revision


@given(seed=st.integers(0, 2**32), size=st.integers(1, 12), breakages=st.integers(1, 12))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_one_sweep_sets_right_whatever_was_broken_and_nothing_else(
    seed: int, size: int, breakages: int
) -> None:
    asyncio.run(scenario(seed, size, breakages))


def many_scenarios() -> None:
    for seed in range(60):
        asyncio.run(scenario(seed, 8, 6))


def _never_a_stray(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("coordinator.reconciler.repair.why_stray", lambda key, job: "")


def _always_a_stray(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("coordinator.reconciler.repair.why_stray", lambda key, job: "planted")
    patch.setattr("tests.support.memory_upkeep.why_stray", lambda key, job: "planted")


def _no_lack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("coordinator.reconciler.repair.lacks", lambda job, revision, seen: ())


def _ready_is_not_put_with_the_record(patch: pytest.MonkeyPatch) -> None:
    original = upkeep.repair_writes

    def partly(job: Job, missing: Any) -> Any:
        return tuple(w for w in original(job, missing) if w.where.slot is not Slot.READY)

    patch.setattr("coordinator.reconciler.repair.repair_writes", partly)


def _orphans_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(upkeep, "_why_orphan", lambda claim, job: "")
    patch.setattr(RepairPass, "_judge", _judge_no_claims)


def _judge_no_claims(self: Any, sight: Any, namespace: str) -> None:
    return None


BUGS = (_never_a_stray, _always_a_stray, _no_lack, _ready_is_not_put_with_the_record, _orphans_are_believed)


@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__.strip("_"))
def test_a_planted_bug_is_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        many_scenarios()
