"""The demo's other store: a SQLite file that takes the effects of jobs, and refuses the stale ones.

This is all that a store needs to be safe behind Leasekeeper: keep the fencing token beside the row, and let
an upsert through only if its token is not below the one that is there. The log of accepted writes is kept
by triggers, so no caller can forget or forge it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.cli.demo_parse import Counts

__all__ = ["Sink", "SinkReading", "SinkRow", "read_sink"]

_BUSY_MS = 30_000

_SCHEMA = """
CREATE TABLE effects (
    unit TEXT PRIMARY KEY, token INTEGER NOT NULL, worker TEXT NOT NULL,
    status TEXT NOT NULL, lines INTEGER NOT NULL, functions INTEGER NOT NULL, classes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE accepted (
    place INTEGER PRIMARY KEY AUTOINCREMENT, unit TEXT NOT NULL, token INTEGER NOT NULL, worker TEXT NOT NULL
);
CREATE TABLE refused (
    place INTEGER PRIMARY KEY AUTOINCREMENT, unit TEXT NOT NULL, token INTEGER NOT NULL, worker TEXT NOT NULL,
    held INTEGER NOT NULL
);
CREATE TABLE stale_settlements (
    place INTEGER PRIMARY KEY AUTOINCREMENT, unit TEXT NOT NULL, token INTEGER NOT NULL, worker TEXT NOT NULL,
    answer TEXT NOT NULL
);
CREATE TRIGGER log_insert AFTER INSERT ON effects BEGIN
    INSERT INTO accepted (unit, token, worker) VALUES (new.unit, new.token, new.worker);
END;
CREATE TRIGGER log_update AFTER UPDATE ON effects BEGIN
    INSERT INTO accepted (unit, token, worker) VALUES (new.unit, new.token, new.worker);
END;
"""

_UPSERT = """
INSERT INTO effects (unit, token, worker, status, lines, functions, classes) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (unit) DO UPDATE SET
    token = excluded.token, worker = excluded.worker, status = excluded.status,
    lines = excluded.lines, functions = excluded.functions, classes = excluded.classes
WHERE excluded.token >= effects.token
"""


@dataclass(frozen=True, slots=True)
class SinkRow:
    """One line of a log: which unit, under which token."""

    unit: str
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReading:
    """Everything that the file says, read at one moment.

    Args:
        rows: token of the row of each unit.
        accepted: accepted writes in their order.
        refused: refused writes in their order.
        stale_settlements: settlements that the coordinator answered with CLAIM_LOST.
        statuses: number of rows of each parse status.
    """

    rows: dict[str, int]
    accepted: tuple[SinkRow, ...]
    refused: tuple[SinkRow, ...]
    stale_settlements: tuple[SinkRow, ...]
    statuses: dict[str, int]


class Sink:
    """One writer's connection; not for use by two threads at once.

    Args:
        path: the file.
        worker: name that the logs carry.
    """

    def __init__(self, path: Path, worker: str) -> None:
        self._worker = worker
        self._connection = _connect(path)

    @staticmethod
    def create(path: Path) -> None:
        """Make the file. Raises sqlite3.OperationalError if there is one already."""
        with closing(_connect(path)) as connection:
            # Readers and writers do not wait for each other; a crash of a process loses nothing committed.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the connection. Repeatable."""
        self._connection.close()

    def write(self, unit: str, token: int, counts: Counts) -> bool:
        """Store the counts of a unit unless a write with a higher token was there first.

        The same token again is the same attempt and passes. Returns whether the write was accepted.
        """
        values = (
            unit,
            token,
            self._worker,
            str(counts.status),
            counts.lines,
            counts.functions,
            counts.classes,
        )
        with self._transaction() as cursor:
            if cursor.execute(_UPSERT, values).rowcount > 0:
                return True
            cursor.execute(
                "INSERT INTO refused (unit, token, worker, held)"
                " SELECT ?, ?, ?, token FROM effects WHERE unit = ?",
                (unit, token, self._worker, unit),
            )
            return False

    def note_stale_settlement(self, unit: str, token: int, answer: str) -> None:
        """Keep what the coordinator answered to a settlement with a token that is not current."""
        with self._transaction() as cursor:
            cursor.execute(
                "INSERT INTO stale_settlements (unit, token, worker, answer) VALUES (?, ?, ?, ?)",
                (unit, token, self._worker, answer),
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        cursor = self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def read_sink(path: Path) -> SinkReading:
    """Read the whole file in one transaction."""
    with closing(_connect(path)) as connection:
        connection.execute("BEGIN")
        rows = dict(connection.execute("SELECT unit, token FROM effects"))
        accepted = _log(connection, "SELECT unit, token FROM accepted ORDER BY place")
        refused = _log(connection, "SELECT unit, token FROM refused ORDER BY place")
        settlements = _log(
            connection,
            "SELECT unit, token FROM stale_settlements WHERE answer = 'CLAIM_LOST' ORDER BY place",
        )
        statuses = dict(connection.execute("SELECT status, count(*) FROM effects GROUP BY status"))
    return SinkReading(
        rows=rows, accepted=accepted, refused=refused, stale_settlements=settlements, statuses=statuses
    )


def _log(connection: sqlite3.Connection, query: str) -> tuple[SinkRow, ...]:
    return tuple(SinkRow(unit, token) for unit, token in connection.execute(query))


def _connect(path: Path) -> sqlite3.Connection:
    # Transactions are begun by hand, so that the lock is taken at the start; threads take turns.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
