"""Jobs of one window that cannot be claimed now, each with the lock that it waits for.

They stand apart from the window's line, so that they block nobody behind them. Places are limited: what finds
none is passed, and of those that were passed only the first rank is remembered. Pure bookkeeping.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from coordinator.core.rank import Rank
from coordinator.services.window_entry import Entry, Key

__all__ = ["PLACES", "Parked"]

PLACES: Final = 1_000
"""Parked jobs of one window."""


class Parked:
    """The parked jobs of one window.

    Args:
        places: how many may be parked.
    """

    def __init__(self, places: int = PLACES) -> None:
        self._places = places
        self._entries: dict[Key, tuple[Entry, str]] = {}
        self._by_lock: dict[str, list[Key]] = {}
        self.passed: Rank | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def has_room(self) -> bool:
        """Whether one more may be parked."""
        return len(self._entries) < self._places

    @property
    def half_free(self) -> bool:
        """Whether half the places are free."""
        return len(self._entries) * 2 <= self._places

    def get(self, key: Key) -> Entry | None:
        """A parked job."""
        found = self._entries.get(key)
        return found[0] if found is not None else None

    def waits_for(self, lock: str) -> bool:
        """Whether a parked job waits for this lock."""
        return lock in self._by_lock

    def park(self, entry: Entry, lock: str) -> bool:
        """Give it a place; False: there is none, and it is passed."""
        key = entry.key
        if not self.has_room:
            rank = Rank(key[0], key[1])
            if self.passed is None or rank < self.passed:
                self.passed = rank
            return False
        self._entries[key] = (entry, lock)
        insort(self._by_lock.setdefault(lock, []), key)
        return True

    def leave(self, key: Key) -> Entry | None:
        """It is parked no more."""
        found = self._entries.pop(key, None)
        if found is None:
            return None
        entry, lock = found
        line = self._by_lock[lock]
        del line[bisect_left(line, key)]
        if not line:
            del self._by_lock[lock]
        return entry

    def first(self, lock: str, count: int | None) -> list[Entry]:
        """The first ``count`` (None: all) that wait for this lock, in rank order."""
        return [self._entries[key][0] for key in self._by_lock.get(lock, ())[:count]]

    def items(self) -> list[tuple[Key, Entry]]:
        """All of them."""
        return [(key, entry) for key, (entry, _) in self._entries.items()]

    def locks(self) -> list[str]:
        """What is waited for."""
        return list(self._by_lock)

    def clear(self) -> None:
        """Forget all of them, and what was passed."""
        self._entries.clear()
        self._by_lock.clear()
        self.passed = None
