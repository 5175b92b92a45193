"""Refusals, unknown outcomes, deadlines, dead leases, the epoch: what each caller is told."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.errors import (
    DeadlinePassed,
    DuplicateKey,
    EpochChanged,
    EtcdUnavailable,
    InvalidRequest,
    LeaseNotFound,
    NotApplied,
    OutcomeUnknown,
    PermissionDenied,
    RequestTooLarge,
    StorageError,
    StorageFull,
    TooManyRequests,
)
from coordinator.etcd import wire
from coordinator.etcd.committer import CommitterConfig, GroupLimits, GuardedOp, OpResult
from leasekeeper.internal.etcd.v1 import kv_pb2 as pb
from tests.unit.etcd.committer_fakes import Bench, Call, make_bench, running, settle

UNKNOWN = OutcomeUnknown("connection reset")


def enqueue_many(bench: Bench, count: int) -> list[asyncio.Future[OpResult]]:
    return [bench.committer.enqueue(bench.op(f"k{n:02}")) for n in range(count)]


# --- refusals that wrote nothing ---


@pytest.mark.parametrize(
    "error", [DuplicateKey("dup"), LeaseNotFound("gone"), InvalidRequest("bad"), RequestTooLarge("big")]
)
@pytest.mark.parametrize("culprits", [{0}, {59}, {17, 18, 42}])
async def test_only_the_culprit_of_a_refusal_hears_of_it(error: NotApplied, culprits: set[int]) -> None:
    bad = {f"k{n:02}".encode() for n in culprits}
    async with running() as bench:
        bench.etcd.script = lambda call: error if bad.intersection(call.keys) else bench.etcd.won(call)
        futures = enqueue_many(bench, 60)
        await settle()
        for n, future in enumerate(futures):
            if n in culprits:
                assert type(future.exception()) is type(error)
            else:
                assert future.result().won
                assert not future.result().resent
        assert len(bench.etcd.calls) <= 1 + len(culprits) * 12
        written = [key for call in bench.etcd.calls if not bad.intersection(call.keys) for key in call.keys]
        assert sorted(written) == sorted(set(written))  # nobody was sent again after an answer


async def test_groups_shrink_when_etcd_takes_fewer_operations_than_configured_and_grow_again() -> None:
    async with running(CommitterConfig(limits=GroupLimits(max_ops=60), max_in_flight=1)) as bench:
        most = 20
        bench.etcd.script = lambda call: (
            RequestTooLarge("too many operations") if len(call.keys) > most else bench.etcd.won(call)
        )
        results = await bench.committer.commit_all([bench.op(f"k{n}") for n in range(600)])
        assert all(isinstance(result, OpResult) and result.won for result in results)
        assert bench.committer.stats.refused <= 8
        most = 60
        results = await bench.committer.commit_all([bench.op(f"n{n}") for n in range(3000)])
        assert all(isinstance(result, OpResult) and result.won for result in results)
        assert max(len(call.keys) for call in bench.etcd.calls[-30:]) == 60


@pytest.mark.parametrize(
    "error",
    [TooManyRequests("overloaded"), EtcdUnavailable("nobody listens"), DeadlinePassed("login was slow")],
)
async def test_overload_is_waited_out_with_growing_pauses_and_nobody_is_marked_as_resent(
    error: StorageError,
) -> None:
    async with running() as bench:
        bench.etcd.script = lambda call: error if len(bench.etcd.calls) < 4 else bench.etcd.won(call)
        future = bench.committer.enqueue(bench.op("a"))
        await settle()
        assert len(bench.etcd.calls) == 1
        await bench.clock.advance(0.0101)
        assert len(bench.etcd.calls) == 2
        await bench.clock.advance(0.0151)
        assert len(bench.etcd.calls) == 2
        await bench.clock.advance(0.005)
        assert len(bench.etcd.calls) == 3
        await bench.clock.advance(0.041)
        assert future.result().won
        assert not future.result().resent


@pytest.mark.parametrize(
    "error",
    [TooManyRequests("overloaded"), EtcdUnavailable("nobody listens"), DeadlinePassed("login was slow")],
)
async def test_overload_until_the_deadline_is_a_certain_refusal(error: StorageError) -> None:
    async with running() as bench:
        bench.etcd.script = lambda _: error
        future = bench.committer.enqueue(bench.op("a", lasts=1.0))
        await settle()
        await bench.clock.advance(0.99)
        assert not future.done()
        await bench.clock.advance(0.06)
        assert type(future.exception()) is type(error)
        tries = len(bench.etcd.calls)
        await bench.clock.advance(2.0)
        assert len(bench.etcd.calls) == tries
        assert bench.committer.outstanding == 0


async def test_a_group_that_waits_holds_up_nobody_yet_an_outage_piles_up_only_the_maximum() -> None:
    async with running(CommitterConfig(max_in_flight=3, jitter=lambda: 0.5)) as bench:
        stuck = bench.committer.enqueue(bench.op("stuck"))
        bench.etcd.script = lambda call: (
            TooManyRequests("") if b"stuck" in call.keys else bench.etcd.won(call)
        )
        await settle()
        other = bench.committer.enqueue(bench.op("other"))
        await settle()
        assert other.result().won
        assert not stuck.done()
        bench.etcd.script = lambda _: TooManyRequests("")
        for n in range(10):
            bench.take(f"k{n}")
            await settle()
        waiting = {tuple(call.keys) for call in bench.etcd.calls} - {(b"other",)}
        assert waiting == {(b"stuck",), (b"k0",), (b"k1",)}


# --- unknown outcomes ---


async def test_an_unknown_outcome_is_sent_again_unchanged_and_the_answer_says_so() -> None:
    async with running() as bench:
        futures = enqueue_many(bench, 3)
        await settle()
        await bench.etcd.fail(bench.etcd.calls[0], UNKNOWN)
        late = bench.committer.enqueue(bench.op("late"))
        await settle()
        assert bench.etcd.calls[1].keys == [b"late"]  # the pause of the first group holds up nobody
        await bench.etcd.answer(bench.etcd.calls[1])
        assert not late.result().resent
        await bench.clock.advance(0.011)
        again = bench.etcd.calls[2]
        assert again.request == bench.etcd.calls[0].request
        await bench.etcd.answer(again, losers=frozenset({b"k00", b"k01", b"k02"}))
        for future in futures:
            result = future.result()
            assert (result.won, result.resent) == (False, True)
            assert result.responses[0].response_range.kvs[0].value == b"holder"


async def test_revisions_of_unknown_outcomes_and_of_txns_that_wrote_nothing_are_never_called_own() -> None:
    async with running() as bench:
        bench.take("a")
        await settle()
        await bench.etcd.fail(bench.etcd.calls[0], UNKNOWN)
        await bench.clock.advance(0.011)
        await bench.etcd.answer(bench.etcd.calls[1], losers=frozenset({b"a"}))
        assert bench.own_revisions == []  # the header's revision is then somebody else's
        nothing = pb.TxnResponse(
            header=pb.ResponseHeader(revision=7),
            succeeded=True,
            responses=[
                pb.ResponseOp(
                    response_txn=pb.TxnResponse(
                        succeeded=True,
                        responses=[pb.ResponseOp(response_delete_range=pb.DeleteRangeResponse(deleted=0))],
                    )
                )
            ],
        )
        future = bench.committer.enqueue(bench.op("b"))
        await settle()
        bench.etcd.calls[2].reply.set_result(nothing)
        await settle()
        assert future.result().won
        assert bench.own_revisions == []
        bench.take("c")
        await settle()
        await bench.etcd.answer(bench.etcd.calls[3])
        assert bench.own_revisions == [101]


async def test_the_deadline_of_a_sent_operation_ends_in_unknown_never_in_a_definite_failure() -> None:
    won: list[int] = []
    async with running() as bench:
        future = bench.committer.enqueue(
            bench.op("a", lasts=1.0, on_won=lambda revision, _: won.append(revision))
        )
        longer = bench.committer.enqueue(bench.op("b", lasts=3.0))
        await settle()
        assert bench.etcd.calls[0].timeout == pytest.approx(3.0)
        await bench.clock.advance(1.05)
        assert type(future.exception()) is OutcomeUnknown
        assert not longer.done()
        await bench.etcd.answer(bench.etcd.calls[0])
        assert longer.result().won
        assert won == [101]  # the index learns of it all the same


async def test_the_deadline_of_an_operation_never_sent_is_a_certain_failure_and_it_is_never_sent() -> None:
    async with running() as bench:
        bench.take("a1", lanes=("a",))
        await settle()
        waiting = bench.committer.enqueue(bench.op("a2", lanes=("a",), lasts=0.5))
        queued = bench.committer.enqueue(bench.op("b", lasts=0.5))
        await bench.clock.advance(0.55)
        assert type(waiting.exception()) is DeadlinePassed
        assert type(queued.exception()) is DeadlinePassed
        await bench.etcd.answer(bench.etcd.calls[0])
        assert len(bench.etcd.calls) == 1
        assert bench.committer.outstanding == 0


async def test_unknown_until_the_deadline_is_reported_as_unknown_and_the_lane_is_free_again() -> None:
    async with running() as bench:
        bench.etcd.script = lambda call: UNKNOWN if b"a1" in call.keys else bench.etcd.won(call)
        future = bench.committer.enqueue(bench.op("a1", lanes=("a",), lasts=1.0))
        after = bench.committer.enqueue(bench.op("a2", lanes=("a",), lasts=5.0))
        await settle()
        await bench.clock.advance(2.0)
        assert type(future.exception()) is OutcomeUnknown
        assert after.result().won
        assert len(bench.etcd.calls) <= 12


@pytest.mark.parametrize("refusal", [InvalidRequest("bad"), LeaseNotFound("gone"), TooManyRequests("busy")])
async def test_a_refused_repeat_says_nothing_of_the_first_try(refusal: NotApplied) -> None:
    async with running() as bench:
        bench.etcd.script = lambda _: UNKNOWN if len(bench.etcd.calls) == 1 else refusal
        future = bench.committer.enqueue(bench.op("a", lasts=1.0))
        await settle()
        await bench.clock.advance(1.1)
        assert type(future.exception()) is OutcomeUnknown


async def test_a_full_store_is_unknown_and_is_told_as_what_it_is() -> None:
    async with running() as bench:
        bench.etcd.script = lambda _: StorageFull("database space exceeded")
        future = bench.committer.enqueue(bench.op("a", lasts=1.0))
        await settle()
        await bench.clock.advance(1.1)
        assert type(future.exception()) is StorageFull


async def test_in_a_full_store_operations_that_only_delete_do_not_wait_for_those_that_put() -> None:
    def full(call: Call) -> pb.TxnResponse | BaseException:
        puts = any(
            one.HasField("request_put") for op in call.request.success for one in op.request_txn.success
        )
        return StorageFull("database space exceeded") if puts else bench.etcd.won(call)

    async with running() as bench:
        bench.etcd.script = full
        put = bench.committer.enqueue(bench.op("put", lasts=1.0))
        release = bench.op("release")
        release.thens = (wire.delete(b"lock"),)
        released = bench.committer.enqueue(release)
        await settle()
        await bench.clock.advance(1.1)
        assert released.result().won
        assert type(put.exception()) is StorageFull


async def test_a_missing_permission_is_told_to_the_whole_group_at_once() -> None:
    async with running() as bench:
        bench.etcd.script = lambda _: PermissionDenied("user may not write here")
        futures = enqueue_many(bench, 60)
        await settle()
        assert {type(future.exception()) for future in futures} == {PermissionDenied}
        assert len(bench.etcd.calls) == 1


async def test_an_answer_that_does_not_fit_the_request_is_an_unknown_outcome() -> None:
    async with running() as bench:
        future = bench.committer.enqueue(bench.op("a"))
        await settle()
        bench.etcd.calls[0].reply.set_result(pb.TxnResponse(succeeded=True))
        await settle()
        assert not future.done()
        await bench.clock.advance(0.02)
        await bench.etcd.answer(bench.etcd.calls[1])
        assert future.result().resent


async def test_a_cancelled_operation_with_unknown_outcome_is_still_settled() -> None:
    won: list[int] = []
    async with running() as bench:
        future = bench.committer.enqueue(bench.op("a", on_won=lambda revision, _: won.append(revision)))
        await settle()
        future.cancel()
        await bench.etcd.fail(bench.etcd.calls[0], UNKNOWN)
        await bench.clock.advance(0.02)
        await bench.etcd.answer(bench.etcd.calls[1])
        assert won == [101]


async def test_the_callers_of_an_operation_under_way_hear_unknown_when_the_committer_is_cancelled() -> None:
    bench = make_bench()
    task = asyncio.ensure_future(bench.committer.run())
    sent = bench.committer.enqueue(bench.op("a1", lanes=("a",)))
    queued = bench.committer.enqueue(bench.op("a2", lanes=("a",)))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert type(sent.exception()) is OutcomeUnknown
    assert type(queued.exception()) is DeadlinePassed
    assert type(bench.committer.enqueue(bench.op("b")).exception()) is NotApplied


async def test_closing_gives_up_after_the_drain_timeout() -> None:
    bench = make_bench(CommitterConfig(drain_timeout=2.0, jitter=lambda: 0.5))
    bench.etcd.script = lambda _: UNKNOWN
    task = asyncio.ensure_future(bench.committer.run())
    sent = bench.committer.enqueue(bench.op("a1", lanes=("a",), lasts=60.0))
    queued = bench.committer.enqueue(bench.op("a2", lanes=("a",), lasts=60.0))
    await settle()
    closing = asyncio.ensure_future(bench.committer.close())
    await bench.clock.advance(1.9)
    assert not sent.done()
    await bench.clock.advance(1.0)
    await closing
    await task
    assert type(sent.exception()) is OutcomeUnknown
    assert isinstance(queued.exception(), NotApplied)


# --- callbacks ---


async def test_callbacks_run_after_the_own_revision_and_before_any_caller_of_the_txn_resumes() -> None:
    order: list[str] = []
    async with running() as bench:

        async def caller(name: str) -> None:
            await bench.committer.commit(
                bench.op(name, on_won=lambda *_: order.append(f"won {name} {bench.own_revisions}"))
            )
            order.append(f"resumed {name}")

        callers = [asyncio.ensure_future(caller(name)) for name in "abc"]
        await settle()
        await bench.etcd.answer(bench.etcd.calls[0], losers=frozenset({b"b"}))
        assert order == ["won a [101]", "won c [101]", "resumed a", "resumed b", "resumed c"]
        await asyncio.gather(*callers)


async def test_a_callback_that_fails_costs_nobody_an_answer_and_is_raised_to_the_owner() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("index is broken")

    bench = make_bench()
    task = asyncio.ensure_future(bench.committer.run())
    a = bench.committer.enqueue(bench.op("a", on_won=fail))
    b = bench.committer.enqueue(bench.op("b"))
    await settle()
    next_one = bench.committer.enqueue(bench.op("b2", lanes=("b",)))
    await bench.etcd.answer(bench.etcd.calls[0])
    assert a.result().won
    assert b.result().won
    await bench.etcd.answer(bench.etcd.calls[1])
    assert next_one.result().won
    with pytest.raises(RuntimeError, match="index is broken"):
        await task


# --- retention leases ---


def retained(bench: Bench, name: str, lease: int, fresh: list[int]) -> GuardedOp:
    def rebuild() -> GuardedOp | None:
        return retained(bench, name, fresh[0], fresh) if fresh else None

    op = bench.op(name, retention=lease, rebuild=rebuild)
    op.thens = (*op.thens, b"\x12" + _lease_put(name, lease))
    return op


def _lease_put(name: str, lease: int) -> bytes:
    body = pb.PutRequest(key=f"{name}/result".encode(), value=b"r", lease=lease).SerializeToString()
    return bytes((len(body),)) + body


def leases(call: Call) -> set[int]:
    return {one.request_put.lease for op in call.request.success for one in op.request_txn.success} - {0}


async def test_a_dead_retention_lease_means_the_same_operation_under_another_one() -> None:
    async with running() as bench:
        bench.etcd.script = lambda call: LeaseNotFound("gone") if 66 in leases(call) else bench.etcd.won(call)
        fresh = [77]
        futures = [
            bench.committer.enqueue(retained(bench, f"k{n:02}", 66 if n % 2 else 55, fresh))
            for n in range(60)
        ]
        await settle()
        assert all(future.result().won and not future.result().resent for future in futures)
        assert {lease for call in bench.etcd.calls for lease in leases(call)} == {55, 66, 77}
        # Found once by bisecting; its other 29 users are built again without asking etcd.
        assert len(bench.etcd.calls) <= 14
        assert bench.committer.stats.rebuilt == 30
        tries = len(bench.etcd.calls)
        more = bench.committer.enqueue(retained(bench, "later", 66, fresh))
        await settle()
        assert more.result().won
        assert len(bench.etcd.calls) == tries + 1


async def test_without_another_retention_lease_the_caller_is_told_that_it_is_gone() -> None:
    async with running() as bench:
        bench.etcd.script = lambda call: LeaseNotFound("gone") if leases(call) else bench.etcd.won(call)
        none = bench.committer.enqueue(retained(bench, "a", 66, []))
        always_dead = bench.committer.enqueue(retained(bench, "b", 67, [68]))
        await settle()
        assert type(none.exception()) is LeaseNotFound
        assert type(always_dead.exception()) is LeaseNotFound
        assert len(bench.etcd.calls) <= 8


# --- the epoch ---


def by_epoch(bench: Bench, call: Call) -> pb.TxnResponse:
    if call.epoch != bench.epoch.stored:
        return pb.TxnResponse(succeeded=False, header=pb.ResponseHeader(revision=bench.etcd.revision))
    return bench.etcd.won(call)


async def test_a_changed_epoch_is_read_again_and_the_group_sent_again_under_it() -> None:
    async with running() as bench:
        bench.etcd.script = lambda call: by_epoch(bench, call)
        bench.epoch.stored = b"2"
        futures = enqueue_many(bench, 3)
        await settle()
        assert [call.epoch for call in bench.etcd.calls] == [b"1", b"2"]
        assert all(future.result().won and not future.result().resent for future in futures)
        assert bench.epoch.reads == 1


@pytest.mark.parametrize("error", [None, EtcdUnavailable("cannot read the epoch")])
async def test_an_epoch_that_stays_wrong_is_a_certain_refusal_for_the_whole_group(
    error: Exception | None,
) -> None:
    async with running() as bench:
        bench.etcd.script = lambda call: pb.TxnResponse(succeeded=False)
        bench.epoch.error = error
        futures = enqueue_many(bench, 3)
        await settle()
        assert [type(future.exception()) for future in futures] == [EpochChanged] * 3
        assert bench.epoch.reads == 1
        assert bench.own_revisions == []


async def test_an_epoch_change_after_an_unknown_outcome_stays_unknown() -> None:
    async with running() as bench:
        bench.etcd.script = lambda call: (
            UNKNOWN if len(bench.etcd.calls) == 1 else pb.TxnResponse(succeeded=False)
        )
        future = bench.committer.enqueue(bench.op("a"))
        await settle()
        await bench.clock.advance(0.1)
        assert type(future.exception()) is OutcomeUnknown
