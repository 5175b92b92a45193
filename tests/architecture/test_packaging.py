"""What is installed is pinned, and what is promised to pip is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source_tree import ROOT, pyproject

PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)( ;[^\\]*)? \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")
SDK = {"googleapis-common-protos", "grpcio", "protobuf"}


def constraints() -> list[str]:
    """Return the lines of constraints.txt that are not comments."""
    text = (ROOT / "constraints.txt").read_text()
    return [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]


def declared() -> dict[str, Requirement]:
    """Return every requirement of pyproject.toml by canonical name."""
    project = pyproject()["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    groups += pyproject()["dependency-groups"].values()
    requirements = [Requirement(text) for group in groups for text in group]
    return {canonicalize_name(r.name): r for r in requirements if r.name != "leasekeeper"}


def test_constraints_hold_versions_with_hashes_and_nothing_else() -> None:
    odd = [line for line in constraints() if not PINNED.match(line) and not HASH.match(line)]

    assert [] == odd


def test_constraints_hold_everything_that_is_declared_at_an_allowed_version() -> None:
    pinned = {canonicalize_name(m[1]): m[2] for line in constraints() if (m := PINNED.match(line))}

    assert set() == set(declared()) - set(pinned)
    assert [] == [
        f"{requirement} excludes {pinned[name]}"
        for name, requirement in declared().items()
        if not requirement.specifier.contains(pinned[name])
    ]


def test_the_sdk_installs_three_packages() -> None:
    assert SDK == {Requirement(text).name for text in pyproject()["project"]["dependencies"]}


def test_every_requirement_that_users_install_has_a_floor_and_a_ceiling() -> None:
    project = pyproject()["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    floorless = [
        text for text in texts if not {">=", "=="} & {s.operator for s in Requirement(text).specifier}
    ]
    endless = [
        text for text in texts if not {"<", "=="} & {spec.operator for spec in Requirement(text).specifier}
    ]

    assert [] == floorless
    assert [] == endless


@pytest.mark.parametrize("group", ["scripts", "leasekeeper.commands"])
def test_entry_points_lead_somewhere(group: str) -> None:
    project = pyproject()["project"]
    entries = project["scripts"] if group == "scripts" else project["entry-points"][group]
    assert entries
    for target in entries.values():
        module, _, function = target.partition(":")
        path = ROOT / Path(*module.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        assert file.exists(), f"{target}: no module {module}"
        assert re.search(rf"\b{function}\b", file.read_text()), f"{target}: {file} has no {function}"


def test_the_wheel_holds_every_shipped_package() -> None:
    packages = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    assert ["coordinator", "worker_sdk", "pytest_leasekeeper", "proto/gen/leasekeeper"] == packages
    assert all((ROOT / package / "__init__.py").exists() for package in packages)
    assert (ROOT / "worker_sdk" / "py.typed").exists()


def test_scripts_run_by_make_exist() -> None:
    named = set(re.findall(r"scripts/\w+\.(?:sh|py)", (ROOT / "Makefile").read_text()))

    assert named
    assert [] == sorted(name for name in named if not (ROOT / name).exists())
