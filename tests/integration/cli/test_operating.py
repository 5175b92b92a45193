"""`leasekeeper queues` and `leasekeeper sessions` against a running coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from typer.testing import CliRunner

from coordinator.app import running_coordinator
from coordinator.cli.commands import commands_entry
from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import job_service_pb2_grpc, worker_service_pb2_grpc
from leasekeeper.v1 import worker_service_pb2 as w
from tests.integration.rpc.conftest import Api, open_worker, settings_for
from tests.support.polling import eventually
from tests.unit.rpc import builders as b


class Bench:
    """A coordinator, and the command line."""

    def __init__(self, api: Api) -> None:
        self.api = api

    async def run(self, group: str, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        given = [group, "--address", self.api.address, *arguments]
        result = await asyncio.to_thread(CliRunner().invoke, commands_entry, given, env={"COLUMNS": "200"})
        return result.exit_code, result.stdout, result.stderr

    async def json(self, group: str, *arguments: str) -> dict[str, Any]:
        for _ in range(100):
            code, out, err = await self.run(group, *arguments, "--json")
            if "NOT_READY" not in err:  # it lists the namespace, also for a moment under load
                break
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found


@pytest.fixture
async def bench(etcd_server: EtcdProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    for name in list(os.environ):
        if name.startswith("LEASEKEEPER_") and "TEST" not in name:
            monkeypatch.delenv(name)
    settings = settings_for(etcd_server, f"/cli-{uuid.uuid4().hex[:12]}")
    async with running_coordinator(settings) as address, grpc.aio.insecure_channel(address) as channel:
        yield Bench(
            Api(
                address,
                channel,
                job_service_pb2_grpc.JobServiceStub(channel),
                worker_service_pb2_grpc.WorkerServiceStub(channel),
            )
        )


async def test_a_queue_is_set_shown_paused_and_resumed(bench: Bench) -> None:
    first = await bench.json("queues", "set", "mail", "--run-timeout", "60", "--max-retries", "1")
    assert first["settings"]["run_timeout"] == 60
    second = await bench.json("queues", "set", "mail", "--target-waits", "1,2,3,4,5")
    assert second["settings"]["target_waits"] == [1, 2, 3, 4, 5]
    assert second["settings"]["run_timeout"] == 60
    assert second["settings"]["retry_policy"]["max_retries"] == 1
    third = await bench.json("queues", "set", "mail", "--run-timeout", "0", "--default-retries")
    assert third["settings"]["run_timeout"] is None
    assert third["settings"]["retry_policy"] is None

    code, _, err = await bench.run("queues", "set", "mail", "--run-timeout", "9", "--etag", first["etag"])
    assert (code, "ETAG_MISMATCH" in err) == (1, True)
    code, _, err = await bench.run("queues", "set", "mail", "--run-timeout", "61", "--total-timeout", "60")
    assert code == 2
    assert "61 s" in err
    assert "60 s" in err

    paused = await bench.json("queues", "pause", "mail", "--reason", "stocktaking [red]")
    assert (paused["paused"], paused["pause_reason"]) == (True, "stocktaking [red]")
    listed = await bench.json("queues", "list")
    assert [queue["queue"] for queue in listed["queues"]] == ["mail"]
    code, out, _ = await bench.run("queues", "list")
    assert (code, "stocktaking [red]" in out) == (0, True)
    assert not (await bench.json("queues", "resume", "mail"))["paused"]


async def test_figures_of_a_queue_are_shown(bench: Bench) -> None:
    await bench.api.jobs.SubmitJob(b.submit(job_id="a"), timeout=5)

    async def one_waits() -> bool:
        return bool((await bench.json("queues", "stats", "mail"))["pending"] == 1)

    await eventually(one_waits)
    figures = await bench.json("queues", "stats", "mail")
    assert figures["priorities"][0]["pending"] == 1
    assert figures["types"][0]["circuit"] == "CLOSED"
    code, out, _ = await bench.run("queues", "stats", "mail")
    assert (code, "1 pending" in out) == (0, True)


async def test_a_session_is_found_by_its_label_shown_and_drained(bench: Bench) -> None:
    worker = await open_worker(bench.api, labels={"zone": "a"})
    await bench.api.jobs.SubmitJob(b.submit(job_id="a"), timeout=5)
    [claim] = await worker.claim(wait=5)

    async def listed() -> list[str]:
        found = await bench.json("sessions", "list", "--label", "zone=a")
        return [one["session_id"] for one in found["sessions"]]

    assert await eventually(listed) == [worker.session_id]
    assert (await bench.json("sessions", "list", "--label", "zone=b"))["sessions"] == []
    shown = await bench.json("sessions", "get", worker.session_id)
    assert [one["job_id"] for one in shown["claims"]] == ["a"]
    assert shown["claims"][0]["fencing_token"] == claim.fencing_token
    drained = await bench.json("sessions", "drain", worker.session_id, "--terminate-after", "3600")
    assert drained["command"] == "QUIET"
    assert drained["terminate_time"]
    assert (await worker.beat(1, claim)).command == w.WORKER_COMMAND_QUIET
    code, out, _ = await bench.run("sessions", "drain", worker.session_id, "--resume")
    assert (code, worker.session_id in out) == (0, True)

    code, _, err = await bench.run("sessions", "get", "0123456789abcdef")
    assert (code, "SESSION_NOT_FOUND" in err) == (1, True)
    code, _, err = await bench.run("sessions", "list", "--label", "zone")
    assert (code, "KEY=VALUE" in err) == (2, True)
