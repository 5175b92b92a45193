"""A revision is delivered whole and in order, however the server cuts it."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.errors import EtcdUnavailable
from coordinator.etcd.watch import FragmentJoiner, split_revisions
from coordinator.etcd.watch_barrier import WatchBarrier
from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue
from leasekeeper.internal.etcd.v1.watch_pb2 import Event, WatchResponse


def event(revision: int, key: bytes = b"k") -> Event:
    return Event(kv=KeyValue(key=key, mod_revision=revision))


def response(watch_id: int, *revisions: int, fragment: bool = False) -> WatchResponse:
    return WatchResponse(watch_id=watch_id, fragment=fragment, events=[event(each) for each in revisions])


def test_fragments_of_one_watch_are_joined_while_another_watch_passes() -> None:
    joiner = FragmentJoiner()
    assert joiner.add(response(1, 5, 6, fragment=True)) is None
    other = joiner.add(response(2, 6))
    assert other is not None
    assert len(other) == 1
    assert joiner.add(response(1, 6, fragment=True)) is None
    joined = joiner.add(response(1, 6, 7))
    assert joined is not None
    assert [each.kv.mod_revision for each in joined] == [5, 6, 6, 6, 7]
    assert joiner.add(response(1)) == []


@pytest.mark.parametrize(
    ("revisions", "expected"),
    [((), []), ((4,), [(4, 1)]), ((4, 4), [(4, 2)]), ((4, 4, 5, 7, 7), [(4, 2), (5, 1), (7, 2)])],
)
def test_events_are_grouped_by_revision(revisions: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    groups = split_revisions([event(each) for each in revisions])
    assert [(revision, len(events)) for revision, events in groups] == expected


async def test_barrier_wakes_whoever_waits_for_what_has_passed() -> None:
    barrier = WatchBarrier()
    barrier.reset("jobs", 10)
    await barrier.wait_revision("jobs", 10, timeout=0.01)
    early = asyncio.create_task(barrier.wait_revision("jobs", 11, timeout=5))
    late = asyncio.create_task(barrier.wait_revision("jobs", 20, timeout=5))
    await asyncio.sleep(0)
    barrier.advance("other", 30)
    barrier.advance("jobs", 15)
    await early
    assert not late.done()
    barrier.advance("jobs", 3)
    assert barrier.passed("jobs") == 15
    barrier.advance("jobs", 20)
    await late
    with pytest.raises(EtcdUnavailable):
        await barrier.wait_revision("jobs", 21, timeout=0.01)


def test_barrier_goes_back_with_the_store() -> None:
    barrier = WatchBarrier()
    barrier.reset("jobs", 10)
    barrier.reset("jobs", 4)
    assert barrier.passed("jobs") == 4
