"""Whether a server that may be away is worth a try. Pure: time comes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Breaker", "BreakerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """Attributes:
    failures: in a row, after which it opens.
    pause_s: seconds until the first probe; doubled with each probe that fails, up to ``pause_max_s``.
    """

    failures: int = 3
    pause_s: float = 0.25
    pause_max_s: float = 2.0


class Breaker:
    """Closed, open, or probing with one call at a time.

    Args:
        monotonic: seconds of a clock that never goes back.
        config: see `BreakerConfig`.
    """

    def __init__(self, monotonic: Callable[[], float], config: BreakerConfig | None = None) -> None:
        self._monotonic = monotonic
        self._config = config or BreakerConfig()
        self._failures = 0
        self._pause = 0.0
        self._until = 0.0
        self._probing = False

    @property
    def open(self) -> bool:
        """Whether calls are held back."""
        return self._pause > 0

    def allows(self) -> bool:
        """Whether a call may go; exactly one of `succeeded`, `failed` and `left` follows it."""
        if not self._pause:
            return True
        if self._probing or self._monotonic() < self._until:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """The server answered."""
        self._failures, self._pause, self._probing = 0, 0.0, False

    def failed(self) -> bool:
        """The server did not answer, or refused. Answers whether this opened the breaker."""
        self._failures += 1
        config = self._config
        if self._pause:
            # Calls that were under way when it opened say nothing new.
            if self._probing:
                self._probing = False
                self._pause = min(self._pause * 2, config.pause_max_s)
                self._until = self._monotonic() + self._pause
        elif self._failures >= config.failures:
            self._pause = config.pause_s
            self._until = self._monotonic() + self._pause
            return True
        return False

    def left(self) -> None:
        """The caller went away before the answer, which says nothing of the server."""
        self._probing = False
