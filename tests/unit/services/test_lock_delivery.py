"""Locks that a session's beats leave out are taken away, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from coordinator.core.lock_order import LockEntry
from coordinator.services.api import Beat, BeatLock
from coordinator.services.lock_delivery import LockDelivery
from tests.support.clock import SteppingClock
from tests.support.lock_bench import NS, LockCoordinator
from tests.support.memory_locks import MemoryLocks

TTL_MS = 10_000


class Bench:
    """One coordinator with a session ``s`` whose beats come at times of the test's choice."""

    def __init__(self) -> None:
        self.clock = SteppingClock()
        self.store = MemoryLocks()
        self.store.sessions |= {"s", "other"}
        self.coordinator = LockCoordinator(self.store, self.clock)
        self.taken: list[LockEntry] = []
        self.delivery = LockDelivery(self.coordinator.lines, self._take_away)
        self.number = 0

    def _take_away(self, namespace: str, entries: Sequence[LockEntry]) -> None:
        assert namespace == NS
        self.taken += entries

    async def beat(self, *listed: tuple[str, str], seconds: float, sent: float | None = None) -> None:
        """A beat ``seconds`` after the last, sent so much after its own last; lists (name, request id)."""
        await self.clock.advance(seconds)
        self.number += round((seconds if sent is None else sent) * 1000)
        locks = [BeatLock(name, 0, request) for name, request in listed]
        said = Beat(session_id="s", number=1, sent_ms=self.number, claims=(), locks=locks)
        self.delivery.beaten(NS, said, ttl_ms=TTL_MS, now=self.clock.monotonic())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.coordinator.start()
    yield made
    await made.coordinator.stop()


async def test_what_every_beat_leaves_out_for_a_ttl_is_taken_away(bench: Bench) -> None:
    [kept] = await bench.coordinator.take("a", session="s", request="one")
    [forgotten] = await bench.coordinator.take("b", session="s", request="two")
    await bench.coordinator.take("c", session="other")
    for _ in range(3):
        await bench.beat(("a", "one"), seconds=4)
        assert not bench.taken
    await bench.beat(("a", "one"), seconds=4)
    assert bench.taken == [forgotten]
    assert kept not in bench.taken


async def test_one_beat_that_lists_it_begins_the_span_anew(bench: Bench) -> None:
    await bench.coordinator.take("a", session="s", request="one")
    for _ in range(4):
        await bench.beat(seconds=9)
        await bench.beat(("a", "one"), seconds=9)
    assert not bench.taken


async def test_two_beats_at_least_must_leave_it_out(bench: Bench) -> None:
    await bench.coordinator.take("a", session="s", request="one")
    await bench.beat(seconds=3_600)
    assert not bench.taken


@pytest.mark.parametrize(("seconds", "sent"), [(20.0, 1.0), (1.0, 20.0)])
async def test_a_span_must_have_passed_on_both_clocks(bench: Bench, seconds: float, sent: float) -> None:
    """Beats that are read late harm nobody, and a worker's clock can only delay."""
    await bench.coordinator.take("a", session="s", request="one")
    for _ in range(3):
        await bench.beat(seconds=seconds, sent=sent)
    assert not bench.taken


async def test_another_request_id_lists_another_entry(bench: Bench) -> None:
    [entry] = await bench.coordinator.take("a", session="s", request="one")
    await bench.beat(("a", "two"), seconds=0)
    await bench.beat(("a", "two"), seconds=10)
    assert bench.taken == [entry]


async def test_what_could_not_be_deleted_is_reported_again_after_another_span(bench: Bench) -> None:
    await bench.coordinator.take("a", session="s", request="one")
    for _ in range(4):
        await bench.beat(seconds=10)
    assert len(bench.taken) == 2


async def test_ended_sessions_leave_nothing_behind(bench: Bench) -> None:
    await bench.coordinator.take("a", session="s", request="one")
    await bench.beat(seconds=0)
    bench.delivery.forget(NS, "s")
    await bench.beat(seconds=10)
    assert not bench.taken
