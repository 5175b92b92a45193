"""One server program as a child process: start, prove that it listens, stop, kill, pause, and no orphans."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["ChildProcess", "ChildStartError", "PortTaken", "free_ports", "listens_on"]

_POLL_SECONDS = 0.02
_PAUSE_TIMEOUT = 5.0
_LISTEN_STATE = "0A"  # TCP_LISTEN in the "st" column of /proc/net/tcp


class ChildStartError(RuntimeError):
    """The server did not come up; the message ends with the last lines of its log."""


class PortTaken(ChildStartError):
    """Somebody else holds one of the ports; another try with other ports may succeed."""


def free_ports(count: int) -> list[int]:
    """Return *count* distinct TCP ports of 127.0.0.1 that are free now.

    Nothing reserves them: another process may take one before the caller binds it, so callers retry.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def listens_on(pid: int, port: int) -> bool:
    """Tell whether process *pid* itself holds a listening TCP socket on *port*.

    Elsewhere than on Linux it can only be told that somebody listens; then True means just that.
    """
    if not sys.platform.startswith("linux"):
        with socket.socket() as probe:
            probe.settimeout(0.2)
            return probe.connect_ex(("127.0.0.1", port)) == 0
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table, encoding="ascii") as lines:
            next(lines)
            for line in lines:
                fields = line.split()
                if fields[3] == _LISTEN_STATE and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    try:
        descriptors = list(os.scandir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, PermissionError):
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.readlink(descriptor.path) in inodes:
                return True
    return False


class ChildProcess:
    """A server process, its log file, and a watcher that kills it should this process die.

    Blocking and not thread-safe: use it from one thread, or through ``asyncio.to_thread`` one call at a time.

    Args:
        command: program and arguments.
        log_path: file that receives stdout and stderr, appended.
        env: environment variables to add; a ``None`` environment is this process's.
    """

    def __init__(
        self, command: Sequence[str], log_path: Path, *, env: Mapping[str, str] | None = None
    ) -> None:
        self.command = tuple(command)
        self.log_path = log_path
        self._env = dict(env or {})
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._log_start = 0

    @property
    def pid(self) -> int:
        """Process id. Raises RuntimeError if the process is not running."""
        if self._child is None or self._child.poll() is not None:
            raise RuntimeError(f"{self.command[0]} is not running")
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process exists (paused counts as running)."""
        return self._child is not None and self._child.poll() is None

    def start(self, ready: Callable[[], bool], *, timeout: float) -> None:
        """Start the program, and return once *ready* says so.

        Args:
            ready: polled every 20 ms; must neither block for long nor raise.
            timeout: seconds until the attempt counts as failed.

        Raises:
            PortTaken: the program ended, saying that an address is in use.
            ChildStartError: it ended otherwise, or was not ready in time. It no longer runs then.
        """
        self.spawn()
        self.wait_ready(ready, timeout=timeout)

    def spawn(self) -> None:
        """Start the program without waiting for it; `wait_ready` must follow."""
        if self.running:
            raise RuntimeError(f"{self.command[0]} runs already")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with open(self.log_path, "ab") as log:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                # A Ctrl-C for us must not reach the server before we stop it in order.
                start_new_session=True,
            )
        # The watcher's stdin is a pipe whose only writer is this process. When we die, however we die, the
        # read ends and the server is killed. PR_SET_PDEATHSIG would fire at the end of the starting *thread*.
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -KILL "$1"', "sh", str(self._child.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._paused = False

    def wait_ready(self, ready: Callable[[], bool], *, timeout: float) -> None:
        """Wait until *ready*; arguments and errors as of `start`."""
        child = self._child
        if child is None:
            raise RuntimeError("spawn() comes first")
        deadline = time.monotonic() + timeout
        while True:
            if child.poll() is not None:
                tail = self.log_tail()
                self._release()
                kind = PortTaken if "address already in use" in tail.lower() else ChildStartError
                raise kind(f"{self.command[0]} ended with code {child.returncode}:\n{tail}")
            if ready():
                return
            if time.monotonic() > deadline:
                tail = self.log_tail()
                self.kill()
                raise ChildStartError(f"{self.command[0]} was not ready after {timeout} s:\n{tail}")
            time.sleep(_POLL_SECONDS)

    def stop(self, *, timeout: float = 10.0) -> None:
        """Ask the process to end (SIGTERM), kill it after *timeout* seconds, and reap it. Repeatable."""
        child = self._child
        if child is not None and child.poll() is None:
            self.resume()
            child.terminate()
            try:
                child.wait(timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._release()

    def kill(self) -> None:
        """End the process at once (SIGKILL) and reap it. Repeatable."""
        child = self._child
        if child is not None and child.poll() is None:
            child.kill()
            child.wait()
        self._release()

    def wait(self, *, timeout: float) -> int:
        """Wait until the process has ended by itself, reap it, and return its exit code (negative: a signal).

        Raises:
            TimeoutError: it still runs after *timeout* seconds.
        """
        child = self._child
        if child is None:
            raise RuntimeError(f"{self.command[0]} is not running")
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.command[0]} still runs after {timeout} s") from error
        self._release()
        return code

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): its sockets stay open, nothing answers. Returns once it stands still.

        Raises:
            TimeoutError: it went on for ``_PAUSE_TIMEOUT``.
        """
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True
        # The signal is delivered to one thread after the other; until then some may still answer.
        deadline = time.monotonic() + _PAUSE_TIMEOUT
        while not self._stopped():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} goes on after SIGSTOP")
            time.sleep(0.001)

    def _stopped(self) -> bool:
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                stat = (task / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # that thread has ended
            if stat.rpartition(")")[2].split()[0] not in ("T", "Z"):
                return False
        return True

    def resume(self) -> None:
        """Continue a frozen process; no effect on one that is not."""
        if self._paused and self.running:
            os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def log_tail(self, size: int = 4096) -> str:
        """Return the last *size* bytes that the process logged since its last start."""
        if not self.log_path.exists():
            return ""
        with open(self.log_path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - size))
            return log.read().decode(errors="replace")

    def _release(self) -> None:
        """Drop the child, which has been reaped, and its watcher."""
        self._child = None
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.kill()
            watcher.wait()
            if watcher.stdin is not None:
                watcher.stdin.close()
