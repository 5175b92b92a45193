"""Retries by hand while everything else goes on: coordinators die, sweep and retry the same jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from coordinator.core.job import JobState
from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import job_service_pb2, types_pb2
from tests.fault.support.calls import Calls, available
from tests.fault.support.court import Court
from tests.fault.support.processes import SWEEP_OFTEN, Coordinator
from tests.support.polling import eventually

CIRCUITS_OFF = {"CIRCUITS__ENABLED": "false"}
"""A type whose jobs do nothing but die is held back, and here all of them are to die."""
NO_RETRY = types_pb2.RetryPolicy(max_retries=0)
COUNT = 120


async def all_dead(calls: Calls, ids: list[str]) -> None:
    """Claim and fail them all, beyond all retries."""
    session, left = await calls.open(ttl=60), len(ids)
    while left:
        for claim in await calls.claim(session, most=50, wait=10):
            assert await calls.fail(claim) == "DEAD"
            left -= 1


async def redriven(calls: Calls, until: asyncio.Event) -> list[str]:
    """Redrive again and again, and say what was said to be retried; a coordinator may be away."""
    done: list[str] = []
    while not until.is_set():
        request = job_service_pb2.RedriveJobsRequest(
            namespace=calls.namespace, max_jobs=40, jobs_per_second=1_000
        )
        try:
            reply = await calls.job_call("RedriveJobs", request, timeout=5)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error  # noqa: PT017
            await asyncio.sleep(0.1)
            continue
        done += reply.job_ids
        await asyncio.sleep(0.02)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", ["retry.before-commit", "retry.after-commit"])
async def test_two_redrives_and_a_death_among_sweeps_retry_each_job_once(
    dies_at: str, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """One coordinator dies at each retry that it makes and is started again, until all jobs wait."""
    ids = [f"j{n:03}" for n in range(COUNT)]
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, plan=SWEEP_OFTEN, settings=CIRCUITS_OFF) as sound,
        Coordinator(
            own_etcd.endpoints, tmp_path, name="dying", plan=SWEEP_OFTEN, settings=CIRCUITS_OFF
        ) as dying,
        Calls(sound.endpoint, namespace, timeout=20) as calls,
        own_court.etcd() as etcd,
    ):
        await calls.submit_many([calls.spec(job_id, retry_policy=NO_RETRY) for job_id in ids])
        await all_dead(calls, ids)
        await dying.kill()
        dying.failpoints = f"{dies_at}=exit"
        await dying.start()
        over = asyncio.Event()

        async def all_wait() -> bool:
            return {job.state for job in (await own_court.jobs(etcd)).values()} == {JobState.PENDING}

        async with Calls(dying.endpoint, namespace) as doomed:
            at_doomed = asyncio.create_task(redriven(doomed, over))
            await eventually(lambda: not dying.running, timeout=20, what="it dies")
            at_sound = asyncio.create_task(redriven(calls, over))
            await eventually(all_wait, timeout=30, interval=0.2, what="all wait")
            over.set()
            said = [*await at_sound, *await at_doomed]
    assert len(said) == len(set(said)), "no job is said to be retried twice"
    judgement = await own_court.judge(submitted=ids)
    assert {(job.state, job.attempt) for job in judgement.jobs.values()} == {(JobState.PENDING, 1)}


@pytest.mark.slow
async def test_a_retry_that_is_repeated_after_its_coordinator_died_is_one_retry(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """The answer is lost with the coordinator, the job runs and dies again, and then the repetition comes."""
    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as sound,
        Coordinator(
            own_etcd.endpoints, tmp_path, name="dying", failpoints="retry.after-commit=exit"
        ) as dying,
        Calls(sound.endpoint, namespace, timeout=20) as calls,
        Calls(dying.endpoint, namespace) as doomed,
    ):
        request = job_service_pb2.RetryJobRequest(namespace=namespace, job_id="j", request_id="r1")
        await calls.submit("j", retry_policy=NO_RETRY)
        await all_dead(calls, ["j"])
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await doomed.job_call("RetryJob", request)
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        for _ in range(2):
            await available(lambda: calls.job_call("RetryJob", request))
            assert await calls.state("j") == "PENDING"
        await all_dead(calls, ["j"])
        for _ in range(3):
            try:
                await calls.job_call("RetryJob", request)
            except grpc.aio.AioRpcError as error:
                assert error.code() is not grpc.StatusCode.UNAVAILABLE  # noqa: PT017
            assert await calls.state("j") == "DEAD", "the same request is no second retry"
    judgement = await own_court.judge(submitted=["j"])
    assert judgement.jobs["j"].attempt == 2
