"""docs/states.md is what the transition table says."""

from __future__ import annotations

import subprocess
import sys

from coordinator.core.job import JobState
from coordinator.core.machine import TRANSITIONS
from tests.architecture.source_tree import ROOT


def test_the_drawing_of_the_states_is_that_of_the_table() -> None:
    drawn = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "draw_states.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert drawn.returncode == 0, drawn.stderr


def test_the_document_names_every_state_and_command() -> None:
    text = (ROOT / "docs" / "states.md").read_text()
    commands = {command.__name__ for _, command in TRANSITIONS}

    assert [] == [name for name in [*(state.name for state in JobState), *commands] if name not in text]
