"""``leasekeeper worker run --reload``: runs the worker in a child, and starts it again when code has changed.

For development. The child drains as on any stop, so that no job is lost or charged for an edit.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

__all__ = ["changed", "run_reloading", "snapshot"]

_log = logging.getLogger("worker_sdk.reload")
_LOOK_SECONDS = 0.3
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}
_PROGRAM = "from worker_sdk._command import main; main()"


def snapshot(folder: Path) -> dict[str, int]:
    """Return the Python files below *folder* with their times, without hidden and installed ones."""
    found: dict[str, int] = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(parent, name)
                try:
                    found[path] = os.stat(path).st_mtime_ns
                except OSError:
                    continue  # gone since it was listed, as an editor's temporary files are
    return found


def changed(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return the files that were added, removed or written."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def run_reloading(arguments: Sequence[str], folder: Path) -> int:
    """Run ``leasekeeper`` with *arguments* until a signal; return its exit code."""
    stop = _Stop()
    before = {number: signal.signal(number, stop.signalled) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            files = snapshot(folder)
            # In a session of its own: Ctrl-C goes to the whole group, and would reach it twice.
            child = subprocess.Popen([sys.executable, "-c", _PROGRAM, *arguments], start_new_session=True)
            stop.child = child
            code = _attend(child, stop, files, folder)
            if code is not None:
                return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stop:
    """The signals that came, passed on to the child."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.asked = threading.Event()

    def signalled(self, number: int, frame: FrameType | None) -> None:
        self.asked.set()
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)


def _attend(
    child: subprocess.Popen[bytes], stop: _Stop, files: Mapping[str, int], folder: Path
) -> int | None:
    """Wait for the child's end or a change; return the code to end with, None: start another child."""
    told = False
    while True:
        if stop.asked.is_set():
            return _ended(child)
        code = child.poll()
        if code is not None and not told:
            told = True
            _log.warning("the worker ended with code %d; it starts again when code changes", code)
        paths = changed(files, snapshot(folder))
        if paths:
            _log.info("changed: %s; the worker starts again", ", ".join(paths[:5]))
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
                _ended(child)
            return _ended(child) if stop.asked.is_set() else None
        stop.asked.wait(_LOOK_SECONDS)


def _ended(child: subprocess.Popen[bytes]) -> int:
    # No limit of its own: the child's drain has one, and a second signal is passed on to it.
    code = child.wait()
    return 128 - code if code < 0 else code
