"""Keepalives: few however many jobs run, and theirs is no coordinator's property."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1.worker_service_pb2 import Claim
from tests.fault.support.calls import Calls
from tests.fault.support.court import Court
from tests.fault.support.lapse import lapse
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually


def keepalives(etcd: EtcdProcess) -> int:
    """How many keepalive requests etcd has received."""
    with urllib.request.urlopen(f"{etcd.metrics_url}/metrics", timeout=5) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("grpc_server_msg_received_total{") and '"LeaseKeepAlive"' in line:
                return int(float(line.split()[-1]))
    return 0


@pytest.mark.parametrize(
    ("jobs", "ttl", "seconds"),
    [
        pytest.param(400, 6.0, 15, marks=pytest.mark.slow),
        pytest.param(2000, 10.0, 180, marks=[pytest.mark.full, pytest.mark.timeout(420)]),
    ],
)
async def test_keepalives_go_by_sessions_and_not_by_jobs(
    jobs: int,
    ttl: float,
    seconds: int,
    own_etcd: EtcdProcess,
    own_court: Court,
    namespace: str,
    tmp_path: Path,
) -> None:
    """Fault case 027: one keepalive a beat of a session, that is at most three a TTL; no claim is lost."""
    each = 200
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(Coordinator(own_etcd.endpoints, tmp_path))
        calls = await stack.enter_async_context(Calls(coordinator.endpoint, namespace, timeout=10))
        ids = [f"j{number:04}" for number in range(jobs)]
        await calls.submit_many([calls.spec(job_id) for job_id in ids])
        held: list[tuple[str, list[Claim]]] = []
        for _ in range(jobs // each):
            session, mine = await calls.open(ttl=ttl), []
            held.append((session, mine))
            await stack.enter_async_context(calls.beating(session, mine, every=ttl / 3))
            while len(mine) < each:
                mine += await calls.claim(session, most=min(100, each - len(mine)), wait=2)
        before, begin = keepalives(own_etcd), time.monotonic()
        await asyncio.sleep(seconds)
        sent, span = keepalives(own_etcd) - before, time.monotonic() - begin
        for _, mine in held:
            for claim in mine:
                assert await calls.complete(claim) == "SUCCEEDED"
    # The coordinator's own leases (membership, retention) are a handful.
    bound = (len(held) + 5) * 3 * (span / ttl + 2)
    assert 0 < sent <= bound, f"{sent} keepalives in {span:.0f} s, at most {bound:.0f} expected"
    judgement = await own_court.judge(submitted=ids)
    assert {(job.attempt, job.lease_losses) for job in judgement.jobs.values()} == {(1, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("returns", ["the same one", "another one"])
@pytest.mark.parametrize("jobs", [20, pytest.param(100, marks=pytest.mark.full)])
async def test_workers_keep_their_leases_over_the_death_of_a_coordinator(
    jobs: int, returns: str, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 115: SIGKILL, two seconds of nothing, then it or another one: no lease is lost.

    The TTL leaves a busy machine time to start a coordinator.
    """
    ids = [f"j{number:03}" for number in range(jobs)]
    async with AsyncExitStack() as stack:
        dies = await stack.enter_async_context(Coordinator(own_etcd.endpoints, tmp_path, name="dies"))
        other = Coordinator(own_etcd.endpoints, tmp_path, name="other")
        if returns == "another one":
            await stack.enter_async_context(other)
        endpoints = f"{dies.endpoint},{other.endpoint}" if returns == "another one" else dies.endpoint
        for n in range(2):
            await stack.enter_async_context(
                WorkerProcess(
                    endpoints,
                    namespace,
                    tmp_path,
                    name=f"w{n}",
                    sink=own_court.sink.path,
                    gates=tmp_path,
                    queues={"work": jobs},
                    ttl=20.0,
                )
            )
        async with Calls(dies.endpoint, namespace) as calls:
            await calls.submit_many([calls.spec(job_id, {"gate": "open"}) for job_id in ids])
        await eventually(lambda: len(own_court.read().starts) == jobs, timeout=30, what="all run")
        etcd = await stack.enter_async_context(own_court.etcd())
        found = await etcd.range(*own_court.keys.all_sessions(), timeout=5)
        leases = {entry.lease for entry in found.kvs}
        await dies.kill()
        await lapse(2)
        if returns == "the same one":
            await dies.start()
        # Longer than the TTL: without further beats the leases would have ended.
        await lapse(22)
        found = await etcd.range(*own_court.keys.all_sessions(), timeout=5)
        assert {entry.lease for entry in found.kvs} == leases
        (tmp_path / "open").touch()
        await own_court.ended(ids, timeout=30)
    judgement = await own_court.judge(submitted=ids)
    assert {(job.attempt, job.lease_losses) for job in judgement.jobs.values()} == {(1, 0)}
    assert judgement.claims == jobs
