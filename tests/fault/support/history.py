"""Everything that etcd ever held below one namespace, revision by revision, read by a watch of our own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from coordinator.core.fencing import make_token
from coordinator.errors import StorageFull
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.codec import decode_epoch
from coordinator.etcd.keys import KeySpace
from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue
from leasekeeper.internal.etcd.v1.watch_pb2 import (
    Event,
    WatchCreateRequest,
    WatchRequest,
    WatchResponse,
)

__all__ = ["History", "Step", "read_history"]

_PATH = "/etcdserverpb.Watch/Watch"
_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one revision changed: keys put (as they were then) and keys deleted."""

    revision: int
    puts: tuple[KeyValue, ...] = ()
    deletes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All steps of one namespace in their order, and the epoch of its tokens."""

    namespace: str
    root: bytes
    epoch: int
    steps: tuple[Step, ...]

    def token(self, revision: int) -> int:
        """The fencing token of a claim made at *revision*."""
        return make_token(self.epoch, revision)


async def read_history(endpoints: Sequence[str], namespace: str, *, start: int = 1) -> History:
    """Replay the namespace from revision *start* until now.

    Raises:
        AssertionError: history from there on is compacted away, so nothing can be judged.
    """
    space = KeySpace()
    # Any key of the namespace shows where it begins; no key literal outside the module of keys.
    root = space.namespace(namespace).all_claims().start.removesuffix(b"claim/")
    async with EtcdClient(EtcdConfig(endpoints=tuple(endpoints))) as client:
        found = await client.range(space.epoch, timeout=_TIMEOUT)
        epoch = decode_epoch(found.kvs[0].value) if found.kvs else 0
        marks = root + b"zz-judge/"
        try:
            marked = await client.put(marks + uuid.uuid4().hex.encode(), b"", timeout=_TIMEOUT)
            until = marked.header.revision
        except StorageFull:
            # What etcd takes even then is a deletion: of the marks of earlier readings.
            dropped = await client.delete_range(marks, marks[:-1] + b"0", timeout=_TIMEOUT)
            assert dropped.deleted, "the store is full, and nobody read its history before"
            until = dropped.header.revision
    events = await _watch(endpoints, root, root[:-1] + b"0", start, until)
    return History(namespace=namespace, root=root, epoch=epoch, steps=tuple(_steps(events)))


async def _watch(
    endpoints: Sequence[str], start_key: bytes, end_key: bytes, start: int, until: int
) -> list[Event]:
    failure = ""
    for endpoint in endpoints:
        try:
            async with asyncio.timeout(_TIMEOUT):
                return await _watch_member(endpoint, start_key, end_key, start, until)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            failure += f"{endpoint}: {error!r}; "
    raise AssertionError(f"history cannot be read: {failure}")


async def _watch_member(
    endpoint: str, start_key: bytes, end_key: bytes, start: int, until: int
) -> list[Event]:
    create = WatchCreateRequest(key=start_key, range_end=end_key, start_revision=start)
    events: list[Event] = []
    options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        method = channel.stream_stream(
            _PATH,
            request_serializer=WatchRequest.SerializeToString,
            response_deserializer=WatchResponse.FromString,
        )
        call = method(metadata=(("hasleader", "true"),))
        await call.write(WatchRequest(create_request=create))
        while not events or events[-1].kv.mod_revision < until:
            reply = await call.read()
            assert isinstance(reply, WatchResponse), "the watch ended before the present"
            assert not reply.canceled, f"history is gone: {reply.compact_revision} {reply.cancel_reason}"
            events.extend(reply.events)
        call.cancel()
    return events


def _steps(events: Sequence[Event]) -> list[Step]:
    by_revision: dict[int, list[Event]] = {}
    for event in events:
        by_revision.setdefault(event.kv.mod_revision, []).append(event)
    return [
        Step(
            revision=revision,
            puts=tuple(event.kv for event in group if event.type == Event.PUT),
            deletes=tuple(event.kv.key for event in group if event.type != Event.PUT),
        )
        for revision, group in sorted(by_revision.items())
    ]
