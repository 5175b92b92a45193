"""The examples for workers run, and print what they promise."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "worker"
SAID = {
    "process_pool": ["7837 primes below 80000", "none of them this one: True"],
    "document_pipeline": [
        "attempt 1 starts with page 1",
        "attempt 2 starts with page 4",
        'SUCCEEDED at attempt 2: {"pages_done": 5,',
        '"the": 5',
    ],
    "cancellation": [
        "on the loop: cancelled",
        "on-loop: RUNNING when asked, then CANCELLED",
        "in a thread: cancelled",
        "in-thread: RUNNING when asked, then CANCELLED",
        "in-process: RUNNING when asked, then CANCELLED",
    ],
    "idempotent_charge": [
        "attempt 1: charged",
        "attempt 2: was charged before",
        "the first attempt's token is refused now",
        "SUCCEEDED at attempt 2, 750 cents left of 1000",
    ],
}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
async def test_an_example_runs_and_says_what_it_shows(endpoint: str, tmp_path: Path, name: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}",
        "LEASEKEEPER_ENDPOINTS": endpoint,
        "TMPDIR": str(tmp_path),
    }
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert [line for line in SAID[name] if line not in run.stdout] == [], run.stdout
