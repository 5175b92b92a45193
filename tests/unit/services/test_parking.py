"""Jobs whose lock is held: parked, woken as the lock changes, passed and looked for again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from coordinator.core.job import JobLock
from coordinator.core.lock_order import LockEntry, LockMode, job_waiter
from coordinator.core.rank import Rank
from coordinator.ports import ReadyPage, Stored
from coordinator.services.lock_lines import LockLines
from coordinator.services.parked import Parked
from coordinator.services.parking import Parking, ParkingConfig
from coordinator.services.waiters import Pair
from coordinator.services.window import Entry, Window
from tests.support.builders import a_job
from tests.support.clock import SteppingClock
from tests.support.memory_locks import MemoryLocks

NS, SESSION = "default", "00000000000000a1"
PAIR: Pair = (NS, "q", "t")
EXCLUSIVE = LockMode.EXCLUSIVE


class Ready:
    """The part of ``ports.JobStore`` that is asked: what waits, in rank order."""

    def __init__(self) -> None:
        self.stored: list[Stored] = []
        self.asked: list[tuple[Rank | None, Rank]] = []

    async def list_ready(
        self,
        namespace: str,
        queue: str,
        type_: str,
        *,
        after: Rank | None,
        until: Rank,
        limit: int,
        deadline: float,
    ) -> ReadyPage:
        self.asked.append((after, until))
        found = [one for one in self.stored if (after is None or one.job.rank > after)]
        found = sorted((one for one in found if one.job.rank <= until), key=lambda one: one.job.rank)
        cut = tuple(found[:limit])
        complete = len(found) <= limit
        return ReadyPage(cut, complete, None if complete else cut[-1].job.rank)


@dataclass
class Bench:
    """Windows of one coordinator, and the locks that it watches."""

    clock: SteppingClock = field(default_factory=SteppingClock)
    locks: MemoryLocks = field(default_factory=MemoryLocks)
    ready: Ready = field(default_factory=Ready)
    arrived: list[str] = field(default_factory=list)
    woken: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.windows = {PAIR: Window(5_000, complete=True)}
        self.lines = LockLines(self.locks, self.clock)
        self.locks.sessions.add(SESSION)
        self.parking = Parking(
            self.lines,
            self.locks,
            self.ready,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self.clock,
            token=lambda entry: entry.revision,
            arrived=lambda pair, job_id: self.arrived.append(job_id),
            of_one=lambda namespace, job_id: self.woken.append((namespace, job_id)),
            config=ParkingConfig(stretch=40, rest=0.0),
        )
        self.lines.moved, self.lines.watched = self.parking.changed, self.parking.names

    def window(self, pair: Pair) -> Window | None:
        """The part of ``Index`` that is asked."""
        return self.windows.get(pair)

    @property
    def line(self) -> Window:
        return self.windows[PAIR]

    def put(self, name: str, at: int, *locks: str | JobLock) -> Stored:
        """One more job waits, at rank ``at``."""
        named = tuple(JobLock(name=one) if isinstance(one, str) else one for one in locks)
        job = a_job(name, locks=named)
        stored = Stored(replace(job, rank=Rank(self.clock.now_ms() + at, at)), 5)
        self.ready.stored.append(stored)
        self.line.put(Entry(stored, None, 0.0), created=True)
        return stored

    def firsts(self, count: int = 10) -> list[str]:
        return [one.stored.job.job_id for one in self.parking.ready(PAIR, self.line, count)]

    async def hold(self, name: str, mode: LockMode = EXCLUSIVE, permits: int = 1) -> LockEntry:
        """A session owns, or waits."""
        waiter = f"{SESSION}-{self.locks.revision}"
        wish = LockEntry(name=name, waiter=waiter, session=SESSION, mode=mode, permits=permits)
        assert (await self.locks.acquire(NS, [wish], after=None, deadline=1e9)).won
        return self.locks.entries[name, waiter]


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    await made.locks.watch(made.lines, NS)
    return made


async def test_a_job_whose_lock_is_held_stands_in_nobodys_way(bench: Bench) -> None:
    held = await bench.hold("l")
    for at in range(3):
        bench.put(f"j{at}", at, "l")
    bench.put("free", 7)
    assert bench.firsts(1) == ["free"]
    assert len(bench.line) == 1
    bench.locks.remove(held)
    assert bench.arrived == ["j0"], "as many as the lock admits"
    assert bench.firsts() == ["j0", "free"]


async def test_as_many_come_back_as_permits_are_free_in_the_order_of_their_ranks(bench: Bench) -> None:
    pool = JobLock(name="pool", mode=LockMode.SEMAPHORE, permits=3)
    holds = [await bench.hold("pool", LockMode.SEMAPHORE, 3) for _ in range(3)]
    waiting = [bench.put(f"j{at}", at, pool) for at in range(5)]
    assert bench.firsts() == []
    bench.locks.remove(holds[0])
    assert bench.arrived == ["j0"]
    bench.parking.begin(waiting[0].job)
    bench.locks.remove(holds[1])
    assert bench.arrived == ["j0", "j1"]


async def test_a_claim_on_its_way_counts_as_an_owner_until_it_has_landed(bench: Bench) -> None:
    first, second = bench.put("j0", 0, "l"), bench.put("j1", 1, "l")
    assert bench.firsts() == ["j0", "j1"]
    bench.parking.begin(first.job)
    assert not bench.parking.admits(PAIR, bench.line, Entry(second, None, 0.0))
    bench.parking.landed([first.job])
    assert bench.arrived == ["j1"]


async def test_a_job_of_other_permits_keeps_nobody_else_of_its_lock_waiting(bench: Bench) -> None:
    held = [await bench.hold("pool", LockMode.SEMAPHORE, 2) for _ in range(2)]
    bench.put("other", 0, JobLock(name="pool", mode=LockMode.SEMAPHORE, permits=3))
    bench.put("fits", 1, JobLock(name="pool", mode=LockMode.SEMAPHORE, permits=2))
    assert bench.firsts() == []
    bench.locks.remove(held[0])
    assert bench.firsts() == ["fits"]


async def test_an_entry_that_an_end_of_the_job_left_behind_is_no_way_to_own_twice(bench: Bench) -> None:
    bench.put("j0", 0, JobLock(name="l", mode=LockMode.SHARED))
    wish = LockEntry(name="l", waiter=job_waiter("j0"), session=SESSION, mode=LockMode.SHARED, job_id="j0")
    await bench.locks.acquire(NS, [wish], after=None, deadline=1e9)
    assert bench.firsts() == []


async def test_a_job_waits_for_one_of_its_locks_after_the_other(bench: Bench) -> None:
    a, b = await bench.hold("a"), await bench.hold("b")
    bench.put("j0", 0, "a", "b")
    assert bench.firsts() == []
    bench.locks.remove(a)
    assert bench.firsts() == []
    bench.locks.remove(b)
    assert bench.firsts() == ["j0"]


async def test_a_parked_job_that_is_deleted_or_renewed_is_parked_no_more_or_anew(bench: Bench) -> None:
    held = await bench.hold("l")
    gone, kept = bench.put("j0", 0, "l"), bench.put("j1", 1, "l")
    assert bench.firsts() == []
    bench.line.delete(gone.job.rank, "j0", 9)
    renewed = Stored(kept.job, 8)
    assert not bench.line.put(Entry(renewed, None, 0.0), created=False)
    bench.locks.remove(held)
    [entry] = bench.parking.ready(PAIR, bench.line, 5)
    assert (entry.stored.job.job_id, entry.stored.revision) == ("j1", 8)


async def test_who_wants_a_job_by_its_id_is_told_that_its_lock_has_changed(bench: Bench) -> None:
    held = await bench.hold("l")
    bench.parking.wanted(NS, "j0", "l")
    bench.locks.remove(held)
    assert bench.woken == [(NS, "j0")]


async def _passed(bench: Bench, count: int, places: int = 10) -> LockEntry:
    """``count`` jobs of lock l, which is held, in a window of few places."""
    bench.line.parked = Parked(places)
    held = await bench.hold("l")
    for at in range(count):
        bench.put(f"j{at:03d}", at, "l")
    assert bench.firsts() == []
    assert len(bench.line.parked) == min(count, places)
    return held


async def test_what_finds_no_place_is_passed_and_the_first_of_it_remembered(bench: Bench) -> None:
    await _passed(bench, 30)
    assert bench.line.parked.passed == bench.ready.stored[10].job.rank
    bench.put("free", 99)
    assert bench.firsts() == ["free"]


async def test_a_comparison_does_not_take_passed_jobs_for_missing_ones(bench: Bench) -> None:
    await _passed(bench, 30)
    missing, ghosts = bench.line.compare(tuple(bench.ready.stored), 100, Rank(10**14 - 1, 0))
    assert (missing, ghosts) == ([], [])


async def test_passed_jobs_are_looked_for_when_half_the_places_are_free(bench: Bench) -> None:
    await _passed(bench, 30)
    for at in range(5):
        stored = bench.ready.stored.pop(0)
        bench.line.delete(stored.job.rank, f"j{at:03d}", 9)
    await bench.clock.advance(10.0)
    assert await bench.parking.run_once() == 5 + 15
    assert len(bench.line.parked) == 10
    assert bench.line.parked.passed == bench.ready.stored[10].job.rank


async def test_a_passed_job_runs_soon_after_the_change_of_a_lock_that_no_parked_one_waits_for(
    bench: Bench,
) -> None:
    other = await bench.hold("other")
    await _passed(bench, 100)
    bench.put("behind", 200, "other")
    assert bench.firsts() == [], "it is passed, too"
    await bench.clock.advance(1.0)
    assert await bench.parking.run_once() == 0, "nothing has changed"
    bench.locks.remove(other)
    await bench.parking.run_once()
    assert bench.arrived == ["behind"]
    assert bench.firsts() == ["behind"]
    assert len(bench.ready.asked) > 3, "in stretches"


async def test_a_look_back_that_breaks_off_forgets_nobody(bench: Bench) -> None:
    await _passed(bench, 30)
    first = bench.line.parked.passed
    assert first is not None

    async def fails(*args: object, **more: object) -> ReadyPage:
        raise RuntimeError

    answers, bench.ready.list_ready = bench.ready.list_ready, fails  # type: ignore[method-assign]
    await bench.clock.advance(10.0)
    with pytest.raises(RuntimeError):
        await bench.parking.run_once()
    passed = bench.line.parked.passed
    assert passed is not None
    assert passed < first
    bench.ready.list_ready = answers  # type: ignore[method-assign]
    await bench.clock.advance(10.0)
    assert await bench.parking.run_once() == 20


async def test_parked_jobs_are_at_hand_and_passed_ones_are_not(bench: Bench) -> None:
    await _passed(bench, 10)
    assert (len(bench.line.at_hand()), bench.line.all_at_hand) == (10, True)
    bench.put("one more", 50, "l")
    assert bench.firsts() == []
    assert (len(bench.line.at_hand()), bench.line.all_at_hand) == (10, False)
