"""A bounded window over the waiting jobs of one (queue, type), in rank order.

A backlog of millions costs no more than a thousand: the window holds the first jobs, ``horizon`` says up
to which rank it knows everything, and the rest stays in the store until a refill asks for the next
stretch. Pure bookkeeping: no I/O.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from coordinator.core.job import Job
from coordinator.core.rank import Rank
from coordinator.ports import ReadyPage, Stored
from coordinator.services.line_count import LineCount
from coordinator.services.parked import Parked
from coordinator.services.window_entry import Entry, Key

__all__ = ["Entry", "Window"]

_MAX_COUNTER: Final = 10**14 - 1
_LAST: Final = Rank(10**14 - 1, _MAX_COUNTER)
_FIRST: Final = Rank(0, 0)
_MONTH_MS: Final = 30 * 86_400_000
_DAY_MS: Final = 86_400_000


class Window:
    """The first jobs of one (queue, type).

    Args:
        capacity: entries held at most. It may be changed; a window that is too full shrinks as it is emptied.
        complete: whether nothing lies in the store that the window was not told of.
        stretch: jobs that a refill asks for; None: ``capacity``.
    """

    def __init__(self, capacity: int, *, complete: bool, stretch: int | None = None) -> None:
        self.capacity = capacity
        self._stretch = stretch or capacity
        self._keys: list[Key] = []
        self._entries: dict[Key, Entry] = {}
        self._taken: dict[Key, Entry] = {}
        # The refill under way: where it began and will end, and the jobs that came in between meanwhile.
        self._filling: tuple[Rank | None, Rank] | None = None
        self._early: dict[Key, Entry] = {}
        self._delta_ms = 1_000
        self.horizon: Rank | None = None if complete else _FIRST
        self.line = LineCount()
        self.parked = Parked()

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return (
            f"Window({len(self._keys)} held, {len(self._taken)} taken, {int(self.line)} in all, "
            f"horizon {self.horizon})"
        )

    @property
    def wants_refill(self) -> bool:
        """Whether more lies in the store and less than half a stretch is at hand."""
        return self.horizon is not None and len(self._keys) * 2 < self._stretch

    def put(self, entry: Entry, *, created: bool) -> bool:
        """A job waits; ``created``: this is news. Answers whether the window now holds it."""
        key = entry.key
        held = self._entries.get(key) or self._taken.get(key) or self.parked.get(key)
        if created:
            self.line.changed(1, entry.stored.revision)
        if held is not None:
            if held.stored.revision < entry.stored.revision:
                held.stored = entry.stored
                if self._taken.pop(key, None) is not None:
                    # What was proposed is outdated; the new record is a new proposal.
                    insort(self._keys, key)
                    self._entries[key] = held
                    return True
            return False
        if self.horizon is not None and (key[0], key[1]) > self.horizon:
            if self._filling is not None and (key[0], key[1]) <= self._filling[1]:
                self._keep_early(key, entry)
            return False
        insort(self._keys, key)
        self._entries[key] = entry
        if len(self._keys) > self.capacity:
            last = self._keys.pop()
            del self._entries[last]
            tail = self._keys[-1]
            self.horizon = Rank(tail[0], tail[1])
            # Jobs of equal rank beyond the last one kept would be skipped by a refill that starts behind
            # that rank.
            while self._keys and (self._keys[-1][0], self._keys[-1][1]) == (last[0], last[1]):
                del self._entries[self._keys.pop()]
                tail = self._keys[-1] if self._keys else (0, 0, "")
                self.horizon = Rank(tail[0], tail[1])
            return key in self._entries
        return True

    def _keep_early(self, key: Key, entry: Entry) -> None:
        """Left to the store, it would be missed: the list under way may be older, and is not asked again."""
        known = self._early.get(key)
        if known is None or known.stored.revision < entry.stored.revision:
            entry.spec = None  # nobody would account for it
            self._early[key] = entry

    def delete(self, rank: Rank, job_id: str, revision: int) -> bool:
        """News that it waits no more. Answers whether the window held it; an entry that is newer than
        ``revision`` stays."""
        self.line.changed(-1, revision)
        return self.discard(rank, job_id, revision)

    def discard(self, rank: Rank, job_id: str, revision: int) -> bool:
        """As ``delete``, of what nobody told: it is not counted."""
        key = (rank.ms, rank.counter, job_id)
        entry = self._entries.get(key)
        if entry is not None:
            if entry.stored.revision > revision:
                return False
            del self._entries[key]
            at = bisect_left(self._keys, key)
            del self._keys[at]
            return True
        parked = self.parked.get(key)
        if parked is not None:
            if parked.stored.revision > revision:
                return False
            self.parked.leave(key)
            return True
        early = self._early.get(key)
        if early is not None and early.stored.revision <= revision:
            del self._early[key]
        taken = self._taken.get(key)
        if taken is not None and taken.stored.revision <= revision:
            del self._taken[key]
        return taken is not None

    def at_hand(self) -> list[Entry]:
        """All that wait and are known here, those that wait for a lock too, in no order."""
        return [*self._entries.values(), *(entry for _, entry in self.parked.items())]

    @property
    def all_at_hand(self) -> bool:
        """Whether nothing is left to the store."""
        return self.horizon is None and self.parked.passed is None

    def peek(self, limit: int) -> list[Entry]:
        """The first ``limit`` entries, in rank order, untaken."""
        entries = self._entries
        return [entries[key] for key in self._keys[:limit]]

    def take(self, entry: Entry) -> None:
        """Set an entry aside while it is proposed to the store, so that nobody else proposes it."""
        key = entry.key
        if self._entries.pop(key, None) is not None:
            at = bisect_left(self._keys, key)
            del self._keys[at]
            self._taken[key] = entry

    def park(self, entry: Entry, lock: str) -> bool:
        """Take a job that ``lock`` keeps from being claimed out of the line; False: it is passed."""
        key = entry.key
        if self._entries.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]
        elif self._taken.pop(key, None) is None:
            return True  # it has gone meanwhile
        return self.parked.park(entry, lock)

    def unpark(self, entry: Entry) -> bool:
        """Back into the line; False: it is not parked."""
        key = entry.key
        if self.parked.leave(key) is None:
            return False
        insort(self._keys, key)
        self._entries[key] = entry
        return True

    def knows(self, key: Key) -> bool:
        """Whether a job is here, in whatever way."""
        return key in self._entries or key in self._taken or key in self.parked

    def give_back(self, entry: Entry) -> bool:
        """The proposal came to nothing and the job still waits, unless it was deleted or renewed
        meanwhile."""
        key = entry.key
        if self._taken.pop(key, None) is None:
            return False
        insort(self._keys, key)
        self._entries[key] = entry
        return True

    def drop(self, entry: Entry) -> None:
        """The proposal lost: something else stands in the store, and its change will be reported."""
        self._taken.pop(entry.key, None)

    def next_until(self, now_ms: int) -> Rank:
        """Where the next refill ends. A range costs what it spans, so it is kept to about a window's worth.

        Starts far in the past, where nothing should lie, and halves the gap to now; then follows the
        density met.
        """
        horizon = self.horizon or _FIRST
        if horizon.ms < now_ms - _MONTH_MS:
            return Rank(now_ms - _MONTH_MS, _MAX_COUNTER)
        if horizon.ms > now_ms + _DAY_MS:
            return _LAST
        return Rank(horizon.ms + self._delta_ms, _MAX_COUNTER)

    def begin_refill(self, now_ms: int) -> Rank:
        """The store is about to be asked for (horizon, the answer]; `refill` or `abandon_refill` follows."""
        until = self.next_until(now_ms)
        self._filling, self._early = (self.horizon, until), {}
        return until

    def abandon_refill(self) -> None:
        """The store did not answer; what came meanwhile is left to it."""
        self._filling, self._early = None, {}

    def refill(self, page: ReadyPage, until: Rank, now_ms: int, seen: float) -> list[Stored]:
        """Take in the jobs of (horizon, ``until``], and those that came while they were listed.

        Returns:
            Which of them are new here.
        """
        filling, early = self._filling, self._early
        self.abandon_refill()
        if filling is not None and filling[0] != self.horizon:
            return []  # too many came meanwhile, and the window knows less far now: ask again from there
        found = page.jobs
        if page.complete:
            self.horizon = None if until >= _LAST else until
            if len(found) * 4 < self._stretch:
                gap = now_ms - until.ms
                self._delta_ms = min(max(self._delta_ms * 4, gap // 2), _MONTH_MS)
        else:
            # Beyond what cannot be decoded; else a window's worth of it would hold up all that follows.
            self.horizon = page.last or self.horizon
            self._delta_ms = max(1, self._delta_ms // 2)
        entries = [*(Entry(stored, None, seen) for stored in found), *early.values()]
        return [entry.stored for entry in entries if self.put(entry, created=False)]

    def reset(self, *, complete: bool) -> None:
        """Forget all but what is taken; a new list follows."""
        self.abandon_refill()
        self._keys.clear()
        self._entries.clear()
        self.parked.clear()
        self.horizon = None if complete else _FIRST

    def compare(
        self, found: tuple[Stored, ...], settled_revision: int, until: Rank
    ) -> tuple[list[Stored], list[Entry]]:
        """Differences to a range of the store from the start up to ``until``.

        Args:
            found: what the store held.
            settled_revision: the watch had delivered everything up to here before the store was asked; only
                older differences are errors.
            until: where the range ended.

        Returns:
            Jobs that the window misses, and entries that it should not have.
        """
        there = {(s.job.rank.ms, s.job.rank.counter, s.job.job_id): s for s in found}
        missing = [
            stored
            for key, stored in there.items()
            if stored.revision <= settled_revision and not self.knows(key) and not self._passed_over(stored)
        ]
        ghosts = [
            entry
            for key, entry in (*self._entries.items(), *self.parked.items())
            if key not in there and entry.stored.revision <= settled_revision and (key[0], key[1]) <= until
        ]
        return missing, ghosts

    def _passed_over(self, stored: Stored) -> bool:
        """Whether a job that is not here may have been passed for want of a place among the parked."""
        passed = self.parked.passed
        return passed is not None and stored.job.rank >= passed and bool(stored.job.terms.locks)

    def spec_bytes(self) -> int:
        """Payload bytes of the specs kept here."""
        parked = (entry for _, entry in self.parked.items())
        entries = (*self._entries.values(), *self._taken.values(), *parked)
        return sum(len(entry.spec.payload) for entry in entries if entry.spec is not None)

    @property
    def last_rank(self) -> Rank | None:
        """Rank of the last entry held."""
        return Rank(self._keys[-1][0], self._keys[-1][1]) if self._keys else None


def job_bytes(job: Job, checkpoint_reserve: int) -> int:
    """Bytes that a claimed job may take in a reply: its payload, and room for a checkpoint if it ran
    before."""
    return job.terms.payload_size + 512 + (checkpoint_reserve if job.attempt else 0)
