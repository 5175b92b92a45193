"""docs/guarantees.md: says what users may build on, names tests that exist, and shows SQL that works."""

from __future__ import annotations

import ast
import re
import sqlite3

import pytest

from tests.architecture.source_tree import ROOT

TEXT = (ROOT / "docs" / "guarantees.md").read_text()
PLAIN = re.sub(r"[*\s]+", " ", TEXT)
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)


def missing(path: str, test: str) -> bool:
    """Whether the named file, or the test in it, does not exist."""
    file = ROOT / path
    if not file.is_file():
        return True
    if not test:
        return False
    nodes = ast.walk(ast.parse(file.read_text()))
    return test not in {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def statements() -> dict[str, str]:
    """The SQL of the document by its first word."""
    blocks = re.findall(r"^```sql\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return {block.split()[0]: block for block in blocks}


def test_every_test_that_the_document_names_exists() -> None:
    assert NAMED
    assert [] == [f"{path}::{test}" for path, test in NAMED if missing(path, test)]


def test_every_promise_stands_there_with_a_test() -> None:
    parts = re.split(r"^### (P\d)\. ", TEXT, flags=re.MULTILINE)
    promises = dict(zip(parts[1::2], parts[2::2], strict=True))

    assert list(promises) == [f"P{number}" for number in range(1, 9)]
    assert [] == [name for name, text in promises.items() if "`tests/" not in text]


@pytest.mark.parametrize(
    "statement",
    [
        "every job runs at least once, and takes effect once in every store that checks the fencing token",
        "Exclusion of side effects in stores that ignore the token",
        "The TTL is no upper bound",
        "2 × TTL + 3 s",
        "What `CLAIM_LOST` means",
        "How to use the token",
    ],
)
def test_what_users_must_know_is_said(statement: str) -> None:
    """Fault case 162."""
    assert statement in PLAIN


def test_exactly_once_is_never_claimed() -> None:
    claims = [line for line in TEXT.splitlines() if "exactly once" in line.lower()]

    assert all("no such thing" in line for line in claims)


def test_the_sql_recipe_refuses_an_older_token() -> None:
    sql = statements()
    database = sqlite3.connect(":memory:")
    database.execute(sql["CREATE"])

    def write(token: int, value: str) -> bool:
        rows = database.execute(sql["INSERT"], {"job_id": "j", "token": token, "value": value}).fetchall()
        return rows == [(token,)]

    outcomes = [write(7, "old"), write(9, "new"), write(7, "late"), write(9, "again")]

    assert outcomes == [True, True, False, True]
    assert database.execute("SELECT token, value FROM effects").fetchall() == [(9, "again")]
    database.close()
