"""Lanes, deadlines and groups against plain models of what they promise."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.etcd import wire
from coordinator.etcd.batching import ReadyQueue
from coordinator.etcd.deadlines import DeadlineWheel
from coordinator.etcd.guarded_op import Entry, GroupLimits, GuardedOp, OpEntry
from coordinator.etcd.lanes import LaneTable


@dataclass(eq=False)
class User:
    number: int
    lane_names: tuple[bytes, ...]
    blocked_by: int = 0


LANES = st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=3, unique=True).map(tuple)


@given(st.lists(st.one_of(LANES, st.integers(0, 50)), max_size=60))
def test_who_may_go_is_exactly_who_stands_first_in_all_lanes(steps: list[tuple[bytes, ...] | int]) -> None:
    table: LaneTable[User] = LaneTable()
    waiting: list[User] = []  # the model: all users, in order of entering
    free: list[User] = []

    def first_everywhere(user: User) -> bool:
        before = waiting[: waiting.index(user)]
        return not any(set(user.lane_names) & set(other.lane_names) for other in before)

    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            user = User(number, step)
            waiting.append(user)
            if table.enter(user):
                free.append(user)
        elif free:
            user = free.pop(step % len(free))
            waiting.remove(user)
            free.extend(table.leave(user))
        assert sorted(user.number for user in free) == [u.number for u in waiting if first_everywhere(u)]
    for _ in range(len(waiting)):  # everybody gets through: nobody waits for each other
        user = free.pop()
        waiting.remove(user)
        free.extend(table.leave(user))
    assert not waiting
    assert len(table) == 0


def make_entry(
    loop: asyncio.AbstractEventLoop,
    *,
    width: int = 1,
    size: int = 1,
    reply: int = 1,
    deadline: float = 1.0,
    starts: bool = False,
    limits: GroupLimits | None = None,
) -> Entry:
    op = GuardedOp(
        lanes=(),
        compares=(wire.create_eq(b"k", 0),) * width,
        thens=(wire.put(b"k", b"v" * size),),
        reply_bytes=reply,
        deadline=deadline,
    )
    entry = OpEntry(op)
    entry.starts = starts
    entry.future = loop.create_future()
    entry.check_size(limits or GroupLimits())
    return entry


SHAPES = st.tuples(
    st.integers(1, 127),
    st.sampled_from([1, 1000, 9000, 30_000]),
    st.sampled_from([1, 100, 900, 3000]),
    st.booleans(),
)


@given(st.lists(SHAPES, max_size=80), st.integers(1, 90))
def test_every_group_keeps_every_limit_or_holds_one_operation(
    shapes: list[tuple[int, int, int, bool]], max_ops: int
) -> None:
    limits = GroupLimits(max_ops=max_ops, request_bytes=20_000, reply_bytes=2000)
    loop = asyncio.new_event_loop()
    try:
        entries = [
            make_entry(loop, width=width, size=size, reply=reply, starts=starts, limits=limits)
            for width, size, reply, starts in shapes
        ]
    finally:
        loop.close()
    queue = ReadyQueue(limits)
    for entry in entries:
        queue.push(entry)
    taken: list[Entry] = []
    while queue:
        full = queue.full_group_waits()
        group = queue.take()
        taken += group
        assert group
        if len(group) > 1:
            assert len(group) <= max_ops
            assert len(group) + max(entry.width for entry in group) <= limits.max_txn_ops
            assert sum(len(entry.nested) for entry in group) <= limits.request_bytes
            assert sum(entry.reply_bytes for entry in group) <= limits.reply_bytes
        if len(group) == max_ops:
            assert full
    for starts in (False, True):  # nobody is passed over by his like
        assert [e for e in taken if e.starts is starts] == [e for e in entries if e.starts is starts]
    assert not queue.full_group_waits()


@pytest.mark.parametrize(("server", "ops"), [(128, 120), (100, 92), (1_000, 120), (16, 8), (2, 1)])
def test_groups_fit_a_server_that_allows_fewer_operations(server: int, ops: int) -> None:
    limits = GroupLimits.of_server(server)
    assert (limits.max_ops, limits.max_txn_ops) == (ops, server)


def filled(max_ops: int, *, new: int, under_way: int) -> ReadyQueue:
    loop = asyncio.new_event_loop()
    try:
        entries = [make_entry(loop, starts=True)] * new + [make_entry(loop)] * under_way
    finally:
        loop.close()
    queue = ReadyQueue(GroupLimits(max_ops=max_ops))
    for entry in entries:
        queue.push(entry)
    return queue


def begun(group: list[Entry]) -> int:
    return sum(entry.starts for entry in group)


@given(st.integers(1, 90), st.integers(0, 200), st.integers(0, 200))
def test_no_place_stays_empty_while_somebody_waits(max_ops: int, new: int, under_way: int) -> None:
    queue = filled(max_ops, new=new, under_way=under_way)
    waiting = new + under_way
    while waiting:
        group = queue.take()
        assert len(group) == min(max_ops, waiting)
        waiting -= len(group)


def test_new_work_waits_for_work_under_way_but_for_a_quarter_of_the_places() -> None:
    queue = filled(80, new=400, under_way=400)
    assert [begun(queue.take()) for _ in range(8)] == [20, 20, 20, 20, 20, 20, 40, 80]


def test_new_work_that_is_seldom_earns_no_right_to_more() -> None:
    queue = filled(80, new=0, under_way=2_000)
    [rare] = filled(1, new=1, under_way=0).take()
    for _ in range(10):
        queue.push(rare)
        assert begun(queue.take()) == 1
    for _ in range(100):
        queue.push(rare)
    assert begun(queue.take()) == 20


def test_the_smallest_groups_do_not_starve_new_work() -> None:
    queue = filled(1, new=3, under_way=20)
    assert [begun(queue.take()) for _ in range(12)] == [0, 0, 0, 1] * 3


def test_new_work_gets_its_right_beside_operations_that_fill_a_group_by_their_size() -> None:
    loop = asyncio.new_event_loop()
    try:
        large, new = make_entry(loop, size=9_000), make_entry(loop, starts=True)
    finally:
        loop.close()
    queue = ReadyQueue(GroupLimits(max_ops=8, request_bytes=10_000))
    for entry in [new] * 8 + [large] * 20:
        queue.push(entry)
    assert sum(begun(queue.take()) for _ in range(8)) == 8


@given(st.lists(st.floats(0, 10), max_size=40), st.lists(st.floats(0, 0.5), max_size=40))
def test_deadlines_are_found_within_two_ticks_and_never_early(
    deadlines: list[float], steps: list[float]
) -> None:
    tick = 0.02
    loop = asyncio.new_event_loop()
    try:
        entries = [make_entry(loop, deadline=deadline) for deadline in deadlines]
    finally:
        loop.close()
    wheel = DeadlineWheel(tick)
    for entry in entries:
        wheel.add(entry)
    for entry in entries[::3]:
        wheel.remove(entry)
        wheel.remove(entry)  # a second time changes nothing
    left = {entry for number, entry in enumerate(entries) if number % 3}
    now = 0.0
    for step in steps:
        now += step
        found = wheel.due(now)
        assert all(entry.deadline <= now and entry in left for entry in found)
        left.difference_update(found)
        assert all(entry.deadline > now - 2 * tick for entry in left)
    assert set(wheel.clear()) == left
    assert wheel.clear() == []
