"""Random histories of locks at two coordinators.

Nobody is told to own what it does not, nobody waits for ever, nothing is left behind. Each bug that is put
in is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordinator.core.lock_order import Line, LockEntry
from coordinator.ports import LockCommit
from coordinator.services import lock_acquisition
from coordinator.services.lock_lines import LockLines, Standing
from tests.property.lock_world import play

HISTORIES = 150
TRIED = 400
"""Histories in which a bug has to show."""


@pytest.mark.parametrize("seeds", [range(at, at + 25) for at in range(0, HISTORIES, 25)], ids=str)
async def test_every_history_is_sound(seeds: Sequence[int]) -> None:
    for seed in seeds:
        assert await play(seed) == [], f"seed {seed}"


def guessed_ownership(patch: pytest.MonkeyPatch) -> None:
    """An entry is judged by what is known, however little."""
    patch.setattr(LockLines, "known_to", lambda self, namespace, name: 1 << 40)


def forgotten_compare(patch: pytest.MonkeyPatch) -> None:
    """The Txn does not compare that nothing was added."""
    from tests.support.memory_locks import MemoryLocks

    original = MemoryLocks.acquire

    async def acquire(
        self: MemoryLocks,
        namespace: str,
        asked: Sequence[LockEntry],
        *,
        after: int | None,
        **more: Any,
    ) -> LockCommit:
        return await original(self, namespace, asked, after=None if after is None else 1 << 40, **more)

    patch.setattr(MemoryLocks, "acquire", acquire)


def jumped_queue(patch: pytest.MonkeyPatch) -> None:
    """A new entry is admitted past those who wait."""
    original = Line.admits
    patch.setattr(Line, "admits", lambda self, entry: original(replace(self, waiters=()), entry))


def lost_wake_up(patch: pytest.MonkeyPatch) -> None:
    """A deletion tells nobody."""
    patch.setattr(LockLines, "_tell", lambda self, namespace, space: None)


def stale_clean_up(patch: pytest.MonkeyPatch) -> None:
    """The clean-up of a call that has gone takes out what its repeat has adopted."""
    from tests.support.memory_locks import MemoryLocks

    original = MemoryLocks.delete

    async def delete(
        self: MemoryLocks, namespace: str, entries: Sequence[LockEntry], **more: object
    ) -> object:
        return await original(self, namespace, entries, deadline=0.0)

    patch.setattr(MemoryLocks, "delete", delete)


def no_clean_up(patch: pytest.MonkeyPatch) -> None:
    """A call that goes away during its commit is forgotten."""

    async def nothing(pending: object, asked: object) -> tuple[()]:
        return ()

    patch.setattr(lock_acquisition, "put_by", nothing)


def guessed_completeness(patch: pytest.MonkeyPatch) -> None:
    """Entries that are put to wait count as seen by a compare."""
    original = LockLines.put

    def put(self: LockLines, namespace: str, entries: Iterable[LockEntry], *, complete: bool) -> None:
        original(self, namespace, entries, complete=True)

    patch.setattr(LockLines, "put", put)


def judged_deletions(patch: pytest.MonkeyPatch) -> None:
    """An own deletion counts in judgements before the watch has come to it."""

    def deleted(self: LockLines, namespace: str, entry: LockEntry) -> None:
        space = self._spaces[namespace]
        self._drop(namespace, space, entry.name, entry.waiter, entry.revision)
        self._tell(namespace, space)

    patch.setattr(LockLines, "deleted", deleted)


def half_owned(patch: pytest.MonkeyPatch) -> None:
    """A call of several names owns when it owns one."""
    original = LockLines.standing

    def standing(self: LockLines, namespace: str, entry: LockEntry) -> Standing:
        own = original(self, namespace, entry)
        others = [
            original(self, namespace, one)
            for one in self.of_session(namespace, entry.session)
            if one.waiter == entry.waiter
        ]
        return Standing.OWNS if own is Standing.WAITS and Standing.OWNS in others else own

    patch.setattr(LockLines, "standing", standing)


def unsecured_twin(patch: pytest.MonkeyPatch) -> None:
    """A call is told that it owns by an entry that its twin may just be taking out."""

    async def secured(self: object, call: object, entries: Sequence[LockEntry]) -> list[LockEntry]:
        return list(entries)

    patch.setattr(lock_acquisition.LockAcquisition, "_secured", secured)


@pytest.mark.parametrize(
    "bug",
    [
        guessed_ownership,
        forgotten_compare,
        jumped_queue,
        lost_wake_up,
        stale_clean_up,
        no_clean_up,
        guessed_completeness,
        judged_deletions,
        half_owned,
        unsecured_twin,
    ],
)
async def test_a_bug_that_is_put_in_is_found(bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)  # type: ignore[operator]
    for seed in range(TRIED):
        if await play(seed):
            return
    pytest.fail(f"{TRIED} histories did not show it")
