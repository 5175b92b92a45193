"""Jobs that are not due yet: kept over a restart, cheap while they wait, run once as they fall due."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.embedded.etcd_process import EtcdProcess
from tests.fault.support.calls import Calls, available
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually

LATE = 5.0


def wall(at: float) -> Timestamp:
    """A wall time, in seconds since 1970."""
    made = Timestamp()
    made.FromMilliseconds(round(at * 1000))
    return made


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has no memory")


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [200, pytest.param(1000, marks=pytest.mark.full)])
async def test_scheduled_jobs_outlive_a_restart_of_store_and_coordinator(
    jobs: int, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 061: both are killed before the jobs are due; none starts early, late or twice."""
    ids = [f"j{number:04}" for number in range(jobs)]
    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        due = time.time() + 10.0
        await calls.submit_many([calls.spec(job_id, run_at=wall(due)) for job_id in ids])
        await asyncio.to_thread(own_etcd.kill)
        await coordinator.kill()
        await asyncio.to_thread(own_etcd.restart)
        await coordinator.start()
        session = await available(lambda: calls.open(ttl=60))
        started: Counter[str] = Counter()
        while len(started) < jobs:
            for claim in await calls.claim(session, most=100, wait=15):
                assert time.time() > due - 0.05
                started[claim.job_id] += 1
                assert await calls.complete(claim) == "SUCCEEDED"
            assert time.time() < due + 3 * LATE, f"only {len(started)} of {jobs} have started"

    assert started == Counter(ids)
    judgement = await own_court.judge(submitted=ids)
    assert judgement.states == {"SUCCEEDED": jobs}
    assert all(job.attempts[0].start_ms >= due * 1000 - 50 for job in judgement.jobs.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "crowd", [10_000, pytest.param(50_000, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
async def test_a_crowd_that_is_due_later_neither_fills_the_memory_nor_hides_who_is_due(
    crowd: int, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 062: a crowd is due in an hour, ten jobs are due now.

    Memory is compared after a first part of the crowd, so that what a busy process needs anyway is no growth.
    """
    first = crowd // 5
    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        Calls(coordinator.endpoint, namespace, timeout=20) as calls,
    ):
        in_an_hour = wall(time.time() + 3600)
        specs = [calls.spec(f"later{number:05}", b"x" * 200, run_at=in_an_hour) for number in range(crowd)]
        await calls.submit_many(specs[:first])
        before = resident_mb(coordinator.pid)
        await calls.submit_many(specs[first:])
        soon = [f"soon{number}" for number in range(10)]
        await calls.submit_many([calls.spec(job_id, run_at=wall(time.time() + 0.5)) for job_id in soon])
        session = await calls.open(ttl=60)
        started: set[str] = set()
        begin = time.monotonic()
        while len(started) < len(soon):
            for claim in await calls.claim(session, most=10, wait=5):
                started.add(claim.job_id)
                assert await calls.complete(claim) == "SUCCEEDED"
            assert time.monotonic() - begin < 10, f"only {started} have started"
        grown = resident_mb(coordinator.pid) - before
        assert started == set(soon)
        assert grown < 50, f"{crowd - first} waiting jobs cost {grown:.0f} MB"

        # A process that starts beside the crowd does not fetch it either.
        await coordinator.kill()
        await coordinator.start()
        await calls.submit("again", run_at=wall(time.time() + 0.5))
        session = await available(lambda: calls.open(ttl=60))
        [claim] = await calls.claim(session, wait=10)
        assert (claim.job_id, await calls.complete(claim)) == ("again", "SUCCEEDED")
        assert resident_mb(coordinator.pid) < before + 50


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1000, pytest.param(5000, marks=pytest.mark.full)])
async def test_a_crowd_that_falls_due_at_once_starts_once_and_callers_are_served_meanwhile(
    jobs: int, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 063: the same run_at for all, more than one Txn can hold; two coordinators, two workers."""
    ids = [f"j{number:04}" for number in range(jobs)]
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, name="c1") as c1,
        Coordinator(own_etcd.endpoints, tmp_path, name="c2") as c2,
        Calls(c1.endpoint, namespace, timeout=10) as calls,
    ):
        due = wall(time.time() + 4.0)
        await calls.submit_many([calls.spec(job_id, run_at=due) for job_id in ids])
        told = {"sink": own_court.sink.path, "queues": {"work": 8}, "ttl": 15.0}
        async with (
            WorkerProcess(c1.endpoint, namespace, tmp_path, name="w1", **told),
            WorkerProcess(c2.endpoint, namespace, tmp_path, name="w2", **told),
        ):
            await eventually(lambda: own_court.read().starts, timeout=15, what="the first job starts")
            session = await calls.open(ttl=60)
            while len(own_court.read().starts) < jobs / 2:
                job_id = (await calls.submit(queue="other")).job_id
                claim = await calls.claim_one(session, job_id, wait=2)
                assert await calls.complete(claim) == "SUCCEEDED"
            await own_court.ended(ids, timeout=120)

    workers = Counter(start.worker for start in own_court.read().starts)
    assert sum(workers.values()) == jobs
    assert set(workers) == {"w1", "w2"}
    judgement = await own_court.judge(submitted=ids, raw=set(await everything(own_court)) - set(ids))
    assert set(judgement.outcomes) == {"SUCCEEDED"}


async def everything(court: Court) -> list[str]:
    """Every job that there is."""
    async with court.etcd() as etcd:
        return list(await court.jobs(etcd))
