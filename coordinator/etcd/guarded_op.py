"""One group-committed operation: what its caller hands over, what it gets back, and its state on the way.

An operation is a small guarded Txn of its own (compares, thens, elses). The committer nests many of them in
one etcd Txn, where each wins or loses alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from coordinator.errors import (
    ConfigError,
    DeadlinePassed,
    OutcomeUnknown,
    RequestTooLarge,
    StorageError,
)
from coordinator.etcd import wire

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import ResponseOp

__all__ = ["Entry", "GroupLimits", "GuardedOp", "OpResult", "Responses"]

Responses: TypeAlias = "Sequence[ResponseOp]"


@dataclass(slots=True, kw_only=True)
class GuardedOp:
    """One operation to commit. Pieces are encoded by ``coordinator.etcd.wire``.

    A mutable class because freezing costs a microsecond per operation. Nobody changes one once it was handed
    over, but for the committer, which drops the callbacks of an operation that has its answer.

    Attributes:
        lanes: names of which only one operation may be under way: job ids, unique keys, each with what tells
            it from another namespace's. They cover every key that the operation writes or compares for
            absence, except those that ``adds`` covers.
        adds: lock names that this operation adds an entry to; one operation in flight per name.
        compares: the guard, at least one. A repeat of the operation after it was applied **must** fail the
            guard, since a try whose outcome is unknown is sent again.
        thens: what a win does; flat, no further nesting.
        elses: reads that tell a loser (or a repeat of a winner) what holds.
        deadline: seconds of the committer's monotonic clock; nothing is sent after it.
        reply_bytes: expected size of the reply, an estimate.
        on_won: called with the Txn's revision and the branch's responses, in the completion loop, before any
            caller of the Txn resumes. Not called for a win that only a later try recognises
            (``OpResult.resent``).
        retention: id of the retention lease that ``thens`` name, 0 for none.
        rebuild: makes the same operation (same lanes, same guard) under another retention lease, or None if
            there is none; called when etcd says that the lease is dead.
    """

    lanes: tuple[bytes, ...]
    compares: tuple[bytes, ...]
    thens: tuple[bytes, ...]
    deadline: float
    elses: tuple[bytes, ...] = ()
    adds: tuple[bytes, ...] = ()
    reply_bytes: int = 128
    on_won: Callable[[int, Responses], None] | None = None
    retention: int = 0
    rebuild: Callable[[], GuardedOp | None] | None = None


@dataclass(slots=True)
class OpResult:
    """What became of one operation.

    Attributes:
        won: its guard held and its ``thens`` were applied, by the try that was answered.
        revision: header revision of the whole Txn; of a winner that wrote, the revision of its writes.
        responses: of the branch taken, in its order.
        resent: an earlier try had an unknown outcome. If then ``won`` is False, the caller has to look into
            ``responses`` for its own nonce: found, the earlier try won; not found proves nothing more than
            that the guard failed when this try was applied.
    """

    won: bool
    revision: int
    responses: Responses
    resent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """How much travels in one Txn.

    Attributes:
        max_ops: nested operations; 60-80 is best on 2 cores, more rarely fill.
        max_txn_ops: etcd's ``--max-txn-ops``.
        request_bytes: encoded size of a group; a larger operation travels alone.
        reply_bytes: expected size of a group's reply; likewise.
        max_request_bytes: largest single operation; below etcd's ``--max-request-bytes`` (1.5 MiB), which
            counts the whole raft entry.
    """

    max_ops: int = 80
    max_txn_ops: int = 128
    request_bytes: int = 512 * 1024
    reply_bytes: int = 3 * 1024 * 1024
    max_request_bytes: int = 1_536 * 1024 - 4096

    def __post_init__(self) -> None:
        if not 1 <= self.max_ops < self.max_txn_ops:
            raise ConfigError(f"max_ops {self.max_ops} is not in 1 .. max_txn_ops {self.max_txn_ops} - 1")
        if not 0 < self.request_bytes <= self.max_request_bytes:
            raise ConfigError(f"request_bytes {self.request_bytes} is not in 1 .. {self.max_request_bytes}")
        if self.reply_bytes <= 0:
            raise ConfigError(f"reply_bytes {self.reply_bytes} is not positive")


class Entry:
    """An operation on its way, with all that the committer has to remember of it."""

    __slots__ = (
        "blocked_by",
        "deadline",
        "flying",
        "future",
        "lane_names",
        "last_error",
        "nested",
        "op",
        "rebuilds",
        "slot",
        "unknown",
        "width",
    )

    def __init__(self, op: GuardedOp, future: asyncio.Future[OpResult], limits: GroupLimits) -> None:
        self.lane_names = _lane_names(op)
        self.deadline = op.deadline
        self.future = future
        self.blocked_by = 0
        self.flying = False  # a try is with etcd now
        self.unknown = False  # an earlier try has an unknown outcome
        self.rebuilds = 0
        self.last_error: StorageError | None = None
        self.slot: set[Entry] | None = None  # where the deadline wheel keeps it
        self.fill(op, limits)

    def fill(self, op: GuardedOp, limits: GroupLimits) -> None:
        """Take ``op`` as what to send.

        Raises:
            RequestTooLarge: etcd would refuse it even alone.
        """
        self.op = op
        self.width = max(len(op.compares), len(op.thens), len(op.elses))
        if self.width > limits.max_txn_ops - 1:
            raise RequestTooLarge(
                f"an operation of {self.width} compares or writes, etcd takes {limits.max_txn_ops - 1}"
            )
        self.nested = wire.nested(op.compares, op.thens, op.elses)
        size = len(self.nested)
        if size > limits.max_request_bytes:
            raise RequestTooLarge(f"an operation of {size} bytes, etcd takes {limits.max_request_bytes}")

    def needs_space(self) -> bool:
        """Whether a win puts anything; etcd that is out of space still deletes and reads."""
        return any(map(wire.is_put, self.op.thens))

    def refuse(self, error: StorageError) -> None:
        """Answer that this try wrote nothing; which says nothing of an earlier one with unknown outcome."""
        if self.future.done():
            return
        if self.unknown:
            unknown = OutcomeUnknown(
                f"a repeat was refused ({error}); whether the first was applied is unknown"
            )
            unknown.__cause__ = error
            self.future.set_exception(unknown)
        else:
            self.future.set_exception(_copy(error))

    def expire(self, why: str) -> bool:
        """Answer that time is up: unknown if a try may have been applied, else certain. False if answered."""
        if self.future.done():
            return False
        error: StorageError
        last = self.last_error
        if not self.unknown and not self.flying:
            error = DeadlinePassed(f"{why} before anything was sent") if last is None else _copy(last)
        elif isinstance(last, OutcomeUnknown):
            error = _copy(last)
        else:
            error = OutcomeUnknown(f"{why} before etcd answered")
        self.future.set_exception(error)
        return True


def _lane_names(op: GuardedOp) -> tuple[bytes, ...]:
    names = op.lanes
    if op.adds:
        names = (*names, *(b"\x00add\x00" + name for name in op.adds))
    return names if len(names) < 2 else tuple(dict.fromkeys(names))


def _copy(error: StorageError) -> StorageError:
    # One exception object for many callers would collect the tracebacks of all.
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
