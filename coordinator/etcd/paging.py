"""Walk a range of keys in pages, all at the revision of the first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from coordinator.etcd.client import EtcdClient
from coordinator.etcd.keys import KeyRange
from coordinator.etcd.time_left import read_timeout
from coordinator.ports import Clock

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["PAGE", "pages"]

PAGE: Final = 500
"""Keys of one page: a few hundred KiB, a few milliseconds of etcd."""


async def pages(
    client: EtcdClient, span: KeyRange, *, clock: Clock, deadline: float, page: int = PAGE
) -> AsyncIterator[KeyValue]:
    """Every key of ``span``, in order, as of one revision.

    Raises:
        EtcdUnavailable: no answer by the deadline.
        Compacted: history was compacted while pages were read; begin again.
    """
    start, revision = span.start, 0
    while True:
        reply = await client.range(
            start, span.end, limit=page, revision=revision, timeout=read_timeout(clock, deadline)
        )
        for kv in reply.kvs:
            yield kv
        if not reply.more or not reply.kvs:
            return
        revision = revision or reply.header.revision
        start = reply.kvs[-1].key + b"\0"
