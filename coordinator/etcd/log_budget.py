"""Keep an outage from flooding the log: so many lines a minute, the rest counted."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["LogBudget"]

_WINDOW_SECONDS = 60.0


class LogBudget:
    """A logger with at most *lines* lines in each minute; the next line says how many were left out.

    Args:
        logger: where lines go.
        lines: how many in a minute.
        monotonic: seconds, never falling.
    """

    def __init__(self, logger: logging.Logger, lines: int, monotonic: Callable[[], float]) -> None:
        self._logger = logger
        self._lines = lines
        self._monotonic = monotonic
        self._window = -_WINDOW_SECONDS
        self._used = 0
        self._left_out = 0

    def info(self, message: str, *values: object) -> None:
        """Log at INFO, if the budget allows."""
        self._line(logging.INFO, message, values)

    def warning(self, message: str, *values: object) -> None:
        """Log at WARNING, if the budget allows."""
        self._line(logging.WARNING, message, values)

    def _line(self, level: int, message: str, values: tuple[object, ...]) -> None:
        now = self._monotonic()
        if now - self._window >= _WINDOW_SECONDS:
            self._window, self._used = now, 0
        if self._used >= self._lines:
            self._left_out += 1
            return
        self._used += 1
        if self._left_out:
            message += " (%d lines left out)"
            values = (*values, self._left_out)
            self._left_out = 0
        self._logger.log(level, message, *values)
