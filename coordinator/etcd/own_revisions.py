"""Remember which revisions this process wrote, so that their echo on the watch need not be decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["OwnRevisions"]

_KEPT: Final = 65_536
"""Several seconds of Txns at full speed; an older echo is merely decoded."""


class OwnRevisions:
    """The committer adds, the feeds ask.

    Args:
        kept: how many are remembered.
        under_way: whether the committer waits for answers, which may be about revisions not known here yet.
    """

    __slots__ = ("_kept", "_order", "_revisions", "_under_way")

    def __init__(self, kept: int = _KEPT, *, under_way: Callable[[], bool] = lambda: False) -> None:
        self._kept = kept
        self._under_way = under_way
        self._order: deque[int] = deque()
        self._revisions: set[int] = set()

    def add(self, revision: int) -> None:
        """``revision`` is certainly the work of this process's committer, all of it."""
        if revision in self._revisions:
            return
        self._revisions.add(revision)
        self._order.append(revision)
        if len(self._order) > self._kept:
            self._revisions.discard(self._order.popleft())

    def is_own(self, revision: int) -> bool:
        """Whether it is known to be ours. False says nothing: our own answer may still be on its way."""
        return revision in self._revisions

    def may_become_own(self, revision: int) -> bool:
        """Whether ``revision`` is unknown and an answer under way may yet claim it."""
        return revision not in self._revisions and self._under_way()

    def forget(self) -> None:
        """The store's history went back: its numbers will be used again by others."""
        self._order.clear()
        self._revisions.clear()
