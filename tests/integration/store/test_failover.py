"""Three members, and the leader dies: work goes on, no job has two holders, tokens grow."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core.job import JobState
from coordinator.embedded.etcd_cluster import EtcdCluster
from coordinator.errors import EtcdUnavailable, NotApplied, OutcomeUnknown
from tests.integration.store.conftest import Harness, HarnessFactory
from tests.support.polling import eventually
from tests.support.services import EtcdClusterFactory

JOBS = 60


async def run_job(harness: Harness, job_id: str, tokens: dict[str, int]) -> None:
    """Submit, claim and complete, each repeated as an unknown outcome asks for; by its nonce and token."""
    nonce = job_id.encode()
    for _ in range(200):
        try:
            found = await harness.jobs.read(harness.namespace, job_id, deadline=harness.deadline())
            if found.stored is None:
                await harness.submit(job_id)
            elif found.stored.job.state is JobState.PENDING:
                await harness.claim(found.stored, nonce=nonce)
            elif found.stored.job.state is JobState.RUNNING:
                assert found.claim is not None
                assert found.claim.nonce == nonce
                assert tokens.setdefault(job_id, found.claim.token) == found.claim.token
                await harness.complete(found.stored, found.claim.token)
            else:
                assert found.stored.job.state is JobState.SUCCEEDED
                assert [attempt.token for attempt in found.stored.job.attempts] == [tokens[job_id]]
                return
        except (OutcomeUnknown, EtcdUnavailable, NotApplied):
            await asyncio.sleep(0.05)
    raise AssertionError(f"{job_id} does not end")


async def kill_leader(cluster: EtcdCluster, harness: Harness) -> None:
    for member in cluster.members:
        status = await harness.store.client.status(member.endpoint, timeout=5)
        if status.leader == status.header.member_id:
            member.kill()
            return
    raise AssertionError("no member leads")


@pytest.mark.etcd36
async def test_work_goes_on_when_the_leader_dies(
    etcd_cluster_factory: EtcdClusterFactory, make_harness: HarnessFactory
) -> None:
    cluster = etcd_cluster_factory()
    async with make_harness(",".join(cluster.endpoints), txn_timeout=1.0) as harness:
        await harness.store.namespaces.ensure(harness.namespace, deadline=harness.deadline())
        await harness.open_session(ttl_ms=60_000)
        tokens: dict[str, int] = {}
        async with asyncio.TaskGroup() as tasks:
            for number in range(JOBS):
                tasks.create_task(run_job(harness, f"j{number}", tokens))
                if number == JOBS // 2:
                    await eventually(lambda: tokens)
                    await kill_leader(cluster, harness)
        assert len(tokens) == JOBS
        await eventually(lambda: harness.told.fresh.get(harness.namespace), timeout=15)
        assert not harness.store.present.regressed
