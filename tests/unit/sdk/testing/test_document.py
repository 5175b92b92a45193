"""What docs/testing.md shows is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.sdk.testing.test_plugin import ROOT, run
from worker_sdk.testing import FakeCoordinator

TEXT = (ROOT / "docs" / "testing.md").read_text()
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_its_examples_pass(tmp_path: Path) -> None:
    examples = CODE.findall(TEXT)

    assert len(examples) == 2
    assert "3 passed in" in run(tmp_path, "\n".join(examples))


def test_it_names_every_control_of_the_fake() -> None:
    controls = {name for name in vars(FakeCoordinator) if not name.startswith("_")}
    told = set(re.findall(r"[`,] ?`?([a-z_]+)(?=[(`,])", TEXT))

    assert controls - told - {"start", "stop", "endpoint", "now"} == set()
