"""docs/keys.md names every form of key, every record, and every guard, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.core.machine import Guard
from coordinator.etcd.keys import FORMS
from leasekeeper.internal.storage.v1 import records_pb2

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "keys.md").read_text()


def rows(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_form_of_key_is_on_the_page_once() -> None:
    named = [row[0].strip("`") for part in ("Of the installation", "Of a namespace") for row in rows(part)]
    named = [name for name in named if name != "key"]
    assert sorted(named) == sorted(FORMS.values())


def test_every_record_on_the_page_exists() -> None:
    records = set(re.findall(r"\b[A-Z][A-Za-z]+Record\b", PAGE))
    assert records
    assert records <= set(records_pb2.DESCRIPTOR.message_types_by_name)


def test_every_guard_is_on_the_page() -> None:
    named = {row[0].split(" ")[0] for row in rows("Transactions")}
    assert {guard.name for guard in Guard} <= named
