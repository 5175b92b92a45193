"""One Watch stream of etcd: create watches, probe, read, and join the fragments of a response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import grpc

from coordinator.etcd.auth import Metadata
from coordinator.etcd.channels import Member, Purpose
from leasekeeper.internal.etcd.v1.watch_pb2 import (
    Event,
    WatchCreateRequest,
    WatchProgressRequest,
    WatchRequest,
    WatchResponse,
)

__all__ = ["ChangeEvent", "End", "EndKind", "FragmentJoiner", "WatchRange", "WatchStream", "split_revisions"]

ChangeEvent: TypeAlias = Event
"""A put or a deletion as etcd tells it: ``type``, ``kv`` (of a deletion only key and mod_revision)."""

_PATH = "/etcdserverpb.Watch/Watch"
# Without it a stream to a member that lost its quorum stays silently open for ever.
_REQUIRE_LEADER = (("hasleader", "true"),)


@dataclass(frozen=True, slots=True)
class WatchRange:
    """A range of keys to watch, [start, end), and the name that its changes are reported under."""

    name: str
    start: bytes
    end: bytes


class EndKind(Enum):
    """Why a stream is of no more use. All but BROKEN call for a new list."""

    BROKEN = "broken"
    """The connection or the member failed; nothing says that history was lost."""
    ENDED = "ended"
    """The server closed the stream with status OK."""
    CANCELLED = "cancelled"
    """The server cancelled one of the watches."""
    COMPACTED = "compacted"
    """The revision to go on from is gone."""
    QUIET = "quiet"
    """No answer to a probe."""
    ANOTHER_CLUSTER = "another cluster"


@dataclass(frozen=True, slots=True)
class End:
    """How a stream ended, with the server's words where there are any."""

    kind: EndKind
    detail: str = ""


class WatchStream:
    """One bidirectional call. A single task reads; any task may write.

    Args:
        member: where to.
        login: metadata of the login, if any.
    """

    def __init__(self, member: Member, login: Metadata | None) -> None:
        self.member = member
        method = member.channel(Purpose.WATCH).stream_stream(
            _PATH,
            request_serializer=WatchRequest.SerializeToString,
            response_deserializer=WatchResponse.FromString,
        )
        self._call = method(metadata=(*_REQUIRE_LEADER, *(login or ())))
        self._write_lock = asyncio.Lock()

    async def create(self, watch_id: int, watched: WatchRange, start_revision: int) -> None:
        """Ask for the changes of *watched* from *start_revision* on. Errors show at `read`."""
        create = WatchCreateRequest(
            key=watched.start,
            range_end=watched.end,
            start_revision=start_revision,
            progress_notify=True,
            fragment=True,
            watch_id=watch_id,
        )
        await self._write(WatchRequest(create_request=create))

    async def probe(self) -> None:
        """Ask for any answer at all.

        It proves that member and path live, no more: before etcd 3.5.8 the answer may overtake events
        (etcd issue 15220), so it says nothing about what has been delivered.
        """
        await self._write(WatchRequest(progress_request=WatchProgressRequest()))

    async def read(self) -> WatchResponse | End:
        """Wait for the next response, or for the end of the stream."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            return End(EndKind.BROKEN, f"{error.code().name}: {error.details()}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return End(EndKind.BROKEN, "the connection was closed")
        if message is grpc.aio.EOF:
            return End(EndKind.ENDED, "the server closed the stream")
        assert isinstance(message, WatchResponse)
        if message.canceled:
            if message.compact_revision:
                return End(EndKind.COMPACTED, f"history starts at {message.compact_revision}")
            return End(EndKind.CANCELLED, message.cancel_reason)
        return message

    def cancel(self) -> None:
        """End the call. Repeatable."""
        self._call.cancel()

    async def _write(self, request: WatchRequest) -> None:
        async with self._write_lock:
            try:
                await self._call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # the call has ended; `read` tells how
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise


class FragmentJoiner:
    """Puts the parts of split responses together, so that no revision is ever seen by half."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Event]] = {}

    def add(self, response: WatchResponse) -> Sequence[Event] | None:
        """Return all events once the last part is there, None before that."""
        watch_id = response.watch_id
        if not response.fragment and watch_id not in self._parts:
            return response.events
        parts = self._parts.setdefault(watch_id, [])
        parts.extend(response.events)
        if response.fragment:
            return None
        return self._parts.pop(watch_id)


def split_revisions(events: Sequence[Event]) -> list[tuple[int, Sequence[Event]]]:
    """Split *events*, which come in order of revision, into (mod revision, its events)."""
    if not events:
        return []
    if events[0].kv.mod_revision == events[-1].kv.mod_revision:
        return [(events[0].kv.mod_revision, events)]
    groups: list[tuple[int, Sequence[Event]]] = []
    first = 0
    for index in range(1, len(events) + 1):
        if index == len(events) or events[index].kv.mod_revision != events[first].kv.mod_revision:
            groups.append((events[first].kv.mod_revision, events[first:index]))
            first = index
    return groups
