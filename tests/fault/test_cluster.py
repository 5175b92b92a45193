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
from tests.fault.support.calls import Calls, available, refusal
from tests.fault.support.court import Court
from tests.fault.support.lapse import lapse
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.fault.support.split import SplitCluster
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
    """Fault case 110: the path to the member in use swallows everything; no claim is lost."""
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


async def test_a_coordinator_whose_member_is_killed_renews_and_answers_by_another(
    cluster: EtcdCluster, cluster_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 110: SIGKILL of the member in use. Beats are confirmed again within half a TTL."""
    ttl = 20.0
    async with AsyncExitStack() as stack:
        paths = [await stack.enter_async_context(TcpProxy(end)) for end in cluster.endpoints]
        coordinator = await stack.enter_async_context(
            Coordinator([path.endpoint for path in paths], tmp_path)
        )
        calls = await stack.enter_async_context(Calls(coordinator.endpoint, namespace, timeout=4.0))
        session = await calls.open(ttl=ttl)
        await calls.submit("j1")
        [claim] = await calls.claim(session, wait=2)
        for _ in range(20):
            await calls.get("j1")
        in_use = max(range(3), key=lambda n: paths[n].bytes_up)
        await asyncio.to_thread(cluster.members[in_use].kill)
        killed = time.monotonic()

        async def confirmed() -> bool:
            return bool((await available(lambda: calls.beat(session, [claim]))).HasField("safe_duration"))

        await eventually(confirmed, timeout=ttl, what="a confirmed beat")
        took = time.monotonic() - killed
        await available(lambda: calls.submit("j2"))
        assert await calls.verdict(session, claim) == "HELD"
        assert await calls.complete(claim) == "SUCCEEDED"
        assert calls.late == []
    assert took < ttl / 2
    judgement = await cluster_court.judge(submitted=["j1", "j2"], raw=["j1"])
    assert judgement.jobs["j1"].lease_losses == 0


@pytest.mark.parametrize(
    ("seconds", "jobs", "work"),
    [
        pytest.param(16, 20, 2.0, marks=pytest.mark.slow),
        pytest.param(60, 50, 10.0, marks=[pytest.mark.full, pytest.mark.timeout(400)]),
    ],
)
async def test_jobs_outlive_a_leadership_that_flaps(
    seconds: int,
    jobs: int,
    work: float,
    cluster: EtcdCluster,
    cluster_court: Court,
    namespace: str,
    tmp_path: Path,
) -> None:
    """Fault case 114: whoever leads is frozen for 1.5 s every 4 s. All jobs finish, and renewal goes on."""
    ids = [f"j{number:02}" for number in range(jobs)]
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(Coordinator(cluster.endpoints, tmp_path))
        for n in range(2):
            await stack.enter_async_context(
                WorkerProcess(
                    coordinator.endpoint,
                    namespace,
                    tmp_path,
                    name=f"w{n}",
                    sink=cluster_court.sink.path,
                    queues={"work": 10},
                    ttl=TTL,
                )
            )
        async with Calls(coordinator.endpoint, namespace) as calls:
            await calls.submit_many([calls.spec(job_id, {"work": work}) for job_id in ids])
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            leader = await leader_of(cluster.members)
            leader.pause()
            try:
                await lapse(1.5)
            finally:
                leader.resume()
            await lapse(2.5)
        await cluster_court.ended(ids, timeout=60 + work * 3)
    judgement = await cluster_court.judge(submitted=ids)
    assert set(judgement.states) <= {"SUCCEEDED", "QUARANTINED"}, judgement.states
    assert {job.failures for job in judgement.jobs.values()} == {0}
    lost = judgement.outcomes["LOST"]
    assert lost <= jobs, f"{lost} of {judgement.claims} claims were lost"


@pytest.mark.slow
async def test_a_coordinator_on_the_losing_side_of_a_split_grants_nothing(
    namespace: str, tmp_path: Path
) -> None:
    """Fault case 109: one of three members is cut off from the others, and a coordinator knows only that one.

    It answers UNAVAILABLE or UNKNOWN in time and grants nothing; one that knows all members goes on; both
    together keep every promise, and the first one serves again when the split has healed.
    """
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(SplitCluster(tmp_path).running())
        court = Court(cluster.endpoints, namespace, tmp_path / "sink.sqlite")
        lonely = cluster.members[0]
        pinned = await stack.enter_async_context(Coordinator(lonely.endpoints, tmp_path, name="pinned"))
        free = await stack.enter_async_context(Coordinator(cluster.endpoints, tmp_path, name="free"))
        there = await stack.enter_async_context(Calls(pinned.endpoint, namespace, timeout=4))
        here = await stack.enter_async_context(Calls(free.endpoint, namespace, timeout=4))
        session = await there.open(ttl=60)
        for job_id in ("held", "first", "second"):
            await there.submit(job_id)
        held = await there.claim_one(session, "held")

        cluster.cut(lonely)
        cut = time.monotonic()
        await available(lambda: here.submit("third"), timeout=20)
        took = time.monotonic() - cut
        refused = [
            await refusal(there.claim_one(session, "first")),
            await refusal(there.complete(held)),
            await refusal(there.get("held")),
            await refusal(there.submit("nowhere", request_id="r1")),
        ]
        beat = await there.beat(session, [held])
        other = await available(lambda: here.open(ttl=60))
        first = await here.claim_one(other, "first")
        assert await here.complete(first) == "SUCCEEDED"
        cluster.heal()
        assert await available(lambda: there.complete(held), timeout=20) == "SUCCEEDED"
        again = await available(lambda: there.submit("nowhere", request_id="r1"))
        second = await available(lambda: there.claim_one(session, "second"))
        assert await there.complete(second) == "SUCCEEDED"
        assert (here.late, there.late) == ([], [])
        judgement = await court.judge(submitted=["held", "first", "second", "third", "nowhere"])
    assert took < 15
    assert again.job_id == "nowhere"
    assert {answer.code for answer in refused} <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}, refused
    assert beat.authority == 2, "AUTHORITY_UNKNOWN"
    assert judgement.claims == 3
