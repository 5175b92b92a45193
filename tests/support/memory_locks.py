"""``ports.LockStore`` in memory: a history of its own, sessions that open and end, watches that may lag."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from coordinator.core.lock_order import LockEntry
from coordinator.errors import LeasekeeperError, OutcomeUnknown
from coordinator.ports import LockChanges, LockCommit, LockDeletion, LocksRead

__all__ = ["MemoryLocks", "Watch"]


class Watch:
    """One coordinator's watch: what it is told lies in ``pending`` while it is ``held``."""

    def __init__(self, listener: LockChanges, namespace: str) -> None:
        self.listener = listener
        self.namespace = namespace
        self.held = False
        self.pending: list[tuple[int, list[LockEntry], list[LockEntry]]] = []

    def tell(self, revision: int, put: list[LockEntry], gone: list[LockEntry]) -> None:
        """One revision's changes."""
        self.pending.append((revision, put, gone))
        if not self.held:
            self.deliver()

    def deliver(self, count: int = 1 << 30) -> None:
        """Tell the first ``count`` of what is pending."""
        for _ in range(min(count, len(self.pending))):
            revision, put, gone = self.pending.pop(0)
            for entry in put:
                own = self.listener.own_put(self.namespace, entry.name, entry.waiter, entry.version)
                self.listener.lock_put(self.namespace, own or entry)
            for entry in gone:
                self.listener.lock_deleted(self.namespace, entry.name, entry.waiter, revision)
            self.listener.locks_passed(self.namespace, revision)

    def release(self) -> None:
        """Lag no more."""
        self.held = False
        self.deliver()


class MemoryLocks:
    """One namespace's locks.

    Attributes:
        revision: of the last change.
        sessions: those that are open.
        entries: by (name, waiter).
        watches: told of changes.
        failures: errors that the next writes raise after they were applied (OutcomeUnknown) or instead.
        gate: writes wait for it.
        commits: writes that reached the store.
        reads: reads that did.
        unknown: waiters of entries whose puts were answered by OutcomeUnknown.
    """

    def __init__(self) -> None:
        self.revision = 10
        self.sessions: set[str] = set()
        self.entries: dict[tuple[str, str], LockEntry] = {}
        self.watches: list[Watch] = []
        self.failures: list[LeasekeeperError] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.commits = 0
        self.reads = 0
        self.unknown: set[str] = set()

    async def watch(self, listener: LockChanges, namespace: str = "default") -> Watch:
        """List and listen."""
        await listener.relist(namespace, self.revision)
        watch = Watch(listener, namespace)
        self.watches.append(watch)
        return watch

    def line(self, name: str) -> list[LockEntry]:
        """Entries of one lock, in order."""
        return sorted(
            (entry for entry in self.entries.values() if entry.name == name), key=lambda one: one.revision
        )

    def end(self, session: str) -> None:
        """A session's end."""
        self.sessions.discard(session)
        gone = [entry for entry in self.entries.values() if entry.session == session]
        if gone:
            self._change([], gone)

    def remove(self, entry: LockEntry) -> None:
        """By hand."""
        self._change([], [entry])

    def _change(self, put: list[LockEntry], gone: list[LockEntry]) -> int:
        self.revision += 1
        put = [
            replace(entry, revision=entry.revision or self.revision, version=self.revision) for entry in put
        ]
        for entry in gone:
            del self.entries[entry.name, entry.waiter]
        for entry in put:
            self.entries[entry.name, entry.waiter] = entry
        for watch in self.watches:
            watch.tell(self.revision, put, gone)
        return self.revision

    async def _reached(self) -> LeasekeeperError | None:
        """An unknown outcome that comes after the write, if there is one."""
        await asyncio.sleep(0)
        await self.gate.wait()
        self.commits += 1
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None and not isinstance(failure, OutcomeUnknown):
            raise failure
        return failure

    async def acquire(
        self,
        namespace: str,
        asked: Sequence[LockEntry],
        *,
        after: int | None,
        deadline: float,
        orphaned: Callable[[Awaitable[LockCommit]], None] = lambda pending: None,
    ) -> LockCommit:
        """See ``ports.LockStore``."""
        pending = asyncio.ensure_future(self._acquire(asked, after))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            orphaned(pending)
            raise

    async def _acquire(self, asked: Sequence[LockEntry], after: int | None) -> LockCommit:
        unknown = await self._reached()
        session = asked[0].session
        lines = {entry.name: self.line(entry.name) for entry in asked}
        absent = all((entry.name, entry.waiter) not in self.entries for entry in asked)
        fresh = after is None or all(one.version <= after for line in lines.values() for one in line)
        won = session in self.sessions and absent and fresh
        revision = self._change(list(asked), []) if won else self.revision
        if unknown is not None:
            self.unknown.add(asked[0].waiter)
            raise unknown
        if won:
            return LockCommit(won=True, revision=revision)
        return LockCommit(won=False, revision=revision, session_gone=session not in self.sessions)

    async def adopt(self, namespace: str, found: Sequence[LockEntry], *, deadline: float) -> int:
        """See ``ports.LockStore``."""
        unknown = await self._reached()
        standing = [self.entries.get((entry.name, entry.waiter)) for entry in found]
        won = all(
            one is not None and one.version == entry.version
            for one, entry in zip(standing, found, strict=True)
        )
        revision = self._change(list(found), []) if won else 0
        if unknown is not None:
            self.unknown.add(found[0].waiter)
            raise unknown
        return revision

    async def delete(
        self, namespace: str, entries: Sequence[LockEntry], *, untouched: bool = False, deadline: float
    ) -> list[LockDeletion | LeasekeeperError]:
        """See ``ports.LockStore``."""
        results: list[LockDeletion | LeasekeeperError] = []
        for entry in entries:
            try:
                unknown = await self._reached()
            except LeasekeeperError as error:
                results.append(error)
                continue
            stands = self.entries.get((entry.name, entry.waiter))
            deleted = stands is not None and (
                stands.version == entry.version if untouched else stands.revision == entry.revision
            )
            revision = self._change([], [stands]) if deleted and stands is not None else self.revision
            results.append(
                unknown
                if unknown is not None
                else LockDeletion(deleted, revision, session_open=entry.session in self.sessions)
            )
        return results

    async def read(self, namespace: str, names: Sequence[str], *, deadline: float) -> LocksRead:
        """See ``ports.LockStore``."""
        self.reads += 1
        await asyncio.sleep(0)
        return LocksRead(self.revision, {name: tuple(self.line(name)) for name in names})

    async def of_session(self, namespace: str, session_id: str, *, deadline: float) -> list[LockEntry]:
        """See ``ports.LockStore``."""
        await asyncio.sleep(0)
        return [entry for entry in self.entries.values() if entry.session == session_id]

    async def list_entries(self, namespace: str, *, deadline: float) -> tuple[int, list[LockEntry]]:
        """See ``ports.LockStore``."""
        await asyncio.sleep(0)
        return self.revision, list(self.entries.values())
