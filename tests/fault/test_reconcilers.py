"""Reconcilers as daemons: one leads, another takes over, and who was frozen changes nothing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.core.job import Job, JobState
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdClient
from leasekeeper.v1 import queue_service_pb2
from tests.fault.support.calls import Calls
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator
from tests.fault.support.reconciler_process import Leader, Reconciler, leader_of_sweeps
from tests.support.polling import eventually

MEMBERSHIP_TTL = 10.0
"""Seconds until a leader that has gone is forgotten."""
PROMISED = MEMBERSHIP_TTL + 2.0
"""Seconds until another has swept; what the machine is slower by comes on top."""
SLOW_MACHINE = 15.0
OFTEN = {"RECONCILER__SWEEP_EVERY_S": "1"}
LEAVES_SWEEPS = {"RECONCILER__ENABLED": "false"}


async def took_over(client: EtcdClient, daemons: Sequence[Reconciler], *, but: str = "") -> Leader:
    """The leader, once it is one of the daemons and not *but*."""
    addresses = {daemon.address for daemon in daemons}

    async def found() -> Leader | None:
        leader = await leader_of_sweeps(client)
        return leader if leader is not None and leader.address in addresses - {but} else None

    leader = await eventually(found, timeout=PROMISED + SLOW_MACHINE, interval=0.1, what="a leader")
    assert leader is not None
    return leader


async def state_of(court: Court, client: EtcdClient, job_id: str) -> JobState:
    jobs: dict[str, Job] = await court.jobs(client)
    return jobs[job_id].state


async def written_at(court: Court, client: EtcdClient, job_id: str) -> int:
    """Revision of the job's record."""
    return (await client.range(court.keys.state(job_id), timeout=5)).kvs[0].mod_revision


async def recovered(court: Court, client: EtcdClient, job_id: str) -> None:
    async def waits() -> bool:
        return await state_of(court, client, job_id) is JobState.PENDING

    await eventually(waits, timeout=PROMISED + SLOW_MACHINE, interval=0.1, what=f"{job_id} is recovered")


async def knows_of_one_claim(calls: Calls, like: str) -> None:
    """Wait until the coordinator believes that one job of the queue of *like* is held."""
    queue = calls.spec(like).queue

    async def one() -> bool:
        reply = await calls.queues.GetQueueStats(
            queue_service_pb2.GetQueueStatsRequest(namespace=calls.namespace, queue=queue), timeout=5
        )
        return sum(found.running for found in reply.types) == 1

    await eventually(one, timeout=SLOW_MACHINE, interval=0.05, what="the deletion is heard of")


@pytest.mark.slow
async def test_a_leader_that_is_frozen_is_replaced_and_changes_nothing_when_it_goes_on(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Only a sweep finds claims deleted by hand, and the coordinator leaves sweeps to the daemons."""
    etcd = own_etcd.endpoints
    async with (
        Coordinator(etcd, tmp_path, settings=LEAVES_SWEEPS) as coordinator,
        Reconciler(etcd, tmp_path, name="d1", settings=OFTEN) as one,
        Reconciler(etcd, tmp_path, name="d2", settings=OFTEN) as other,
        Calls(coordinator.endpoint, namespace) as calls,
        own_court.etcd() as client,
    ):
        by_address = {daemon.address: daemon for daemon in (one, other)}
        await calls.submit_many([calls.spec(job_id) for job_id in ("j1", "j2", "held")])
        session = await calls.open(ttl=120)
        for job_id in ("j1", "j2", "held"):
            await calls.claim_one(session, job_id, wait=10)
        held = await own_court.claim_revision("held")
        first = await took_over(client, (one, other))

        by_address[first.address].pause()
        await client.delete_range(own_court.keys.claim("j1"), timeout=5)
        second = await took_over(client, (one, other), but=first.address)
        await recovered(own_court, client, "j1")
        assert await written_at(own_court, client, "j1") > second.since, "nobody sweeps but the leader"

        # The old leader goes on, late with its sweep, while nobody else can sweep.
        by_address[second.address].pause()
        await client.delete_range(own_court.keys.claim("j2"), timeout=5)
        by_address[first.address].resume()
        third = await took_over(client, (one, other), but=second.address)
        await recovered(own_court, client, "j2")
        assert third.address == first.address
        assert third.since > second.since
        assert await written_at(own_court, client, "j2") > third.since, "it swept before it led again"

        # The other one goes on too, and finds nothing to do that is not the leader's.
        before = {job_id: await written_at(own_court, client, job_id) for job_id in ("j1", "j2", "held")}
        by_address[second.address].resume()
        await by_address[second.address].becomes(serving=True)
        leading = await leader_of_sweeps(client)
        assert leading == third
        assert before == {job_id: await written_at(own_court, client, job_id) for job_id in before}
        assert await own_court.claim_revision("held") == held, "a live holder was touched"
    judgement = await own_court.judge(submitted=("j1", "j2", "held"), by_hand=("j1", "j2"), quiet=False)
    assert {job_id: judgement.jobs[job_id].lease_losses for job_id in before} == {"j1": 1, "j2": 1, "held": 0}


@pytest.mark.slow
async def test_a_daemon_tells_of_its_health_and_ends_in_order(own_etcd: EtcdProcess, tmp_path: Path) -> None:
    daemon = Reconciler(own_etcd.endpoints, tmp_path, name="d1")
    own_etcd.pause()
    daemon.child.spawn()
    try:
        await eventually(lambda: daemon.serving("") is True, timeout=30, interval=0.1)
        assert daemon.serving() is False, "it has listed nothing yet"
        own_etcd.resume()
        await daemon.becomes(serving=True)
        own_etcd.pause()
        await daemon.becomes(serving=False)
        assert daemon.serving("") is True, "it is alive, and need not be started again"
        own_etcd.resume()
        await daemon.becomes(serving=True)
        assert await daemon.terminate(timeout=20) == 0
        assert '"stopped"' in daemon.log
    finally:
        own_etcd.resume()
        await daemon.kill()


async def test_a_coordinator_that_leaves_sweeps_still_recovers_what_it_hears_of(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, settings=LEAVES_SWEEPS) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
        own_court.etcd() as client,
    ):
        await calls.submit_many([calls.spec("j1"), calls.spec("j2")])
        session = await calls.open(ttl=60)
        for job_id in ("j1", "j2"):
            await calls.claim_one(session, job_id, wait=10)
        await client.delete_range(own_court.keys.claim("j2"), timeout=5)
        # Each kind of key has its watch: who hears of the session's end first takes the claim's
        # deletion for a part of it, looks, and recovers the job as well.
        await knows_of_one_claim(calls, "j1")
        await client.lease_revoke(int(session, 16), timeout=5)
        await recovered(own_court, client, "j1")
        await asyncio.sleep(0.3)
        assert await state_of(own_court, client, "j2") is JobState.RUNNING, "that is for a sweep to find"
        assert await leader_of_sweeps(client) is None
