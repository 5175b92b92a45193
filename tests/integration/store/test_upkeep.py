"""Single keys on a real etcd: walks with tight ends, sights, guarded deletions, and the leader's compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from coordinator.core import commands as c
from coordinator.core.effects import Slot, Where
from coordinator.core.fencing import split_token
from coordinator.core.job import JobState
from coordinator.core.machine import Decision, Guard, decide
from coordinator.core.upkeep import KeySeen, lacks, repair_writes
from coordinator.errors import NotApplied
from coordinator.etcd.key_walk import TightWalk, WalkHint
from coordinator.etcd.keys import KeyRange
from coordinator.ports import Operation, Stored
from coordinator.services.commits import operation_of
from leasekeeper.internal.etcd.v1.kv_pb2 import PutRequest, RequestOp, TxnRequest
from tests.integration.store.conftest import Harness, HarnessFactory

OTHERS_LEASE = 0x7A11


async def put_many(harness: Harness, keys: Sequence[bytes]) -> None:
    for start in range(0, len(keys), 120):
        puts = [RequestOp(request_put=PutRequest(key=key)) for key in keys[start : start + 120]]
        await harness.store.client.txn(TxnRequest(success=puts), timeout=5)


async def walked(harness: Harness, slot: Slot) -> list[KeySeen]:
    walk = harness.store.upkeep.walk(harness.namespace, slot)
    found: list[KeySeen] = []
    while (page := await walk.page(deadline=harness.deadline())) is not None:
        found += page
    return found


def at(harness: Harness, slot: Slot, job_id: str = "j1", **parts: object) -> Where:
    return Where(slot, harness.namespace, job_id, **parts)  # type: ignore[arg-type]


def scattered(number: int) -> bytes:
    return b"%032x" % random.Random(number).getrandbits(128)


def counted(number: int) -> bytes:
    return b"invoice-2026-%07d" % number


def clustered(number: int) -> bytes:
    return (b"a" if number < 3 else b"job-%d-" % (number % 3) * 3) + b"%06d" % number


def nested(number: int) -> bytes:
    return b"x" * (number % 200) + b"-%d" % (number // 200)


@pytest.mark.parametrize(("key", "times"), [(scattered, 10), (counted, 10), (clustered, 10), (nested, 100)])
async def test_a_walk_meets_every_key_once_in_ranges_that_end_tightly(
    harness: Harness, key: Callable[[int], bytes], times: int
) -> None:
    """``times``: how often etcd's index may be walked over one key; with one wide end it would be 60 times.
    Names of which each continues the last one are the worst case."""
    prefix = f"/test-walk/{harness.namespace}/".encode()
    keys = sorted({prefix + key(number) for number in range(6_000)})
    await put_many(harness, keys)
    span = KeyRange(prefix, prefix[:-1] + b"0")
    walk = TightWalk(harness.store.client, span, clock=harness.clock, keys_only=True, page=50)
    found: list[bytes] = []
    while (page := await walk.page(deadline=harness.deadline())) is not None:
        found += [kv.key for kv in page]
        assert len(walk.covered) < 2_000
    assert found == keys
    assert sum(walk.covered) < times * len(keys)


async def a_walk(harness: Harness, span: KeyRange, hint: WalkHint) -> tuple[list[bytes], list[int]]:
    walk = TightWalk(harness.store.client, span, clock=harness.clock, keys_only=True, page=50, hint=hint)
    found: list[bytes] = []
    while (page := await walk.page(deadline=harness.deadline())) is not None:
        found += [kv.key for kv in page]
    return found, walk.covered


@pytest.mark.parametrize("key", [scattered, counted, clustered])
async def test_only_the_first_walk_has_a_range_over_everything(
    harness: Harness, key: Callable[[int], bytes]
) -> None:
    """Later ones go from mark to mark, and find what has come before, between and behind them as well."""
    prefix = f"/test-walk/{harness.namespace}/".encode()
    keys = sorted({prefix + key(number) for number in range(6_000)})
    await put_many(harness, keys)
    span, hint = KeyRange(prefix, prefix[:-1] + b"0"), WalkHint()
    found, covered = await a_walk(harness, span, hint)
    assert (found, covered[0]) == (keys, len(keys))
    for _ in range(3):
        found, covered = await a_walk(harness, span, hint)
        assert found == keys
        assert max(covered) <= 100, "two pages"
        assert len(covered) < 3 * len(keys) / 50
    new = [prefix + b"%b%03d" % (where, number) for where in (b"!", b"job-1", b"~") for number in range(120)]
    await put_many(harness, new)
    found, covered = await a_walk(harness, span, hint)
    assert found == sorted(keys + new)
    assert max(covered) <= 100 + len(new)
    await harness.store.client.delete_range(span.start, span.end, timeout=5)
    for _ in range(2):
        found, covered = await a_walk(harness, span, hint)
        assert (found, sum(covered)) == ([], 0)
    assert len(covered) == 1


async def test_what_lies_beside_a_record_is_read_at_one_revision(harness: Harness) -> None:
    stored = await harness.submitted("j1", unique_key="u", queue_timeout_ms=60_000)
    await harness.store.client.delete_range(
        harness.store.space.namespace(harness.namespace).unique("q", "u"), timeout=5
    )
    old = Stored(stored.job, stored.revision - 1)
    beside, gone = await harness.store.upkeep.look(
        harness.namespace, [stored, old], deadline=harness.deadline()
    )
    assert gone is None, "the record has changed since"
    assert beside is not None
    assert [lack.where.slot for lack in lacks(stored.job, stored.revision, beside.keys)] == [Slot.UNIQUE]
    assert beside.claim is None


async def test_strays_of_every_kind_are_met_and_sound_keys_are_not(harness: Harness) -> None:
    await harness.submitted("sound", unique_key="u", queue_timeout_ms=60_000)
    await harness.claimed("held")
    keys = harness.store.space.namespace(harness.namespace)
    rank = (await harness.submitted("other")).job.rank
    strays = {
        Slot.READY: keys.ready("q", "t", rank, "held"),
        Slot.DUE: keys.due(99, "sound"),
        Slot.UNIQUE: keys.unique("q", "v"),
        Slot.CANCEL: keys.cancel("held"),
        Slot.CHECKPOINT: keys.checkpoint("none"),
        Slot.RESULT: keys.result("sound"),
        Slot.SPEC: keys.spec("none"),
        Slot.CLAIM: keys.claim("sound"),
    }
    unique = await harness.store.client.range(keys.unique("q", "u"), timeout=5)
    held = await harness.store.client.range(keys.claim("held"), timeout=5)
    values = {Slot.UNIQUE: unique.kvs[0].value, Slot.CLAIM: held.kvs[0].value}
    for slot, key in strays.items():
        await harness.store.client.put(key, values.get(slot, b""), timeout=5)
    await harness.store.client.put(keys.claim("sound") + b"/%", b"", timeout=5)
    for slot, key in strays.items():
        found = await walked(harness, slot)
        suspects = await harness.store.upkeep.suspects(harness.namespace, found, deadline=harness.deadline())
        assert [keys.where(one.where) for one in suspects] == [key], slot
        sight = await harness.store.upkeep.sight(
            harness.namespace, suspects[0].where, deadline=harness.deadline()
        )
        removed = await harness.store.upkeep.remove(
            harness.namespace, sight, as_leader=False, deadline=harness.deadline()
        )
        assert removed
        assert not (await harness.store.client.range(key, timeout=5)).kvs
    assert harness.store.set_aside.counts["claim"] == 1


async def test_a_key_is_not_removed_once_it_or_its_record_has_changed(harness: Harness) -> None:
    stored = await harness.submitted("j1")
    keys = harness.store.space.namespace(harness.namespace)

    async def edited() -> None:
        await harness.store.client.put(keys.cancel("j1"), b"", timeout=5)

    async def updated() -> None:
        assert (await harness.jobs.commit(harness.operation(stored, c.Update(priority=1)))).won

    async def left_alone() -> None:
        return

    await edited()
    for change, removed in ((edited, False), (updated, False), (left_alone, True)):
        where = at(harness, Slot.CANCEL)
        sight = await harness.store.upkeep.sight(harness.namespace, where, deadline=harness.deadline())
        await change()
        done = await harness.store.upkeep.remove(
            harness.namespace, sight, as_leader=False, deadline=harness.deadline()
        )
        assert done is removed, change


async def test_an_undecodable_record_keeps_its_keys(harness: Harness) -> None:
    await harness.submitted("j1", queue_timeout_ms=60_000, unique_key="u")
    keys = harness.store.space.namespace(harness.namespace)
    await harness.store.client.put(keys.state("j1"), b"\xff\xff", timeout=5)
    for slot in (Slot.DUE, Slot.UNIQUE, Slot.SPEC):
        found = await walked(harness, slot)
        assert found
        suspects = await harness.store.upkeep.suspects(harness.namespace, found, deadline=harness.deadline())
        assert not suspects, slot
        sight = await harness.store.upkeep.sight(
            harness.namespace, found[0].where, deadline=harness.deadline()
        )
        assert not sight.readable


async def test_a_claim_on_a_foreign_lease_shows_its_lease_and_whether_its_session_is_open(
    harness: Harness,
) -> None:
    stored, token = await harness.claimed("j1")
    keys, client = harness.store.space.namespace(harness.namespace), harness.store.client
    assert harness.session is not None
    await client.lease_grant(600, OTHERS_LEASE, timeout=5)
    try:
        value = (await client.range(keys.claim("j1"), timeout=5)).kvs[0].value
        await client.put(keys.claim("j1"), value, lease=OTHERS_LEASE, timeout=5)
        [seen] = await walked(harness, Slot.CLAIM)
        assert seen.lease == OTHERS_LEASE
        assert seen.created == split_token(token).revision
        upkeep = harness.store.upkeep
        assert await upkeep.suspects(harness.namespace, [seen], deadline=harness.deadline()) == [seen]
        sight = await upkeep.sight(harness.namespace, seen.where, deadline=harness.deadline())
        assert sight.session_open
        await harness.sessions.close(
            harness.namespace, harness.session.session_id, deadline=harness.deadline()
        )
        sight = await upkeep.sight(harness.namespace, seen.where, deadline=harness.deadline())
        assert (sight.session_open, sight.revision) == (False, stored.revision)
        await harness.sessions.open(
            harness.new_session(session_id=harness.session.session_id), deadline=harness.deadline()
        )
        assert not await upkeep.remove(
            harness.namespace, sight, as_leader=False, deadline=harness.deadline()
        ), "its session is open again"
    finally:
        await client.lease_revoke(OTHERS_LEASE, timeout=5)


async def test_a_claim_whose_session_has_no_witness_is_looked_at(harness: Harness) -> None:
    await harness.claimed("j1")
    assert harness.session is not None
    seen = await walked(harness, Slot.CLAIM)
    upkeep = harness.store.upkeep
    assert not await upkeep.suspects(harness.namespace, seen, deadline=harness.deadline())
    await harness.sessions.shut(harness.namespace, harness.session.session_id, deadline=harness.deadline())
    assert await upkeep.suspects(harness.namespace, seen, deadline=harness.deadline()) == seen


async def test_a_repair_loses_against_whatever_has_changed_since(harness: Harness) -> None:
    stored, token = await harness.claimed("j1", unique_key="u")
    keys = harness.store.space.namespace(harness.namespace)
    await harness.store.client.delete_range(keys.unique("q", "u"), timeout=5)

    async def repair(read: Stored, token: int) -> bool:
        claim = harness.claim_for(read.job)
        outcome = decide(read.job, claim, c.Repair(token=token), harness.clock.now_ms())
        assert isinstance(outcome, Decision)
        assert outcome.guard is Guard.SEEN
        assert outcome.job is not None
        missing = lacks(read.job, read.revision, {})
        commit = await harness.jobs.commit(
            Operation(
                guard=outcome.guard,
                before=read,
                after=outcome.job,
                writes=repair_writes(outcome.job, missing),
                deadline=harness.deadline(),
                token=token,
            )
        )
        return commit.won

    assert not await repair(stored, 0), "there is a claim"
    assert not await repair(stored, token + 1), "it is another claim"
    await harness.submitted("j2", unique_key="u")
    assert not await repair(stored, token), "another job has the unique key meanwhile"
    await harness.store.client.delete_range(keys.unique("q", "u"), timeout=5)
    assert await repair(stored, token)
    found = await harness.jobs.read(harness.namespace, "j1", deadline=harness.deadline())
    assert found.stored is not None
    assert found.stored.job.state is JobState.RUNNING
    assert found.stored.job.attempts[-1].token == token, "its revision does not tell it any more"
    assert not await repair(stored, token), "the record was written again"


async def test_what_a_sweep_decided_is_void_once_another_process_leads(
    make_harness: HarnessFactory,
) -> None:
    async with make_harness() as first, make_harness() as second:
        await first.submitted("j1")
        await first.store.membership.joined()
        await second.store.membership.joined()
        found = await first.jobs.read(first.namespace, "j1", deadline=first.deadline())
        assert found.stored is not None
        cancel = decide(found.stored.job, None, c.Cancel(), first.clock.now_ms())
        assert isinstance(cancel, Decision)

        def swept() -> Operation:
            return operation_of(found.stored, cancel, first.deadline(), as_leader=True)

        with pytest.raises(NotApplied, match="leads"):
            await first.jobs.commit(swept())
        assert await first.store.sweeps.stand_once()
        assert not await second.store.sweeps.stand_once()
        with pytest.raises(NotApplied, match="leads"):
            await second.jobs.commit(swept())
        # The first stands still, its lease ends, the second takes the role; then the first goes on.
        await first.store.client.lease_revoke(first.store.membership.lease, timeout=5)
        assert await second.store.sweeps.stand_once()
        assert first.store.sweeps.is_leader, "it has not looked since"
        assert not (await first.jobs.commit(swept())).won
        keys = first.store.space.namespace(first.namespace)
        await first.store.client.put(keys.cancel("j1"), b"", timeout=5)
        sight = await first.store.upkeep.sight(
            first.namespace, at(first, Slot.CANCEL), deadline=first.deadline()
        )
        assert not await first.store.upkeep.remove(
            first.namespace, sight, as_leader=True, deadline=first.deadline()
        )
        assert await second.store.upkeep.remove(
            second.namespace, sight, as_leader=True, deadline=second.deadline()
        )
        assert (await second.jobs.commit(swept())).won
