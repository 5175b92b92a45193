"""Three members of etcd: one is killed, the leader is frozen, a coordinator is cut off. All stays well."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from coordinator.embedded.etcd_cluster import EtcdCluster
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import StorageError
from coordinator.etcd.client import EtcdClient, EtcdConfig
from tests.fault.support.calls import Calls, available
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually
from tests.support.services import EtcdClusterFactory
from tests.support.tcp_proxy import ProxyMode, TcpProxy

pytestmark = pytest.mark.etcd36

TTL = 5.0


@pytest.fixture
def cluster(etcd_cluster_factory: EtcdClusterFactory) -> EtcdCluster:
    """Three members of etcd 3.6."""
    return etcd_cluster_factory()


@pytest.fixture
def cluster_court(cluster: EtcdCluster, namespace: str, tmp_path: Path) -> Court:
    """The judge on the cluster."""
    return Court(cluster.endpoints, namespace, tmp_path / "sink.sqlite")


async def leader_of(members: Sequence[EtcdProcess]) -> EtcdProcess:
    """The member that leads now."""

    async def find() -> EtcdProcess | None:
        for member in members:
            if not member.running:
                continue
            try:
                async with EtcdClient(EtcdConfig(endpoints=member.endpoints)) as client:
                    status = await client.status(timeout=1.0)
            except StorageError:
                continue
            if status.leader == status.header.member_id:
                return member
        return None

    return await eventually(find, timeout=15, interval=0.1, what="a leader")


@asynccontextmanager
async def load(
    coordinators: Sequence[str], court: Court, folder: Path, *, ttl: float = TTL
) -> AsyncIterator[list[str]]:
    """Two workers, and jobs that come until the block ends; then all of them must end."""
    ids: list[str] = []
    enough = asyncio.Event()
    async with AsyncExitStack() as stack:
        for n in range(2):
            worker = WorkerProcess(
                ",".join(coordinators), court.namespace, folder, name=f"w{n}",
                sink=court.sink.path, queues={"work": 3}, ttl=ttl,
            )  # fmt: skip
            await stack.enter_async_context(worker)
        calls = await stack.enter_async_context(Calls(coordinators[0], court.namespace))

        async def produce() -> None:
            while not enough.is_set():
                job_id = f"j{len(ids):05}"
                await available(
                    lambda job_id=job_id: calls.submit(job_id, {"work": 0.05}, timeout=10), timeout=30
                )
                ids.append(job_id)
                await asyncio.sleep(0.02)

        producing = asyncio.create_task(produce())
        try:
            yield ids
            enough.set()
            await producing
            await court.ended(ids, timeout=40)
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)


async def progress(court: Court, more: int) -> None:
    """Wait until so many further effects have been written."""
    start = len(court.read().effects)
    await eventually(
        lambda: len(court.read().effects) >= start + more, timeout=30, interval=0.05, what="progress"
    )


async def test_a_member_killed_under_load_is_hardly_noticed(
    cluster: EtcdCluster, cluster_court: Court, tmp_path: Path
) -> None:
    """SIGKILL of the leader, then its return: no job is lost, charged or done twice."""
    async with (
        Coordinator(cluster.endpoints, tmp_path) as coordinator,
        load([coordinator.endpoint], cluster_court, tmp_path, ttl=10.0) as ids,
    ):
        await progress(cluster_court, 20)
        leader = await leader_of(cluster.members)
        await asyncio.to_thread(leader.kill)
        killed = time.monotonic()
        await progress(cluster_court, 20)
        assert time.monotonic() - killed < 15
        await asyncio.to_thread(leader.restart)
        await progress(cluster_court, 20)
    judgement = await cluster_court.judge(submitted=ids)
    assert judgement.states == {"SUCCEEDED": len(ids)}
    assert {job.lease_losses for job in judgement.jobs.values()} == {0}


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=[pytest.mark.full, pytest.mark.timeout(300)])])
async def test_a_frozen_leader_breaks_no_promise_when_it_wakes(
    rounds: int, cluster: EtcdCluster, cluster_court: Court, tmp_path: Path
) -> None:
    """SIGSTOP of the leader for 0.8 to 2 TTLs under load (cases 021 and 114 in small).

    Sessions may end, for a new leader may be late; what the judge asks is that no two holders overlap,
    nothing is lost, and every job ends.
    """
    chance = random.Random(21)
    async with (
        Coordinator(cluster.endpoints, tmp_path, name="c1") as first,
        Coordinator(cluster.endpoints, tmp_path, name="c2") as second,
        load([first.endpoint, second.endpoint], cluster_court, tmp_path) as ids,
    ):
        for number in range(rounds):
            await progress(cluster_court, 10)
            leader = await leader_of(cluster.members)
            leader.pause()
            try:
                await asyncio.sleep(TTL * (0.8, 1.2, 2.0, chance.uniform(0.2, 2))[number % 4])
            finally:
                leader.resume()
    judgement = await cluster_court.judge(submitted=ids)
    assert judgement.states == {"SUCCEEDED": len(ids)}
    assert {job.failures for job in judgement.jobs.values()} == {0}


async def test_a_coordinator_whose_member_falls_silent_goes_to_another(
    cluster: EtcdCluster, cluster_court: Court, namespace: str, tmp_path: Path
) -> None:
    """The path to the member in use swallows everything: calls are answered in seconds, no claim is lost."""
    async with AsyncExitStack() as stack:
        paths = [await stack.enter_async_context(TcpProxy(end)) for end in cluster.endpoints]
        coordinator = await stack.enter_async_context(
            Coordinator([path.endpoint for path in paths], tmp_path)
        )
        calls = await stack.enter_async_context(Calls(coordinator.endpoint, namespace, timeout=4.0))
        session = await calls.open(ttl=10)
        await calls.submit("j1")
        [claim] = await calls.claim(session, wait=2)
        in_use = max(paths, key=lambda path: path.bytes_up)
        in_use.set_mode(ProxyMode.DROP)
        cut = time.monotonic()
        await available(lambda: calls.submit("j2"), timeout=15)
        took = time.monotonic() - cut
        verdict = await available(lambda: calls.verdict(session, claim))
        assert await available(lambda: calls.complete(claim)) == "SUCCEEDED"
        [other] = await calls.claim(session, wait=5)
        assert await calls.complete(other) == "SUCCEEDED"
        assert calls.late == []

    assert took < 8
    assert verdict == "HELD"
    await cluster_court.judge(submitted=["j1", "j2"])
