"""Natural batching, lanes and limits: what travels together, and when."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.errors import (
    ConfigError,
    DeadlinePassed,
    NotApplied,
    RequestTooLarge,
    TooManyRequests,
)
from coordinator.etcd.committer import CommitterConfig, GroupLimits
from tests.unit.etcd.committer_fakes import running, settle


async def test_operations_of_one_loop_round_travel_in_one_txn_under_the_epoch() -> None:
    async with running() as bench:
        futures = [bench.committer.enqueue(bench.op(f"k{n}")) for n in range(5)]
        await settle()
        (call,) = bench.etcd.calls
        assert call.keys == [b"k0", b"k1", b"k2", b"k3", b"k4"]
        assert call.epoch == b"1"
        await bench.etcd.answer(call, losers=frozenset({b"k3"}))
        results = [future.result() for future in futures]
        assert [result.won for result in results] == [True, True, True, False, True]
        assert {result.revision for result in results} == {101}
        assert results[3].responses[0].response_range.kvs[0].value == b"holder"
        assert not any(result.resent for result in results)


async def test_what_arrives_while_a_txn_is_under_way_goes_next() -> None:
    async with running() as bench:
        bench.take("a")
        await settle()
        for name in "bcd":
            bench.take(name)
            await settle()
        assert len(bench.etcd.calls) == 1
        await bench.etcd.answer(bench.etcd.calls[0])
        assert bench.etcd.calls[1].keys == [b"b", b"c", b"d"]


async def test_a_second_txn_flies_only_while_a_full_group_waits() -> None:
    config = CommitterConfig(limits=GroupLimits(max_ops=3), max_in_flight=3)
    async with running(config) as bench:
        for n in range(1 + 3 + 2):
            bench.take(f"k{n}")
            await settle()
        assert [len(call.keys) for call in bench.etcd.calls] == [1, 3]
        for n in range(10, 30):
            bench.take(f"k{n}")
        await settle()
        assert [len(call.keys) for call in bench.etcd.calls] == [1, 3, 3]  # never above max_in_flight
        assert bench.etcd.most_in_flight == 3


async def test_two_operations_on_one_lane_never_fly_together_and_keep_their_order() -> None:
    async with running() as bench:
        for name in ("a1", "b1", "a2", "a3", "c1"):
            bench.take(name, lanes=(name[0],))
        await settle()
        assert bench.etcd.calls[0].keys == [b"a1", b"b1", b"c1"]
        await bench.etcd.answer(bench.etcd.calls[0])
        assert bench.etcd.calls[1].keys == [b"a2"]
        await bench.etcd.answer(bench.etcd.calls[1])
        assert bench.etcd.calls[2].keys == [b"a3"]


async def test_an_operation_on_two_lanes_waits_for_both_and_holds_both() -> None:
    async with running() as bench:
        for name, lanes in (("1", "x"), ("2", "y"), ("3", "xy"), ("4", "y"), ("5", "z"), ("6", "xx")):
            bench.take(name, lanes=tuple(lanes))
        await settle()
        sent = [b"".join(bench.etcd.calls[0].keys)]
        for _ in range(2):
            await bench.etcd.answer(bench.etcd.open_calls[0])
            sent.append(b"".join(bench.etcd.calls[-1].keys))
        assert sent == [b"125", b"3", b"64"] or sent == [b"125", b"3", b"46"]


async def test_operations_that_add_to_one_lock_go_one_at_a_time_but_a_lane_of_that_name_is_free() -> None:
    async with running() as bench:
        bench.take("a", adds=("lock",))
        bench.take("b", adds=("lock",))
        bench.take("lock")
        await settle()
        assert bench.etcd.calls[0].keys == [b"a", b"lock"]
        await bench.etcd.answer(bench.etcd.calls[0])
        assert bench.etcd.calls[1].keys == [b"b"]


async def test_a_busy_lane_does_not_hold_up_the_others() -> None:
    async with running() as bench:
        for n in range(100):
            bench.take(f"hot{n}", lanes=("hot",))
        bench.take("cold")
        await settle()
        assert bench.etcd.calls[0].keys == [b"hot0", b"cold"]


async def test_wide_operations_make_the_group_smaller() -> None:
    # 128 - N: with an operation of 100 writes, N <= 28.
    async with running() as bench:
        bench.take("wide", thens=100)
        for n in range(40):
            bench.take(f"k{n}")
        bench.take("wide too", thens=120)
        await settle()
        await bench.etcd.answer(bench.etcd.calls[0])
        await bench.etcd.answer(bench.etcd.calls[1])
        assert [len(call.keys) for call in bench.etcd.calls] == [28, 13, 1]
        for call in bench.etcd.calls:
            width = max(len(op.request_txn.success) for op in call.request.success)
            assert len(call.keys) + width <= 128


async def test_groups_keep_the_bounds_of_request_and_expected_reply() -> None:
    limits = GroupLimits(request_bytes=10_000, reply_bytes=1000)
    async with running(CommitterConfig(limits=limits, max_in_flight=9)) as bench:
        for n in range(4):
            bench.take(f"k{n}", size=4000)
        bench.take("alone", size=20_000)
        for n in range(4):
            bench.take(f"r{n}", reply_bytes=400)
        bench.take("s", reply_bytes=5000)
        await settle()
        while bench.etcd.open_calls:
            await bench.etcd.answer(bench.etcd.open_calls[0])
        assert [len(call.keys) for call in bench.etcd.calls] == [2, 2, 1, 2, 2, 1]


@pytest.mark.parametrize(("size", "thens"), [(1_600_000, 1), (1, 128)])
async def test_an_operation_too_large_for_etcd_is_refused_alone(size: int, thens: int) -> None:
    async with running() as bench:
        refused = bench.committer.enqueue(bench.op("big", size=size, thens=thens))
        fine = bench.committer.enqueue(bench.op("fine"))
        await settle()
        await bench.etcd.answer(bench.etcd.calls[0])
        assert isinstance(refused.exception(), RequestTooLarge)
        assert fine.result().won


async def test_a_full_queue_refuses_at_once_and_takes_again_when_there_is_room() -> None:
    async with running(CommitterConfig(max_queued=3)) as bench:
        taken = [bench.committer.enqueue(bench.op(f"k{n}")) for n in range(3)]
        refused = bench.committer.enqueue(bench.op("k3"))
        assert isinstance(refused.exception(), TooManyRequests)
        await settle()
        await bench.etcd.answer(bench.etcd.calls[0])
        assert all(future.result().won for future in taken)
        bench.take("k3")
        await settle()
        assert bench.etcd.calls[1].keys == [b"k3"]


async def test_a_cancelled_caller_drops_an_operation_not_sent_and_frees_its_lane() -> None:
    async with running() as bench:
        first = bench.committer.enqueue(bench.op("a1", lanes=("a",)))
        await settle()
        second = bench.committer.enqueue(bench.op("a2", lanes=("a",)))
        bench.take("a3", lanes=("a",))
        second.cancel()
        await bench.etcd.answer(bench.etcd.calls[0])
        assert first.result().won
        assert bench.etcd.calls[1].keys == [b"a3"]


async def test_a_sent_operation_completes_without_its_caller() -> None:
    won: list[int] = []
    async with running() as bench:
        future = bench.committer.enqueue(bench.op("a", on_won=lambda revision, _: won.append(revision)))
        await settle()
        future.cancel()
        await bench.etcd.answer(bench.etcd.calls[0])
        assert won == [101]
        assert bench.committer.outstanding == 0


async def test_commit_all_gives_each_operation_its_own_outcome() -> None:
    async with running() as bench:
        ops = [bench.op("a"), bench.op("big", thens=128), bench.op("b")]
        waiting = asyncio.ensure_future(bench.committer.commit_all(ops))
        await settle()
        await bench.etcd.answer(bench.etcd.calls[0], losers=frozenset({b"b"}))
        a, big, b = await waiting
        assert not isinstance(a, Exception)
        assert a.won
        assert isinstance(big, RequestTooLarge)
        assert not isinstance(b, Exception)
        assert not b.won


async def test_an_operation_without_guard_is_a_programming_error() -> None:
    async with running() as bench:
        op = bench.op("a")
        op.compares = ()
        with pytest.raises(ValueError, match="needs a compare"):
            await bench.committer.commit(op)
        assert bench.committer.outstanding == 0


async def test_a_deadline_already_passed_is_answered_at_once() -> None:
    async with running() as bench:
        future = bench.committer.enqueue(bench.op("a", lasts=0.0))
        assert isinstance(future.exception(), DeadlinePassed)
        await settle()
        assert bench.etcd.calls == []


async def test_close_finishes_what_was_taken_and_refuses_the_rest() -> None:
    async with running() as bench:
        taken = [bench.committer.enqueue(bench.op(f"a{n}", lanes=("a",))) for n in range(3)]
        await settle()
        closing = asyncio.ensure_future(bench.committer.close())
        await settle()
        late = bench.committer.enqueue(bench.op("late"))
        assert isinstance(late.exception(), NotApplied)
        for n in range(3):
            await bench.etcd.answer(bench.etcd.calls[n])
        await closing
        assert [future.result().won for future in taken] == [True, True, True]


@pytest.mark.parametrize(
    "build",
    [
        lambda: GroupLimits(max_ops=128),
        lambda: GroupLimits(max_ops=0),
        lambda: GroupLimits(request_bytes=2_000_000),
        lambda: GroupLimits(reply_bytes=0),
        lambda: CommitterConfig(max_in_flight=0),
        lambda: CommitterConfig(txn_timeout=0),
        lambda: CommitterConfig(backoff_first=1.0, backoff_max=0.5),
    ],
)
def test_settings_that_cannot_work_are_refused(build: type) -> None:
    with pytest.raises(ConfigError, match=r"\d|positive"):
        build()


async def test_an_answered_operation_forgets_its_callbacks_so_that_it_is_freed_without_the_collector() -> (
    None
):
    async with running() as bench:
        op = bench.op("a")
        op.on_won = lambda revision, responses: None
        op.rebuild = lambda: None
        future = bench.committer.enqueue(op)
        await settle()
        await bench.etcd.answer(bench.etcd.calls[0])
        assert (await future).won
        callbacks: tuple[object, ...] = (op.on_won, op.rebuild)
        assert callbacks == (None, None)
