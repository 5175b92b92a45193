"""`leasekeeper reconciler` as a process of a test, and who leads the sweeps."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.etcd.client import EtcdClient
from coordinator.etcd.keys import KeySpace
from leasekeeper.internal.storage.v1.records_pb2 import CoordinatorRecord, LeaderRecord
from tests.fault.support.processes import Process

__all__ = ["ADMIN_SERVICE", "Leader", "Reconciler", "leader_of_sweeps"]

ADMIN_SERVICE = "leasekeeper.v1.AdminService"
_RECONCILER = (sys.executable, "-m", "coordinator", "reconciler")
_START_SECONDS = 30.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


class Reconciler(Process):
    """A daemon on a free port; an async context manager that starts it and kills it.

    Args:
        etcd: client endpoints.
        folder: for log and state.
        name: tells several in one folder apart.
        settings: further settings, by the names of their environment variables without the prefix.
    """

    def __init__(
        self, etcd: Iterable[str], folder: Path, *, name: str, settings: Mapping[str, str] | None = None
    ) -> None:
        env = {
            "LEASEKEEPER_ETCD__ENDPOINTS": ",".join(etcd),
            "LEASEKEEPER_ETCD__ALLOW_UNSAFE": "true",
            "LEASEKEEPER_RECONCILER__LISTEN": "127.0.0.1:0",
            "LEASEKEEPER_STORAGE__STATE_DIR": str(folder / f"{name}-state"),
            # The judge replays history from the first revision, so nobody may compact it away.
            "LEASEKEEPER_STORAGE__HISTORY_S": "86400",
            "LEASEKEEPER_STORAGE__COMPACT_IN_USE": "0.8",
            "LEASEKEEPER_LOG__FORMAT": "json",
            **{f"LEASEKEEPER_{key}": value for key, value in (settings or {}).items()},
        }
        super().__init__(_RECONCILER, folder / f"{name}.log", env)
        self.name = name

    async def __aenter__(self) -> Self:
        self.child.spawn()
        await self.becomes(serving=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def address(self) -> str:
        """Where it listens, empty until it does."""
        for line in self.log.splitlines():
            if line.startswith("{") and json.loads(line)["event"] == "listening":
                return str(json.loads(line)["address"])
        return ""

    def serving(self, service: str = ADMIN_SERVICE) -> bool | None:
        """What its health says; None: no answer."""
        if not self.address:
            return None
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
            except grpc.RpcError:
                return None
        return bool(answer.status == _SERVING)

    async def becomes(self, *, serving: bool, timeout: float = _START_SECONDS) -> None:
        """Wait until its health says so.

        Raises:
            ChildStartError: it ended, or did not say so in time.
        """
        await asyncio.to_thread(self.child.wait_ready, lambda: self.serving() is serving, timeout=timeout)


class Leader(NamedTuple):
    """Who leads: where it listens, and the revision at which it took the role."""

    address: str
    since: int


async def leader_of_sweeps(client: EtcdClient) -> Leader | None:
    """Whose key stands."""
    space = KeySpace()
    found = (await client.range(space.leader("sweep"), timeout=5)).kvs
    if not found:
        return None
    leader = LeaderRecord.FromString(found[0].value).coordinator
    member = (await client.range(space.coordinator(leader), timeout=5)).kvs
    if not member:
        return None
    return Leader(CoordinatorRecord.FromString(member[0].value).endpoint, found[0].create_revision)
