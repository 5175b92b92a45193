"""The command line itself: what it says about itself, and about options that it would not heed."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli.commands import commands_entry


def run(*arguments: str) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    result = CliRunner().invoke(commands_entry, arguments)
    return result.exit_code, result.output


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version") == (0, f"leasekeeper {version('leasekeeper')}\n")


@pytest.mark.parametrize("option", [("--rounds", "1"), ("--scale", "0.1"), ("--dir", ".")])
def test_an_option_before_the_name_of_a_bench_is_refused_not_ignored(option: tuple[str, str]) -> None:
    code, output = run("bench", *option, "grpc-echo")

    assert code == 2
    assert f"{option[0]} must stand behind grpc-echo" in output


def test_a_bench_in_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    code, output = run("bench", "lifecycle", "--jobs", "1", "--dir", str(tmp_path / "absent"))

    assert code == 2
    assert "--dir" in output
