"""How fast jobs begin to wait and leave their line, over about the last minute. Samples, no bookkeeping per
job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from coordinator.ports import Clock
from coordinator.services.waiters import Pair

__all__ = ["LineRates", "Rates", "RatesConfig", "Totals"]


class Totals(Protocol):
    """What a line counts since it is known here."""

    @property
    def came(self) -> int:
        """Jobs that began to wait."""

    @property
    def left(self) -> int:
        """Jobs that wait no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesConfig:
    """Seconds between samples, and how many are kept: together about a minute."""

    interval: float = 5.0
    kept: int = 13


@dataclass(frozen=True, slots=True)
class Rates:
    """Jobs a second."""

    came: float = 0.0
    left: float = 0.0


class LineRates:
    """Rates of lines.

    Args:
        totals: of each line, by (namespace, queue, type).
        clock: time.
        config: times.
    """

    def __init__(
        self, totals: Callable[[], Mapping[Pair, Totals]], clock: Clock, config: RatesConfig | None = None
    ) -> None:
        self._totals = totals
        self._clock = clock
        self._config = config or RatesConfig()
        self._samples: deque[tuple[float, dict[Pair, tuple[int, int]]]] = deque(maxlen=self._config.kept)

    def of_queue(self, namespace: str, queue: str) -> Rates:
        """Of all lines of a queue, since the oldest sample; 0 before there is one.

        A line that the sample does not know was empty then.
        """
        if not self._samples:
            return Rates()
        at, before = self._samples[0]
        span = self._clock.monotonic() - at
        if span <= 0:
            return Rates()
        came = left = 0
        for pair, totals in self._totals().items():
            if pair[:2] == (namespace, queue):
                came_then, left_then = before.get(pair, (0, 0))
                came += totals.came - came_then
                left += totals.left - left_then
        return Rates(came / span, left / span)

    def sample(self) -> None:
        """Remember where all lines stand."""
        counts = {pair: (totals.came, totals.left) for pair, totals in self._totals().items()}
        self._samples.append((self._clock.monotonic(), counts))

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample()
            await self._clock.sleep(self._config.interval)
