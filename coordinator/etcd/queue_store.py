"""Queues in etcd: ``queue/<queue>``, swapped under a compare of its mod revision and the epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.core.queue_settings import QueueSettings, QueueState
from coordinator.errors import CodecError, KeyFormatError
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import FORMAT, decode_record
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.paging import pages
from coordinator.etcd.present import EtcdPresent
from coordinator.etcd.record_swap import swap_record
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.terms_codec import policy_from_record, retry_record
from coordinator.etcd.time_left import read_timeout
from coordinator.ports import Clock, QueueSwap, StoredQueue
from leasekeeper.internal.storage.v1.records_pb2 import QueueRecord

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["EtcdQueueStore", "decode_queue", "encode_queue"]


def encode_queue(state: QueueState) -> bytes:
    """Value of ``queue/<queue>``."""
    settings, retry = state.settings, state.settings.retry
    return QueueRecord(
        format=FORMAT,
        target_wait_ms=settings.target_wait_ms,
        retry=retry_record(retry) if retry is not None else None,
        queue_timeout_ms=settings.queue_timeout_ms,
        run_timeout_ms=settings.run_timeout_ms,
        total_timeout_ms=settings.total_timeout_ms,
        heartbeat_timeout_ms=settings.heartbeat_timeout_ms,
        paused=state.paused,
        pause_reason=state.pause_reason,
        pause_ms=state.pause_ms,
        request_digest=state.request_digest,
    ).SerializeToString()


def decode_queue(value: bytes) -> QueueState:
    """Undo ``encode_queue``.

    Raises:
        CodecError: it is no such record.
    """
    record = decode_record(QueueRecord.FromString, value, "queue")
    if len(record.target_wait_ms) not in (0, 5):
        raise CodecError(f"queue: {len(record.target_wait_ms)} target waits for 5 priorities")
    settings = QueueSettings(
        target_wait_ms=tuple(record.target_wait_ms),
        retry=policy_from_record(record.retry) if record.HasField("retry") else None,
        queue_timeout_ms=record.queue_timeout_ms,
        run_timeout_ms=record.run_timeout_ms,
        total_timeout_ms=record.total_timeout_ms,
        heartbeat_timeout_ms=record.heartbeat_timeout_ms,
    )
    return QueueState(
        settings=settings,
        paused=record.paused,
        pause_reason=record.pause_reason,
        pause_ms=record.pause_ms,
        request_digest=record.request_digest,
    )


class EtcdQueueStore:
    """Implements ``ports.QueueStore``. Changes of queues are rare, so each is a Txn of its own.

    Args:
        client: the etcd client.
        space: the keys.
        present: the epoch that every Txn compares.
        set_aside: told of undecodable records.
        clock: deadlines.
    """

    def __init__(
        self, client: EtcdClient, space: KeySpace, present: EtcdPresent, set_aside: SetAside, clock: Clock
    ) -> None:
        self._client = client
        self._space = space
        self._present = present
        self._set_aside = set_aside
        self._clock = clock

    async def read(self, namespace: str, queue: str, *, deadline: float) -> StoredQueue:
        """See ``ports.QueueStore``."""
        key = self._space.namespace(namespace).queue(queue)
        reply = await self._client.range(key, timeout=read_timeout(self._clock, deadline))
        return self._stored(reply.kvs[0] if reply.kvs else None)

    async def swap(
        self, namespace: str, queue: str, *, before: StoredQueue, after: QueueState, deadline: float
    ) -> QueueSwap:
        """See ``ports.QueueStore``."""
        key = self._space.namespace(namespace).queue(queue)
        reply = await swap_record(
            self._client,
            self._present,
            self._clock,
            key,
            wire.put(key, encode_queue(after)),
            version=before.revision,
            deadline=deadline,
        )
        if reply.won:
            return QueueSwap(won=True, stored=StoredQueue(after, reply.revision), revision=reply.revision)
        stands = self._stored(reply.stands)
        # Whoever wrote the very same wanted the very same: whose it was matters to nobody.
        won = reply.doubtful and stands.state == after
        return QueueSwap(won=won, stored=stands, revision=reply.revision)

    async def list_queues(self, namespace: str, *, deadline: float) -> list[tuple[str, StoredQueue]]:
        """See ``ports.QueueStore``."""
        keys = self._space.namespace(namespace)
        found: list[tuple[str, StoredQueue]] = []
        async for kv in pages(self._client, keys.all_queues(), clock=self._clock, deadline=deadline):
            try:
                queue = keys.parse_queue(kv.key)
            except KeyFormatError as error:
                self._set_aside.add("queue", kv.key, error)
                continue
            found.append((queue, self._stored(kv)))
        return found

    def _stored(self, kv: KeyValue | None) -> StoredQueue:
        if kv is None:
            return StoredQueue()
        try:
            return StoredQueue(decode_queue(kv.value), kv.mod_revision)
        except CodecError as error:
            self._set_aside.add("queue", kv.key, error)
            return StoredQueue(revision=kv.mod_revision)
