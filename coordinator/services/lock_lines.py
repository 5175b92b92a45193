"""The lines of all locks, as the watch tells them; waiting calls are woken from here, observers too.

Two views are kept apart. What the watch (or a read of a whole line) has told is the line as it once stood,
at one revision: by it an entry is judged, as soon as it covers the entry's creation. What this coordinator
itself has put or deleted since is added for those who ask whether a lock seems free; they compare in their
Txn, so they may be wrong. Were own deletions to count in judgements, an entry that went before them,
unknown here as yet, would be told that it owns.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from coordinator.core.lock_order import MAX_WAITERS, Line, LockEntry, line_of
from coordinator.errors import LeasekeeperError
from coordinator.ports import Clock, LockStore

__all__ = ["LockLines", "LockLinesConfig", "LockPlace", "Standing"]

_log = logging.getLogger(__name__)

_NO_LINE: Final = Line((), (), ())


class Standing(Enum):
    """Where an entry stands, as far as is known."""

    UNSEEN = "unseen"  # its line is not known up to its creation
    WAITS = "waits"
    OWNS = "owns"
    MISFIT = "misfit"  # earlier entries have other permits
    SURPLUS = "surplus"  # as many as may wait stand before it
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockLinesConfig:
    """Times in seconds.

    Attributes:
        list_timeout: of one list of a namespace.
        look_every: how often lines that somebody waits in are compared with the store.
        names_per_look: lines of one such read.
    """

    list_timeout: float = 10.0
    look_every: float = 5.0
    names_per_look: int = 64


@dataclass(slots=True, eq=False)
class LockPlace:
    """One call that waits. ``moved`` is set when one of its entries stands differently."""

    namespace: str
    entries: tuple[LockEntry, ...]
    moved: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Line:
    """``entries`` are those that stood at the revision that the line is known to: the watch's, or ``seen``.

    ``early`` are own ones put since, by waiter, and ``gone`` own deletions since, by waiter and revision.
    ``compared``: an own Txn made sure that up to there no entry was added but those known.
    """

    entries: dict[str, LockEntry] = field(default_factory=dict)
    early: dict[str, LockEntry] = field(default_factory=dict)
    gone: set[tuple[str, int]] = field(default_factory=set)
    seen: int = 0
    compared: int = 0
    judged: Line | None = None

    def judge(self) -> Line:
        """Of what the watch has told."""
        if self.judged is None:
            self.judged = line_of(list(self.entries.values()))
        return self.judged

    def guess(self) -> Line:
        """With own changes."""
        if not self.early and not self.gone:
            return self.judge()
        present = {**self.entries, **self.early}.values()
        return line_of([one for one in present if (one.waiter, one.revision) not in self.gone])

    @property
    def empty(self) -> bool:
        """Whether nothing is remembered of it."""
        return not self.entries and not self.early and not self.gone


@dataclass(slots=True)
class _Space:
    lines: dict[str, _Line] = field(default_factory=dict)
    listed: int = 0
    passed: int = 0
    changed: set[str] = field(default_factory=set)
    lingering: set[str] = field(default_factory=set)  # empty lines whose look the watch has not come to
    of_session: defaultdict[str, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))


class LockLines:
    """Implements ``ports.LockChanges``.

    Args:
        store: for lists and looks.
        clock: time.
        config: see ``LockLinesConfig``.
    """

    def __init__(self, store: LockStore, clock: Clock, config: LockLinesConfig | None = None) -> None:
        self._store = store
        self._clock = clock
        self._config = config or LockLinesConfig()
        self._spaces: dict[str, _Space] = {}
        self._places: dict[tuple[str, str], dict[str, set[LockPlace]]] = {}
        self._observers: dict[tuple[str, str], set[asyncio.Event]] = {}
        self._waiting = 0
        self.moved: Callable[[str, str], None] = lambda namespace, name: None
        """Called with (namespace, name) whenever a line has changed; it must not block."""
        self.watched: Callable[[], Iterable[tuple[str, str]]] = tuple
        """(namespace, name) of further lines that somebody waits for, in no place of theirs."""

    # -- what is known

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return self._waiting

    def line(self, namespace: str, name: str) -> Line:
        """How the line of a lock seems to stand now."""
        line = self._line(namespace, name)
        return line.guess() if line is not None else _NO_LINE

    def told(self, namespace: str, name: str) -> Line:
        """How it stood at ``known_to``."""
        line = self._line(namespace, name)
        return line.judge() if line is not None else _NO_LINE

    def known_to(self, namespace: str, name: str) -> int:
        """The revision of what is told of a line; 0: nothing is."""
        space = self._spaces.get(namespace)
        line = self._line(namespace, name)
        return max(space.passed if space is not None else 0, line.seen if line is not None else 0)

    def compared_to(self, namespace: str, name: str) -> int:
        """The revision up to which every entry that stands is known; 0: none is."""
        line = self._line(namespace, name)
        return max(self.known_to(namespace, name), line.compared if line is not None else 0)

    def entry(self, namespace: str, name: str, *, session: str, revision: int) -> LockEntry | None:
        """A session's entry by its create revision."""
        line = self._line(namespace, name)
        if line is None:
            return None
        for kept in (line.early, line.entries):
            for entry in kept.values():
                if entry.revision == revision and entry.session == session:
                    return entry
        return None

    def of_session(self, namespace: str, session: str) -> list[LockEntry]:
        """What a session owns and waits for, as it seems."""
        space = self._spaces.get(namespace)
        if space is None:
            return []
        found: list[LockEntry] = []
        for name, waiter in space.of_session.get(session, ()):
            line = space.lines[name]
            found.append(line.early.get(waiter) or line.entries[waiter])
        return found

    def held_by(self, namespace: str, session: str) -> int:
        """How many entries a session seems to have."""
        space = self._spaces.get(namespace)
        return len(space.of_session.get(session, ())) if space is not None else 0

    def names(self, namespace: str, after: str, count: int) -> list[str]:
        """Names of locks that have entries, in order, beyond ``after``."""
        space = self._spaces.get(namespace)
        if space is None:
            return []
        ordered = sorted(space.lines)
        start = bisect.bisect_right(ordered, after) if after else 0
        return ordered[start : start + count]

    def standing(self, namespace: str, entry: LockEntry) -> Standing:
        """Where an entry stands. ``entry.revision`` is known."""
        if self.known_to(namespace, entry.name) < entry.revision:
            return Standing.UNSEEN
        line = self._line(namespace, entry.name)
        present = line.entries.get(entry.waiter) if line is not None else None
        if line is None or present is None or present.revision != entry.revision:
            return Standing.GONE
        judged = line.judge()
        if present in judged.owners:
            return Standing.OWNS
        if present in judged.misfits:
            return Standing.MISFIT
        surplus = judged.waiters[MAX_WAITERS:]
        return Standing.SURPLUS if present in surplus else Standing.WAITS

    # -- who waits

    def join(self, namespace: str, entries: Sequence[LockEntry]) -> LockPlace:
        """Wait with these entries, which stand in the store. Whoever joins must `leave`."""
        place = LockPlace(namespace, tuple(entries))
        for entry in entries:
            by_waiter = self._places.setdefault((namespace, entry.name), {})
            by_waiter.setdefault(entry.waiter, set()).add(place)
        self._waiting += 1
        return place

    def leave(self, place: LockPlace) -> None:
        """Wait no more."""
        self._waiting -= 1
        for entry in place.entries:
            key = (place.namespace, entry.name)
            by_waiter = self._places[key]
            by_waiter[entry.waiter].discard(place)
            if not by_waiter[entry.waiter]:
                del by_waiter[entry.waiter]
            if not by_waiter:
                del self._places[key]

    def observe(self, namespace: str, name: str) -> asyncio.Event:
        """An event that is set whenever the lock changes. Whoever observes must `forget`."""
        event = asyncio.Event()
        self._observers.setdefault((namespace, name), set()).add(event)
        return event

    def forget(self, namespace: str, name: str, event: asyncio.Event) -> None:
        """Observe no more."""
        key = (namespace, name)
        self._observers[key].discard(event)
        if not self._observers[key]:
            del self._observers[key]

    def wake_all(self) -> None:
        """Tell everybody to look around."""
        for by_waiter in self._places.values():
            for places in by_waiter.values():
                _wake(places)
        for events in self._observers.values():
            for event in events:
                event.set()

    # -- own commits

    def put(self, namespace: str, entries: Iterable[LockEntry], *, complete: bool) -> None:
        """Own entries stand. The watch brings them too, and may already have brought their end.

        Args:
            namespace: where.
            entries: those put.
            complete: the Txn compared that nothing was added to what is known of their lines.
        """
        space = self._spaces.setdefault(namespace, _Space())
        for entry in entries:
            line = space.lines.get(entry.name)
            if entry.revision > max(space.passed, line.seen if line is not None else 0):
                if line is None:
                    line = space.lines[entry.name] = _Line()
                line.early[entry.waiter] = entry
                space.of_session[entry.session].add((entry.name, entry.waiter))
                if complete:
                    line.compared = entry.revision

    def deleted(self, namespace: str, entry: LockEntry) -> None:
        """An own deletion was committed. The watch tells of it too, or has told already."""
        line = self._line(namespace, entry.name)
        if line is None:
            return
        present = line.early.get(entry.waiter) or line.entries.get(entry.waiter)
        if present is not None and present.revision == entry.revision:
            line.gone.add((entry.waiter, entry.revision))
            self._unindex(self._spaces[namespace], present)
            self.moved(namespace, entry.name)

    # -- the watch

    async def relist(self, namespace: str, revision: int) -> None:
        """See ``ports.LockChanges``."""
        deadline = self._clock.monotonic() + self._config.list_timeout
        listed, entries = await self._store.list_entries(namespace, deadline=deadline)
        space = self._spaces[namespace] = _Space(listed=listed, passed=listed)
        for entry in entries:
            self._keep(space, entry)
        space.changed.clear()
        for (of_namespace, _), by_waiter in self._places.items():
            if of_namespace == namespace:
                for places in by_waiter.values():
                    _wake(places)
        for (of_namespace, _), events in self._observers.items():
            if of_namespace == namespace:
                for event in events:
                    event.set()
        for of_namespace, name in tuple(self.watched()):
            if of_namespace == namespace:
                self.moved(namespace, name)

    def own_put(self, namespace: str, name: str, waiter: str, revision: int) -> LockEntry | None:
        """See ``ports.LockChanges``."""
        line = self._line(namespace, name)
        own = line.early.get(waiter) if line is not None else None
        return own if own is not None and own.version == revision else None

    def lock_put(self, namespace: str, entry: LockEntry) -> None:
        """See ``ports.LockChanges``."""
        space = self._spaces.setdefault(namespace, _Space())
        line = space.lines.get(entry.name)
        if entry.version <= max(space.listed, line.seen if line is not None else 0):
            return  # what was read shows more than this: if it is not there, it has gone already
        self._keep(space, entry)

    def lock_deleted(self, namespace: str, name: str, waiter: str, revision: int) -> None:
        """See ``ports.LockChanges``."""
        space = self._spaces.setdefault(namespace, _Space())
        self._drop(namespace, space, name, waiter, revision - 1)

    def locks_passed(self, namespace: str, revision: int) -> None:
        """See ``ports.LockChanges``."""
        space = self._spaces.setdefault(namespace, _Space())
        if revision > space.passed:
            space.passed = revision
        if space.lingering:
            for name in list(space.lingering):
                self._forget_empty(space, name)
        if space.changed:
            self._tell(namespace, space)

    # -- safety

    async def run(self) -> None:
        """Compare the lines that somebody waits in or observes with the store, until cancelled."""
        while True:
            await self._clock.sleep(self._config.look_every)
            await self.run_once()

    async def run_once(self) -> int:
        """One look at all of them; answers how many entries were found to have gone unnoticed."""
        by_space: defaultdict[str, list[str]] = defaultdict(list)
        waited = dict.fromkeys((*self._places, *self._observers, *self.watched()))
        for namespace, name in waited:
            by_space[namespace].append(name)
        missed = 0
        for namespace, names in by_space.items():
            for at in range(0, len(names), self._config.names_per_look):
                chunk = names[at : at + self._config.names_per_look]
                deadline = self._clock.monotonic() + self._config.look_every
                try:
                    read = await self._store.read(namespace, chunk, deadline=deadline)
                except LeasekeeperError as error:
                    _log.debug("the look at waiting locks failed: %s", error)
                    continue
                for name in chunk:
                    missed += self.looked(namespace, name, read.entries[name], read.revision)
        if missed:
            _log.warning("%d entries of locks had gone and no watch had told", missed)
        return missed

    def looked(self, namespace: str, name: str, entries: Sequence[LockEntry], revision: int) -> int:
        """Somebody read a whole line as of ``revision``; answers how many known entries were not there."""
        space = self._spaces.setdefault(namespace, _Space())
        standing = {entry.waiter: entry.revision for entry in entries}
        line = space.lines.get(name)
        newer = revision > self.known_to(namespace, name)
        if newer and line is not None:
            line.seen = revision
        gone = [
            entry
            for entry in (line.entries.values() if line is not None else ())
            if entry.revision <= revision and standing.get(entry.waiter, 0) != entry.revision
        ]
        for entry in gone:
            self._drop(namespace, space, name, entry.waiter, entry.revision)
        if newer:
            for entry in entries:
                self._keep(space, entry)
            line = space.lines.get(name)
            if line is not None:
                for early in [one for one in line.early.values() if one.revision <= revision]:
                    del line.early[early.waiter]
                    if early.waiter not in line.entries:
                        self._unindex(space, early)
                line.seen = revision
                space.changed.add(name)
                self._forget_empty(space, name)
        self._tell(namespace, space)
        return len(gone)

    # -- inside

    def _line(self, namespace: str, name: str) -> _Line | None:
        space = self._spaces.get(namespace)
        return space.lines.get(name) if space is not None else None

    def _keep(self, space: _Space, entry: LockEntry) -> None:
        line = space.lines.get(entry.name)
        if line is None:
            line = space.lines[entry.name] = _Line()
        before = line.entries.get(entry.waiter)
        if before is not None and before.version > entry.version:
            return
        line.entries[entry.waiter] = entry
        line.judged = None
        early = line.early.get(entry.waiter)
        if early is not None and early.revision <= entry.revision:
            del line.early[entry.waiter]
        if entry.session and not (line.gone and (entry.waiter, entry.revision) in line.gone):
            space.of_session[entry.session].add((entry.name, entry.waiter))
        space.changed.add(entry.name)

    def _drop(self, namespace: str, space: _Space, name: str, waiter: str, up_to: int) -> None:
        """Forget an entry created at ``up_to`` or earlier; its calls are told."""
        line = space.lines.get(name)
        if line is None:
            return
        if line.gone:
            line.gone = {one for one in line.gone if one[0] != waiter or one[1] > up_to}
        for kept in (line.early, line.entries):
            entry = kept.get(waiter)
            if entry is not None and entry.revision <= up_to:
                del kept[waiter]
                line.judged = None
                if waiter not in line.early and waiter not in line.entries:
                    self._unindex(space, entry)
        by_waiter = self._places.get((namespace, name))
        if by_waiter is not None:
            _wake(by_waiter.get(waiter, ()))
        space.changed.add(name)
        self._forget_empty(space, name)

    @staticmethod
    def _unindex(space: _Space, entry: LockEntry) -> None:
        of_session = space.of_session.get(entry.session)
        if of_session is not None:
            of_session.discard((entry.name, entry.waiter))
            if not of_session:
                del space.of_session[entry.session]

    @staticmethod
    def _forget_empty(space: _Space, name: str) -> None:
        """Until the watch has come as far as the look, what it still tells of the past is told from news by
        ``seen`` alone."""
        line = space.lines.get(name)
        space.lingering.discard(name)
        if line is not None and line.empty:
            if line.seen > space.passed:
                space.lingering.add(name)
            else:
                del space.lines[name]

    def _tell(self, namespace: str, space: _Space) -> None:
        """Wake the calls of those that own now, or have to go; one hand-over wakes one."""
        changed, space.changed = space.changed, set()
        for name in changed:
            self.moved(namespace, name)
        if not self._observers and not self._places:
            return
        for name in changed:
            for event in self._observers.get((namespace, name), ()):
                event.set()
            by_waiter = self._places.get((namespace, name))
            line = space.lines.get(name)
            if by_waiter is None or line is None:
                continue
            judged = line.judge()
            for entry in (*judged.owners, *judged.misfits, *judged.waiters[MAX_WAITERS:]):
                _wake(by_waiter.get(entry.waiter, ()))


def _wake(places: Iterable[LockPlace]) -> None:
    for place in places:
        place.moved.set()
