"""docs/running.md lists every setting with its default, and no others; its flags exist."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from coordinator.config import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "running.md").read_text()


def shown(default: object) -> str:
    """The default as the table writes it."""
    if default is None or default == "":
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def test_every_setting_is_on_the_page_with_its_default() -> None:
    settings = Settings()
    expected = {
        f"{group.name}.{setting.name}": shown(getattr(getattr(settings, group.name), setting.name))
        for group in fields(Settings)
        for setting in fields(getattr(settings, group.name))
    }
    rows = re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| (.*?) \| \S.* \|$", PAGE, re.MULTILINE)

    assert dict(rows) == expected
    assert len(rows) == len(expected)


def test_every_flag_of_serve_on_the_page_exists() -> None:
    command = [sys.executable, "-c", "from coordinator.cli import commands_entry; commands_entry()"]
    help_text = subprocess.run(
        [*command, "serve", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    etcds = {
        "--quota-backend-bytes",
        "--experimental-compaction-batch-limit",
        "--compaction-batch-limit",
        "--max-txn-ops",
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - etcds

    assert {"--etcd", "--state-dir"} <= named
    assert [] == sorted(flag for flag in named if flag not in help_text)
