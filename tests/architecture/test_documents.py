"""The documents: links resolve, commands exist, decisions are recorded in one form."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.architecture.source_tree import ROOT, found

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
ADR_NAME = re.compile(r"^(\d{4})-[a-z0-9-]+\.md$")
ADR_SECTIONS = ("Context", "Decision", "Consequences")


def documents() -> list[Path]:
    """Return every Markdown file of the repository."""
    top = found(ROOT.glob("*.md"), "Markdown file at the top")
    below = [
        path
        for folder in ("docs", "tests", "compose", "deploy", "examples", "benchmarks", "proto")
        for path in (ROOT / folder).rglob("*.md")
    ]
    return sorted([*top, *below])


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(FENCE.sub("", text)))
    return {heading.replace(" ", "-") for heading in plain}


def dead_links(document: Path) -> list[str]:
    """Return the links of *document* that lead to no file or no heading of this repository."""
    dead = []
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor.lower() not in anchors(file.read_text())
        ):
            dead.append(target)
    return dead


def adrs() -> list[Path]:
    """Return the decision records."""
    return found((ROOT / "docs" / "adr").glob("*.md"), "decision records")


def test_links_between_documents_resolve() -> None:
    assert {} == {str(d.relative_to(ROOT)): dead_links(d) for d in documents() if dead_links(d)}


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (str(document.relative_to(ROOT)), target)
        for document in documents()
        for target in re.findall(r"`(?:[A-Z_]+=\S+ )*make ([a-z-]+)", document.read_text())
    }

    assert named
    assert [] == sorted(f"{document}: make {target}" for document, target in named if target not in targets)


@pytest.mark.parametrize("adr", adrs(), ids=lambda path: path.stem)
def test_a_decision_record_has_context_decision_and_consequences(adr: Path) -> None:
    headings = HEADING.findall(adr.read_text())

    assert ADR_NAME.match(adr.name), adr.name
    assert headings[0].startswith(adr.name[:4].lstrip("0") + ". ")
    assert [] == [section for section in ADR_SECTIONS if section not in headings]


def test_decision_records_are_numbered_once() -> None:
    numbers = [adr.name[:4] for adr in adrs()]

    assert len(numbers) == len(set(numbers))


def test_the_changelog_has_an_unreleased_section() -> None:
    assert "[Unreleased]" in HEADING.findall((ROOT / "CHANGELOG.md").read_text())[1]


def test_the_license_is_the_whole_apache_license() -> None:
    text = (ROOT / "LICENSE").read_text()

    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
