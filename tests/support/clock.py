"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools

__all__ = ["SteppingClock"]

_DEFAULT_START_MS = 1_700_000_000_000
_SETTLE_ROUNDS = 20


class SteppingClock:
    """Wall time, monotonic time and sleeping, moved by `advance` alone.

    Args:
        now_ms: wall time at the start, milliseconds since 1970.
        monotonic: monotonic time at the start, seconds.
    """

    def __init__(self, *, now_ms: int = _DEFAULT_START_MS, monotonic: float = 1000.0) -> None:
        self._wall_offset_ms = now_ms - monotonic * 1000
        self._monotonic = monotonic
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        """Seconds; never falls."""
        return self._monotonic

    def boottime(self) -> float:
        """The same as `monotonic`: this machine never sleeps."""
        return self._monotonic

    def now_ms(self) -> int:
        """Wall time in milliseconds since 1970."""
        return round(self._monotonic * 1000 + self._wall_offset_ms)

    def now(self) -> float:
        """Wall time in seconds since 1970."""
        return self.now_ms() / 1000

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back without any time passing."""
        self._wall_offset_ms += seconds * 1000

    @property
    def sleepers(self) -> int:
        """How many tasks sleep on this clock now."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has moved the clock by *seconds*; 0 or less only lets others run."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move the clock, waking sleepers in order of their time, and let the woken run in between."""
        target = self._monotonic + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            when, _, future = heapq.heappop(self._sleepers)
            self._monotonic = max(self._monotonic, when)
            if not future.done():
                future.set_result(None)
                await self._settle()
        self._monotonic = target
        await self._settle()

    async def wait_for_sleepers(self, count: int = 1, *, rounds: int = 1000) -> None:
        """Let tasks run until *count* of them sleep here; AssertionError after *rounds* turns of the loop."""
        for _ in range(rounds):
            if self.sleepers >= count:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{self.sleepers} tasks sleep on the clock, expected {count}")

    @staticmethod
    async def _settle() -> None:
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(0)
