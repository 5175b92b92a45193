"""A pytest plugin: a coordinator in memory for each test that asks for it. See docs/testing.md.

A package of its own, so that pytest loads three functions at its start, and the SDK only where a test uses
one of them. It needs no plugin for async tests, and gets along with each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from worker_sdk import JobClient, Worker
    from worker_sdk.testing import FakeCoordinator

__all__ = ["job_client", "leasekeeper", "leasekeeper_queues", "worker"]

_BEAT_SECONDS = 0.05
"""Between a worker's beats: so soon it hears that its job is cancelled or lost."""


@pytest.fixture
def leasekeeper() -> Iterator[FakeCoordinator]:
    """A coordinator in memory, whose time moves by `advance` alone."""
    from worker_sdk.testing import FakeCoordinator

    with FakeCoordinator(beat_seconds=_BEAT_SECONDS) as fake:
        yield fake


@pytest.fixture
def leasekeeper_queues() -> Sequence[str]:
    """The queues that `worker` serves. Override it where they have other names."""
    return ("default",)


@pytest.fixture
def job_client(leasekeeper: FakeCoordinator) -> JobClient:
    """A client of it, for the one event loop that first uses it."""
    from worker_sdk import JobClient

    return JobClient(leasekeeper.endpoint)


@pytest.fixture
def worker(leasekeeper: FakeCoordinator, leasekeeper_queues: Sequence[str]) -> Worker:
    """A worker of it that does not run yet: register handlers, then use it with `worker_sdk.testing.running`,
    or let a task run it."""
    from worker_sdk import Worker, WorkerConfig

    config = WorkerConfig(handle_signals=False)
    return Worker(leasekeeper.endpoint, queues=leasekeeper_queues, config=config)
