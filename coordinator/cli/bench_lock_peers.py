"""What locks are measured beside: redis-py's on a Valkey, and locks the way the package etcd3 makes them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import redis.asyncio
import redis.asyncio.lock

from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient

__all__ = ["EtcdStyleLocks", "RedisLocks"]

_TTL_SECONDS = 30
_CALL_SECONDS = 10.0


class RedisLocks:
    """redis-py's ``Lock`` as it comes: SET NX PX to take, a script that compares to give back, 0.1 s between
    looks. No token, and no line."""

    def __init__(self, url: str) -> None:
        # As many connections as callers: none waits for another's.
        self._client = redis.asyncio.Redis.from_url(url, max_connections=128)

    async def acquire(self, name: str) -> redis.asyncio.lock.Lock:
        """Take it."""
        lock = self._client.lock(name, timeout=_TTL_SECONDS)
        if not await lock.acquire():
            raise RuntimeError(f"redis-py's lock {name} was not acquired")
        return lock

    async def release(self, held: redis.asyncio.lock.Lock) -> None:
        """Give it back."""
        await held.release()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


@dataclass(frozen=True, slots=True)
class EtcdStyleLock:
    """A key that was put with a value of its holder's own."""

    key: bytes
    owner: bytes


class EtcdStyleLocks:
    """As etcd3 0.12.0 ``Lock``: a lease for each acquisition, a Txn that puts the key if it is absent, a Txn
    that deletes it if the value is the holder's. For names that nobody else wants."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client

    async def acquire(self, name: str) -> EtcdStyleLock:
        """Take it."""
        key, owner = b"/locks/" + name.encode(), uuid.uuid4().bytes
        lease = (await self._client.lease_grant(_TTL_SECONDS, timeout=_CALL_SECONDS)).id
        request = wire.txn((wire.create_eq(key, 0),), (wire.put(key, owner, lease),), ())
        if not (await self._client.txn_bytes(request, timeout=_CALL_SECONDS)).succeeded:
            raise RuntimeError(f"etcd3-style lock {name} is held")
        return EtcdStyleLock(key, owner)

    async def release(self, held: EtcdStyleLock) -> None:
        """Give it back. The lease is left to expire, as there."""
        request = wire.txn((wire.value_eq(held.key, held.owner),), (wire.delete(held.key),), ())
        await self._client.txn_bytes(request, timeout=_CALL_SECONDS)
