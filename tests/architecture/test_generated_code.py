"""The generated code is that of the .proto files, and loads on the lowest versions that we allow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.architecture.source_tree import GENERATED, ROOT, found, pyproject

PROTOBUF_STAMP = re.compile(r"^# Protobuf Python Version: (\S+)$", re.MULTILINE)
GRPC_STAMP = re.compile(r"^GRPC_GENERATED_VERSION = '([^']+)'$", re.MULTILINE)


def floor(distribution: str) -> Version:
    """Return the lower bound of one of the SDK's dependencies."""
    requirements = map(Requirement, pyproject()["project"]["dependencies"])
    (wanted,) = [requirement for requirement in requirements if requirement.name == distribution]
    (bound,) = [spec.version for spec in wanted.specifier if spec.operator == ">="]
    return Version(bound)


def stamps(files: list[Path], pattern: re.Pattern[str]) -> set[Version]:
    """Return the versions stamped into *files*, each of which must carry one."""
    versions = set()
    for file in files:
        stamp = pattern.search(file.read_text())
        assert stamp is not None, f"{file} carries no version"
        versions.add(Version(stamp[1]))
    return versions


def test_messages_load_on_the_lowest_protobuf() -> None:
    files = found(GENERATED.rglob("*_pb2.py"), "generated messages")

    assert max(stamps(files, PROTOBUF_STAMP)) <= floor("protobuf")


def test_stubs_load_on_the_lowest_grpcio() -> None:
    files = found(GENERATED.rglob("*_pb2_grpc.py"), "generated stubs")

    assert max(stamps(files, GRPC_STAMP)) <= floor("grpcio")


def test_every_generated_package_is_typed_and_importable() -> None:
    folders = {path.parent for path in found(GENERATED.rglob("*_pb2.py"), "generated messages")}

    assert [] == sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists())
    assert (GENERATED / "leasekeeper" / "py.typed").exists()


@pytest.mark.timeout(300)
def test_generated_code_is_that_of_the_protos() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gen_protos.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert 0 == done.returncode, done.stdout + done.stderr
