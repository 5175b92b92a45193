"""A snapshot is restored in place: history went back, and no token may ever come twice."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from coordinator.core.fencing import Position
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.high_water import HighWaterFile
from leasekeeper.v1 import types_pb2 as types
from tests.fault.support.calls import Calls, available, refusal, told
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator
from tests.support.polling import eventually


def run_tool(etcd: EtcdProcess, tool: str, *arguments: str) -> None:
    """Run etcdctl or etcdutl of the same release."""
    program = etcd.binary.with_name(tool)
    ran = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def restore(etcd: EtcdProcess, snapshot: Path) -> None:
    """Stop it, put the snapshot in the place of its data, without a revision bump, and start it again."""
    etcd.kill()
    flags = dict(part.removeprefix("--").split("=", 1) for part in etcd.command() if part.startswith("--"))
    shutil.rmtree(etcd.data_dir)
    same = ("name", "initial-cluster", "initial-cluster-token", "initial-advertise-peer-urls", "data-dir")
    run_tool(
        etcd, "etcdutl", "snapshot", "restore", str(snapshot), *(f"--{each}={flags[each]}" for each in same)
    )
    etcd.restart()


async def epoch_bump(etcd: EtcdProcess) -> str:
    """``leasekeeper epoch bump``."""
    command = [sys.executable, "-m", "coordinator", "epoch", "bump", "--etcd", etcd.endpoint]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return str(ran.stdout)


@pytest.mark.parametrize(
    "noticed_by", ["the running process", "the high-water file", "the token of a caller"]
)
async def test_a_restored_store_grants_nothing_until_its_epoch_is_raised(
    noticed_by: str, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault cases 017 and 105: three ways to notice, the refusal, and later tokens above all earlier.

    Under a running coordinator the watch is in the future too: what came after the snapshot is forgotten.
    """
    snapshot = tmp_path / "snapshot.db"
    async with Coordinator(own_etcd.endpoints, tmp_path) as coordinator:
        async with Calls(coordinator.endpoint, namespace) as calls:
            often = types.RetryPolicy(max_lease_losses=1000)
            await calls.submit_many([calls.spec(f"j{n}", retry_policy=often) for n in range(3)])
            session = await calls.open(ttl=600)
            run_snapshot = ("snapshot", "save", str(snapshot), f"--endpoints={own_etcd.endpoint}")
            await asyncio.to_thread(run_tool, own_etcd, "etcdctl", *run_snapshot)
            for _ in range(60):
                last = await calls.claim_one(session, "j1")
                await calls.release(last)
            last = await calls.claim_one(session, "j1")
            await calls.submit("came-later")
        if noticed_by == "the high-water file":
            # It is written every second; what is newer than it only the token of a caller shows.
            file = HighWaterFile(tmp_path / "coordinator-state")
            newest = Position(1, last.fencing_token % 2**44)
            await eventually(
                lambda: (file.read() or Position(0, 0)) >= newest, timeout=20, what="it is written"
            )
        if noticed_by != "the running process":
            await coordinator.kill()
        await asyncio.to_thread(restore, own_etcd, snapshot)
        if noticed_by == "the token of a caller":
            shutil.rmtree(tmp_path / "coordinator-state")
        if noticed_by != "the running process":
            coordinator.launch()
            await eventually(lambda: '"serving"' in coordinator.log, timeout=20, what="it serves")

        async with Calls(coordinator.endpoint, namespace) as calls:

            async def refuses() -> bool:
                if noticed_by == "the token of a caller":
                    return (await refusal(calls.complete(last))).reason == "EPOCH_REGRESSED"
                other = await refusal(calls.claim(session, timeout=3))
                return other.reason == "EPOCH_REGRESSED"

            await eventually(refuses, timeout=20, interval=0.2, what="it refuses")
            said = await epoch_bump(own_etcd)

            fresh = await available(lambda: calls.open(ttl=60), timeout=20)

            async def all_again() -> bool:
                try:
                    claims = await available(lambda: calls.claim(fresh, most=10, wait=1), timeout=20)
                except grpc.aio.AioRpcError as error:
                    # It looks at the epoch every second.
                    assert told(error).reason == "EPOCH_REGRESSED"  # noqa: PT017
                    return False
                got.update((claim.job_id, claim.fencing_token) for claim in claims)
                return len(got) >= 3

            got: dict[str, int] = {}
            await eventually(all_again, timeout=30, what="the jobs of the snapshot are handed out")
            stale = await refusal(calls.complete(last))
    assert "epoch 1 -> 2" in said
    assert sorted(got) == ["j0", "j1", "j2"]
    assert min(got.values()) > last.fencing_token
    assert stale.reason == "CLAIM_LOST"
    if noticed_by != "the token of a caller":
        assert "history went back" in coordinator.log
        assert "granted and settled again" in coordinator.log
