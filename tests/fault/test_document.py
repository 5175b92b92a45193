"""docs/faults.md names tests that exist, and every case that a test names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "faults.md").read_text()


def cases_of(path: Path) -> dict[str, str]:
    """Docstring of each test function of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        node.name: ast.get_docstring(node) or ""
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_test_that_the_document_names_exists() -> None:
    named = re.findall(r"`(tests/fault/test_\w+\.py)::(\w+)`", TEXT)

    assert len(named) > 50
    assert [] == [f"{path}::{test}" for path, test in named if test not in cases_of(ROOT / path)]


def test_every_case_that_a_test_names_stands_in_the_document_with_that_test() -> None:
    def row(number: str) -> str:
        return "".join(line for line in TEXT.splitlines() if line.startswith(f"| {number}"))

    missing = [
        f"{number}: {test}"
        for path in sorted((ROOT / "tests" / "fault").glob("test_*.py"))
        for test, words in cases_of(path).items()
        for found in re.findall(r"Fault cases? ((?:[0-9]{3}(?:, | and )?)+)", words)
        for number in re.findall(r"[0-9]{3}", found)
        if test not in row(number)
    ]

    assert [] == missing


def test_every_case_that_was_asked_for_has_a_row() -> None:
    wanted = "001 002 003 005 006 007 009 010 011 013 014 018 019 022 023 026"
    wanted += " 041 042 043 045 065 066 067 069 070 071 089 090 091 093 094 095 097 098"
    wanted += " 017 025 027 029 030 099 101 102 103 105 106 107 109 110 111 113 114 115"
    wanted += " 145 149 150 151 153 154 155"

    assert [] == [
        number for number in wanted.split() if not re.search(rf"^\| {number}\b", TEXT, re.MULTILINE)
    ]
