"""`leasekeeper demo`: the whole of it on a small input, and what its output and exit code mean."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.integration.cli.dev_process import COMMAND

FIELDS = [
    "jobs",
    "succeeded",
    "recovered",
    "stale_effects_refused",
    "stale_settlements_rejected",
    "duplicate_effects",
    "lost",
    "seconds",
    "jobs_per_second",
]


def small_input(folder: Path) -> Path:
    """Some sixty files, the odd ones among them, with fewer than a thousand lines."""
    folder.mkdir()
    odd = {
        "empty.py": b"",
        "broken.py": b"def f(:\n",
        "null.py": b"x = 1\0\n",
        "latin.py": b"# coding: latin-1\nname = '\xe4'\n",
        "undeclared.py": b"name = '\xe4'\n",
        "no newline.py": b"x = 1",
        "ünïcode.py": b"class A: pass\n",
    }
    for name, content in odd.items():
        (folder / name).write_bytes(content)
    for number in range(53):
        (folder / f"m{number:02}.py").write_text(f"class C{number}:\n    def f(self): return {number}\n")
    return folder


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "TMPDIR": str(cwd)},
    )


def test_a_small_input_meets_every_condition(tmp_path: Path) -> None:
    source = small_input(tmp_path / "source")
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    ran = demo("--input", str(source), "--workers", "3", "--json", cwd=scratch)

    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 1
    summary = json.loads(ran.stdout)
    assert list(summary) == FIELDS
    lines = sum(max(1, len(file.read_bytes().splitlines())) for file in source.iterdir())
    assert summary["jobs"] == summary["succeeded"] == lines
    assert summary["recovered"] >= 1
    assert summary["stale_effects_refused"] >= 1
    assert summary["stale_settlements_rejected"] >= 1
    assert (summary["duplicate_effects"], summary["lost"]) == (0, 0)
    assert summary["seconds"] > 0
    assert list(scratch.iterdir()) == []


def test_one_file_and_one_worker_are_enough(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("x = 1\n")

    ran = demo("--input", str(tmp_path), "--workers", "1", cwd=tmp_path)

    assert ran.returncode == 0, ran.stderr
    assert "1 jobs, 1 succeeded (1 parsed)" in ran.stdout


def test_an_input_without_python_files_cannot_run(tmp_path: Path) -> None:
    ran = demo("--input", str(tmp_path), "--json", cwd=tmp_path)

    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no *.py file below" in ran.stderr
