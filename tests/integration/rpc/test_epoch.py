"""`leasekeeper epoch`: shown, raised, and what that does to tokens and sessions."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from google.protobuf.duration_pb2 import Duration

from coordinator.config import Settings
from coordinator.core.fencing import split_token
from tests.integration.rpc.conftest import Api, OpenedWorker, open_worker
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal


async def epoch(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command against the test's keys."""
    command = [sys.executable, "-m", "coordinator", "epoch", *arguments]
    command += ["--etcd", settings.etcd.endpoints, "--set", f"etcd.root={settings.etcd.root}"]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)


async def test_a_store_that_nobody_used_has_epoch_0(settings: Settings) -> None:
    shown = await epoch(settings, "show")

    assert (0, "0\n") == (shown.returncode, shown.stdout)


async def test_a_bump_makes_every_token_stale_and_every_later_one_larger(
    settings: Settings, api: Api, worker: OpenedWorker
) -> None:
    await api.jobs.SubmitJob(b.submit(), timeout=5)
    [old] = await worker.claim(wait=1)
    before = await epoch(settings, "show")
    bumped = await epoch(settings, "bump")
    after = await epoch(settings, "show")

    stale = await refusal(api.workers.CompleteJob(b.complete(fencing_token=old.fencing_token), timeout=5))
    gone = await refusal(worker.beat(1, old))
    other = await open_worker(api, ttl=Duration(seconds=20))
    [new] = await other.claim(wait=9)
    again = await epoch(settings, "bump", "--at-least", "7")

    assert ("1\n", "2\n") == (before.stdout, after.stdout)
    assert "epoch 1 -> 2; 1 sessions ended in 1 namespaces" in bumped.stdout
    assert "epoch 2 -> 7; 1 sessions ended in 1 namespaces" in again.stdout
    assert ("CLAIM_LOST", "SESSION_NOT_FOUND") == (stale.reason, gone.reason)
    assert (1, 2) == (split_token(old.fencing_token).epoch, split_token(new.fencing_token).epoch)
    assert new.fencing_token > old.fencing_token


async def test_a_bump_without_etcd_says_so() -> None:
    command = [
        sys.executable,
        "-m",
        "coordinator",
        "epoch",
        "bump",
        "--etcd",
        "127.0.0.1:1",
        "--timeout",
        "1",
    ]
    failed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)

    assert (1, "") == (failed.returncode, failed.stdout)
    assert "leasekeeper epoch bump:" in failed.stderr
    assert "Traceback" not in failed.stderr
