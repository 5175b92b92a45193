"""One AcquireLock call on its way: what it asks for, what it saw of the lines, what it may leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.core.lock_order import Line, LockEntry, LockMode, session_waiter
from coordinator.ports import LockCommit
from coordinator.services.contention import Resource
from coordinator.services.digests import lock_nonce, request_digest
from coordinator.services.lock_cleanup import put_at
from coordinator.services.lock_values import LOCK, LockWish

__all__ = ["LinesSeen", "LockCall", "adopted_by", "call_of", "own_of", "put_by", "resource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockCall:
    """``entries``: one for each name, as they are to be put. ``deadline``: monotonic seconds."""

    namespace: str
    session_id: str
    nonce: bytes
    entries: tuple[LockEntry, ...]
    deadline: float

    @property
    def waiter(self) -> str:
        """The last part of its entries' keys."""
        return self.entries[0].waiter


@dataclass(frozen=True, slots=True)
class LinesSeen:
    """Lines by name, complete up to ``revision``; ``stored``: by a read of the store."""

    lines: Mapping[str, Line]
    revision: int
    stored: bool


def call_of(namespace: str, wish: LockWish, *, now_ms: int, deadline: float) -> LockCall:
    """What a wish comes to."""
    nonce = lock_nonce(wish)
    waiter = session_waiter(wish.session_id, request_digest(wish.request_id))
    permits = wish.permits if wish.mode is LockMode.SEMAPHORE else 1
    return LockCall(
        namespace=namespace,
        session_id=wish.session_id,
        nonce=nonce,
        entries=tuple(
            [
                LockEntry(
                    name=name,
                    waiter=waiter,
                    session=wish.session_id,
                    mode=wish.mode,
                    permits=permits,
                    nonce=nonce,
                    value=wish.value,
                    since_ms=now_ms,
                    repeats=wish.repeats,
                )
                for name in wish.names
            ]
        ),
        deadline=deadline,
    )


def own_of(call: LockCall, seen: LinesSeen) -> list[LockEntry]:
    """Entries of the call that stand already, in its order."""
    if not any(line.owners or line.misfits for line in seen.lines.values()):
        return []
    return [
        standing
        for entry in call.entries
        for line in (seen.lines[entry.name],)
        for standing in (*line.owners, *line.waiters, *line.misfits)
        if standing.waiter == call.waiter
    ]


async def put_by(pending: Awaitable[LockCommit], asked: Sequence[LockEntry]) -> Sequence[LockEntry]:
    """The entries that a commit under way puts."""
    commit = await pending
    return put_at(asked, commit.revision) if commit.won else ()


async def adopted_by(pending: asyncio.Future[int], own: Sequence[LockEntry]) -> Sequence[LockEntry]:
    """The entries that an adoption under way takes over."""
    version = await pending
    return [replace(entry, version=version) for entry in own] if version else ()


def resource(call: LockCall, name: str) -> Resource:
    """One of its locks, for ``services.contention``."""
    return Resource(LOCK, call.namespace, name)
