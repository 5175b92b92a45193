"""Failpoints: inert unless armed, refused by name, and every point that has a name stands in the code."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import failpoints
from coordinator.errors import ConfigError
from tests.support.polling import eventually

ROOT = Path(failpoints.__file__).parent


@pytest.fixture(autouse=True)
def _inert() -> Iterator[None]:
    yield
    failpoints.disarm()


async def test_a_point_that_nobody_armed_does_nothing() -> None:
    failpoints.arm("claim.after-commit=exit")

    await failpoints.reached("claim.before-commit")


async def test_a_paused_point_says_so_and_waits_for_its_file(tmp_path: Path) -> None:
    failpoints.arm(f"lost.before-commit=pause:{tmp_path / 'go'}")
    held = asyncio.create_task(failpoints.reached("lost.before-commit"))

    await eventually((tmp_path / "go.reached").exists, what="the point is reached")
    assert not held.done()
    (tmp_path / "go").touch()
    await asyncio.wait_for(held, 5)


def test_exit_ends_the_process_at_once_with_its_own_code() -> None:
    program = (
        "import asyncio, atexit; from coordinator import failpoints as f;"
        "atexit.register(print, 'flushed'); f.arm('settle.after-commit=exit');"
        "asyncio.run(f.reached('settle.after-commit'))"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, cwd=ROOT.parent)

    assert (ended.returncode, ended.stdout) == (failpoints.EXIT_CODE, b"")


@pytest.mark.parametrize(
    "text",
    ["nowhere=exit", "claim.after-commit", "claim.after-commit=", "claim.after-commit=pause:",
     "claim.after-commit=delay:x", "claim.after-commit=delay:-1", "claim.after-commit=delay:nan",
     "claim.after-commit=exit:now"],
)  # fmt: skip
async def test_what_cannot_be_read_arms_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match=failpoints.VARIABLE):
        failpoints.arm(f"submit.after-commit=exit;{text}")

    await failpoints.reached("submit.after-commit")


def test_serve_refuses_armed_points_without_its_flag() -> None:
    command = [sys.executable, "-m", "coordinator", "serve", "--etcd", "127.0.0.1:1"]
    env = {failpoints.VARIABLE: "claim.after-commit=exit", "PYTHONPATH": f"{ROOT.parent / 'proto' / 'gen'}"}

    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=ROOT.parent)

    assert ended.returncode == 2
    assert "--allow-failpoints" in ended.stderr


def test_the_code_has_every_point_that_has_a_name_and_no_other() -> None:
    found = {
        point
        for path in ROOT.rglob("*.py")
        for point in re.findall(r'failpoints\.reached\("([^"]+)"\)', path.read_text())
    }

    assert found == failpoints.POINTS
