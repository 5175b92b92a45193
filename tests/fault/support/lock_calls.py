"""LockService through its generated stubs, and what stands in etcd: for tests that the SDK would mend."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import grpc.aio

from coordinator.core.lock_order import LockEntry
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.lock_codec import decode_lock
from leasekeeper.v1 import lock_service_pb2 as pb
from leasekeeper.v1 import types_pb2, worker_service_pb2
from leasekeeper.v1.lock_service_pb2_grpc import LockServiceStub
from leasekeeper.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fault.support.calls import seconds

__all__ = ["LockHand", "standing"]

_TIMEOUT = 10.0


class LockHand:
    """One session that beats only when it is told to; an async context manager.

    Args:
        endpoint: a coordinator's.
        namespace: of every call.
        ttl: seconds of its session.
    """

    def __init__(self, endpoint: str, namespace: str, *, ttl: float = 60.0) -> None:
        self._endpoint = endpoint
        self._namespace = namespace
        self._ttl = ttl
        self._beats = 0
        self.session = ""

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._endpoint)
        self._locks: Any = LockServiceStub(self._channel)
        self._workers: Any = WorkerServiceStub(self._channel)
        self.session = await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def _open(self) -> str:
        request = worker_service_pb2.OpenSessionRequest(
            namespace=self._namespace, request_id=uuid.uuid4().hex, ttl=seconds(self._ttl)
        )
        return str((await self._workers.OpenSession(request, timeout=_TIMEOUT)).session_id)

    async def take(self, name: str, *, request_id: str = "", wait: float = 0.0, permits: int = 0) -> int:
        """AcquireLock, exclusive, or a semaphore of *permits*; the token."""
        request = pb.AcquireLockRequest(
            namespace=self._namespace,
            request_id=request_id or uuid.uuid4().hex,
            session_id=self.session,
            names=[name],
            mode=types_pb2.LOCK_MODE_SEMAPHORE if permits else types_pb2.LOCK_MODE_EXCLUSIVE,
            permits=permits,
            wait=seconds(wait),
        )
        reply = await self._locks.AcquireLock(request, timeout=wait + _TIMEOUT)
        return int(reply.locks[0].fencing_token)

    async def give(self, name: str, token: int, *, repeat: bool = False) -> None:
        """ReleaseLock."""
        request = pb.ReleaseLockRequest(
            namespace=self._namespace,
            request_id=uuid.uuid4().hex,
            session_id=self.session,
            locks=[pb.HeldLock(name=name, fencing_token=token)],
            repeat=repeat,
        )
        await self._locks.ReleaseLock(request, timeout=_TIMEOUT)


async def standing(etcd: Iterable[str], namespace: str, name: str) -> list[LockEntry]:
    """The entries of a lock in etcd, in order."""
    keys = KeySpace().namespace(namespace)
    span = keys.lock_entries(name)
    async with EtcdClient(EtcdConfig(endpoints=tuple(etcd))) as client:
        found = await client.range(span.start, span.end, timeout=_TIMEOUT)
    entries = [decode_lock(*keys.parse_lock(kv.key), kv) for kv in found.kvs]
    return sorted(entries, key=lambda one: one.revision)
