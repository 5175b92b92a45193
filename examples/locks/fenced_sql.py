"""A row that only the newest holder of a lock may change: the update names the token, the row keeps it."""

from __future__ import annotations

import sqlite3

SCHEMA = "CREATE TABLE items (id TEXT PRIMARY KEY, value TEXT NOT NULL, token INTEGER NOT NULL)"

WRITE = """
INSERT INTO items (id, value, token) VALUES (:id, :value, :token)
ON CONFLICT (id) DO UPDATE SET value = excluded.value, token = excluded.token
WHERE items.token <= excluded.token
"""


def write_item(database: sqlite3.Connection, item: str, value: str, token: int) -> bool:
    """Write, unless a holder with a larger token has written before; whether it was written.

    ``<=``: one holder may write many times. The statement reads as well on PostgreSQL (BIGINT for the token).
    """
    with database:
        written = database.execute(WRITE, {"id": item, "value": value, "token": token})
    return written.rowcount == 1
