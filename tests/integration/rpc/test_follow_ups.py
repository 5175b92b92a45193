"""Follow-up jobs as callers of any language meet them, on a real etcd."""

from __future__ import annotations

import asyncio

import grpc

from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.integration.rpc.conftest import Api, OpenedWorker, open_worker
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal


async def test_a_worker_that_waits_gets_a_follow_up_at_once(api: Api, worker: OpenedWorker) -> None:
    await api.jobs.SubmitJob(b.submit(job_id="first"), timeout=5)
    [claim] = await worker.claim()
    other = await open_worker(api)
    waiting = asyncio.create_task(other.claim(wait=5))
    await asyncio.sleep(0)
    done = b.complete(
        job_id="first", fencing_token=claim.fencing_token, follow_ups=[b.job_spec(job_id="second")]
    )
    async with asyncio.timeout(2):  # and not at the end of its poll
        assert (await api.workers.CompleteJob(done, timeout=5)).state == t.JOB_STATE_SUCCEEDED
        [following] = await waiting
    assert (following.job_id, following.payload) == ("second", b"p")
    assert (await api.workers.CompleteJob(done, timeout=5)).state == t.JOB_STATE_SUCCEEDED


async def test_a_refused_follow_up_is_told_with_its_place_and_the_claim_stays(
    api: Api, worker: OpenedWorker
) -> None:
    await api.jobs.SubmitJob(b.submit(job_id="first"), timeout=5)
    await api.jobs.SubmitJob(b.submit(job_id="taken", queue="elsewhere"), timeout=5)
    [claim] = await worker.claim()
    jobs = [b.job_spec(job_id="fresh"), b.job_spec(job_id="taken", queue="elsewhere", payload=b"other")]
    done = b.complete(job_id="first", fencing_token=claim.fencing_token, follow_ups=jobs)
    told = await refusal(api.workers.CompleteJob(done, timeout=5))
    assert told.code is grpc.StatusCode.ALREADY_EXISTS
    assert told.reason == "JOB_EXISTS"
    assert told.metadata["follow_up"] == "1"
    found = await api.jobs.GetJob(j.GetJobRequest(job_id="first"), timeout=5)
    assert found.job.state == t.JOB_STATE_RUNNING
    one = w.Settlement(
        job_id="first",
        fencing_token=claim.fencing_token,
        complete=w.Completion(follow_ups=jobs[:1]),
    )
    answer = await api.workers.SettleJobs(w.SettleJobsRequest(settlements=[one]), timeout=5)
    assert answer.results[0].state == t.JOB_STATE_SUCCEEDED
    assert (
        await api.jobs.GetJob(j.GetJobRequest(job_id="fresh"), timeout=5)
    ).job.state == t.JOB_STATE_PENDING
