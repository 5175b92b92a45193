"""Wait until a watch has delivered everything up to a revision."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from coordinator.errors import EtcdUnavailable

__all__ = ["WatchBarrier"]


class WatchBarrier:
    """How far the watch of each named range has come, and who waits for more."""

    def __init__(self) -> None:
        self._passed: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[int, int, asyncio.Future[None]]]] = {}
        self._order = itertools.count()

    def passed(self, name: str) -> int:
        """Revision up to which range *name* has been delivered; 0 before its first list."""
        return self._passed.get(name, 0)

    def advance(self, name: str, revision: int) -> None:
        """Note progress, and wake those who waited for it."""
        if revision <= self._passed.get(name, 0):
            return
        self._passed[name] = revision
        heap = self._waiting.get(name)
        while heap and heap[0][0] <= revision:
            future = heapq.heappop(heap)[2]
            if not future.done():
                future.set_result(None)

    def reset(self, name: str, revision: int) -> None:
        """Start again at *revision*, which may be lower than before: the store went back."""
        self._passed[name] = 0
        self.advance(name, revision)

    async def wait_revision(self, name: str, revision: int, *, timeout: float) -> None:
        """Wait until range *name* has been delivered up to *revision*.

        Ask only for a revision that changed a key of the range: a watch of a range in which nothing
        happens hears of newer revisions only every few minutes.

        Raises:
            EtcdUnavailable: it did not come that far within *timeout* seconds.
        """
        if self.passed(name) >= revision:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting.setdefault(name, []), (revision, next(self._order), future))
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            raise EtcdUnavailable(
                f"the watch of {name} stands at {self.passed(name)}, not at {revision}, after {timeout} s"
            ) from None
