"""Runs one pass again and again: when woken, by its timer, at once while there is more. It never dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coordinator.errors import LeasekeeperError
from coordinator.ports import Clock, Entropy
from coordinator.services.waiting import wait_event

__all__ = ["LoopConfig", "PassLoop"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Seconds. ``interval_s``: the timer, moved by up to ± ``jitter``/2 of itself.

    ``max_pause_s``: the longest pause after failures. ``alarm_failures`` in a row are trouble that health
    tells of, and so is no end of a run for ``alarm_s`` and three intervals; a sweep may take minutes.
    """

    interval_s: float
    jitter: float = 0.2
    max_pause_s: float = 5.0
    alarm_failures: int = 3
    alarm_s: float = 600.0


class PassLoop:
    """Owns the repetition of one pass; ``run`` belongs to a task group.

    Args:
        name: for the log.
        step: one run of the pass; True: there is more to do now.
        clock: the timer.
        entropy: jitter, so that coordinators do not march in step.
        config: times.
        active: asked before each run; False skips it (not the leader, not yet listed).
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[bool]],
        clock: Clock,
        entropy: Entropy,
        config: LoopConfig,
        *,
        active: Callable[[], bool] = lambda: True,
    ) -> None:
        self._name = name
        self._step = step
        self._clock = clock
        self._entropy = entropy
        self._config = config
        self._active = active
        self._woken = asyncio.Event()
        self._ended_at = clock.monotonic()
        self._last_error = ""
        self.failures = 0

    @property
    def trouble(self) -> str:
        """Why the pass does not do its work, empty if it does or need not (``active``)."""
        if self.failures >= self._config.alarm_failures:
            return f"pass {self._name} failed {self.failures} times: {self._last_error}"
        silent = self._clock.monotonic() - self._ended_at
        if silent > max(self._config.alarm_s, 3 * self._config.interval_s):
            return f"pass {self._name} has not ended a run for {silent:.0f} s"
        return ""

    def wake(self) -> None:
        """There may be something to do."""
        self._woken.set()

    async def run(self) -> None:
        """Run until cancelled. Failures are logged once per outage, and each next run comes later."""
        self._ended_at = self._clock.monotonic()
        while True:
            self._woken.clear()
            more = False
            if self._active():
                more = await self._once()
            else:
                self.failures = 0  # whoever acts now tells of its own
            self._ended_at = self._clock.monotonic()
            if self.failures:
                pause = min(self._config.max_pause_s, self._config.interval_s * 2 ** min(self.failures, 16))
                await self._clock.sleep(pause)
            elif more:
                await self._clock.sleep(0)  # others have their turn between two runs
            else:
                spread = 1 + self._config.jitter * (self._entropy.fraction() - 0.5)
                await wait_event(self._clock, self._woken, self._config.interval_s * spread)

    async def _once(self) -> bool:
        try:
            more = await self._step()
        except LeasekeeperError as error:
            if not self.failures:
                logger.warning("pass %s fails, and is tried again: %s", self._name, error)
            self.failures += 1
            self._last_error = str(error)
            return False
        except Exception as error:
            # A fault of our own must not end the recovery of everything else.
            logger.exception("pass %s failed, and is tried again", self._name)
            self.failures += 1
            self._last_error = type(error).__name__
            return False
        if self.failures:
            logger.info("pass %s works again after %d failures", self._name, self.failures)
        self.failures = 0
        return more
