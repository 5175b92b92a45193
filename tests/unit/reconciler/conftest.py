"""The world of the services' tests, for the passes."""

from __future__ import annotations

import pytest

from tests.unit.services.conftest import World


@pytest.fixture
def world() -> World:
    return World()
