"""Repair, overdue runs and the sweep on a real etcd, with coordinators that watch.

Fault cases 025, 029, 077 and 145. What lies in etcd is judged by the invariants, from a listing of every key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from coordinator.core.commands import Complete
from coordinator.core.effects import Slot, Where
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import AttemptOutcome, JobLock, JobState
from coordinator.core.lock_order import job_waiter
from coordinator.errors import Reason, RequestError
from coordinator.etcd.codec import decode_unique
from coordinator.etcd.lock_codec import entry_of
from coordinator.etcd.namespace_keys import NamespaceKeys
from coordinator.reconciler.overdue import OverdueConfig, OverduePass
from coordinator.reconciler.repair import RepairPass
from coordinator.reconciler.retention import RetentionPass
from coordinator.reconciler.state_walk import PaceConfig, StateWalk
from coordinator.reconciler.sweep import Sweep, SweptPasses
from coordinator.services.api import Settle
from tests.integration.services.conftest import Side, SideFactory
from tests.integration.store.conftest import MachineEntropy
from tests.support.builders import a_new_job
from tests.support.fake_ports import RecordedMeters, RecordedNotices
from tests.support.polling import eventually

FOREVER = 0x7A15
KINDS = tuple(slot for slot in Slot if slot not in (Slot.STATE, Slot.LOCK))


@dataclass
class Mended:
    """A coordinator with the passes that its leader would run."""

    side: Side
    notices: RecordedNotices
    walk: StateWalk
    repair: RepairPass
    sweep: Sweep
    overdue: OverduePass

    @property
    def keys(self) -> NamespaceKeys:
        return self.side.store.space.namespace(self.side.namespace)

    async def put(self, key: bytes, value: bytes = b"", lease: int = 0) -> None:
        await self.side.store.client.put(key, value, lease=lease, timeout=5)

    async def get(self, key: bytes) -> bytes:
        reply = await self.side.store.client.range(key, timeout=5)
        return reply.kvs[0].value if reply.kvs else b""

    async def delete(self, *keys: bytes) -> None:
        for key in keys:
            reply = await self.side.store.client.delete_range(key, timeout=5)
            assert reply.deleted == 1, key

    async def wrong(self) -> list[str]:
        """What the invariants say of every key of the namespace."""
        side, present = self.side, defaultdict[str, list[Where]](list)
        for slot in KINDS:
            span = self.keys.all_of(slot)
            reply = await side.store.client.range(span.start, span.end, timeout=5)
            for kv in reply.kvs:
                where = self.keys.parse(slot, kv.key)
                job_id = decode_unique(kv.value) if slot is Slot.UNIQUE else where.job_id
                present[job_id].append(where._replace(job_id=job_id))
        span = self.keys.all_locks()
        for kv in (await side.store.client.range(span.start, span.end, timeout=5)).kvs:
            entry = entry_of(self.keys, kv, side.store.set_aside)
            if entry.job_id:
                where = Where(Slot.LOCK, side.namespace, entry.job_id, lock_name=entry.name)
                present[entry.job_id].append(where)
        span = self.keys.all_of(Slot.STATE)
        states = await side.store.client.range(span.start, span.end, timeout=5)
        found: list[str] = []
        for kv in states.kvs:
            job_id = self.keys.parse_state(kv.key)
            one = await side.store.jobs.read(side.namespace, job_id, deadline=side.deadline)
            assert one.stored is not None
            own = present.pop(job_id, [])
            state = Where(Slot.STATE, side.namespace, job_id)
            found += check_job(one.stored.job, one.claim) + check_keys(one.stored.job, [*own, state])
        return found + [f"keys of no job: {wheres}" for wheres in present.values()]


def mended(side: Side, *, leads: bool = True) -> Mended:
    store, clock, notices = side.store, side.clock, RecordedNotices()
    walk = StateWalk(store.jobs, clock, PaceConfig(rest_s=0.001))
    repair = RepairPass(store.jobs, store.upkeep, walk, clock, notices=notices, suspect=side.lost.suspect)
    retention = RetentionPass(store.jobs, walk, clock, keep_ms=10**12)
    meters = RecordedMeters()
    sweep = Sweep(
        SweptPasses(lost=side.lost, repair=repair, retention=retention),
        walk,
        store.namespaces,
        leads=lambda: store.sweeps.is_leader,
        meters=meters,
        clock=clock,
    )
    overdue = OverduePass(
        store.jobs,
        store.sessions,
        store.upkeep,
        side.holders,
        clock,
        MachineEntropy(),
        notices=notices,
        meters=meters,
        leads=lambda: leads,
        config=OverdueConfig(cancel_grace_s=0.1),
    )
    return Mended(side, notices, walk, repair, sweep, overdue)


@pytest.fixture
async def bench(side: Side) -> AsyncIterator[Mended]:
    await side.store.client.lease_grant(600, FOREVER, timeout=5)
    try:
        yield mended(side)
    finally:
        await side.store.client.lease_revoke(FOREVER, timeout=5)


async def broken(bench: Mended) -> None:
    """One job for each thing that can be wrong, beside one that is sound and held."""
    side, keys = bench.side, bench.keys
    session = await side.open(ttl_ms=60_000)
    for name in ("no-ready", "no-due", "no-unique", "waits"):
        job = a_new_job(name, unique_key=f"u-{name}", queue_timeout_ms=3_600_000)
        await side.submit(job)
    for name in ("held", "no-claim", "stolen"):
        await side.claim(await side.submit(a_new_job(name, unique_key=f"u-{name}")), session)
    jobs = {name: (await side.stored(name)).job for name in ("no-ready", "no-due", "waits")}
    await bench.delete(
        keys.ready("q", "t", jobs["no-ready"].rank, "no-ready"),
        keys.due(jobs["no-due"].due_key_ms, "no-due"),
        keys.unique("q", "u-no-unique"),
        keys.claim("no-claim"),
    )
    claim = await bench.get(keys.claim("held"))
    await bench.put(keys.claim("waits"), claim, FOREVER)
    state = await bench.get(keys.state("waits"))
    await bench.put(keys.ready("q", "t", jobs["waits"].rank._replace(ms=7), "waits"), state)
    await bench.put(keys.ready("q", "t", jobs["waits"].rank._replace(ms=8), "nobody"), state)
    await bench.put(keys.due(77, "held"))
    await bench.put(keys.unique("q", "spare"), await bench.get(keys.unique("q", "u-held")))
    await bench.put(keys.cancel("held"))
    for key in (keys.cancel("nobody"), keys.checkpoint("nobody"), keys.result("waits"), keys.spec("nobody")):
        await bench.put(key)
    gone = await side.open()
    await side.store.sessions.close(side.namespace, gone.session_id, deadline=side.deadline)
    stolen = (await bench.get(keys.claim("stolen"))).replace(
        session.session_id.encode(), gone.session_id.encode()
    )
    await bench.put(keys.claim("stolen"), stolen, FOREVER)


async def test_what_was_broken_by_hand_is_sound_after_one_sweep_and_the_holder_completes(
    bench: Mended,
) -> None:
    await broken(bench)
    side = bench.side
    held = await side.store.jobs.read(side.namespace, "held", deadline=side.deadline)
    assert held.claim is not None
    assert len(await bench.wrong()) >= 10
    planned = await bench.repair.run_once(side.namespace, dry_run=True)
    assert len(await bench.wrong()) >= 10, "a dry run writes nothing"
    await side.store.membership.joined()
    assert await side.store.sweeps.stand_once()
    await bench.sweep.step()
    await eventually(lambda: _recovered(side, "stolen"))
    assert await bench.wrong() == []
    assert planned.changed >= 10
    for name in ("no-ready", "waits"):
        session = await side.open()
        await side.claim(await side.stored(name), session)
    done = Settle("held", Complete(token=held.claim.token, digest=b""))
    [settled] = await side.settlement.settle(side.namespace, [done], side.deadline)
    assert not isinstance(settled, RequestError)
    again = await bench.repair.run_once(side.namespace)
    assert (again.changed, again.failed) == (0, 0)


async def test_entries_of_locks_whose_claim_is_gone_or_another_are_removed_and_those_of_a_held_job_stay(
    bench: Mended,
) -> None:
    side, keys = bench.side, bench.keys
    session = await side.open(ttl_ms=60_000)
    for name in ("held", "unclaimed", "other"):
        stored = await side.submit(
            a_new_job(name, locks=(JobLock(name=f"l-{name}"), JobLock(name=f"m-{name}")))
        )
        await side.claim(stored, session)
    entries = {name: keys.lock(f"l-{name}", job_waiter(name)) for name in ("held", "unclaimed", "other")}
    await bench.delete(keys.claim("unclaimed"), entries["other"])
    value, lease = await bench.get(entries["held"]), int(session.session_id, 16)
    await bench.put(entries["other"], (await bench.get(keys.lock("m-other", job_waiter("other")))), lease)
    await bench.put(keys.lock("stray", job_waiter("nobody")), value.replace(b"held", b"nobo"), lease)

    planned = await bench.repair.run_once(side.namespace, dry_run=True)
    report = await bench.repair.run_once(side.namespace)

    assert report.counts == planned.counts
    removed = [(action.kind, action.job_id) for action in report.actions]
    assert sorted(removed) == [
        ("lock-entry-removed", "nobo"),
        ("lock-entry-removed", "other"),
        ("lock-entry-removed", "unclaimed"),
        ("lock-entry-removed", "unclaimed"),
    ]
    assert await bench.get(entries["held"])
    missing = await bench.repair.run_once(side.namespace)
    assert [(action.kind, action.job_id) for action in missing.actions] == [("lock-entry-missing", "other")]


async def _recovered(side: Side, job_id: str) -> bool:
    return (await side.stored(job_id)).job.state is JobState.PENDING


async def test_the_watch_tells_of_removed_keys_so_that_the_index_forgets_them(bench: Mended) -> None:
    side = bench.side
    await side.submit(a_new_job("j1"))
    job = (await side.stored("j1")).job
    state = await bench.get(bench.keys.state("j1"))
    await bench.put(bench.keys.ready("q", "t", job.rank, "nobody"), state)
    pair = (side.namespace, "q", "t")

    async def waiting(count: int) -> bool:
        window = side.index.window(pair)
        return window is not None and int(window.line) == count

    await eventually(lambda: waiting(2))
    assert (await bench.repair.run_once(side.namespace)).counts == {"ready-key-removed": 1}
    await eventually(lambda: waiting(1))


async def test_a_claim_on_a_lease_that_never_ends_is_freed_and_a_live_one_is_not_touched(
    bench: Mended,
) -> None:
    """Fault case 025."""
    side = bench.side
    session = await side.open(ttl_ms=60_000)
    await side.claim(await side.submit(a_new_job("alive")), session)
    ending = await side.open(ttl_ms=60_000)
    await side.claim(await side.submit(a_new_job("stuck")), ending)
    value = await bench.get(bench.keys.claim("stuck"))
    await bench.put(bench.keys.claim("stuck"), value, FOREVER)
    await side.store.sessions.close(side.namespace, ending.session_id, deadline=side.deadline)
    alive = await side.store.jobs.read(side.namespace, "alive", deadline=side.deadline)
    assert (await bench.repair.run_once(side.namespace)).counts == {"claim-key-removed": 1}
    await eventually(lambda: _recovered(side, "stuck"))
    job = (await side.stored("stuck")).job
    assert job.attempts[-1].outcome is AttemptOutcome.LOST
    [notice] = bench.notices.notices
    assert notice.facts["lease"] == f"{FOREVER:016x}"
    now = await side.store.jobs.read(side.namespace, "alive", deadline=side.deadline)
    assert (now.stored, now.claim) == (alive.stored, alive.claim)


@pytest.mark.parametrize("cancelled", [False, True], ids=["run timeout", "cancel grace"])
async def test_a_session_that_lives_on_holds_no_job_beyond_its_time(bench: Mended, cancelled: bool) -> None:
    """Fault cases 029 and 077."""
    side = bench.side
    session = await side.open(ttl_ms=60_000)
    timeout = {} if cancelled else {"run_timeout_ms": 50}
    claimed = await side.claim(await side.submit(a_new_job("j1", **timeout)), session)
    if cancelled:
        await side.changes.cancel(side.namespace, "j1", "stop", "me", side.deadline)

    async def ended() -> bool:
        await bench.overdue.run_once(side.namespace)
        return (await side.stored("j1")).job.state is not JobState.RUNNING

    await eventually(ended)
    job = (await side.stored("j1")).job
    assert job.state is (JobState.CANCELLED if cancelled else JobState.SCHEDULED)
    assert job.attempts[-1].token == claimed.token
    assert await bench.wrong() == []
    late = Settle("j1", Complete(token=claimed.token, digest=b""))
    [refused] = await side.settlement.settle(side.namespace, [late], side.deadline)
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.CLAIM_LOST


async def test_a_leader_that_was_replaced_while_it_stood_still_changes_nothing(
    start_side: SideFactory,
) -> None:
    async with start_side() as first, start_side() as second:
        one, other = mended(first), mended(second)
        await first.store.membership.joined()
        await second.store.membership.joined()
        session = await first.open(ttl_ms=60_000)
        await first.claim(await first.submit(a_new_job("lost")), session)
        await one.delete(one.keys.claim("lost"))
        await first.submit(a_new_job("j2", unique_key="u"))
        await one.delete(one.keys.unique("q", "u"))
        await one.put(one.keys.cancel("nobody"))
        assert await first.store.sweeps.stand_once()
        await first.store.client.lease_revoke(first.store.membership.lease, timeout=5)
        assert await second.store.sweeps.stand_once()
        assert first.store.sweeps.is_leader, "it has not looked since"
        before = await one.wrong(), await first.stored("lost"), await first.stored("j2")
        await one.sweep.sweep(first.namespace)
        assert (await one.wrong(), await first.stored("lost"), await first.stored("j2")) == before
        await other.sweep.step()
        assert await other.wrong() == []
        assert (await second.stored("lost")).job.state is JobState.PENDING
