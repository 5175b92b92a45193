"""The machine's own time and randomness, as the ports want them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid

__all__ = ["SystemClock", "SystemEntropy"]


class SystemClock:
    """Implements ``ports.Clock``."""

    def now_ms(self) -> int:
        """Unix milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds from any origin, never going back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)


class SystemEntropy:
    """Implements ``ports.Entropy``."""

    def __init__(self) -> None:
        self._counter = itertools.count(1)

    def fraction(self) -> float:
        """Uniform in [0, 1)."""
        return random.random()

    def identifier(self) -> str:
        """A fresh id of 32 hex digits."""
        return uuid.uuid4().hex

    def counter(self) -> int:
        """A number that grows with each call within this process."""
        return next(self._counter)
