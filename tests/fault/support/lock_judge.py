"""Judges what callers were told of locks by the history of the entries in etcd, revision for revision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.core.lock_order import LockEntry, LockMode, line_of

__all__ = ["LockHistory", "Sink", "Told", "judge"]


@dataclass(frozen=True, slots=True)
class Told:
    """A caller was told that it owns the entry created at ``created``; etcd had come to ``known`` by then."""

    name: str
    created: int
    known: int


@dataclass(frozen=True, slots=True)
class LockHistory:
    """Entries as they came and went: (revision, name, waiter, entry or None), in order."""

    changes: Sequence[tuple[int, str, str, LockEntry | None]]


@dataclass(slots=True)
class Sink:
    """A store that keeps the largest token of each exclusive name, and counts who is inside the others.

    Attributes:
        refused: writes with an older token, by holders that had just checked that they own.
        wrong: what must never be.
    """

    largest: dict[str, int] = field(default_factory=dict)
    inside: defaultdict[str, set[tuple[int, LockMode, int]]] = field(default_factory=lambda: defaultdict(set))
    wrong: list[str] = field(default_factory=list)
    writes: int = 0

    def enter(self, name: str, token: int, mode: LockMode, permits: int) -> None:
        """A new owner, right after it was told so."""
        if mode is LockMode.EXCLUSIVE and token <= self.largest.get(name, 0):
            self.wrong.append(f"{name}: token {token} enters after {self.largest[name]}")
        self.inside[name].add((token, mode, permits))
        self.write(name, token, mode)

    def write(self, name: str, token: int, mode: LockMode) -> None:
        """A write by an owner that has just checked."""
        self.writes += 1
        if mode is LockMode.EXCLUSIVE:
            if token < self.largest.get(name, 0):
                self.wrong.append(f"{name}: an owner that checked is refused: {token} < {self.largest[name]}")
            self.largest[name] = max(token, self.largest.get(name, 0))
        present = self.inside[name]
        if len({one[1] for one in present}) > 1:
            self.wrong.append(f"{name}: owners of several modes at once: {sorted(present)}")
        places = {LockMode.EXCLUSIVE: 1, LockMode.SHARED: len(present)}.get(
            mode, max(p for _, _, p in present)
        )
        if len(present) > places:
            self.wrong.append(f"{name}: {len(present)} owners on {places} places")

    def leave(self, name: str, token: int, mode: LockMode, permits: int) -> None:
        """It gives back, or knows that it has lost."""
        self.inside[name].discard((token, mode, permits))


def judge(history: LockHistory, told: Sequence[Told]) -> list[str]:
    """Whoever was told to own did, by the order of entries, when etcd had come so far; or was gone again."""
    wrong: list[str] = []
    standing: defaultdict[str, dict[str, LockEntry]] = defaultdict(dict)
    ever: set[tuple[str, int]] = set()
    asked = sorted(told, key=lambda one: one.known)
    at = 0

    def settle(before: int) -> None:
        nonlocal at
        while at < len(asked) and asked[at].known < before:
            one = asked[at]
            at += 1
            line = line_of(list(standing[one.name].values()))
            waits = [entry.revision for entry in (*line.waiters, *line.misfits)]
            if one.created in waits:
                wrong.append(f"{one.name}: {one.created} was told to own while it waits at {one.known}")
            if (one.name, one.created) not in ever:
                wrong.append(f"{one.name}: {one.created} was told to own and never stood")

    for revision, name, waiter, entry in history.changes:
        settle(revision)
        if entry is None:
            standing[name].pop(waiter, None)
        else:
            standing[name][waiter] = entry
            ever.add((name, entry.revision))
    settle(1 << 62)
    return wrong + [f"{name}: left behind: {sorted(left)}" for name, left in _left(standing).items()]


def _left(standing: Mapping[str, Mapping[str, LockEntry]]) -> dict[str, list[str]]:
    return {name: list(entries) for name, entries in standing.items() if entries}
