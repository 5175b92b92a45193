"""One etcd and one coordinator that all harmless cases of a module share; those that hurt them start own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.embedded.etcd_process import EtcdOptions, EtcdProcess
from tests.fault.support.calls import Calls
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator
from tests.support.services import ETCD_VERSION_VARIABLE, EtcdFactory, session_etcd


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``full`` is slow as well, and what is neither is the core: `make test` leaves out what is slow."""
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        if item.get_closest_marker("full") is not None:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.core)


@pytest.fixture(scope="module")
def uncompacted_etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One etcd for a module's harmless cases, that nobody may compact.

    Each test has a namespace, and a coordinator takes no more than 100 of them: one etcd for all does not do.
    """
    with session_etcd(tmp_path_factory.mktemp("uncompacted-etcd")) as server:
        yield server


@pytest.fixture(scope="module")
def shared(
    uncompacted_etcd_server: EtcdProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Coordinator]:
    """A coordinator on the module's etcd; no test may stop, freeze or cut it off."""
    coordinator = Coordinator(uncompacted_etcd_server.endpoints, tmp_path_factory.mktemp("shared"))
    coordinator.start_blocking()
    yield coordinator
    asyncio.run(coordinator.kill())


@pytest.fixture
def court(uncompacted_etcd_server: EtcdProcess, namespace: str, tmp_path: Path) -> Court:
    """The judge of this test's namespace on the shared etcd."""
    return Court(uncompacted_etcd_server.endpoints, namespace, tmp_path / "sink.sqlite")


@pytest.fixture
async def calls(shared: Coordinator, namespace: str) -> AsyncIterator[Calls]:
    """Raw calls to the shared coordinator; none may outlive its deadline (oracle O5)."""
    async with Calls(shared.endpoint, namespace) as made:
        yield made
    assert made.late == []


@pytest.fixture
def own_etcd(etcd_factory: EtcdFactory) -> EtcdProcess:
    """An etcd of this test alone, of the version under test."""
    return etcd_factory(EtcdOptions(version=os.environ.get(ETCD_VERSION_VARIABLE, "")))


@pytest.fixture
def own_court(own_etcd: EtcdProcess, namespace: str, tmp_path: Path) -> Court:
    """The judge on the test's own etcd."""
    return Court(own_etcd.endpoints, namespace, tmp_path / "sink.sqlite")
