"""The demo's worker processes: started, killed, frozen and continued by the driver, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Crew", "CrewConfig", "WorkerProcess"]

_STOP_SECONDS = 15.0
_MODULE = "coordinator.cli.demo_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewConfig:
    """What every worker is told.

    Args:
        endpoint: of the coordinator.
        namespace: of the jobs.
        input_folder: below which the files lie.
        sink: the SQLite file.
        control: the folder of tickets.
        logs: where each worker's output goes.
        session_ttl: seconds.
    """

    endpoint: str
    namespace: str
    input_folder: Path
    sink: Path
    control: Path
    logs: Path
    session_ttl: float = 3.0

    def arguments(self) -> list[str]:
        """As command line."""
        return [
            f"--endpoint={self.endpoint}",
            f"--namespace={self.namespace}",
            f"--input={self.input_folder}",
            f"--sink={self.sink}",
            f"--control={self.control}",
            f"--session-ttl={self.session_ttl}",
        ]


class WorkerProcess:
    """One worker; made by `Crew`."""

    def __init__(self, name: str, config: CrewConfig) -> None:
        self.name = name
        self.state = "working"
        self.log = config.logs / f"{name}.log"
        with open(self.log, "ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, f"--name={name}", *config.arguments()],
                # The worker ends when this pipe does, however we end.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, also of one that has ended."""
        return self._child.pid

    def ended(self) -> int | None:
        """Exit code if the process has ended by itself; None while it runs or was killed by `kill`."""
        return self._child.poll() if self.state != "killed" else None

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._child.kill()
        self._child.wait(_STOP_SECONDS)
        self.state = "killed"

    def freeze(self) -> None:
        """SIGSTOP; returns once the process has stopped.

        Raises:
            ProcessLookupError: it has ended.
        """
        self._child.send_signal(signal.SIGSTOP)
        found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if found is None or found.si_code != os.CLD_STOPPED:
            raise ProcessLookupError(f"worker {self.name} ended in place of stopping")
        self.state = "frozen"

    def resume(self) -> None:
        """SIGCONT."""
        self._child.send_signal(signal.SIGCONT)
        self.state = "continued"

    def ask_to_stop(self) -> None:
        """SIGTERM: the worker settles what it holds and ends."""
        if self._child.poll() is None:
            self._child.terminate()

    def reap(self, seconds: float = _STOP_SECONDS) -> None:
        """Wait for the end; a process that is not gone by then is killed."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()


class Crew:
    """All workers of one run. As a context manager it ends every one of them.

    Args:
        config: see `CrewConfig`.
        size: how many to start with.
    """

    def __init__(self, config: CrewConfig, size: int) -> None:
        self._config = config
        self._size = size
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> Crew:
        try:
            for _ in range(self._size):
                self.hire()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(tuple(self._workers))

    def hire(self) -> WorkerProcess:
        """Start one more."""
        worker = WorkerProcess(f"w{len(self._workers) + 1}", self._config)
        self._workers.append(worker)
        return worker

    def named(self, name: str) -> WorkerProcess:
        """The worker with this name."""
        return next(worker for worker in self._workers if worker.name == name)

    def broken(self) -> Sequence[WorkerProcess]:
        """Workers that ended though nobody told them to."""
        return [worker for worker in self._workers if worker.ended() is not None]

    def stop(self) -> None:
        """Ask all to end, and wait for it."""
        for worker in self._workers:
            worker.ask_to_stop()
        for worker in self._workers:
            worker.reap()

    def _end(self) -> None:
        for worker in self._workers:
            if worker.state == "frozen":
                worker.kill()
        self.stop()
