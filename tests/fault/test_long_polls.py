"""Polls of workers that are dead, frozen or just leaving: no job stays with them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import grpc
import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import job_service_pb2 as jobs
from tests.fault.support.calls import Calls, available
from tests.fault.support.court import Court, metric
from tests.fault.support.processes import Coordinator, PollProcess, WorkerProcess
from tests.support.polling import eventually
from tests.support.tcp_proxy import TcpProxy

TTL = 2.0


async def test_a_job_passes_by_a_poll_whose_connection_has_ended(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 002 (a): the dead worker's poll is first in line, and its end has been seen."""
    async with PollProcess(shared.endpoint, calls.namespace, tmp_path, name="dead") as dead:
        second = await calls.open(ttl=10)
        polling = asyncio.create_task(calls.claim(second, wait=10))
        await dead.kill()

        await calls.submit("j1")
        submitted = time.monotonic()
        [claim] = await polling

    assert time.monotonic() - submitted < 1.0
    assert claim.job_id == "j1"
    assert await calls.complete(claim) == "SUCCEEDED"
    job = (await court.judge(submitted=["j1"])).jobs["j1"]
    assert (job.failures, job.lease_losses) == (0, 0)


async def test_a_job_handed_to_a_silent_poll_is_back_within_its_ttl(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 002 (b): the worker is frozen, so its connection stays open and its poll is answered.

    It beats no more, so its lease ends within one TTL, and P8 asks for no further wait.
    """
    async with PollProcess(shared.endpoint, calls.namespace, tmp_path, name="frozen", ttl=TTL) as frozen:
        frozen.pause()
        second = await calls.open(ttl=10)

        await calls.submit("j1")
        submitted = time.monotonic()
        [claim] = await calls.claim(second, wait=10)

    assert time.monotonic() - submitted < TTL + 2.0
    assert await calls.complete(claim) == "SUCCEEDED"
    judgement = await court.judge(submitted=["j1"])
    assert judgement.jobs["j1"].failures == 0


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
async def test_a_worker_that_leaves_swallows_no_job(
    rounds: int, shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 003: SIGTERM and the submission within 20 ms of each other, in either order.

    The idle worker polls anew so often that the one that leaves is first in line.
    """
    chance = random.Random(3)
    told = {"sink": court.sink.path, "ttl": 5.0}
    ids = [f"j{number}" for number in range(rounds)]
    submitted: dict[str, float] = {}
    async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="idle", poll_wait=0.2, **told):
        for job_id in ids:
            async with WorkerProcess(
                shared.endpoint, calls.namespace, tmp_path, name=f"leaves-{job_id}", **told
            ) as leaves:
                await asyncio.sleep(0.25 + chance.uniform(0, 0.02))
                first, second = chance.uniform(0, 0.02), chance.uniform(0, 0.02)
                asyncio.get_running_loop().call_later(first, leaves.signal, signal.SIGTERM)
                await asyncio.sleep(second)
                submitted[job_id] = time.monotonic()
                await calls.submit(job_id)
                assert await leaves.wait(10) == 0, leaves.log
        ended = await court.ended(ids, timeout=10)

    reading = court.read()
    delays = {job_id: reading.starts_of(job_id)[-1].at - submitted[job_id] for job_id in ids}
    assert max(delays.values()) < 1.0, delays
    assert {(job.failures, job.lease_losses) for job in ended.values()} == {(0, 0)}
    assert len(reading.effects) == rounds
    await court.judge(submitted=ids)


async def test_a_session_that_closes_as_its_poll_wins_a_job_gives_it_back_uncharged(
    calls: Calls, court: Court
) -> None:
    """Fault case 003 without processes: submission and CloseSession at the same moment, 60 times."""
    chance = random.Random(33)
    ids = [f"j{number}" for number in range(60)]

    async def leave(job_id: str) -> None:
        session = await calls.open(ttl=20)
        polling = asyncio.create_task(calls.claim(session, wait=3, kinds=[job_id]))
        await asyncio.sleep(0.02)
        submitting = asyncio.create_task(calls.submit(job_id, type=job_id))
        # Mostly a few milliseconds, at times more, so that a slow machine meets the moment too.
        await asyncio.sleep(0.1 * chance.random() ** 4)
        await calls.close_session(session)
        await submitting
        await asyncio.gather(polling, return_exceptions=True)

    for start in range(0, len(ids), 10):
        await asyncio.gather(*(leave(job_id) for job_id in ids[start : start + 10]))

    async def all_wait() -> bool:
        async with court.etcd() as etcd:
            return {job.state.name for job in (await court.jobs(etcd)).values()} == {"PENDING"}

    await eventually(all_wait, timeout=5, what="all jobs wait again")
    judgement = await court.judge(submitted=ids)
    assert {(job.failures, job.lease_losses) for job in judgement.jobs.values()} == {(0, 0)}
    assert 0 < judgement.claims, "no poll ever won: prove nothing"


async def test_polls_and_streams_of_a_client_that_vanished_leave_nothing_behind(
    own_etcd: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    """Oracle O4: 40 polls and 20 streams over a connection that is reset; watchers and files as before."""

    def held(pid: int) -> tuple[float, int]:
        watchers = metric(own_etcd.metrics_url, "etcd_debugging_mvcc_watcher_total")
        return watchers, len(os.listdir(f"/proc/{pid}/fd"))

    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        TcpProxy(coordinator.endpoint) as proxy,
        Calls(proxy.endpoint, namespace) as calls,
    ):
        session = await calls.open(ttl=60)
        await calls.claim(session)
        before = held(coordinator.pid)
        for _ in range(2):
            polls = [asyncio.create_task(calls.claim(session, wait=20)) for _ in range(40)]
            streams = [
                calls.jobs.WatchJobs(jobs.WatchJobsRequest(namespace=namespace), timeout=30)
                for _ in range(20)
            ]
            await asyncio.gather(*(stream.read() for stream in streams))
            assert held(coordinator.pid)[0] > before[0]
            proxy.close_connections()
            ended = await asyncio.gather(*polls, return_exceptions=True)
            assert all(isinstance(end, grpc.aio.AioRpcError) for end in ended)
            await available(lambda: calls.beat(session))

        def back() -> bool:
            watchers, files = held(coordinator.pid)
            return watchers <= before[0] and files <= before[1] + 3

        await eventually(back, timeout=10, interval=0.1, what=f"back to {before}")


async def test_jobs_submitted_while_the_coordinator_was_frozen_start_at_once_after_it(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 014: the beats fail just as jobs are assigned."""
    ids = [f"j{number}" for number in range(20)]
    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        WorkerProcess(
            coordinator.endpoint,
            namespace,
            tmp_path,
            name="w1",
            sink=own_court.sink.path,
            ttl=8.0,
            queues={"work": 20},
        ),
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        await calls.submit("warm-up")
        await own_court.ended(["warm-up"], timeout=5)
        coordinator.pause()
        begin = time.monotonic()
        submitting = [asyncio.create_task(calls.submit(job_id, timeout=10)) for job_id in ids]
        await eventually(lambda: time.monotonic() - begin > 3.0, what="three seconds")
        coordinator.resume()
        resumed = time.monotonic()
        await asyncio.gather(*submitting)
        ended = await own_court.ended(ids, timeout=15)

    reading = own_court.read()
    starts = [reading.starts_of(job_id)[0].at - resumed for job_id in ids]
    assert max(starts) < 8.0 + 1.0, starts
    assert {job.attempt for job in ended.values()} == {1}
    await own_court.judge(submitted=[*ids, "warm-up"])
