"""A coordinator on real etcd, a client, and workers in processes of their own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.app import running_coordinator
from coordinator.config import EtcdSettings, ServerSettings, Settings
from coordinator.embedded.etcd_process import EtcdProcess
from worker_sdk import JobClient

ROOT = Path(__file__).resolve().parents[3]
StartWorker = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
async def endpoint(etcd_server: EtcdProcess) -> AsyncIterator[str]:
    """A coordinator with keys of its own, in this loop."""
    settings = Settings(
        server=ServerSettings(listen="127.0.0.1:0"),
        etcd=EtcdSettings(
            endpoints=etcd_server.endpoint, root=f"/test-{uuid.uuid4().hex[:12]}", allow_unsafe=True
        ),
    )
    async with running_coordinator(settings) as address:
        yield address


@pytest.fixture
async def client(endpoint: str) -> AsyncIterator[JobClient]:
    """A client of it."""
    async with JobClient(endpoint) as made:
        yield made


@dataclass(frozen=True)
class Sink:
    """A store that checks tokens: effects of jobs, and the writes that it refused."""

    path: Path

    def rows(self, table: str) -> list[tuple[str, int, str]]:
        """Return (job, token, worker) of *table*: ``accepted`` or ``refused``."""
        with closing(sqlite3.connect(self.path, timeout=10)) as database:
            return list(database.execute(f"SELECT job, token, worker FROM {table} ORDER BY rowid"))


@pytest.fixture
def sink(tmp_path: Path) -> Sink:
    """An empty sink."""
    path = tmp_path / "sink.sqlite"
    with closing(sqlite3.connect(path)) as database:
        for table in ("accepted", "refused"):
            database.execute(f"CREATE TABLE {table} (job TEXT, token INTEGER, worker TEXT)")
        database.commit()
    return Sink(path)


@pytest.fixture
def start_worker(endpoint: str, tmp_path: Path, sink: Sink) -> Iterator[StartWorker]:
    """Start `tests.integration.sdk.worker_program` as a process; the test's end kills what is left."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *, ttl: float = 2.0, slots: int = 1, drain: float = 5.0) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}",
            "LEASEKEEPER_ENDPOINTS": endpoint,
            "WORKER_NAME": name,
            "WORKER_TTL": str(ttl),
            "WORKER_SLOTS": str(slots),
            "WORKER_DRAIN": str(drain),
            "WORKER_FOLDER": str(tmp_path),
            "WORKER_SINK": str(sink.path),
        }
        with (tmp_path / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.sdk.worker_program"],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                text=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


async def exit_code(process: subprocess.Popen[str], timeout: float) -> int:
    """Wait for a process without blocking the coordinator, which runs in this loop."""
    return await asyncio.to_thread(process.wait, timeout)
