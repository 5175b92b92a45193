"""Takes entries out of locks' lines whose calls gave up or went away.

Best effort and bounded: an entry that stays is left out by the session's beats, and taken away by that. An
entry that a repeat of the call has adopted is left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.core.lock_order import LockEntry
from coordinator.errors import LeasekeeperError
from coordinator.ports import Clock, LockDeletion, LockStore
from coordinator.services.lock_lines import LockLines
from coordinator.services.waiting import wait_event

__all__ = ["LockCleanup", "put_at"]

_log = logging.getLogger(__name__)

_TRIES: Final = 4
_PAUSE_S: Final = 1.0
_QUEUED: Final = 20_000
"""Calls at most whose entries wait to be taken out; more are left to the beats."""


@dataclass(slots=True, eq=False)
class _Left:
    namespace: str
    entries: Awaitable[Sequence[LockEntry]] | Sequence[LockEntry]
    done: asyncio.Event = field(default_factory=asyncio.Event)


class LockCleanup:
    """A queue of entries to delete, and the one owner of the tasks that do it.

    Args:
        store: where locks are.
        lines: told of what has gone.
        clock: time.
        timeout: seconds that one deletion may take.
    """

    def __init__(self, store: LockStore, lines: LockLines, clock: Clock, *, timeout: float = 5.0) -> None:
        self._store = store
        self._lines = lines
        self._clock = clock
        self._timeout = timeout
        self._queue: deque[_Left] = deque()
        self._under_way = 0
        self._wake = asyncio.Event()
        self.removed = 0

    def later(
        self, namespace: str, entries: Awaitable[Sequence[LockEntry]] | Sequence[LockEntry]
    ) -> asyncio.Event:
        """Entries of a call that has gone; perhaps they are still being put. Set once it is over."""
        left = _Left(namespace, entries)
        if len(self._queue) + self._under_way >= _QUEUED:
            _log.warning("too many entries wait to be taken out of their lines; the beats will tell")
            if isinstance(entries, Coroutine):
                entries.close()
            left.done.set()
        else:
            self._queue.append(left)
            self._wake.set()
        return left.done

    async def remove(self, namespace: str, entries: Sequence[LockEntry], *, seconds: float) -> None:
        """Take them out, and wait for it a while; it goes on behind that."""
        await wait_event(self._clock, self.later(namespace, entries), seconds)

    async def run(self) -> None:
        """Work the queue off, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    tasks.create_task(self._take_out(self._queue.popleft()))

    async def run_once(self) -> int:
        """Everything that is queued now; answers how many entries have gone."""
        before = self.removed
        await asyncio.gather(*(self._take_out(self._queue.popleft()) for _ in range(len(self._queue))))
        return self.removed - before

    async def _take_out(self, left: _Left) -> None:
        self._under_way += 1
        try:
            entries = left.entries
            if not isinstance(entries, Sequence):
                entries = await entries
            entries = [entry for entry in entries if entry.version]  # others belong to a later send
            for number in range(_TRIES):
                if number:
                    await self._clock.sleep(_PAUSE_S)
                entries = await self._delete(left.namespace, entries)
                if not entries:
                    return
            _log.warning("%d entries of locks could not be taken out of their lines yet", len(entries))
        except LeasekeeperError as error:
            _log.debug("entries of a call that has gone: %s", error)
        finally:
            self._under_way -= 1
            left.done.set()

    async def _delete(self, namespace: str, entries: Sequence[LockEntry]) -> list[LockEntry]:
        """Try once; those of which nothing is certain."""
        deadline = self._clock.monotonic() + self._timeout
        results = await self._store.delete(namespace, entries, untouched=True, deadline=deadline)
        left: list[LockEntry] = []
        for entry, result in zip(entries, results, strict=True):
            if not isinstance(result, LockDeletion):
                left.append(entry)
            elif result.deleted:
                self.removed += 1
                self._lines.deleted(namespace, entry)
        return left


def put_at(entries: Sequence[LockEntry], revision: int, version: int = 0) -> list[LockEntry]:
    """Entries as they stand once they are put."""
    return [entry.standing(revision, version or revision) for entry in entries]
