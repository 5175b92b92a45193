"""Signals of the commands that own child processes: the children must end before we do."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

__all__ = ["interrupt_on_sigterm", "stop_signals"]


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a start under way is finished first, and then undone."""
    stop = threading.Event()

    def note(number: int, frame: object) -> None:
        stop.set()

    with _handling((signal.SIGINT, signal.SIGTERM), note):
        yield stop


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that every context manager cleans up."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handling((signal.SIGTERM,), interrupt):
        yield


@contextlib.contextmanager
def _handling(numbers: tuple[signal.Signals, ...], handler: Callable[[int, object], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
