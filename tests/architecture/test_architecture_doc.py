"""docs/architecture.md names modules that exist."""

from __future__ import annotations

import re

from tests.architecture.source_tree import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text()


def test_every_module_that_the_document_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT))

    assert named
    assert [] == sorted(name for name in named if not (ROOT / "coordinator" / name).is_file())


def test_the_document_names_every_package_of_the_coordinator() -> None:
    packages = {path.parent.name for path in (ROOT / "coordinator").glob("*/__init__.py")}
    spoken_of = {"core", "services", "reconciler", "etcd", "rpc", "app", "cli"}

    assert spoken_of <= packages
    assert [] == [name for name in sorted(spoken_of) if f"`{name}`" not in TEXT]
