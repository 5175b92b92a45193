"""Coordinators hold no authority: killed, stopped or started again under load, they lose nothing (P7)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.core.job import Job
from coordinator.embedded.etcd_process import EtcdProcess
from tests.fault.support.calls import Calls, refusal
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually
from worker_sdk import JobClient, JobSpec

TTL = 6.0
JOBS = 400


class Load:
    """Workers and a producer that know all coordinators."""

    def __init__(self, endpoints: str, court: Court, folder: Path, *, ttl: float = TTL) -> None:
        self.endpoints = endpoints
        self.court = court
        self.folder = folder
        self.ttl = ttl
        self.ids = [f"j{number:04}" for number in range(JOBS)]
        self.submitted: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Three workers, and jobs that keep coming; all are submitted at the end of the block."""
        async with AsyncExitStack() as stack:
            for n in range(3):
                worker = WorkerProcess(
                    self.endpoints, self.court.namespace, self.folder, name=f"w{n}",
                    sink=self.court.sink.path, queues={"work": 4}, ttl=self.ttl,
                )  # fmt: skip
                await stack.enter_async_context(worker)
            client = await stack.enter_async_context(
                JobClient(self.endpoints, namespace=self.court.namespace)
            )
            producing = asyncio.create_task(self._submit(client))
            try:
                yield
                await producing
                await self.court.ended(self.ids, timeout=60)
            finally:
                producing.cancel()
                await asyncio.gather(producing, return_exceptions=True)

    async def _submit(self, client: JobClient) -> None:
        for start in range(0, JOBS, 10):
            part = self.ids[start : start + 10]
            await client.submit_many(
                [
                    JobSpec(queue="work", type="effect", job_id=job_id, payload=b'{"work": 0.03}')
                    for job_id in part
                ],
                timeout=30,
            )
            self.submitted += part

    async def under_way(self, done: int) -> None:
        """Wait until so many effects have been written."""

        def enough() -> bool:
            return len(self.court.read().effects) >= done

        await eventually(enough, timeout=30, interval=0.05, what=f"{done} effects")

    async def judged(self) -> dict[str, Job]:
        """The judgement: everything ended well, no handler's work was charged to anybody."""
        judgement = await self.court.judge(submitted=self.ids)
        assert judgement.states == {"SUCCEEDED": JOBS}
        assert {(job.failures, job.lease_losses) for job in judgement.jobs.values()} == {(0, 0)}
        return dict(judgement.jobs)


@pytest.fixture
async def pair(own_etcd: EtcdProcess, tmp_path: Path) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two coordinators."""
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, name="c1") as first,
        Coordinator(own_etcd.endpoints, tmp_path, name="c2") as second,
    ):
        yield first, second


async def test_a_coordinator_killed_under_load_loses_nothing_and_charges_nobody(
    pair: tuple[Coordinator, Coordinator], own_court: Court, tmp_path: Path
) -> None:
    """P7: SIGKILL of one of two. Sessions, claims and settlements go on at the other."""
    load = Load(f"{pair[0].endpoint},{pair[1].endpoint}", own_court, tmp_path)
    async with load.running():
        await load.under_way(JOBS // 4)
        await pair[0].kill()
    await load.judged()


async def test_all_coordinators_killed_and_started_again_lose_nothing(
    pair: tuple[Coordinator, Coordinator], own_court: Court, tmp_path: Path
) -> None:
    """P7: SIGKILL of all. What they knew lies in etcd.

    The TTL outlasts their absence on a slow machine too, so no session ends for want of beats.
    """
    load = Load(f"{pair[0].endpoint},{pair[1].endpoint}", own_court, tmp_path, ttl=20.0)
    async with load.running():
        await load.under_way(JOBS // 4)
        await asyncio.gather(pair[0].kill(), pair[1].kill())
        await asyncio.gather(pair[0].start(), pair[1].start())
    await load.judged()


async def test_a_coordinator_told_to_stop_under_load_exits_in_order_within_its_grace(
    pair: tuple[Coordinator, Coordinator], own_court: Court, tmp_path: Path
) -> None:
    """SIGTERM: exit code 0 within the grace of 10 s, and nothing is lost, charged or done twice."""
    load = Load(f"{pair[0].endpoint},{pair[1].endpoint}", own_court, tmp_path)
    async with load.running():
        await load.under_way(JOBS // 4)
        begin = time.monotonic()
        code = await pair[0].terminate(timeout=15)
        took = time.monotonic() - begin
    assert code == 0, pair[0].log
    assert took < 10
    jobs = await load.judged()
    assert {job.attempt for job in jobs.values()} == {1}


async def test_no_poll_misses_a_job_that_comes_as_it_begins_to_wait(
    pair: tuple[Coordinator, Coordinator], own_court: Court, namespace: str
) -> None:
    """Fault case 083: submission just before, at and just after the poll, here or at the other one."""
    chance = random.Random(83)
    count = 100
    waited: list[float] = []
    async with Calls(pair[0].endpoint, namespace) as one, Calls(pair[1].endpoint, namespace) as other:
        session = await one.open(ttl=60)
        for number in range(count):
            submitter = (one, other)[number % 2]
            submitting = asyncio.create_task(submitter.submit(f"j{number:03}"))
            await asyncio.sleep(chance.choice((0, 0.001, 0.002, 0.004, 0.008)))
            begin = time.monotonic()
            [claim] = await one.claim(session, wait=5)
            waited.append(time.monotonic() - begin)
            await submitting
            assert await other.complete(claim) == "SUCCEEDED"
    assert max(waited) < 1.0
    await own_court.judge(submitted=[f"j{number:03}" for number in range(count)])


async def test_a_stop_turns_health_off_first_and_answers_long_polls(
    pair: tuple[Coordinator, Coordinator], own_court: Court, namespace: str
) -> None:
    """SIGTERM while a worker polls, a caller waits for a job, and one holds a claim."""
    leaving = pair[0]
    async with (
        Calls(leaving.endpoint, namespace) as calls,
        Calls(pair[1].endpoint, namespace) as others,
        aio.insecure_channel(leaving.endpoint) as channel,
    ):
        session = await calls.open(ttl=30)
        await calls.submit("held", queue="q1")
        [held] = await calls.claim(session, queue="q1", wait=5)
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="leasekeeper.v1.WorkerService"), timeout=20
        )
        first = await watch.read()
        polling = asyncio.create_task(calls.claim(session, wait=20))
        await calls.get("held")  # comes after the poll
        stopping = asyncio.create_task(leaving.terminate(timeout=15))
        last = await watch.read()
        begin = time.monotonic()

        assert await polling == []
        answered = time.monotonic() - begin
        code = await stopping
        late = await refusal(calls.submit("too-late", timeout=2))
        completed = await others.complete(held)
        watch.cancel()

    assert first.status == health_pb2.HealthCheckResponse.SERVING
    assert last.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert answered < 2
    assert code == 0
    assert late.code in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
    assert completed == "SUCCEEDED"
    await own_court.judge(submitted=["held"])
