"""What the README tells people to type works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.dev_process import running_dev
from tests.integration.cli.test_dev import grpcurl_path

README = Path(__file__).resolve().parents[3] / "README.md"
ENDPOINT = "127.0.0.1:7420"


def block(name: str) -> str:
    """The code block below the comment with this name."""
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None, name
    assert ENDPOINT in found[1]
    return found[1]


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_dev(tmp_path_factory.mktemp("readme") / "dev") as server:
        yield server.wait_ready()["coordinator"]


def test_the_python_quick_start_runs_a_job(coordinator: str, tmp_path: Path) -> None:
    script = tmp_path / "quick_start.py"
    script.write_text(block("quick start").replace(ENDPOINT, coordinator))

    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )

    assert (ran.returncode, ran.stdout) == (0, "SUCCEEDED b'sent a letter'\n"), ran.stderr


def test_the_tour_runs_a_job_and_refuses_the_late_completion(coordinator: str) -> None:
    ran = subprocess.run(
        ["sh", "-c", block("tour").replace(ENDPOINT, coordinator)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PATH": grpcurl_path()},
    )

    assert "AUTHORITY_CONFIRMED" in ran.stdout, ran.stderr
    assert "VERDICT_HELD" in ran.stdout
    assert ran.stdout.count("JOB_STATE_SUCCEEDED") == 2
    assert "Code: FailedPrecondition" in ran.stderr
    assert "CLAIM_LOST" in ran.stderr
