"""Walk a prefix of unknown density in ranges that end tightly.

``limit`` bounds etcd's answer, not its work: a range that ends far away walks the index over every key up to
its end while all writes wait (300,000 keys: 28 ms). Keys with a shard or a time in them are split by that.
Others begin with users' text, so the walk learns how long a prefix of the present key has about a page of
keys, and reads only up to the end of that prefix: longer where a page was too small for what lay there,
shorter where little did. That is found out by a few ranges that are too wide. So each walk marks where its
pages ended, and the next one reads no further than to the next mark: then only what has come since can be
too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coordinator.etcd.client import EtcdClient
from coordinator.etcd.keys import KeyRange
from coordinator.etcd.time_left import read_timeout
from coordinator.ports import Clock

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["PAGE", "TightWalk", "WalkHint"]

PAGE: Final = 500
"""Keys of one page: a few hundred KiB, a few milliseconds of etcd."""

_TOO_MANY: Final = 4
"""Pages that may lie behind one range before it is split further."""

_MANY_CHARACTERS: Final = 16
"""A prefix shorter by one character has at most about so many times the keys."""


@dataclass(slots=True)
class WalkHint:
    """What a walk leaves to the next one over the same span: ``marks``, in order, with about a page of keys
    between them."""

    marks: Sequence[bytes] = ()


class TightWalk:
    """A walk over ``span``, in order; what changes meanwhile is seen or not.

    Args:
        client: the etcd client.
        span: begins with the prefix, and ends with it.
        clock: the time that deadlines are measured in.
        keys_only: leave the values.
        page: keys of one page.
        hint: of an earlier walk over the span; it is renewed at the end of this one.

    ``covered`` is how many keys each range covered, read or not; without marks the first cannot know how far
    to go.
    """

    def __init__(
        self,
        client: EtcdClient,
        span: KeyRange,
        *,
        clock: Clock,
        keys_only: bool,
        page: int = PAGE,
        hint: WalkHint | None = None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._keys_only = keys_only
        self._page = page
        self._at = span.start
        self._end = span.end
        self._root = len(span.start)
        self._hint = hint or WalkHint()
        self._marks = self._hint.marks
        self._next_mark = 0
        self._new_marks: list[bytes] = []
        self._unmarked = 0
        self._depth = 0
        self.covered: list[int] = []

    async def page(self, *, deadline: float) -> Sequence[KeyValue] | None:
        """The next keys, maybe none; None at the end.

        Raises:
            EtcdUnavailable: no answer; the same page may be asked for again.
        """
        if self._at >= self._end:
            self._hint.marks = self._new_marks
            return None
        end = self._stop()
        reply = await self._client.range(
            self._at,
            end,
            limit=self._page,
            keys_only=self._keys_only,
            timeout=read_timeout(self._clock, deadline),
        )
        self.covered.append(reply.count)
        kvs = reply.kvs
        self._unmarked += len(kvs)
        if kvs and self._unmarked * 2 >= self._page:
            self._new_marks.append(kvs[-1].key + b"\0")
            self._unmarked = 0
        if reply.more and kvs:
            self._at = kvs[-1].key + b"\0"
            if reply.count > self._page * _TOO_MANY:
                self._depth = max(_shared(kvs[0].key, kvs[-1].key), self._depth) + 1
        else:
            self._at = end
            if reply.count * _MANY_CHARACTERS < self._page:
                self._depth = max(self._root, self._depth - 1)
        return kvs

    def _stop(self) -> bytes:
        """The end of the prefix that the present key has at the depth found so far, or the next mark."""
        while self._next_mark < len(self._marks) and self._marks[self._next_mark] <= self._at:
            self._next_mark += 1
        end = self._marks[self._next_mark] if self._next_mark < len(self._marks) else self._end
        depth = min(self._depth, len(self._at))
        if depth <= self._root:
            return end
        prefix = self._at[:depth]
        return min(end, prefix[:-1] + bytes((min(prefix[-1] + 1, 0xFF),)))


def _shared(one: bytes, other: bytes) -> int:
    """Length of their common prefix."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
