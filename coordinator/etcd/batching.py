"""Which operations fit into one Txn together.

etcd's count rule (``checkTxnRequest``): with N nested operations at the top level each of them may hold up to
``max_txn_ops`` - N compares, thens or elses (128 by default). Sizes are bounded besides: 512 KiB of request
keeps raft entries small, 3 MiB of expected reply keeps one slow reply from holding up everybody. An
operation that breaks a bound for a full group travels in a smaller group, or alone.

Work under way goes before new work: an operation that starts something (a submission) waits for those that go
on with something or end it, else whoever submits runs ahead of the workers and every job waits behind a
backlog. So that new work does not starve where the workers alone could fill every group, it has a quarter of
the places as of right, and what it did not get is owed to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coordinator.etcd.guarded_op import Entry, GroupLimits

__all__ = ["Group", "ReadyQueue"]

_SHARE_OF_NEW = 0.25  # a job makes three operations, so a third would be no priority at all
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
    """Operations free to go, cut into groups that keep the limits; first in first out, but for new work."""

    __slots__ = ("_bytes", "_cap", "_limits", "_new", "_owed", "_queue", "_reply")

    def __init__(self, limits: GroupLimits) -> None:
        self._limits = limits
        self._queue: deque[Entry] = deque()
        self._new: deque[Entry] = deque()
        self._owed = 0.0  # places that new work has a right to
        self._bytes = 0
        self._reply = 0
        self._cap = limits.max_ops

    def __len__(self) -> int:
        return len(self._queue) + len(self._new)

    @property
    def cap(self) -> int:
        """Operations a group may hold now: ``max_ops``, less while etcd refuses that many."""
        return self._cap

    def push(self, entry: Entry) -> None:
        """Add ``entry`` at the end of its line."""
        (self._new if entry.starts else self._queue).append(entry)
        self._bytes += len(entry.nested) + _OP_OVERHEAD
        self._reply += entry.reply_bytes

    def full_group_waits(self) -> bool:
        """Whether what waits fills a Txn by one of the limits."""
        return (
            len(self._queue) + len(self._new) >= self._cap
            or self._bytes >= self._limits.request_bytes
            or self._reply >= self._limits.reply_bytes
        )

    def take(self) -> list[Entry]:
        """Remove what goes into the next Txn; at least one entry unless empty."""
        group = _Filling(self._limits)
        cap = self._cap
        new = self._new
        if not self._queue or not new:
            self._owed = 0.0
            group.fill(self._queue or new, cap)
        else:
            self._owed = min(cap, self._owed + cap * _SHARE_OF_NEW)
            kept = min(len(new), int(self._owed))
            waiting = len(new)
            if group.fill(self._queue, cap - kept) and group.fill(new, len(group.taken) + kept):
                group.fill(self._queue, cap)
                group.fill(new, cap)
            self._owed = max(0.0, self._owed - (waiting - len(new))) if new else 0.0
        self._bytes -= group.size
        self._reply -= group.reply
        return group.taken

    def refused_as_too_large(self, size: int) -> None:
        """etcd called a group of ``size`` too large: its own limits are lower than those configured."""
        self._cap = max(1, min(self._cap, size // 2))

    def accepted(self, size: int) -> None:
        """A group of ``size`` went through; a lowered cap creeps up again: one op may have been the cause."""
        if size >= self._cap < self._limits.max_ops:
            self._cap += 1


class _Filling:
    """A group in the making."""

    __slots__ = ("_limits", "reply", "size", "taken", "widest")

    def __init__(self, limits: GroupLimits) -> None:
        self._limits = limits
        self.taken: list[Entry] = []
        self.size = self.reply = self.widest = 0

    def fill(self, queue: deque[Entry], count: int) -> bool:
        """Take from the head of ``queue`` up to ``count`` entries in all; False if a limit ends it."""
        limits, taken = self._limits, self.taken
        while queue and len(taken) < count:
            entry = queue[0]
            size = self.size + len(entry.nested) + _OP_OVERHEAD
            reply = self.reply + entry.reply_bytes
            widest = max(self.widest, entry.width)
            if taken and (
                size > limits.request_bytes
                or reply > limits.reply_bytes
                or len(taken) + 1 + widest > limits.max_txn_ops
            ):
                return False
            self.size, self.reply, self.widest = size, reply, widest
            taken.append(queue.popleft())
        return True
