"""docs/api.md is what the docstrings of the SDK's public names say."""

from __future__ import annotations

import subprocess
import sys

import worker_sdk
from tests.architecture.source_tree import ROOT


def test_the_reference_is_that_of_the_docstrings() -> None:
    written = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "write_api.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert written.returncode == 0, written.stderr


def test_the_reference_names_everything_that_is_public() -> None:
    text = (ROOT / "docs" / "api.md").read_text()

    assert [] == [
        name for name in worker_sdk.__all__ if f"### {name}\n" not in text and f"- `{name}` (" not in text
    ]
