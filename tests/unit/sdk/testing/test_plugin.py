"""The pytest plugin, in projects of their own: with and without a plugin for async tests."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]

SYNC = """
import asyncio, pytest
from worker_sdk import JobSpec, JobState
from worker_sdk.testing import running

def test_plain(leasekeeper, worker, job_client):
    @worker.handler("email.send")
    def send(ctx):
        if ctx.attempt == 1:
            raise ConnectionError("no server")
        return "sent"

    async def submit():
        async with job_client:
            await job_client.submit(JobSpec(job_id="a", queue="default", type="email.send"))

    with running(worker):
        asyncio.run(submit())
        assert leasekeeper.wait("a", JobState.SCHEDULED).failure.type == "ConnectionError"
        leasekeeper.advance(1)
        assert leasekeeper.wait("a").result == b"sent"

class TestOtherQueues:
    @pytest.fixture
    def leasekeeper_queues(self):
        return ["slow", "fast"]

    def test_they_are_served(self, worker):
        @worker.handler("t")
        def handle(ctx): ...
        with running(worker):
            pass
"""

ASYNC = """
import asyncio
from worker_sdk import JobSpec, JobState

async def test_loop(leasekeeper, worker, job_client):
    @worker.handler("t")
    async def handle(ctx):
        await asyncio.Event().wait()

    run = asyncio.create_task(worker.run())
    await job_client.submit(JobSpec(job_id="a", queue="default", type="t"))
    while leasekeeper.states["a"] is not JobState.RUNNING:
        await asyncio.sleep(0.01)
    leasekeeper.cancel("a")
    assert (await job_client.wait("a", timeout=5)).state is JobState.CANCELLED
    worker.stop()
    await run
"""

LOOP = ("-o", "asyncio_default_fixture_loop_scope=function")

UNUSED = """
import sys

def test_nothing_is_loaded():
    assert not {"worker_sdk", "coordinator", "grpc", "google.protobuf"} & set(sys.modules)
"""


def run(folder: Path, text: str, *options: str) -> str:
    """Run pytest on one file with the plugin, and warnings as errors; return what it printed."""
    (folder / "test_it.py").write_text(text)
    plugin = tomllib.loads((ROOT / "pyproject.toml").read_text())
    name = plugin["project"]["entry-points"]["pytest11"]["leasekeeper"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", name, "-W", "error", *options, str(folder)]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=paths, cwd=folder)
    return done.stdout + done.stderr


def test_it_needs_no_plugin_for_async_tests(tmp_path: Path) -> None:
    assert "2 passed in" in run(tmp_path, SYNC)


def test_it_gets_along_with_a_plugin_for_async_tests(tmp_path: Path) -> None:
    options = ("-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto", *LOOP)
    assert "1 passed in" in run(tmp_path, ASYNC, *options)


def test_it_loads_nothing_where_it_is_not_used(tmp_path: Path) -> None:
    assert "1 passed in" in run(tmp_path, UNUSED)
