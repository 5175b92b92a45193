"""Keys and values that nobody can read, put beside sound ones, which are served as if nothing were."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.keys import KeySpace
from leasekeeper.v1 import admin_service_pb2, admin_service_pb2_grpc, job_service_pb2
from tests.fault.support.calls import Calls
from tests.fault.support.court import Court
from tests.fault.support.health import SERVING, health
from tests.fault.support.processes import SWEEP_OFTEN, Coordinator
from tests.support.polling import eventually

NEVER = {"epoch", "cache_epoch"}
"""Nothing can be fenced without them; that they cannot be read stops a coordinator, and is to."""

VALUES = (b"", b"\xff" * 40, b"\x08\x01", b"\x08\x63", "\N{SNOWMAN}".encode() * 50, bytes(range(256)) * 8)
NAMES = (b"", b"/", b"%zz", b"\xff\xfe", b"a//b", b"x" * 2_000, b"0" * 30 + b"/j", b"..", b"-1/j")


async def spoil(etcd: EtcdClient, namespace: str, chance: random.Random) -> int:
    """Put nonsense under every directory, and under every key of jobs that nobody asks for."""
    count = 0
    for form, sample in KeySpace().samples():
        if form in NEVER:
            continue
        key = sample.replace(b"/default/", b"/" + namespace.encode() + b"/")
        parts = key.split(b"/")
        directories = {b"/".join(parts[:depth]) + b"/" for depth in range(4, len(parts))}
        keys = [key, *(directory + name for directory in directories for name in NAMES)]
        for each in keys:
            await etcd.put(each, chance.choice(VALUES), timeout=5)
            count += 1
    return count


async def reconciled(endpoint: str, namespace: str, *, dry_run: bool) -> list[str]:
    """What each pass said that it failed at; none."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
        request = admin_service_pb2.RunReconcileRequest(namespace=namespace, dry_run=dry_run)
        reply = await stub.RunReconcile(request, timeout=30)
    return [str(one) for one in reply.passes if one.failed or one.error]


async def serving(endpoint: str) -> None:
    async def serves() -> bool:
        return await health(endpoint, "") == SERVING

    await eventually(serves, timeout=10, what="it serves")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_what_cannot_be_read_stops_nobody(
    seed: int, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Each kind of record and key as nonsense, before a coordinator starts and under it."""
    chance = random.Random(seed)
    ids = [f"job{n}" for n in range(20)]
    async with (
        own_court.etcd() as etcd,
        Coordinator(own_etcd.endpoints, tmp_path, plan=SWEEP_OFTEN) as one,
        Calls(one.endpoint, namespace, timeout=20) as calls,
    ):
        await calls.submit_many([calls.spec(job_id, unique_key=job_id) for job_id in ids])
        session = await calls.open(ttl=60)
        held = await calls.claim(session, most=5, wait=5)
        assert await spoil(etcd, namespace, chance) > 100
        for job_id in ids[:5]:
            other = f"broken-{job_id}"
            await calls.submit(other)
            await etcd.put(own_court.keys.state(other), chance.choice(VALUES), timeout=5)
        async with (
            Coordinator(own_etcd.endpoints, tmp_path, name="two", plan=SWEEP_OFTEN) as two,
            Calls(two.endpoint, namespace, timeout=20) as elsewhere,
        ):
            for coordinator in (one, two):

                async def serves(endpoint: str = coordinator.endpoint) -> bool:
                    return await health(endpoint, "") == SERVING

                await eventually(serves, timeout=10, what="it serves")
                assert await reconciled(coordinator.endpoint, namespace, dry_run=True) == []
                assert await reconciled(coordinator.endpoint, namespace, dry_run=False) == []
            for claim in held:
                assert await elsewhere.complete(claim) == "SUCCEEDED"
            mine = await elsewhere.open(ttl=60)
            done = {claim.job_id for claim in held}
            while len(done) < len(ids):
                claims = await elsewhere.claim(mine, most=20, wait=10)
                assert claims, done
                for claim in claims:
                    if claim.job_id in ids:
                        assert await calls.complete(claim) == "SUCCEEDED"
                        done.add(claim.job_id)
            request = job_service_pb2.ListJobsRequest(namespace=namespace, page_size=100)
            listed = await calls.job_call("ListJobs", request)
            assert {job.spec.job_id for job in listed.jobs} >= set(ids)
            for coordinator in (one, two):
                assert '"level": "critical"' not in coordinator.log
                assert "Traceback" not in coordinator.log
