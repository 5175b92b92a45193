"""What `core.bucket` has to do, written a second time and otherwise: a meter that is moved millisecond by
millisecond, and a book of all tries that is counted anew for each question."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Book", "Entry", "Meter"]


class Meter:
    """One caller at one resource."""

    def __init__(self, first_ms: int, cap_ms: int) -> None:
        self._delays = [first_ms]
        while self._delays[-1] < cap_ms:
            self._delays.append(min(cap_ms, 2 * self._delays[-1]))
        self.level = 0
        self.penalty = 0
        self._away = 0

    def tick(self) -> None:
        """A millisecond passes: first the penalty is served, then the level leaks."""
        if self.penalty:
            self.penalty -= 1
            return
        self._away += 1
        if self.level and self._away >= self._delays[self.level]:
            self.level -= 1
            self._away = 0

    def fail(self, at_least: int = 0) -> int:
        """The delay that is told."""
        told = max(self._delays[self.level], at_least)
        self.level = min(self.level + 1, len(self._delays) - 1)
        self.penalty = told
        self._away = 0
        return told


@dataclass
class Entry:
    """A try: milliseconds, and whether it got nothing; ``end`` None while it is under way."""

    begin: int
    end: int | None = None
    failed: bool = False


class Book:
    """Every try for one resource since the beginning."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.entries: list[Entry] = []

    def counted(self, now: int) -> int:
        """Tries that hold a place at ``now``."""
        return sum(one.end is None or (one.failed and one.end >= now - self._window) for one in self.entries)

    def most_seen(self) -> int:
        """The most failing tries that a store can have seen in one window, if each came at its begin, or each
        at its end, or every second one."""
        failed = [one for one in self.entries if one.failed and one.end is not None]
        choices = (
            [one.begin for one in failed],
            [one.end or 0 for one in failed],
            [one.begin if n % 2 else one.end or 0 for n, one in enumerate(failed)],
        )
        return max(
            (
                sum(start <= seen <= start + self._window for seen in times)
                for times in choices
                for start in times
            ),
            default=0,
        )
