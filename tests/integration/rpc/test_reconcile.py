"""RunReconcile and `leasekeeper reconcile` against a coordinator on real etcd."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.app import RECONCILER, running_coordinator
from coordinator.cli.commands import commands_entry
from coordinator.config import AuthSettings, ReconcilerSettings, ServerSettings, Settings
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.keys import KeySpace
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2
from tests.integration.rpc.conftest import Api, OpenedWorker
from tests.integration.rpc.test_access import Pki, pki
from tests.unit.rpc import builders as b

__all__ = ["pki"]

UNSWEPT = ReconcilerSettings(sweep_every_s=86_400.0)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Nothing is swept but by hand."""
    return replace(settings, reconciler=replace(UNSWEPT, enabled=False))


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LEASEKEEPER_"):
            monkeypatch.delenv(name)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[EtcdClient]:
    """Hands in etcd."""
    async with EtcdClient(EtcdConfig(endpoints=settings.etcd.endpoint_list)) as made:
        yield made


async def break_a_job(api: Api, worker: OpenedWorker, client: EtcdClient, root: str) -> None:
    """j1 is RUNNING, and somebody deleted its claim."""
    await api.jobs.SubmitJob(b.submit(), timeout=5)
    [claim] = await worker.claim(wait=5)
    keys = KeySpace(root).namespace("default")
    await client.delete_range(keys.claim(claim.job_id), timeout=5)


async def state(api: Api) -> str:
    job = (await api.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=5)).job
    return types_pb2.JobState.Name(job.state)


async def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """`leasekeeper reconcile --json`: exit code, the object, standard error."""
    result = await asyncio.to_thread(CliRunner().invoke, commands_entry, ["reconcile", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout) if result.stdout else {}, result.stderr


def lost(answer: dict[str, Any]) -> dict[str, Any]:
    [found] = [one for one in answer["passes"] if one["pass"] == "lost"]
    return dict(found)


async def test_a_dry_run_finds_the_work_a_run_does_it_and_the_next_finds_none(
    api: Api, worker: OpenedWorker, client: EtcdClient, settings: Settings
) -> None:
    await break_a_job(api, worker, client, settings.etcd.root)
    at = ("--address", api.address)

    code, found, _ = await run(*at, "--dry-run")
    assert (3, {"recovered": 1}) == (code, lost(found)["counts"])
    [action] = lost(found)["actions"]
    assert ("j1", "RUNNING", "PENDING") == (action["job_id"], action["state_before"], action["state_after"])
    assert "JOB_STATE_RUNNING" == await state(api), "a dry run changes nothing"

    code, done, _ = await run(*at)
    assert (0, {"recovered": 1}) == (code, lost(done)["counts"])
    assert "JOB_STATE_PENDING" == await state(api)

    assert [0, 0] == [(await run(*at))[0], (await run(*at, "--dry-run"))[0]]


async def test_a_run_leaves_a_live_holder_alone(
    api: Api, worker: OpenedWorker, client: EtcdClient, settings: Settings
) -> None:
    await api.jobs.SubmitJob(b.submit(job_id="held"), timeout=5)
    [claim] = await worker.claim(wait=5)
    await break_a_job(api, worker, client, settings.etcd.root)

    code, done, _ = await run("--address", api.address)

    assert (0, {"recovered": 1}) == (code, lost(done)["counts"])
    completed = await api.workers.CompleteJob(
        b.complete(job_id="held", fencing_token=claim.fencing_token), timeout=5
    )
    assert completed.state == types_pb2.JOB_STATE_SUCCEEDED


async def test_whoever_is_asked_repairs_though_another_leads_the_sweeps(
    api: Api, worker: OpenedWorker, client: EtcdClient, settings: Settings
) -> None:
    """Neither the daemon that leads nor the coordinator that does not has swept since the job broke."""
    leading = replace(settings, reconciler=replace(UNSWEPT, listen="127.0.0.1:0"))
    async with running_coordinator(leading, role=RECONCILER):
        await break_a_job(api, worker, client, settings.etcd.root)
        code, done, _ = await run("--address", api.address)

    assert (0, {"recovered": 1}) == (code, lost(done)["counts"])


async def test_a_daemon_can_be_asked_too(
    api: Api, worker: OpenedWorker, client: EtcdClient, settings: Settings
) -> None:
    await break_a_job(api, worker, client, settings.etcd.root)
    async with running_coordinator(settings, role=RECONCILER) as address:
        code, done, _ = await run("--address", address, "--pass", "lost")

    assert code == 0
    assert ["lost"] == [one["pass"] for one in done["passes"]]
    assert "JOB_STATE_PENDING" == await state(api)


async def test_an_unknown_pass_is_refused_with_the_names_that_there_are(api: Api) -> None:
    code, answer, err = await run("--address", api.address, "--pass", "lots")

    assert (2, {}) == (code, answer)
    assert "VALIDATION_FAILED" in err
    assert "lost" in err


async def test_a_namespace_that_nobody_uses_has_nothing_to_repair_and_is_not_made(
    api: Api, client: EtcdClient, settings: Settings
) -> None:
    code, answer, _ = await run("--address", api.address, "-n", "nobody")

    assert code == 0
    assert {0} == {one["examined"] for one in answer["passes"]}
    space = KeySpace(settings.etcd.root)
    assert [] == list((await client.range(space.registered("nobody"), timeout=5)).kvs)


async def test_it_needs_a_token_with_the_scope_of_operators_and_takes_it_over_tls(
    settings: Settings, pki: Pki, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        "".join(
            f'[[token]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            f'namespaces = ["default"]\nscopes = ["{scope}"]\n'
            for name, scope in (("operator", "admin"), ("producer", "jobs:write"))
        )
    )
    guarded = replace(
        settings,
        server=ServerSettings(listen="127.0.0.1:0", tls_cert=pki.cert, tls_key=pki.key),
        auth=AuthSettings(tokens_file=tokens),
    )
    for name in ("operator", "producer"):
        (tmp_path / name).write_text(name)
    async with running_coordinator(guarded) as address:
        at = ("--address", address, "--tls-ca", str(pki.ca_file))
        taken = await run(*at, "--token-file", str(tmp_path / "operator"))
        scope = await run(*at, "--token-file", str(tmp_path / "producer"))
        namespace = await run(*at, "--token-file", str(tmp_path / "operator"), "-n", "other")
        nobody = await run(*at)

        assert (0, "") == (taken[0], taken[2])
        assert [1, 1, 1] == [scope[0], namespace[0], nobody[0]]
        assert "PERMISSION_DENIED" in scope[2]
        assert "PERMISSION_DENIED" in namespace[2]
        assert "UNAUTHENTICATED" in nobody[2]
