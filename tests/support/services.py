"""Real services for tests: shared servers of a test session, and servers of one test alone.

A service that this machine lacks skips the test with a reason, unless LEASEKEEPER_REQUIRE names it (or is
``all``): then it fails, so that a CI run cannot pass by skipping. LEASEKEEPER_TEST_ETCD=3.6 runs the shared
etcd from ``tools/bin``.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from coordinator.embedded.etcd_cluster import EtcdCluster
from coordinator.embedded.etcd_process import EtcdBinaryMissing, EtcdOptions, EtcdProcess
from coordinator.embedded.valkey_process import ValkeyBinaryMissing, ValkeyOptions, ValkeyProcess

__all__ = [
    "EtcdClusterFactory",
    "EtcdFactory",
    "ValkeyFactory",
    "missing_service",
    "session_etcd",
]

REQUIRE_VARIABLE = "LEASEKEEPER_REQUIRE"
ETCD_VERSION_VARIABLE = "LEASEKEEPER_TEST_ETCD"

EtcdFactory = Callable[..., EtcdProcess]
EtcdClusterFactory = Callable[..., EtcdCluster]
ValkeyFactory = Callable[..., ValkeyProcess]


def missing_service(name: str, reason: str) -> NoReturn:
    """Skip the running test, or fail it where *name* is required."""
    required = {word.strip() for word in os.environ.get(REQUIRE_VARIABLE, "").split(",")}
    if required & {"all", name}:
        pytest.fail(f"{name} is required by {REQUIRE_VARIABLE} but missing: {reason}")
    pytest.skip(f"no {name}: {reason}")


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One etcd for all tests of the session; each test keeps to its own prefix and must not stop it."""
    with session_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


def session_etcd(folder: Path) -> EtcdProcess:
    """An etcd of the version under test, to be entered; a missing program skips or fails the test."""
    try:
        return EtcdProcess(folder, EtcdOptions(version=os.environ.get(ETCD_VERSION_VARIABLE, "")))
    except EtcdBinaryMissing as error:
        missing_service("etcd", str(error))


@pytest.fixture
def etcd_factory(tmp_path: Path) -> Iterator[EtcdFactory]:
    """Start etcd servers of this test alone: ``etcd_factory(options=None)``; they end with the test."""
    started: list[EtcdProcess] = []

    def start(options: EtcdOptions | None = None) -> EtcdProcess:
        try:
            server = EtcdProcess(tmp_path / f"etcd{len(started)}", options)
        except EtcdBinaryMissing as error:
            missing_service("etcd", str(error))
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def etcd_cluster_factory(tmp_path: Path) -> Iterator[EtcdClusterFactory]:
    """Start clusters of this test alone: ``etcd_cluster_factory(options=None, size=3)``; etcd 3.6 by default.

    The default is 3.6, because 3.5.1 from PyPI has defects of its own when members crash (etcd issue 13766).
    """
    started: list[EtcdCluster] = []

    def start(options: EtcdOptions | None = None, *, size: int = 3) -> EtcdCluster:
        try:
            cluster = EtcdCluster(
                tmp_path / f"cluster{len(started)}", options or EtcdOptions(version="3.6"), size=size
            )
        except EtcdBinaryMissing as error:
            missing_service("etcd", str(error))
        started.append(cluster)
        return cluster.start()

    yield start
    for cluster in started:
        for member in cluster.members:
            member.kill()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    """One Valkey for all tests of the session; each test keeps to its own namespace and must not stop it."""
    try:
        server = ValkeyProcess(tmp_path_factory.mktemp("valkey"))
    except ValkeyBinaryMissing as error:
        missing_service("valkey", str(error))
    with server:
        yield server


@pytest.fixture
def valkey_factory(tmp_path: Path) -> Iterator[ValkeyFactory]:
    """Start Valkey servers of this test alone: ``valkey_factory(options=None)``; they end with the test."""
    started: list[ValkeyProcess] = []

    def start(options: ValkeyOptions | None = None) -> ValkeyProcess:
        try:
            server = ValkeyProcess(tmp_path / f"valkey{len(started)}", options)
        except ValkeyBinaryMissing as error:
            missing_service("valkey", str(error))
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def namespace() -> str:
    """A Leasekeeper namespace that no other test uses."""
    return f"t-{uuid.uuid4().hex[:16]}"


@pytest.fixture
def etcd_prefix() -> bytes:
    """A key prefix that no other test uses, ending in a slash."""
    return f"/test/{uuid.uuid4().hex[:16]}/".encode()
