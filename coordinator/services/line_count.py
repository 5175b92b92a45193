"""How many jobs wait in one line: counted once at a list, then followed; never scanned."""

from __future__ import annotations

__all__ = ["LineCount"]


class LineCount:
    """A count as of a revision, and each change told since.

    A change is told once, by an own commit or by the watch; but the watch may tell changes that the count has
    seen already, and commits go on while the store is counting. So changes carry their revisions.
    ``came`` and ``left`` are all changes of either kind since the line is known here.
    """

    __slots__ = ("_as_of", "_meanwhile", "_number", "came", "left")

    def __init__(self) -> None:
        self.came = 0
        self.left = 0
        self._number = 0
        self._as_of = 0
        self._meanwhile: list[tuple[int, int]] | None = None

    def __int__(self) -> int:
        """How many wait, as far as is known."""
        return max(0, self._number)

    def begin(self) -> None:
        """The store is about to be asked; ``counted`` follows."""
        self._meanwhile = []

    def counted(self, number: int, revision: int) -> None:
        """The store has ``number`` as of ``revision``."""
        later = sum(change for at, change in self._meanwhile or () if at > revision)
        self._number, self._as_of, self._meanwhile = number + later, revision, None

    def changed(self, change: int, revision: int) -> None:
        """One more or one less since ``revision``."""
        if self._meanwhile is not None:
            self._meanwhile.append((revision, change))
        if revision > self._as_of:
            self._number += change
            if change > 0:
                self.came += change
            else:
                self.left -= change
