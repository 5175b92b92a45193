"""Which operations fit into one Txn together.

etcd's count rule (``checkTxnRequest``): with N nested operations at the top level each of them may hold up to
``max_txn_ops`` - N compares, thens or elses (128 by default). Sizes are bounded besides: 512 KiB of request
keeps raft entries small, 3 MiB of expected reply keeps one slow reply from holding up everybody. An
operation that breaks a bound for a full group travels in a smaller group, or alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coordinator.etcd.guarded_op import Entry, GroupLimits

__all__ = ["Group", "ReadyQueue"]

_OP_OVERHEAD = 16  # bytes: tag and length of the nested op, and its share of the Txn around it


@dataclass(slots=True, kw_only=True)
class Group:
    """Operations that travel in one Txn, and what their earlier tries met."""

    entries: list[Entry]
    failures: int = 0
    epoch_read_again: bool = False

    def halves(self) -> tuple[Group, Group]:
        """First and second half, each with the group's history."""
        half = len(self.entries) // 2
        return self._part(self.entries[:half]), self._part(self.entries[half:])

    def by_need_of_space(self) -> tuple[Group, Group]:
        """Operations that put something, and those that only delete; either may be empty."""
        puts = [entry for entry in self.entries if entry.needs_space()]
        deletes = [entry for entry in self.entries if not entry.needs_space()]
        return self._part(puts), self._part(deletes)

    def _part(self, entries: list[Entry]) -> Group:
        return Group(entries=entries, failures=self.failures, epoch_read_again=self.epoch_read_again)


class ReadyQueue:
    """Operations free to go, first in first out, cut into groups that keep the limits."""

    __slots__ = ("_bytes", "_cap", "_limits", "_queue", "_reply")

    def __init__(self, limits: GroupLimits) -> None:
        self._limits = limits
        self._queue: deque[Entry] = deque()
        self._bytes = 0
        self._reply = 0
        self._cap = limits.max_ops

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def cap(self) -> int:
        """Operations a group may hold now: ``max_ops``, less while etcd refuses that many."""
        return self._cap

    def push(self, entry: Entry) -> None:
        """Add ``entry`` at the end."""
        self._queue.append(entry)
        self._bytes += len(entry.nested) + _OP_OVERHEAD
        self._reply += entry.reply_bytes

    def full_group_waits(self) -> bool:
        """Whether what waits fills a Txn by one of the limits."""
        return (
            len(self._queue) >= self._cap
            or self._bytes >= self._limits.request_bytes
            or self._reply >= self._limits.reply_bytes
        )

    def take(self) -> list[Entry]:
        """Remove the longest run from the head that fits into one Txn; at least one entry unless empty."""
        limits = self._limits
        queue = self._queue
        taken: list[Entry] = []
        size = reply = widest = 0
        while queue and len(taken) < self._cap:
            entry = queue[0]
            grown = size + len(entry.nested) + _OP_OVERHEAD
            reply += entry.reply_bytes
            if entry.width > widest:
                widest = entry.width
            if taken and (
                grown > limits.request_bytes
                or reply > limits.reply_bytes
                or len(taken) + 1 + widest > limits.max_txn_ops
            ):
                break
            size = grown
            queue.popleft()
            taken.append(entry)
            self._reply -= entry.reply_bytes
        self._bytes -= size
        return taken

    def refused_as_too_large(self, size: int) -> None:
        """etcd called a group of ``size`` too large: its own limits are lower than those configured."""
        self._cap = max(1, min(self._cap, size // 2))

    def accepted(self, size: int) -> None:
        """A group of ``size`` went through; a lowered cap creeps up again: one op may have been the cause."""
        if size >= self._cap < self._limits.max_ops:
            self._cap += 1
