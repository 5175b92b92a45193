"""Coordinators and workers as real processes: start, prove that they serve, freeze, kill, stop in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.embedded.child_process import ChildProcess, PortTaken, free_ports, listens_on

__all__ = ["BUG_VARIABLE", "SWEEP_OFTEN", "Coordinator", "PollProcess", "Process", "WorkerProcess"]

_SERVE = (sys.executable, "-m", "coordinator", "serve")
_HURT = (sys.executable, "-m", "tests.fault.support.hurt_coordinator", "serve")
BUG_VARIABLE = "FAULT_BUG"
"""Names the bug that every coordinator of this test run has; see ``process_bugs``."""
_ROOT = Path(__file__).resolve().parents[3]
SWEEP_OFTEN = {"every_s": 0.5}
"""A plan: every pass runs each half second at least; sweeps otherwise come every 30 s and more."""
_SERVICES = ("leasekeeper.v1.JobService", "leasekeeper.v1.WorkerService")
_START_SECONDS = 30.0
_PORT_TRIES = 10


class Process:
    """A child process and the faults that it may suffer. Blocking parts run in threads."""

    def __init__(self, command: Iterable[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        paths = os.pathsep.join((str(_ROOT), str(_ROOT / "proto" / "gen")))
        self.child = ChildProcess(tuple(command), log, env={"PYTHONPATH": paths, **(env or {})})

    @property
    def pid(self) -> int:
        """Process id; RuntimeError if it is not running."""
        return self.child.pid

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self.child.running

    @property
    def log(self) -> str:
        """What it said since its last start, the last 200 kB."""
        return self.child.log_tail(200_000)

    async def kill(self) -> None:
        """SIGKILL. Repeatable."""
        await asyncio.to_thread(self.child.kill)

    def pause(self) -> None:
        """SIGSTOP."""
        self.child.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self.child.resume()

    def signal(self, number: signal.Signals) -> None:
        """Send one signal."""
        os.kill(self.child.pid, number)

    async def wait(self, timeout: float) -> int:
        """Wait until the process has ended by itself; its exit code.

        Raises:
            TimeoutError: it still runs after *timeout* seconds.
        """
        return await asyncio.to_thread(self.child.wait, timeout=timeout)

    async def terminate(self, timeout: float) -> int:
        """SIGTERM and `wait`."""
        self.signal(signal.SIGTERM)
        return await self.wait(timeout)


class Coordinator(Process):
    """A coordinator; an async context manager that starts it and kills it.

    Args:
        etcd: client endpoints.
        folder: for log and state.
        name: tells several in one folder apart.
        settings: further settings, by the names of their environment variables without the prefix.
        failpoints: see ``coordinator.failpoints``; they may be changed before the next `start`.
        plan: see ``hurt_coordinator``.
    """

    def __init__(
        self,
        etcd: Iterable[str],
        folder: Path,
        *,
        name: str = "coordinator",
        settings: Mapping[str, str] | None = None,
        failpoints: str = "",
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        self._port = 0
        self.failpoints = failpoints
        self._plan = dict(plan or {})
        if BUG_VARIABLE in os.environ:
            self._plan["bug"] = os.environ[BUG_VARIABLE]
        self._served = False
        self._env = {
            "LEASEKEEPER_ETCD__ENDPOINTS": ",".join(etcd),
            "LEASEKEEPER_ETCD__ALLOW_UNSAFE": "true",
            "LEASEKEEPER_STORAGE__STATE_DIR": str(folder / f"{name}-state"),
            # The judge replays history from the first revision, so nobody may compact it away.
            "LEASEKEEPER_STORAGE__HISTORY_S": "86400",
            "LEASEKEEPER_STORAGE__COMPACT_IN_USE": "0.8",
            "LEASEKEEPER_LOG__FORMAT": "json",
            **{f"LEASEKEEPER_{key}": value for key, value in (settings or {}).items()},
        }
        self._log = folder / f"{name}.log"
        super().__init__(_SERVE, self._log, self._env)

    @property
    def endpoint(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def start(self) -> Self:
        """Start, on the same port as before, and return once both services are SERVING."""
        await asyncio.to_thread(self.start_blocking)
        return self

    def start_blocking(self) -> None:
        """See `start`."""
        for attempt in range(1, _PORT_TRIES + 1):
            self.launch()
            try:
                self.child.wait_ready(self._serves, timeout=_START_SECONDS)
                self._served = True
                return
            except PortTaken:
                if attempt == _PORT_TRIES:
                    raise
                if not self._served:
                    self._port = 0  # somebody was quicker: another one
                # Else others know this port: wait for whatever outgoing connection sits on it.
                time.sleep(0.2)

    def launch(self) -> None:
        """Start the process, and wait for nothing."""
        self._port = self._port or free_ports(1)[0]
        env = {**self._env, "LEASEKEEPER_SERVER__LISTEN": self.endpoint}
        command: tuple[str, ...] = _SERVE
        if self._plan:
            command = _HURT
            env["FAULT_PLAN"] = json.dumps(self._plan, default=str)
        if self.failpoints:
            command += ("--allow-failpoints",)
            env["LEASEKEEPER_FAILPOINTS"] = self.failpoints
        Process.__init__(self, command, self._log, env)
        self.child.spawn()

    def _serves(self) -> bool:
        if not self.running or not listens_on(self.pid, self._port):
            return False
        with grpc.insecure_channel(self.endpoint) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            try:
                return all(
                    health.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0).status
                    == health_pb2.HealthCheckResponse.SERVING
                    for service in _SERVICES
                )
            except grpc.RpcError:
                return False


class WorkerProcess(Process):
    """`tests.fault.support.worker_program` as a process; an async context manager that starts and kills it.

    Args:
        endpoints: of coordinators, or of proxies before them.
        folder: for its log.
        name: the worker's identity.
        options: see ``worker_program``.
    """

    def __init__(self, endpoints: str, namespace: str, folder: Path, *, name: str, **options: Any) -> None:
        told = {"endpoints": endpoints, "namespace": namespace, "name": name, **options}
        command = (sys.executable, "-m", "tests.fault.support.worker_program", json.dumps(told, default=str))
        super().__init__(command, folder / f"{name}.log")
        self.name = name

    async def __aenter__(self) -> Self:
        self.child.spawn()
        await asyncio.to_thread(self.child.wait_ready, self._ready, timeout=_START_SECONDS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    def _ready(self) -> bool:
        return "worker ready" in self.log


class PollProcess(Process):
    """`tests.fault.support.poll_program` as a process; an async context manager that starts and kills it.

    ``__aenter__`` returns once it has a session.
    """

    def __init__(
        self,
        endpoint: str,
        namespace: str,
        folder: Path,
        *,
        name: str,
        ttl: float = 2.0,
        wait: float = 20.0,
        many: int = 0,
    ) -> None:
        told = {"endpoint": endpoint, "namespace": namespace, "ttl": ttl, "wait": wait, "many": many}
        command = (sys.executable, "-m", "tests.fault.support.poll_program", json.dumps(told))
        super().__init__(command, folder / f"{name}.log")

    async def __aenter__(self) -> Self:
        self.child.spawn()
        await self.said("session ")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def said(self, word: str) -> None:
        """Wait until it has said *word*."""
        await asyncio.to_thread(self.child.wait_ready, lambda: word in self.log, timeout=_START_SECONDS)
