"""`leasekeeper dev` as a child process of a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["COMMAND", "DevProcess", "running_dev"]

COMMAND = (sys.executable, "-c", "from worker_sdk._command import main; main()")
_START_SECONDS = 60.0


class DevProcess:
    """A running `dev`; its output goes to a file, so that it never blocks."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.output = folder.with_suffix(".out")
        with open(self.output, "wb") as out:
            self.child = subprocess.Popen(
                [*COMMAND, "dev", "--dir", str(folder), *arguments], stdout=out, stderr=subprocess.STDOUT
            )

    def wait_ready(self) -> dict[str, str]:
        """The endpoints, once everything runs."""
        deadline = time.monotonic() + _START_SECONDS
        file = self.folder / "endpoints.json"
        while not file.exists():
            assert self.child.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)
        found: dict[str, str] = json.loads(file.read_text())
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal; the exit code."""
        self.child.send_signal(number)
        return self.child.wait(40)


@contextlib.contextmanager
def running_dev(folder: Path, *arguments: str) -> Iterator[DevProcess]:
    """A `dev` on a folder and a free port, or with other arguments; it ends with the block."""
    process = DevProcess(folder, *(arguments or ("--port", "0")))
    try:
        yield process
    finally:
        if process.child.poll() is None:
            process.child.kill()
            process.child.wait()


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
