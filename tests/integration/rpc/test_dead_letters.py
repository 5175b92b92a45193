"""RetryJob, RedriveJobs, ListAttempts and rollback jobs on real etcd, over gRPC."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration

from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.integration.rpc.conftest import Api, OpenedWorker
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal

UNDO = t.RollbackJob(queue="undo", type="refund", payload=b"undo it", content_type="text/plain")


async def get(api: Api, job_id: str) -> t.Job:
    job: t.Job = (await api.jobs.GetJob(j.GetJobRequest(job_id=job_id), timeout=5)).job
    return job


async def submit(api: Api, *job_ids: str, **spec: Any) -> None:
    for job_id in job_ids:
        request = j.SubmitJobRequest(job=b.job_spec(job_id=job_id, **spec))
        await api.jobs.SubmitJob(request, timeout=5)


async def die(worker: OpenedWorker, *job_ids: str, failure: str = "Broken") -> None:
    """Claim the jobs and fail them for good."""
    claims = await worker.claim(wait=1, max_jobs=len(job_ids))
    assert sorted(job_ids) == sorted(claim.job_id for claim in claims)
    for claim in claims:
        request = w.FailJobRequest(
            job_id=claim.job_id,
            fencing_token=claim.fencing_token,
            no_retry=True,
            failure=t.Failure(type=failure, message="for good"),
        )
        await worker.api.workers.FailJob(request, timeout=5)


async def retry(api: Api, job_id: str = "j1", **fields: Any) -> t.Job:
    request = j.RetryJobRequest(job_id=job_id, **fields)
    job: t.Job = (await api.jobs.RetryJob(request, timeout=5)).job
    return job


async def test_a_dead_job_runs_again_and_its_attempts_are_told(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "j1", unique_key="k")
    await die(worker, "j1")
    dead = await get(api, "j1")
    assert (dead.state, dead.failures, dead.end_reason) == (t.JOB_STATE_DEAD, 1, "told not to retry")

    alive = await retry(api, etag=dead.etag, request_id="r1")

    assert (alive.state, alive.failures, alive.attempt) == (t.JOB_STATE_PENDING, 0, 1)
    assert not alive.HasField("settle_time")
    [claim] = await worker.claim(wait=1)
    assert (claim.job_id, claim.payload, claim.attempt) == ("j1", b"p", 2)
    assert (await retry(api, etag=dead.etag, request_id="r1")).state == t.JOB_STATE_RUNNING
    told = await api.jobs.ListAttempts(j.ListAttemptsRequest(job_id="j1"), timeout=5)
    first, second = told.attempts
    assert (first.number, first.outcome, first.failure.type) == (1, t.ATTEMPT_OUTCOME_FAILED, "Broken")
    assert first.session_id == second.session_id == worker.session_id
    assert (second.number, second.outcome) == (2, t.ATTEMPT_OUTCOME_RUNNING)
    assert second.fencing_token == claim.fencing_token > first.fencing_token > 0
    assert (told.total, told.failures) == (2, 0)
    await api.workers.CompleteJob(b.complete(job_id="j1", fencing_token=claim.fencing_token), timeout=5)
    assert (await retry(api, request_id="r1")).state == t.JOB_STATE_SUCCEEDED


async def test_a_retry_that_cannot_be_is_refused_with_its_reason(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "j1", unique_key="k")
    await die(worker, "j1")
    await submit(api, "j2", unique_key="k")

    refusals = []
    for job_id, fields in (("j1", {}), ("j1", {"etag": "1"}), ("nobody", {})):
        error = await refusal(retry(api, job_id, **fields))
        refusals.append((error.code.name, error.reason))

    assert refusals == [
        ("ALREADY_EXISTS", "DUPLICATE_JOB"),
        ("ABORTED", "ETAG_MISMATCH"),
        ("NOT_FOUND", "JOB_NOT_FOUND"),
    ]


async def test_a_rollback_job_is_there_with_the_death_and_is_claimed_like_any_other(
    api: Api, worker: OpenedWorker
) -> None:
    await submit(api, "j1", rollback=UNDO)
    assert (await get(api, "j1")).spec.rollback == UNDO
    await die(worker, "j1")
    dead = await get(api, "j1")

    [claim] = await worker.claim(wait=1, queues=[w.QueueTypes(queue="undo", types=["refund"])])

    assert claim.job_id == dead.rollback_job_id
    assert (claim.payload, claim.content_type) == (b"undo it", "text/plain")
    child = await get(api, claim.job_id)
    assert dict(child.spec.labels) == {
        "leasekeeper.rollback-of": "j1",
        "leasekeeper.rollback-reason": "DEAD",
    }
    listed = await api.jobs.ListJobs(j.ListJobsRequest(states=[t.JOB_STATE_DEAD]), timeout=5)
    assert [job.spec.rollback.payload for job in listed.jobs] == [b""]
    assert listed.jobs[0].rollback_job_id == claim.job_id


async def test_a_job_that_runs_out_of_time_is_rolled_back_and_gets_its_time_again(
    api: Api, worker: OpenedWorker
) -> None:
    await submit(api, "j1", rollback=UNDO, total_timeout=Duration(nanos=300_000_000))

    waited = await api.jobs.WaitJob(j.WaitJobRequest(job_id="j1", timeout=Duration(seconds=10)), timeout=15)

    assert (waited.job.state, waited.job.end_reason) == (t.JOB_STATE_DEAD, "total timeout")
    assert (await get(api, waited.job.rollback_job_id)).state == t.JOB_STATE_PENDING
    assert (await retry(api)).state == t.JOB_STATE_PENDING


async def test_dead_jobs_that_match_are_redriven(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a", "b", labels={"team": "x"})
    await die(worker, "a", "b", failure="Broken")
    await submit(api, "c", labels={"team": "x"})
    await die(worker, "c", failure="Timeout")
    asked: dict[str, Any] = {"failure_type": "Broken", "labels": {"team": "x"}, "max_jobs": 1}

    async def redrive(**fields: Any) -> list[str]:
        found: list[str] = []
        token = ""
        for _ in range(9):
            request = j.RedriveJobsRequest(request_id="r", page_token=token, **{**asked, **fields})
            answer = await api.jobs.RedriveJobs(request, timeout=5)
            found += answer.job_ids
            token = answer.next_page_token
            if not token:
                return sorted(found)
        raise AssertionError("no last page")

    assert await redrive(validate_only=True) == ["a", "b"]
    assert await redrive() == ["a", "b"]
    assert await redrive() == []
    assert [(await get(api, job_id)).state for job_id in "abc"] == [
        t.JOB_STATE_PENDING,
        t.JOB_STATE_PENDING,
        t.JOB_STATE_DEAD,
    ]
    error = await refusal(api.jobs.RedriveJobs(j.RedriveJobsRequest(page_token="x.y"), timeout=5))
    assert error.reason == "VALIDATION_FAILED"
