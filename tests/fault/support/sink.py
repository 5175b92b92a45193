"""The other store: a SQLite file that refuses effects with an older token, and logs when handlers ran.

Times are CLOCK_MONOTONIC seconds, which all processes of a machine share.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Effect", "Note", "Sink", "SinkReading", "Start"]

_SCHEMA = """
CREATE TABLE fence (job TEXT PRIMARY KEY, token INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE effects (job TEXT PRIMARY KEY, token INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE starts (
    place INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, token INTEGER NOT NULL,
    worker TEXT NOT NULL, at REAL NOT NULL
);
CREATE TABLE log (
    place INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, token INTEGER NOT NULL,
    worker TEXT NOT NULL, t_start REAL NOT NULL, t_end REAL NOT NULL, accepted INTEGER NOT NULL
);
CREATE TABLE notes (
    place INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, token INTEGER NOT NULL,
    worker TEXT NOT NULL, note TEXT NOT NULL, at REAL NOT NULL
);
"""

_FENCE = """
INSERT INTO fence (job, token) VALUES (?, ?)
ON CONFLICT (job) DO UPDATE SET token = excluded.token WHERE excluded.token >= fence.token
"""
_EFFECT = """
INSERT INTO effects (job, token) VALUES (?, ?) ON CONFLICT (job) DO UPDATE SET token = excluded.token
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A handler began."""

    job: str
    token: int
    worker: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A handler wrote, and the sink took it or not."""

    job: str
    token: int
    worker: str
    t_start: float
    t_end: float
    accepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a handler saw."""

    job: str
    token: int
    worker: str
    text: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReading:
    """Everything that the file says, in order."""

    rows: dict[str, int]
    starts: tuple[Start, ...]
    effects: tuple[Effect, ...]
    notes: tuple[Note, ...]

    def starts_of(self, job: str) -> list[Start]:
        """When and where the job's handlers began."""
        return [start for start in self.starts if start.job == job]

    def accepted_of(self, job: str) -> list[Effect]:
        """Effects of the job that were taken."""
        return [effect for effect in self.effects if effect.job == job and effect.accepted]


class Sink:
    """The file. Each call is one short transaction of its own, so that a frozen process blocks nobody."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> Sink:
        """Make the file."""
        with closing(self._connect()) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)
        return self

    def started(self, job: str, token: int, worker: str) -> float:
        """Note that a handler began, and refuse older ones from now on; when."""
        now = time.monotonic()
        with self._transaction() as cursor:
            cursor.execute(_FENCE, (job, token))
            cursor.execute(
                "INSERT INTO starts (job, token, worker, at) VALUES (?, ?, ?, ?)", (job, token, worker, now)
            )
        return now

    def write(self, job: str, token: int, worker: str, t_start: float) -> bool:
        """Store the effect unless a higher token has been seen; whether it was taken."""
        with self._transaction() as cursor:
            accepted = cursor.execute(_FENCE, (job, token)).rowcount > 0
            if accepted:
                cursor.execute(_EFFECT, (job, token))
            cursor.execute(
                "INSERT INTO log (job, token, worker, t_start, t_end, accepted) VALUES (?, ?, ?, ?, ?, ?)",
                (job, token, worker, t_start, time.monotonic(), accepted),
            )
        return accepted

    def note(self, job: str, token: int, worker: str, text: str) -> None:
        """Keep what a handler saw."""
        now = time.monotonic()
        with self._transaction() as cursor:
            cursor.execute(
                "INSERT INTO notes (job, token, worker, note, at) VALUES (?, ?, ?, ?, ?)",
                (job, token, worker, text, now),
            )

    def read(self) -> SinkReading:
        """All of it, at one moment."""
        with closing(self._connect()) as connection:
            connection.execute("BEGIN")
            rows = dict(connection.execute("SELECT job, token FROM effects"))
            starts = connection.execute("SELECT job, token, worker, at FROM starts ORDER BY place").fetchall()
            log = connection.execute(
                "SELECT job, token, worker, t_start, t_end, accepted FROM log ORDER BY place"
            ).fetchall()
            notes = connection.execute(
                "SELECT job, token, worker, note, at FROM notes ORDER BY place"
            ).fetchall()
        return SinkReading(
            rows=rows,
            starts=tuple(Start(job=j, token=t, worker=w, at=at) for j, t, w, at in starts),
            effects=tuple(
                Effect(job=j, token=t, worker=w, t_start=a, t_end=b, accepted=bool(ok))
                for j, t, w, a, b, ok in log
            ),
            notes=tuple(Note(job=j, token=t, worker=w, text=text, at=at) for j, t, w, text, at in notes),
        )

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None)
        connection.execute("PRAGMA busy_timeout = 30000")
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        with closing(self._connect()) as connection:
            cursor = connection.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
