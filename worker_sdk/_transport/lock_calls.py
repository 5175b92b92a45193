"""LockService in values, for the event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from leasekeeper.v1 import lock_service_pb2 as pb
from leasekeeper.v1 import types_pb2
from worker_sdk._convert.times import duration
from worker_sdk._transport.channel import CoordinatorChannel
from worker_sdk._transport.methods import ACQUIRE_LOCK, CHECK_TOKEN, OBSERVE_LOCK, RELEASE_LOCK

__all__ = ["LockCalls"]

_WAIT_GRACE = 5.0


class LockCalls:
    """Typed calls of LockService over *channel*, in one namespace."""

    def __init__(self, channel: CoordinatorChannel, namespace: str) -> None:
        self._channel = channel
        self._namespace = namespace

    async def acquire(
        self,
        *,
        request_id: str,
        session_id: str,
        names: Sequence[str],
        mode: int,
        permits: int,
        value: bytes,
        wait: float,
        repeats: int = 0,
        timeout: float | None = None,
    ) -> Mapping[str, int]:
        """Ask once, waiting up to *wait* seconds in line; return the tokens by name.

        *repeats*: how often the request was sent before.
        """
        request = pb.AcquireLockRequest(
            namespace=self._namespace,
            request_id=request_id,
            session_id=session_id,
            names=names,
            mode=types_pb2.LockMode.ValueType(mode),
            permits=permits,
            value=value,
            wait=duration(wait, "wait") if wait > 0 else None,
            repeats=repeats,
        )
        answer = await self._channel.attempt(
            ACQUIRE_LOCK, request, timeout=wait + _WAIT_GRACE if timeout is None else timeout
        )
        return {lock.name: lock.fencing_token for lock in answer.locks}

    async def release(
        self, *, request_id: str, session_id: str, tokens: Mapping[str, int], repeat: bool, timeout: float
    ) -> None:
        """Give locks back, once; *repeat*: an earlier try of this was not answered."""
        request = pb.ReleaseLockRequest(
            namespace=self._namespace,
            request_id=request_id,
            session_id=session_id,
            locks=[pb.HeldLock(name=name, fencing_token=token) for name, token in tokens.items()],
            repeat=repeat,
        )
        await self._channel.attempt(RELEASE_LOCK, request, timeout=timeout)

    async def check(self, name: str, token: int, *, timeout: float) -> bool:
        """Ask whether a token is that of a present owner."""
        request = pb.CheckTokenRequest(namespace=self._namespace, name=name, fencing_token=token)
        return (await self._channel.call(CHECK_TOKEN, request, timeout=timeout)).current

    async def observe(self, name: str, *, timeout: float) -> AsyncGenerator[list[tuple[bytes, int]], None]:
        """Yield value and token of each owner, at each change, from one coordinator."""
        request = pb.ObserveLockRequest(namespace=self._namespace, name=name)
        async with aclosing(self._channel.stream(OBSERVE_LOCK, request, timeout=timeout)) as messages:
            async for message in messages:
                yield [(entry.value, entry.fencing_token) for entry in message.lock.owners]
