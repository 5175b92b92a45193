"""`leasekeeper dev`: everything in one folder, one user at a time, and the data stay."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from coordinator.cli.dev import USUAL_PORT
from coordinator.cli.dev_tour import tour_lines
from tests.integration.cli.dev_process import COMMAND, alive, children_of, running_dev
from tests.support.services import missing_service
from worker_sdk import JobClient, JobSpec

TOOLS = Path(__file__).resolve().parents[3] / "tools" / "bin"


def grpcurl_path() -> str:
    """A PATH that has grpcurl on it."""
    path = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("grpcurl", path=path) is None:
        missing_service("grpcurl", "neither tools/bin/grpcurl (`make tools`) nor one on the PATH")
    return path


async def test_a_second_start_on_the_folder_keeps_the_data(tmp_path: Path) -> None:
    folder = tmp_path / "dev"
    spec = JobSpec(queue="q", type="t", payload=b"kept", job_id="a job")

    with running_dev(folder) as first:
        async with JobClient(first.wait_ready()["coordinator"]) as client:
            await client.submit(spec)
        children = children_of(first.child.pid)
        assert first.stop() == 0
    assert not any(alive(child) for child in children)
    assert not (folder / "endpoints.json").exists()

    with running_dev(folder) as second:
        async with JobClient(second.wait_ready()["coordinator"]) as client:
            assert (await client.get("a job")).spec.payload == b"kept"
            assert not (await client.submit(spec)).created
        assert second.stop(signal.SIGINT) == 0


def test_a_folder_in_use_is_refused_and_the_printed_lines_run_a_job(tmp_path: Path) -> None:
    path = grpcurl_path()
    with running_dev(tmp_path / "dev") as server:
        coordinator = server.wait_ready()["coordinator"]

        again = subprocess.run(
            [*COMMAND, "dev", "--dir", str(tmp_path / "dev")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert again.returncode == 2
        assert f"in use by process {server.child.pid}" in again.stderr

        printed = server.output.read_text()
        lines = tour_lines(coordinator)
        assert "For development only" in printed
        assert [line for line in printed.splitlines() if "grpcurl -plaintext" in line] == lines
        ran = subprocess.run(
            ["sh", "-ec", "\n".join(lines)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PATH": path},
        )
        assert ran.returncode == 0, ran.stderr
        assert "VERDICT_HELD" in ran.stdout
        assert "JOB_STATE_SUCCEEDED" in ran.stdout
        assert server.stop() == 0


@pytest.mark.parametrize("variable", ["LEASEKEEPER_ETCD_BIN", "LEASEKEEPER_VALKEY_BIN"])
def test_a_missing_program_says_what_to_install(tmp_path: Path, variable: str) -> None:
    ran = subprocess.run(
        [*COMMAND, "dev", "--dir", str(tmp_path / "dev")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, variable: str(tmp_path / "absent")},
    )

    assert ran.returncode == 2
    assert "pip install 'leasekeeper[dev]'" in ran.stderr


def test_the_usual_port_gives_way_to_a_free_one_and_a_port_that_was_asked_for_does_not(
    tmp_path: Path,
) -> None:
    with socket.socket() as taken:
        # Whoever holds it, we or somebody else: it is not free.
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", USUAL_PORT))
            taken.listen()
        refused = subprocess.run(
            [*COMMAND, "dev", "--dir", str(tmp_path / "dev"), "--port", str(USUAL_PORT)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert refused.returncode == 2
        assert f"port {USUAL_PORT} of 127.0.0.1 is in use" in refused.stderr
        # The arguments take the place of the `--port 0` that other tests give.
        with running_dev(tmp_path / "dev", "--dir", str(tmp_path / "dev")) as server:
            assert not server.wait_ready()["coordinator"].endswith(f":{USUAL_PORT}")
            assert server.stop() == 0
