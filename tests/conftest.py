"""Fixtures that every test may use; see the modules of `tests.support` for what they do."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ["tests.support.omissions", "tests.support.services"]

# No test is judged by the clock: hypothesis' 200 ms an example say more of the machine than of the code.
settings.register_profile("leasekeeper", deadline=None)
settings.load_profile("leasekeeper")
