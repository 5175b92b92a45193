"""One group-committed operation: what its caller hands over, what it gets back, and its state on the way.

An operation is a small guarded Txn of its own (compares, thens, elses). The committer nests many of them in
one etcd Txn, where each wins or loses alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

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

__all__ = ["Entry", "GroupLimits", "GuardedOp", "OpEntry", "OpResult", "Responses", "lane_names"]

Responses: TypeAlias = "Sequence[ResponseOp]"

_USUAL_WIDTH: Final = 8
"""Compares, writes or reads that an operation in a full group may have."""

_USUAL_OPS: Final = 120


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
        max_ops: nested operations. The more, the less CPU each costs, if as many wait; an operation of more
            than ``max_txn_ops`` - ``max_ops`` compares, writes or reads travels in a smaller group.
        max_txn_ops: etcd's ``--max-txn-ops``.
        request_bytes: encoded size of a group; a larger operation travels alone.
        reply_bytes: expected size of a group's reply; likewise.
        max_request_bytes: largest single operation; below etcd's ``--max-request-bytes`` (1.5 MiB), which
            counts the whole raft entry.
    """

    max_ops: int = _USUAL_OPS
    max_txn_ops: int = 128
    request_bytes: int = 512 * 1024
    reply_bytes: int = 3 * 1024 * 1024
    max_request_bytes: int = 1_536 * 1024 - 4096

    @classmethod
    def of_server(cls, max_txn_ops: int) -> GroupLimits:
        """For an etcd of this ``--max-txn-ops``, at least 2: the usual size, or less if that leaves each
        operation fewer than eight compares, writes or reads."""
        return cls(max_ops=max(1, min(_USUAL_OPS, max_txn_ops - _USUAL_WIDTH)), max_txn_ops=max_txn_ops)

    def __post_init__(self) -> None:
        if not 1 <= self.max_ops < self.max_txn_ops:
            raise ConfigError(f"max_ops {self.max_ops} is not in 1 .. max_txn_ops {self.max_txn_ops} - 1")
        if not 0 < self.request_bytes <= self.max_request_bytes:
            raise ConfigError(f"request_bytes {self.request_bytes} is not in 1 .. {self.max_request_bytes}")
        if self.reply_bytes <= 0:
            raise ConfigError(f"reply_bytes {self.reply_bytes} is not positive")


class Entry:
    """An operation on its way, with all that the committer has to remember of it.

    A kind of operation is a subclass: it fills what is sent, before it is taken, and takes what came of it.
    """

    __slots__ = (
        "blocked_by",
        "deadline",
        "flying",
        "future",
        "lane_names",
        "last_error",
        "nested",
        "rebuilds",
        "reply_bytes",
        "retention",
        "slot",
        "starts",
        "unknown",
        "width",
    )

    future: asyncio.Future[Any]
    """What its caller waits for; made by the committer."""

    lane_names: tuple[bytes, ...]
    nested: bytes
    reply_bytes: int
    retention: int
    width: int

    def __init__(self, deadline: float, *, starts: bool = False) -> None:
        self.deadline = deadline
        self.starts = starts  # it begins new work, which waits for work under way
        self.blocked_by = 0
        self.flying = False  # a try is with etcd now
        self.unknown = False  # an earlier try has an unknown outcome
        self.rebuilds = 0
        self.last_error: StorageError | None = None
        self.slot: set[Entry] | None = None  # where the deadline wheel keeps it

    # --- what a kind of operation says ------------------------------------------------------------

    def applied(self, revision: int, responses: Responses) -> None:
        """A try has won. Called in the completion loop, before any caller of the Txn resumes."""

    def answer(self, won: bool, revision: int, responses: Responses) -> object:
        """What the caller gets."""
        return OpResult(won, revision, responses, self.unknown)

    def needs_space(self) -> bool:
        """Whether a win puts anything; etcd that is out of space still deletes and reads."""
        raise NotImplementedError

    def rebuild(self) -> bool:
        """Become the same operation under another retention lease; False if there is none."""
        return False

    def release(self) -> None:
        """It has its answer: let go what would keep it alive."""

    # --- for the committer ------------------------------------------------------------------------

    def check_size(self, limits: GroupLimits) -> None:
        """Raise RequestTooLarge if etcd would refuse it even alone."""
        if self.width > limits.max_txn_ops - 1:
            raise RequestTooLarge(
                f"an operation of {self.width} compares or writes, etcd takes {limits.max_txn_ops - 1}"
            )
        if len(self.nested) > limits.max_request_bytes:
            raise RequestTooLarge(
                f"an operation of {len(self.nested)} bytes, etcd takes {limits.max_request_bytes}"
            )

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


class OpEntry(Entry):
    """A ``GuardedOp`` on its way."""

    __slots__ = ("op",)

    def __init__(self, op: GuardedOp) -> None:
        super().__init__(op.deadline)
        self.lane_names = lane_names(op)
        self.reply_bytes = op.reply_bytes
        self._send(op)

    def _send(self, op: GuardedOp) -> None:
        self.op = op
        self.retention = op.retention
        self.width = max(len(op.compares), len(op.thens), len(op.elses))
        self.nested = wire.nested(op.compares, op.thens, op.elses)

    def applied(self, revision: int, responses: Responses) -> None:
        """Tell ``on_won``."""
        if self.op.on_won is not None:
            self.op.on_won(revision, responses)

    def needs_space(self) -> bool:
        """See ``Entry.needs_space``."""
        return any(map(wire.is_put, self.op.thens))

    def rebuild(self) -> bool:
        """Take what the operation's own ``rebuild`` makes."""
        op = self.op
        fresh = op.rebuild() if op.rebuild is not None else None
        if fresh is None:
            return False
        if fresh.lanes != op.lanes or fresh.adds != op.adds or not fresh.compares:
            raise ValueError("a rebuilt operation keeps its lanes and has a guard")
        self._send(fresh)
        return True

    def release(self) -> None:
        """Its callbacks know its author, who knows the operation: a ring for the collector to find."""
        self.op.on_won = self.op.rebuild = None


def lane_names(op: GuardedOp) -> tuple[bytes, ...]:
    """The lanes of an operation, those of what it adds to among them."""
    names = op.lanes
    if op.adds:
        names = (*names, *(b"\x00add\x00" + name for name in op.adds))
    return names if len(names) < 2 else tuple(dict.fromkeys(names))


def _copy(error: StorageError) -> StorageError:
    # One exception object for many callers would collect the tracebacks of all.
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
