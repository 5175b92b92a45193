"""A flag that is set once, from any thread, and can be awaited on any loop or waited for in any thread."""

from __future__ import annotations

import asyncio
import threading

__all__ = ["Latch"]


class Latch:
    """Set once, never cleared. All methods may be called from any thread."""

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        # Made at the first wait: most jobs end without anybody waiting.
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event] | threading.Event] | None = None

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it and wake everybody who waits."""
        self._set = True
        with _lock:
            waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if isinstance(waiter, threading.Event):
                waiter.set()
                continue
            loop, event = waiter
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                continue  # that loop has ended, and its waiters with it

    async def wait(self) -> None:
        """Wait until it is set."""
        event = asyncio.Event()
        if self._enlist((asyncio.get_running_loop(), event)):
            await event.wait()

    def wait_blocking(self, timeout: float | None = None) -> bool:
        """Block this thread until it is set, at most *timeout* seconds; return whether it is set."""
        event = threading.Event()
        if self._enlist(event):
            event.wait(timeout)
        return self._set

    def _enlist(self, waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | threading.Event) -> bool:
        with _lock:
            if self._set:
                return False
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            return True


# One lock for all: it is held for a few instructions, when somebody waits or a latch is set.
_lock = threading.Lock()
