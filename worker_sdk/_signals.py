"""SIGTERM and SIGINT for a worker: installed while it runs, with the user's own handlers still called."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

__all__ = ["StopSignals"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PythonHandler = Callable[[int, FrameType | None], object]


class StopSignals:
    """A context in which the two signals call *told*, and what was there before.

    Outside the main thread it does nothing: only the main thread may have signal handlers.
    """

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told
        self._before: dict[signal.Signals, object] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            before = signal.getsignal(number)
            try:
                loop.add_signal_handler(number, self._received, number, _users(before))
            except (NotImplementedError, ValueError, RuntimeError):
                continue  # this loop or platform has none: `Worker.stop` is left
            self._before[number] = before
            self._loop = loop

    def _received(self, number: int, users: _PythonHandler | None) -> None:
        self._told()
        if users is not None:
            users(number, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            assert self._loop is not None
            self._loop.remove_signal_handler(number)
            if before is not None:
                signal.signal(number, before)  # type: ignore[arg-type]
        self._before.clear()


def _users(before: object) -> _PythonHandler | None:
    """Return the handler to call as well: the user's, not the interpreter's default and not asyncio's own."""
    if not callable(before) or before is signal.default_int_handler:
        return None
    function = getattr(before, "func", before)
    if str(getattr(function, "__module__", "")).startswith("asyncio"):
        return None  # asyncio.run's handler of SIGINT would cancel the worker without a drain
    return before
