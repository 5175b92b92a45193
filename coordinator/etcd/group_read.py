"""Fold the linearizable point reads of many callers into few flat read Txns.

A flat read-only Txn goes through no raft entry and shows all its keys at one revision. Batching is natural,
as in the committer: what was asked while a read was under way goes next. ``run`` owns every read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.errors import EtcdUnavailable, StorageError
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.time_left import read_timeout
from coordinator.ports import Clock
from leasekeeper.internal.etcd.v1.kv_pb2 import TxnRequest

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["GroupReadConfig", "GroupReader", "KeysAt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReadConfig:
    """Sizes and times.

    Attributes:
        max_keys: keys of one Txn; etcd's ``--max-txn-ops``.
        reply_bytes: expected bytes of one reply.
        max_in_flight: reads under way at once; the second and further ones only while a full one waits, or
            the last one is slow.
        slow: seconds after which a read without an answer holds up no other.
        max_waiting: callers waiting; one more is refused.
        timeout: longest wait for one reply, seconds.
    """

    max_keys: int = 128
    reply_bytes: int = 3 * 1024 * 1024
    max_in_flight: int = 4
    slow: float = 0.1
    max_waiting: int = 20_000
    timeout: float = 5.0


@dataclass(frozen=True, slots=True)
class KeysAt:
    """Keys in the order asked, None for absent ones; the revision and raft term that they were read at."""

    kvs: list[KeyValue | None]
    revision: int
    raft_term: int


class _Ask:
    __slots__ = ("future", "keys", "reply_bytes")

    def __init__(self, keys: Sequence[bytes], reply_bytes: int, future: asyncio.Future[KeysAt]) -> None:
        self.keys = keys
        self.reply_bytes = reply_bytes
        self.future = future


class GroupReader:
    """Reads keys for many callers.

    Args:
        client: the etcd client.
        clock: the time that deadlines are measured in.
        config: see ``GroupReadConfig``.
    """

    def __init__(self, client: EtcdClient, clock: Clock, config: GroupReadConfig | None = None) -> None:
        self._client = client
        self._clock = clock
        self._config = config or GroupReadConfig()
        self._waiting: deque[_Ask] = deque()
        self._keys_waiting = 0
        self._in_flight = 0
        self._sent_at = 0.0
        self._tasks: asyncio.TaskGroup | None = None
        self._pump_scheduled = False
        self._closed = False
        self.reads = 0

    async def get(self, keys: Sequence[bytes], *, deadline: float, reply_bytes: int = 1024) -> KeysAt:
        """Read ``keys``, at most ``max_keys``, at one revision.

        Raises:
            EtcdUnavailable: no answer by the deadline.
            StorageError: as etcd refused.
        """
        if not 0 < len(keys) <= self._config.max_keys:
            raise ValueError(f"{len(keys)} keys do not fit into one read")
        left = read_timeout(self._clock, deadline)
        if self._closed:
            raise EtcdUnavailable("the store is closed")
        if len(self._waiting) >= self._config.max_waiting:
            raise EtcdUnavailable(f"{len(self._waiting)} reads wait for etcd")
        future: asyncio.Future[KeysAt] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Ask(keys, reply_bytes, future))
        self._keys_waiting += len(keys)
        self._schedule()
        try:
            async with asyncio.timeout(left):
                return await future
        except TimeoutError:
            raise EtcdUnavailable("etcd did not answer by the deadline") from None

    async def run(self) -> None:
        """Read until cancelled; then those who wait get EtcdUnavailable."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._schedule()
                await asyncio.Future()
        finally:
            self._tasks = None
            self._closed = True
            for ask in self._waiting:
                if not ask.future.done():
                    ask.future.set_exception(EtcdUnavailable("the store is closed"))
            self._waiting.clear()

    def _schedule(self) -> None:
        # Not at once: what else the callbacks of this loop round ask belongs to the same read.
        if not self._pump_scheduled and self._tasks is not None:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        while self._waiting and self._tasks is not None and self._may_send():
            asks = self._take()
            if asks:
                self._in_flight += 1
                self._sent_at = self._clock.monotonic()
                self._tasks.create_task(self._read(asks))

    def _may_send(self) -> bool:
        if self._in_flight >= self._config.max_in_flight:
            return False
        if not self._in_flight or self._keys_waiting >= self._config.max_keys:
            return True
        return self._clock.monotonic() - self._sent_at > self._config.slow

    def _take(self) -> list[_Ask]:
        asks: list[_Ask] = []
        keys = size = 0
        while self._waiting:
            ask = self._waiting[0]
            if asks and (
                keys + len(ask.keys) > self._config.max_keys
                or size + ask.reply_bytes > self._config.reply_bytes
            ):
                break
            self._waiting.popleft()
            self._keys_waiting -= len(ask.keys)
            if not ask.future.done():
                asks.append(ask)
                keys += len(ask.keys)
                size += ask.reply_bytes
        return asks

    async def _read(self, asks: list[_Ask]) -> None:
        request = TxnRequest.FromString(wire.txn((), [wire.get(key) for ask in asks for key in ask.keys], ()))
        self.reads += 1
        try:
            reply = await self._client.read_txn(request, timeout=self._config.timeout)
        except StorageError as error:
            for ask in asks:
                if not ask.future.done():
                    ask.future.set_exception(_copy(error))
            return
        except BaseException:
            for ask in asks:
                if not ask.future.done():
                    ask.future.set_exception(EtcdUnavailable("the read was given up"))
            raise
        finally:
            self._in_flight -= 1
            self._schedule()
        responses = reply.responses
        at = 0
        for ask in asks:
            kvs: list[KeyValue | None] = []
            for response in responses[at : at + len(ask.keys)]:
                found = response.response_range.kvs
                kvs.append(found[0] if found else None)
            at += len(ask.keys)
            if not ask.future.done():
                ask.future.set_result(KeysAt(kvs, reply.header.revision, reply.header.raft_term))


def _copy(error: StorageError) -> StorageError:
    # One exception object for many callers would collect the tracebacks of all.
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
