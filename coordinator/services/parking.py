"""Jobs whose lock is held wait apart, and come back into their line as the lock changes.

A window has places for so many of them (``services.parked``). Those beyond are passed: they are left to the
store, and looked for again when half the places are free, when a lock changes that no parked job waits for,
and from time to time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from coordinator.core.job import Job
from coordinator.core.lock_order import LockEntry
from coordinator.core.rank import Rank
from coordinator.errors import LeasekeeperError, RequestError
from coordinator.ports import Clock, Commit, JobStore, LockStore, ReadyPage
from coordinator.services.index import Index
from coordinator.services.job_locks import JobLocks
from coordinator.services.lock_lines import LockLines
from coordinator.services.waiters import Pair
from coordinator.services.window import Entry, Window

__all__ = ["Parking", "ParkingConfig"]

_log = logging.getLogger(__name__)

_MAX_COUNTER: Final = 10**14 - 1
_END: Final = Rank(10**14 - 1, _MAX_COUNTER)
_DAY_MS: Final = 86_400_000
_STRETCHES: Final = 10_000
"""Stretches of one look back at most; each moves on, so this is never met in practice."""

_WANTED: Final = 10_000
"""Calls for one job that wait for a lock and are woken by its change; the others look once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkingConfig:
    """Times in seconds.

    Attributes:
        tick: how often it is asked whether a look back is due.
        look_back: how often those that were passed are looked for whatever happens.
        soonest: no look back of a window begins sooner after the last one's end.
        stretch: jobs of one read.
        rest: between two reads of one look back, since every write waits for a range.
        call_timeout: of one read.
    """

    tick: float = 0.25
    look_back: float = 10.0
    soonest: float = 0.5
    stretch: int = 2_000
    rest: float = 0.02
    call_timeout: float = 5.0


class Parking:
    """Implements ``lock_gate.LockGate``.

    Args:
        lines: what is known of locks.
        locks: the store of locks.
        jobs: the store of jobs, for looks back.
        index: the windows.
        clock: time.
        token: the fencing token of an entry.
        arrived: called with (pair, job id) for each job that is back in its line.
        of_one: called with (namespace, job id) for a job that somebody waits for and whose lock has changed.
        config: times.
    """

    def __init__(
        self,
        lines: LockLines,
        locks: LockStore,
        jobs: JobStore,
        index: Index,
        clock: Clock,
        *,
        token: Callable[[LockEntry], int],
        arrived: Callable[[Pair, str], None],
        of_one: Callable[[str, str], None],
        config: ParkingConfig | None = None,
    ) -> None:
        self.locks = JobLocks(lines, locks, token=token, changed=self.changed)
        self._jobs = jobs
        self._index = index
        self._clock = clock
        self._arrived = arrived
        self._of_one = of_one
        self._config = config or ParkingConfig()
        self._parked: dict[tuple[str, str], set[Pair]] = {}
        self._passed: dict[Pair, float] = {}  # and when it was last looked for
        self._due: set[Pair] = set()
        self._wanted: dict[tuple[str, str], set[str]] = {}

    # -- lock_gate.LockGate

    def ready(self, pair: Pair, window: Window, count: int) -> list[Entry]:
        """See ``LockGate``. Each round parks or passes at least one job, so it ends."""
        while True:
            found = window.peek(count)
            locking = [entry for entry in found if entry.stored.job.terms.locks]
            if not [entry for entry in locking if not self.admits(pair, window, entry)]:
                return found

    def admits(self, pair: Pair, window: Window, entry: Entry) -> bool:
        """See ``LockGate``."""
        bar = self.locks.bar(entry.stored.job)
        if bar is None:
            return True
        name = bar.lock.name
        if window.park(entry, name):
            self._parked.setdefault((pair[0], name), set()).add(pair)
        else:
            self._passed.setdefault(pair, self._clock.monotonic())
        return False

    def refusal(self, job: Job) -> RequestError | None:
        """See ``LockGate``."""
        return self.locks.refusal(job)

    def revisions(self, job: Job) -> tuple[int, ...]:
        """See ``LockGate``."""
        return self.locks.revisions(job)

    def begin(self, job: Job) -> None:
        """See ``LockGate``."""
        self.locks.begin(job)

    def landed(self, jobs: Iterable[Job]) -> None:
        """See ``LockGate``."""
        self.locks.landed(jobs)

    def met(self, namespace: str, commit: Commit) -> None:
        """See ``LockGate``."""
        self.locks.met(namespace, commit)

    async def look(self, job: Job, deadline: float) -> None:
        """See ``LockGate``."""
        await self.locks.look(job, deadline)

    def wanted(self, namespace: str, job_id: str, lock: str) -> None:
        """See ``LockGate``."""
        if len(self._wanted) < _WANTED:
            self._wanted.setdefault((namespace, lock), set()).add(job_id)

    # -- changes

    def names(self) -> list[tuple[str, str]]:
        """(namespace, name) of the locks that parked jobs wait for."""
        return list(self._parked)

    def changed(self, namespace: str, name: str) -> None:
        """A lock has changed: as many of those that wait for it come back as it may admit now."""
        place = (namespace, name)
        if self._wanted:
            for job_id in self._wanted.pop(place, ()):
                self._of_one(namespace, job_id)
        for pair in self._passed:
            if pair[0] == namespace:
                self._look_soon(pair, name)
        pairs = self._parked.get(place)
        if pairs is not None:
            for pair in tuple(pairs):
                window = self._index.window(pair)
                if window is not None:
                    self._unpark(pair, window, name)
                if window is None or not window.parked.waits_for(name):
                    pairs.discard(pair)
            if not pairs:
                del self._parked[place]

    def _look_soon(self, pair: Pair, name: str) -> None:
        """Unless a parked job waits for this lock, one that was passed may."""
        window = self._index.window(pair)
        if window is not None and not window.parked.waits_for(name):
            self._due.add(pair)

    def _unpark(self, pair: Pair, window: Window, name: str) -> None:
        """Of each window as many as the lock admits: whether another type's come first nobody knows."""
        back: list[Entry] = []
        for entry in window.parked.first(name, None):
            job = entry.stored.job
            [lock] = [lock for lock in job.terms.locks if lock.name == name]
            bar = self.locks.bar_of(job, lock, more=len(back))
            if bar is None:
                back.append(entry)
            elif bar.rival is None:
                break
        for entry in back:
            if window.unpark(entry):
                self._arrived(pair, entry.stored.job.job_id)
        if pair in self._passed and window.parked.half_free:
            self._due.add(pair)

    # -- looks back

    async def run(self) -> None:
        """Look for those that were passed, until cancelled."""
        while True:
            await self._clock.sleep(self._config.tick)
            await self.run_once()

    async def run_once(self) -> int:
        """Every look back that is due; answers how many jobs came in."""
        found, now = 0, self._clock.monotonic()
        for pair, last in list(self._passed.items()):
            window = self._index.window(pair)
            if window is None or window.parked.passed is None:
                self._passed.pop(pair, None)  # its namespace was listed again
                self._due.discard(pair)
                continue
            wait = self._config.soonest if pair in self._due else self._config.look_back
            if now - last < wait:
                continue
            self._due.discard(pair)
            try:
                found += await self._look_back(pair, window)
            except LeasekeeperError as error:
                _log.debug("a look back at passed jobs failed: %s", error)
            self._passed[pair] = self._clock.monotonic()
        return found

    async def _look_back(self, pair: Pair, window: Window) -> int:
        """From the first that was passed to the end of what the window knows."""
        first, parked = window.parked.passed, window.parked
        assert first is not None, "something was passed"
        after = Rank(first.ms, first.counter - 1) if first.counter else Rank(first.ms - 1, _MAX_COUNTER)
        parked.passed = None
        found, span_ms = 0, 1_000
        try:
            for _ in range(_STRETCHES):
                end = window.horizon or _END
                if after >= end:
                    return found
                far = after.ms > self._clock.now_ms() + _DAY_MS
                until = end if far else min(end, Rank(after.ms + span_ms, _MAX_COUNTER))
                page = await self._jobs.list_ready(
                    *pair,
                    after=after,
                    until=until,
                    limit=self._config.stretch,
                    deadline=self._clock.monotonic() + self._config.call_timeout,
                )
                found += self._take_in(pair, window, page)
                if page.complete:
                    after = until
                    span_ms *= 4 if len(page.jobs) * 4 < self._config.stretch else 1
                elif page.last is None:
                    return found  # nothing can be told of what lies there
                else:
                    after, span_ms = page.last, max(1, span_ms // 2)
                await self._clock.sleep(self._config.rest)
        except BaseException:
            _still_passed(window, after)
            raise
        _still_passed(window, after)
        return found

    def _take_in(self, pair: Pair, window: Window, page: ReadyPage) -> int:
        found = 0
        for stored in page.jobs:
            job = stored.job
            if not job.terms.locks or window.knows((job.rank.ms, job.rank.counter, job.job_id)):
                continue
            entry = Entry(stored, None, self._clock.monotonic())
            if not window.put(entry, created=False):
                continue
            found += 1
            if self.admits(pair, window, entry):
                self._arrived(pair, job.job_id)
        return found


def _still_passed(window: Window, after: Rank) -> None:
    """The look broke off: what lies behind is passed as before."""
    passed = window.parked.passed
    window.parked.passed = after if passed is None else min(passed, after)
