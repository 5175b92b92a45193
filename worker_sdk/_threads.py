"""A bounded pool of daemon threads for handlers that are plain functions.

Not concurrent.futures: the interpreter joins its threads at exit, so that one stuck handler would keep a
worker from ever ending, and asyncio's default pool is shared with user code that may fill it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["HandlerThreads"]


class HandlerThreads:
    """Runs functions in at most *limit* threads, made as they are needed. A function must not raise.

    The caller gives no more functions at a time than there are threads; more would wait in line.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    def run(self, function: Callable[[], None]) -> None:
        """Run *function* in a thread."""
        with self._lock:
            spare = self._idle > 0
            if spare:
                self._idle -= 1
            elif self._threads < self._limit:
                self._threads += 1
                number = self._threads
            else:
                spare = True
            self._inbox.put(function)
        if not spare:
            threading.Thread(target=self._work, name=f"leasekeeper-handler-{number}", daemon=True).start()

    def close(self) -> None:
        """Let the threads end when they are free; does not wait for them."""
        with self._lock:
            threads = self._threads
        for _ in range(threads):
            self._inbox.put(None)

    def _work(self) -> None:
        while True:
            function = self._inbox.get()
            if function is None:
                return
            function()
            del function
            with self._lock:
                # A function in line is this thread's next: then it is not idle.
                if self._inbox.empty():
                    self._idle += 1
