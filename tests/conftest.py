"""Fixtures that every test may use; see the modules of `tests.support` for what they do."""

from __future__ import annotations

pytest_plugins = ["tests.support.omissions", "tests.support.services"]
