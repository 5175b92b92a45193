"""A client that knows nothing of us: grpcurl, by reflection alone."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.rpc.conftest import Api
from tests.support.services import missing_service

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def grpcurl() -> str:
    """The program."""
    built = ROOT / "tools" / "bin" / "grpcurl"
    found = str(built) if os.access(built, os.X_OK) else shutil.which("grpcurl")
    return found or missing_service("grpcurl", "run `make tools`")


async def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


async def test_the_tour_ends_with_the_stale_completion_refused(api: Api, grpcurl: str) -> None:
    tour = await run(str(ROOT / "examples" / "grpcurl" / "tour.sh"), api.address, GRPCURL=grpcurl)

    assert (0, "") == (tour.returncode, tour.stderr), tour.stdout
    assert "CLAIM_LOST" in tour.stdout
    assert "JOB_STATE_SUCCEEDED" in tour.stdout


async def test_the_tour_of_locks_ends_with_the_stale_token_refused(api: Api, grpcurl: str) -> None:
    tour = await run(str(ROOT / "examples" / "grpcurl" / "locks.sh"), api.address, GRPCURL=grpcurl)

    assert (0, "") == (tour.returncode, tour.stderr), tour.stdout
    assert "LOCK_LOST" in tour.stdout


async def test_the_tour_of_the_stream_is_pushed_a_job_and_a_request_to_stop(api: Api, grpcurl: str) -> None:
    tour = await run(str(ROOT / "examples" / "grpcurl" / "stream.sh"), api.address, GRPCURL=grpcurl)

    assert (0, "") == (tour.returncode, tour.stderr), tour.stdout
    for what in ("opened", "claims", "settled", "JOB_STATE_SUCCEEDED", "stop"):
        assert f'"{what}"' in tour.stdout


async def test_grpcurl_shows_the_details_of_an_error(api: Api, grpcurl: str) -> None:
    method = "leasekeeper.v1.JobService/SubmitJob"
    refused = await run(grpcurl, "-plaintext", "-d", '{"job": {"queue": "A"}}', api.address, method)

    assert refused.returncode != 0
    assert "InvalidArgument" in refused.stderr
    assert "VALIDATION_FAILED" in refused.stderr
    assert "job.queue" in refused.stderr


@pytest.mark.parametrize(
    "symbol",
    [
        "leasekeeper.v1.JobService",
        "leasekeeper.v1.WorkerService",
        "leasekeeper.v1.LockService",
        "leasekeeper.v1.AdminService",
        "grpc.health.v1.Health",
        "leasekeeper.v1.Job",
    ],
)
async def test_every_service_and_message_describes_itself(api: Api, grpcurl: str, symbol: str) -> None:
    described = await run(grpcurl, "-plaintext", api.address, "describe", symbol)

    assert (0, "") == (described.returncode, described.stderr)
    assert symbol.rpartition(".")[2] in described.stdout


async def test_an_operator_needs_no_more_than_the_line_of_the_example(api: Api, grpcurl: str) -> None:
    """The line of examples/grpcurl/README.md, with this coordinator's address."""
    text = (ROOT / "examples" / "grpcurl" / "README.md").read_text()
    [line] = [line.strip() for line in text.splitlines() if "RunReconcile" in line]
    _, *words = shlex.split(line.replace("127.0.0.1:7420", api.address))

    answer = await run(grpcurl, *words)

    assert (0, "") == (answer.returncode, answer.stderr)
    assert {"lost", "due"} <= {one["pass"] for one in json.loads(answer.stdout)["passes"]}


async def test_health_answers_without_protos(api: Api, grpcurl: str) -> None:
    answer = await run(
        grpcurl, "-plaintext", "-d", '{"service": ""}', api.address, "grpc.health.v1.Health/Check"
    )

    assert "SERVING" in answer.stdout
