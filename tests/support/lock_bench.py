"""Coordinators that share one store of locks in memory, wired as the app wires them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

from coordinator.core.fencing import make_token
from coordinator.core.lock_order import LockEntry, LockMode
from coordinator.ports import Session, SessionStore
from coordinator.services.contention import Contention, ContentionConfig
from coordinator.services.fencing import FutureTokens
from coordinator.services.holders import Holders
from coordinator.services.lock_acquisition import LockAcquisition
from coordinator.services.lock_cleanup import LockCleanup
from coordinator.services.lock_lines import LockLines
from coordinator.services.lock_values import HeldName, LockWish
from coordinator.services.locks import Locks
from tests.support.builders import FAR, a_session
from tests.support.clock import SteppingClock
from tests.support.fake_ports import RecordedNotices, StillFeeds
from tests.support.memory_locks import MemoryLocks, Watch

__all__ = ["NS", "LockCoordinator", "LockPresent", "settle"]

NS = "default"


@dataclass
class LockPresent:
    """``ports.Present`` of the memory store."""

    store: MemoryLocks
    epoch: int = 1
    regressed: bool = False

    def token(self) -> int:
        """The position."""
        return make_token(self.epoch, self.store.revision)

    async def refresh(self, *, deadline: float) -> int:
        """The position."""
        return self.token()


class _Sessions:
    """The part of ``ports.SessionStore`` that locks need."""

    def __init__(self, store: MemoryLocks) -> None:
        self._store = store

    async def read(self, namespace: str, session_id: str, *, deadline: float) -> Session | None:
        await asyncio.sleep(0)
        return a_session(session_id) if session_id in self._store.sessions else None


@dataclass
class LockCoordinator:
    """One coordinator. Await ``start`` first."""

    store: MemoryLocks
    clock: SteppingClock
    contention_config: ContentionConfig = field(default_factory=ContentionConfig)

    def __post_init__(self) -> None:
        self.lines = LockLines(self.store, self.clock)
        self.notices = RecordedNotices()
        self.holders = Holders(lambda suspect: None, notices=self.notices)
        self.holders.locks_held_by = self.lines.held_by
        self.contention = Contention(self.clock, self.contention_config, has_line=lambda one: False)
        self.cleanup = LockCleanup(self.store, self.lines, self.clock)
        self.present = LockPresent(self.store)
        sessions = cast(SessionStore, _Sessions(self.store))
        self.acquisition = LockAcquisition(
            self.store,
            sessions,
            StillFeeds(),
            self.present,
            self.lines,
            self.holders,
            self.contention,
            self.cleanup,
            self.clock,
        )
        self.locks = Locks(
            self.store,
            sessions,
            StillFeeds(),
            self.present,
            self.lines,
            self.contention,
            FutureTokens(self.notices, self.clock),
            self.clock,
        )

    async def start(self) -> Watch:
        """List, listen and clean up."""
        watch = await self.store.watch(self.lines, NS)
        self.cleaning = asyncio.ensure_future(self.cleanup.run())
        return watch

    async def stop(self) -> None:
        """End the clean-up."""
        self.cleaning.cancel()
        await asyncio.gather(self.cleaning, return_exceptions=True)

    async def take(
        self,
        *names: str,
        session: str,
        request: str = "r",
        mode: LockMode = LockMode.EXCLUSIVE,
        permits: int = 1,
        value: bytes = b"",
        wait_ms: int = 0,
        repeats: int = 0,
        deadline: float = FAR,
    ) -> list[LockEntry]:
        """AcquireLock."""
        wish = LockWish(
            session_id=session,
            request_id=request,
            names=names,
            mode=mode,
            permits=permits,
            value=value,
            wait_ms=wait_ms,
            repeats=repeats,
        )
        return await self.acquisition.acquire(NS, wish, deadline)

    async def give(self, *entries: LockEntry, repeat: bool = False) -> int:
        """ReleaseLock, by the session of the first."""
        held = [HeldName(entry.name, self.locks.token_of(entry)) for entry in entries]
        return await self.locks.release(NS, entries[0].session, held, repeat=repeat, deadline=FAR)


async def settle(rounds: int = 30) -> None:
    """Let everything run that can."""
    for _ in range(rounds):
        await asyncio.sleep(0)
