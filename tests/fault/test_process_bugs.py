"""Every bug planted in the coordinator process fails the test that is there to catch it.

That the same tests pass without a bug is shown by the suite itself, of which they are a part; here each runs
once more, with every coordinator of its run changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.support.process_bugs import BUGS
from tests.fault.support.processes import BUG_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "a_submission_is_answered_before_it_is_committed",
    "a_failure_overwrites_a_cancellation",
    "a_beat_does_not_look_at_the_claim",
    "a_release_needs_no_token",
)
"""These take a few seconds each and stand for the rest in the core."""


def test_there_are_enough_bugs_and_the_quick_ones_exist() -> None:
    assert len(BUGS) >= 12
    assert set(QUICK) <= set(BUGS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BUGS]
)
def test_a_planted_bug_is_caught(name: str, tmp_path: Path) -> None:
    bug = BUGS[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--basetemp={tmp_path / 'run'}", f"tests/fault/{bug.caught_by}"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}

    ran = subprocess.run(
        command, cwd=ROOT, env={**env, BUG_VARIABLE: name}, capture_output=True, text=True, timeout=380
    )

    last = ran.stdout.strip().splitlines()[-1]
    assert re.match(r"1 failed in ", last), f"not caught: {ran.stdout[-3000:]}"
    blamed = "\n".join(line for line in ran.stdout.splitlines() if line.startswith("E "))
    assert re.search(bug.says, blamed), f"failed, but for another reason: {blamed[-3000:]}"
