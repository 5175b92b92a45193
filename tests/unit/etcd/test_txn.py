"""Operations as guarded Txns: the table of docs/keys.md, compare by compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import commands as c
from coordinator.core.effects import effects
from coordinator.core.fencing import make_token
from coordinator.core.job import Claim, Job, JobLock, Terms
from coordinator.core.lock_order import LockEntry, LockMode, job_waiter
from coordinator.core.machine import Decision, Guard, decide
from coordinator.errors import CodecError
from coordinator.etcd import codec, wire
from coordinator.etcd.guarded_op import lane_names
from coordinator.etcd.keys import KeyRange, KeySpace
from coordinator.etcd.lock_codec import decode_lock, encode_lock
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.txn import TxnCodec
from coordinator.ports import Operation, Spec, Stored
from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue, RequestOp, ResponseOp

NOW = 1_700_000_000_000
SPACE = KeySpace("/r")
KEYS = SPACE.namespace("default")
SESSION = "00000000000000ff"
TERMS = Terms(queue="q", type="t", submit_ms=NOW, digest=b"d", unique_key="u")


def txn_codec() -> TxnCodec:
    return TxnCodec(SPACE, codec.JobCodec(), epoch=lambda: 3, set_aside=SetAside(), now_ms=lambda: NOW)


def decided(job: Job | None, claim: Claim | None, command: c.Command) -> Decision:
    outcome = decide(job, claim, command, NOW)
    assert isinstance(outcome, Decision)
    return outcome


PENDING = decided(None, None, c.Submit(namespace="default", job_id="j", terms=TERMS)).job
assert PENDING is not None
CLAIM = Claim(session=SESSION, attempt=1, nonce=b"n", start_ms=NOW, queue="q", type="t")
RUNNING = decided(PENDING, None, c.ClaimIt(claim=CLAIM)).job
assert RUNNING is not None
TOKEN = make_token(3, 55)
HELD = replace(CLAIM, token=TOKEN)
DONE = decided(RUNNING, HELD, c.Complete(token=TOKEN, digest=b"c")).job
assert DONE is not None


def operation(
    guard: Guard, before: Job | None, after: Job | None, revision: int = 55, **more: object
) -> Operation:
    return Operation(
        guard=guard,
        before=Stored(before, revision) if before is not None else None,
        after=after,
        writes=effects(before, after),
        deadline=1.0,
        **more,  # type: ignore[arg-type]
    )


SUBMIT = operation(Guard.ABSENT, None, PENDING, spec=Spec(payload=b"p"))
TAKE = operation(Guard.READY, PENDING, RUNNING, claim=CLAIM, want_spec=True, want_checkpoint=True)
SETTLE = operation(Guard.HELD, RUNNING, DONE, token=TOKEN)


def puts(op: Operation, lease: int = 0) -> dict[bytes, tuple[bytes, int]]:
    found = {}
    for piece in txn_codec().describe(op, lease)[0].thens:
        request = RequestOp.FromString(piece)
        if request.HasField("request_put"):
            found[request.request_put.key] = (request.request_put.value, request.request_put.lease)
    return found


def deletes(op: Operation) -> set[bytes]:
    requests = [RequestOp.FromString(piece) for piece in txn_codec().describe(op, 9)[0].thens]
    return {r.request_delete_range.key for r in requests if r.HasField("request_delete_range")}


def test_submit_compares_state_and_unique_absent_and_reads_state_before_unique() -> None:
    guarded = txn_codec().describe(SUBMIT)[0]
    assert guarded.compares == (wire.create_eq(KEYS.state("j"), 0), wire.create_eq(KEYS.unique("q", "u"), 0))
    assert guarded.elses == (wire.get(KEYS.state("j")), wire.get(KEYS.unique("q", "u")))
    assert guarded.lanes == (KEYS.state("j"), KEYS.unique("q", "u"))


def test_state_and_ready_are_one_value() -> None:
    written = puts(SUBMIT)
    assert written[KEYS.state("j")] == written[KEYS.ready("q", "t", PENDING.rank, "j")]


def test_a_claim_compares_ready_state_claim_and_witness() -> None:
    guarded = txn_codec().describe(TAKE)[0]
    assert guarded.compares == (
        wire.mod_eq(KEYS.ready("q", "t", PENDING.rank, "j"), 55),
        wire.mod_eq(KEYS.state("j"), 55),
        wire.create_eq(KEYS.claim("j"), 0),
        wire.lease_eq(KEYS.session(SESSION), 0xFF),
    )
    assert guarded.elses == (
        wire.get(KEYS.state("j")),
        wire.get(KEYS.claim("j")),
        wire.get(KEYS.session(SESSION)),
    )
    assert guarded.thens[-2:] == (wire.get(KEYS.spec("j")), wire.get(KEYS.checkpoint("j")))
    assert guarded.reply_bytes > TERMS.payload_size


def test_only_the_claim_lies_on_the_sessions_lease() -> None:
    leases = {key: lease for key, (_, lease) in puts(TAKE).items()}
    assert leases == {KEYS.state("j"): 0, KEYS.claim("j"): 0xFF}
    assert deletes(TAKE) == {KEYS.ready("q", "t", PENDING.rank, "j")}


def test_a_settlement_compares_token_and_state_and_retires_the_record() -> None:
    guarded = txn_codec().describe(SETTLE, 9)[0]
    assert guarded.compares == (wire.create_eq(KEYS.claim("j"), 55), wire.mod_eq(KEYS.state("j"), 55))
    assert guarded.retention == 9
    assert {key: lease for key, (_, lease) in puts(SETTLE, 9).items()} == {KEYS.state("j"): 9}
    assert deletes(SETTLE) == {
        KEYS.claim("j"),
        KEYS.spec("j"),
        KEYS.checkpoint("j"),
        KEYS.unique("q", "u"),
    }
    assert KEYS.unique("q", "u") in guarded.lanes


def test_a_loss_compares_that_nobody_holds_it() -> None:
    after = decided(RUNNING, None, c.Lose()).job
    guarded = txn_codec().describe(operation(Guard.UNHELD, RUNNING, after))[0]
    assert guarded.compares == (wire.create_eq(KEYS.claim("j"), 0), wire.mod_eq(KEYS.state("j"), 55))


def test_other_changes_compare_the_record_as_read() -> None:
    after = decided(RUNNING, HELD, c.Cancel(reason="r")).job
    op = operation(Guard.STATE, RUNNING, after, cancelled_by="me")
    guarded = txn_codec().describe(op)[0]
    assert guarded.compares == (wire.mod_eq(KEYS.state("j"), 55),)
    assert KEYS.cancel("j") in puts(op)


@pytest.mark.parametrize("guard", [Guard.READY, Guard.HELD, Guard.UNHELD, Guard.STATE])
def test_a_guard_on_nothing_is_refused(guard: Guard) -> None:
    with pytest.raises(ValueError, match="as read"):
        txn_codec().compile(operation(guard, RUNNING, DONE, revision=0, token=TOKEN, claim=CLAIM))


def kv(key: bytes, value: bytes, revision: int, lease: int = 0) -> ResponseOp:
    found = ResponseOp()
    found.response_range.kvs.append(
        KeyValue(key=key, value=value, create_revision=revision, mod_revision=revision, lease=lease)
    )
    return found


def nothing() -> ResponseOp:
    found = ResponseOp()
    found.response_range.SetInParent()
    return found


def test_a_win_tells_token_record_and_spec() -> None:
    what = txn_codec()
    plan = what.compile(TAKE)
    written = [ResponseOp() for _ in range(plan.reads_at)]
    spec = kv(KEYS.spec("j"), codec.encode_spec(Spec(payload=b"p")), 5)
    commit = what.won(TAKE, plan.reads_at, 88, [*written, spec, nothing()])
    assert commit.won
    assert commit.token == make_token(3, 88)
    assert commit.stored == Stored(RUNNING, 88)
    assert commit.spec == Spec(payload=b"p")
    assert commit.checkpoint is None


def test_a_loss_tells_holder_record_and_whether_the_session_is_gone() -> None:
    what = txn_codec()
    state = kv(KEYS.state("j"), codec.JobCodec().encode(RUNNING), 60)
    claim = kv(KEYS.claim("j"), codec.encode_claim(CLAIM), 60, lease=0xFF)
    for witness, gone in ((nothing(), True), (kv(KEYS.session(SESSION), b"", 4, lease=0xFF), False)):
        commit = what.lost(TAKE, 99, [state, claim, witness], resent=True)
        assert not commit.won
        assert commit.resent
        assert commit.stored == Stored(RUNNING, 60)
        assert commit.claim == replace(CLAIM, token=make_token(3, 60))
        assert commit.session_gone is gone


def test_a_duplicate_is_told_its_owner() -> None:
    what = txn_codec()
    owner = kv(KEYS.unique("q", "u"), codec.encode_unique("other"), 7)
    commit = what.lost(SUBMIT, 99, [nothing(), owner], resent=False)
    assert commit.stored is None
    assert commit.unique_owner == "other"


def test_an_undecodable_record_in_the_way_decides_nothing() -> None:
    what = txn_codec()
    broken = kv(KEYS.state("j"), b"\xff", 60)
    with pytest.raises(CodecError):
        what.lost(SETTLE, 99, [broken, nothing()], resent=False)


def test_an_undecodable_spec_costs_no_claim() -> None:
    what = txn_codec()
    plan = what.compile(TAKE)
    written = [ResponseOp() for _ in range(plan.reads_at)]
    commit = what.won(TAKE, plan.reads_at, 88, [*written, kv(KEYS.spec("j"), b"\xff", 5), nothing()])
    assert commit.won
    assert commit.spec is None


# --- jobs submitted along with it -----------------------------------------------------------------


def follow_up(job_id: str = "child", unique: str = "") -> Operation:
    command = c.Submit(namespace="default", job_id=job_id, terms=replace(TERMS, unique_key=unique))
    child = decided(None, None, command).job
    return operation(Guard.ABSENT, None, child, spec=Spec(payload=b"undo"))


def test_follow_ups_are_written_with_their_parent_under_its_guard_alone() -> None:
    child = follow_up()
    both = operation(Guard.HELD, RUNNING, DONE, token=TOKEN, also=(child,))
    alone, together = txn_codec().describe(SETTLE, 9)[0], txn_codec().describe(both, 9)[0]

    assert together.compares == alone.compares
    assert together.elses == alone.elses
    assert together.thens == (*alone.thens, *txn_codec().describe(child)[0].thens)
    assert together.lanes == (*alone.lanes, KEYS.state("child"))
    assert {value[1] for key, value in puts(both, 9).items() if b"child" in key} == {0}, "no retention lease"


def test_a_follow_up_may_take_the_unique_key_that_its_parent_gives_up() -> None:
    both = operation(Guard.HELD, RUNNING, DONE, token=TOKEN, also=(follow_up(unique="u"),))

    assert codec.decode_unique(puts(both, 9)[KEYS.unique("q", "u")][0]) == "child"
    assert KEYS.unique("q", "u") not in deletes(both), "etcd refuses two writes of one key"
    assert len(txn_codec().describe(both, 9)[0].lanes) == 3


def test_a_follow_up_takes_no_other_unique_key_as_no_guard_compares_it() -> None:
    both = operation(Guard.HELD, RUNNING, DONE, token=TOKEN, also=(follow_up(unique="another"),))

    with pytest.raises(ValueError, match="unique key"):
        txn_codec().describe(both, 9)


def guarded(*children: Operation) -> Operation:
    return operation(Guard.HELD, RUNNING, DONE, token=TOKEN, also=children, guards_also=True)


def test_a_guarded_follow_up_is_compared_for_absence_with_its_unique_key() -> None:
    alone = txn_codec().describe(SETTLE, 9)[0]
    together = txn_codec().describe(guarded(follow_up(unique="v"), follow_up("c2")), 9)[0]

    own = (KEYS.state("child"), KEYS.unique("q", "v"), KEYS.state("c2"))
    assert together.compares == (*alone.compares, *(wire.create_eq(key, 0) for key in own))
    assert together.elses == (*alone.elses, *map(wire.get, own))
    assert together.lanes == (*alone.lanes, *own)


def test_the_unique_key_that_the_parent_gives_up_is_read_and_not_compared() -> None:
    together = txn_codec().describe(guarded(follow_up(unique="u")), 9)[0]

    assert wire.create_eq(KEYS.unique("q", "u"), 0) not in together.compares
    assert together.elses[-1] == wire.get(KEYS.unique("q", "u"))


def test_what_stands_in_the_way_of_guarded_follow_ups_is_told_in_their_order() -> None:
    both = guarded(follow_up(unique="v"), follow_up("c2"))
    value = codec.JobCodec().encode(RUNNING)
    found = [
        kv(KEYS.state("j"), value, 55),
        nothing(),
        nothing(),
        kv(KEYS.unique("q", "v"), codec.encode_unique("x"), 7),
        kv(KEYS.state("c2"), codec.JobCodec().encode(PENDING), 8),
    ]
    commit = txn_codec().lost(both, 99, found, False)

    assert [(one.job is not None, one.unique_owner) for one in commit.also] == [(False, "x"), (True, "")]
    assert commit.unique_owner == "", "that is of the operation's own job"


def test_twenty_widest_follow_ups_fit_into_one_operation() -> None:
    wide = replace(TERMS, queue_timeout_ms=1_000)
    children = []
    for n in range(20):
        command = c.Submit(namespace="default", job_id=f"c{n}", terms=replace(wide, unique_key=f"k{n}"))
        children.append(
            operation(Guard.ABSENT, None, decided(None, None, command).job, spec=Spec(payload=b"p"))
        )
    entry = txn_codec().compile(guarded(*children), 9)

    assert 100 < entry.width <= 127


def test_an_operation_with_follow_ups_takes_no_template() -> None:
    both = Operation(
        guard=Guard.HELD,
        before=Stored(replace(RUNNING, terms=replace(TERMS, unique_key="")), 55),
        after=replace(DONE, terms=replace(TERMS, unique_key="")),
        deadline=1.0,
        token=TOKEN,
        also=(follow_up(),),
    )

    assert both.usual is None
    assert KEYS.state("child") in txn_codec().compile(both, 9).nested
    assert KEYS.state("child") in txn_codec().compile(both, 9).lanes


def test_a_retry_compares_record_and_unique_key() -> None:
    dead = decided(RUNNING, HELD, c.Fail(token=TOKEN, digest=b"f", no_retry=True)).job
    assert dead is not None
    alive = decided(dead, None, c.Retry())
    guarded = txn_codec().describe(operation(alive.guard, dead, alive.job))[0]

    assert guarded.compares == (wire.mod_eq(KEYS.state("j"), 55), wire.create_eq(KEYS.unique("q", "u"), 0))
    assert guarded.elses == (
        wire.get(KEYS.state("j")),
        wire.get(KEYS.claim("j")),
        wire.get(KEYS.unique("q", "u")),
    )


# --- locks that a job names

LOCKS = (JobLock(name="a"), JobLock(name="b/c", mode=LockMode.SEMAPHORE, permits=3))
LOCKING = replace(PENDING, terms=replace(TERMS, locks=LOCKS, unique_key=""))
LOCKED = decided(LOCKING, None, c.ClaimIt(claim=CLAIM)).job
assert LOCKED is not None
TAKE_ALL = operation(Guard.READY, LOCKING, LOCKED, claim=CLAIM, want_spec=True, lock_revisions=(40, 0))
ENTRIES = [KEYS.lock(lock.name, job_waiter("j")) for lock in LOCKS]


def test_a_claim_puts_the_entries_of_its_locks_on_its_sessions_lease() -> None:
    written = puts(TAKE_ALL)

    assert [written[key][1] for key in (KEYS.claim("j"), *ENTRIES)] == [int(SESSION, 16)] * 3
    kv = KeyValue(key=ENTRIES[1], value=written[ENTRIES[1]][0], create_revision=9, mod_revision=9)
    entry = decode_lock("b/c", job_waiter("j"), kv)
    assert (entry.job_id, entry.session, entry.nonce) == ("j", SESSION, b"n")
    assert (entry.mode, entry.permits, entry.since_ms) == (LockMode.SEMAPHORE, 3, NOW)


def test_a_claim_compares_that_nothing_was_added_to_its_locks_and_only_one_operation_adds_to_them() -> None:
    guarded, _ = txn_codec().describe(TAKE_ALL)

    spans = [KEYS.lock_entries(lock.name) for lock in LOCKS]
    known = (wire.range_mod_less(spans[0].start, spans[0].end, 41), wire.range_mod_less(*_span(spans[1]), 1))
    assert set(known) <= set(guarded.compares)
    assert {wire.create_eq(key, 0) for key in ENTRIES} <= set(guarded.compares)
    assert guarded.adds == tuple(span.start for span in spans)
    assert txn_codec().compile(TAKE_ALL).lanes == lane_names(guarded)


def test_a_claim_without_a_known_revision_for_each_of_its_locks_is_refused() -> None:
    with pytest.raises(ValueError):
        txn_codec().describe(operation(Guard.READY, LOCKING, LOCKED, claim=CLAIM, lock_revisions=(40,)))


def test_a_lost_claim_learns_what_stands_in_the_lines_of_its_locks() -> None:
    entry = decode_lock("a", "other", KeyValue(value=encode_lock(_held_by_another()), create_revision=50))
    reads = [ResponseOp() for _ in range(5)]
    reads[3].response_range.kvs.append(
        KeyValue(key=KEYS.lock("a", "other"), value=encode_lock(entry), create_revision=50, mod_revision=51)
    )

    commit = txn_codec().lost(TAKE_ALL, 60, reads, False)

    assert commit.lines is not None
    assert [(one.waiter, one.revision) for one in commit.lines["a"]] == [("other", 50)]
    assert commit.lines["b/c"] == ()


def test_the_end_of_a_claim_deletes_its_entries_in_the_same_txn() -> None:
    ended = decided(LOCKED, HELD, c.Complete(token=TOKEN, digest=b"c")).job
    lost = decided(LOCKED, None, c.Lose()).job

    assert {*ENTRIES, KEYS.claim("j")} <= deletes(operation(Guard.HELD, LOCKED, ended, token=TOKEN))
    assert {*ENTRIES, KEYS.claim("j")} <= deletes(operation(Guard.UNHELD, LOCKED, lost))


def test_a_claim_of_as_many_locks_as_a_job_may_name_fits_into_a_txn() -> None:
    locks = tuple(JobLock(name=f"lock-{at}") for at in range(8))
    before = replace(PENDING, terms=replace(TERMS, locks=locks))
    after = decided(before, None, c.ClaimIt(claim=CLAIM)).job

    op = operation(Guard.READY, before, after, claim=CLAIM, want_spec=True, lock_revisions=(1,) * 8)

    assert txn_codec().compile(op).width <= 128 - 80


def _span(span: KeyRange) -> tuple[bytes, bytes]:
    return span.start, span.end


def _held_by_another() -> LockEntry:
    return LockEntry(name="a", waiter="other", session="00000000000000aa", mode=LockMode.EXCLUSIVE)
