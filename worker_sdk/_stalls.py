"""Judges, from outside of the event loop, whether it turns. Pure: the beat thread brings turns and times."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stall", "StallWatch"]


@dataclass(frozen=True, slots=True)
class Stall:
    """A loop that does not turn.

    Attributes:
        seconds: since it was last seen to turn.
        report: to be told now; once for each stall.
        hopeless: longer than the limit, after which `WorkerConfig.on_stall` says what follows.
    """

    seconds: float
    report: bool
    hopeless: bool


class StallWatch:
    """Looks at a loop's turns; *warn* and *limit* in seconds without one."""

    def __init__(self, *, warn: float, limit: float) -> None:
        self._warn = warn
        self._limit = limit
        self._turns = -1
        self._since = 0.0
        self._told = False

    def look(self, turns: int, now: float) -> Stall | None:
        """Return the stall that there is at *now*; None: the loop has turned lately."""
        if turns != self._turns:
            self._turns, self._since, self._told = turns, now, False
            return None
        seconds = now - self._since
        hopeless = seconds > self._limit
        if seconds <= self._warn and not hopeless:
            return None
        report = seconds > self._warn and not self._told
        self._told = self._told or report
        return Stall(seconds, report, hopeless)
