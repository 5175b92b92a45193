"""Every planted bug fails the run of the fleet, which passes without one in tests/property/test_fleet.py."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import tests.fault.seeded_retry_bugs  # noqa: F401 - plants its bugs among BUGS
from tests.fault.seeded_bugs import BUGS
from tests.property.fleet import Fleet
from tests.property.test_fleet import RUN

GENERATE_ONLY = settings(RUN, phases=[Phase.generate], report_multiple_bugs=False)
"""The same examples; only the search for the smallest failure is left out."""


@pytest.mark.parametrize("bug", BUGS)
def test_the_run_of_the_fleet_catches(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Fleet, settings=GENERATE_ONLY)
