"""Every method of JobService on real etcd, over gRPC."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.integration.rpc.conftest import Api, OpenedWorker
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal

PENDING, RUNNING, SUCCEEDED = t.JOB_STATE_PENDING, t.JOB_STATE_RUNNING, t.JOB_STATE_SUCCEEDED
SCHEDULED, CANCELLED = t.JOB_STATE_SCHEDULED, t.JOB_STATE_CANCELLED


async def get(api: Api, job_id: str) -> t.Job:
    job: t.Job = (await api.jobs.GetJob(j.GetJobRequest(job_id=job_id), timeout=5)).job
    return job


async def finish(worker: OpenedWorker, job_id: str, result: bytes = b"") -> None:
    [claim] = await worker.claim(wait=1)
    assert job_id == claim.job_id
    done = b.complete(job_id=job_id, fencing_token=claim.fencing_token, result=result)
    await worker.api.workers.CompleteJob(done, timeout=5)


async def test_a_job_is_read_as_it_was_submitted(api: Api) -> None:
    spec = b.job_spec(
        payload=bytes(range(256)),
        content_type="application/octet-stream",
        labels={"team": "α", "x": ""},
        priority=2,
        due_time=Timestamp(seconds=2_000_000_000),
        queue_timeout=Duration(seconds=100),
        run_timeout=Duration(nanos=1),
        total_timeout=Duration(seconds=1000),
        heartbeat_timeout=Duration(seconds=7, nanos=1_000_000),
        retry_policy=t.RetryPolicy(max_retries=0, jitter=0, non_retryable_types=["Bad"]),
        unique_key="k/1",
    )
    await api.jobs.SubmitJob(j.SubmitJobRequest(job=spec), timeout=5)

    job = await get(api, "j1")

    told = job.spec
    assert (bytes(range(256)), "application/octet-stream") == (told.payload, told.content_type)
    assert {"team": "α", "x": ""} == dict(told.labels)
    assert (2, 2_000_000_000, "k/1") == (told.priority, told.due_time.seconds, told.unique_key)
    assert (100, 1_000_000, 1000) == (
        told.queue_timeout.seconds,
        told.run_timeout.nanos,
        told.total_timeout.seconds,
    )
    assert Duration(seconds=7, nanos=1_000_000) == told.heartbeat_timeout
    assert (0, 0.0, ["Bad"], 2.0, 3) == (
        told.retry_policy.max_retries,
        told.retry_policy.jitter,
        list(told.retry_policy.non_retryable_types),
        told.retry_policy.multiplier,
        told.retry_policy.max_lease_losses,
    )
    assert (PENDING, "default", 256) == (job.state, job.namespace, job.payload_size)
    assert job.submit_time.seconds <= job.ready_time.seconds


async def test_the_same_job_again_is_no_error_and_another_of_its_id_is(api: Api) -> None:
    first = await api.jobs.SubmitJob(b.submit(), timeout=5)
    again = await api.jobs.SubmitJob(b.submit(), timeout=5)
    other = await refusal(api.jobs.SubmitJob(b.submit(payload=b"other"), timeout=5))

    assert (True, False, first.etag) == (first.created, again.created, again.etag)
    assert (grpc.StatusCode.ALREADY_EXISTS, "JOB_EXISTS") == (other.code, other.reason)


async def test_a_made_id_is_the_same_for_every_repeat(api: Api) -> None:
    request = j.SubmitJobRequest(request_id="r1", job=b.job_spec(job_id=""))
    first = await api.jobs.SubmitJob(request, timeout=5)
    again = await api.jobs.SubmitJob(request, timeout=5)
    changed = j.SubmitJobRequest(request_id="r1", job=b.job_spec(job_id="", payload=b"other"))
    reused = await refusal(api.jobs.SubmitJob(changed, timeout=5))

    assert (first.job_id, False) == (again.job_id, again.created)
    assert (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED") == (reused.code, reused.reason)


async def test_a_unique_key_has_one_job_until_that_ends(api: Api) -> None:
    await api.jobs.SubmitJob(b.submit(unique_key="k"), timeout=5)
    taken = await refusal(api.jobs.SubmitJob(b.submit(job_id="j2", unique_key="k"), timeout=5))
    await api.jobs.CancelJob(j.CancelJobRequest(job_id="j1"), timeout=5)
    freed = await api.jobs.SubmitJob(b.submit(job_id="j2", unique_key="k"), timeout=5)

    assert (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_JOB", "j1") == (
        taken.code,
        taken.reason,
        taken.metadata["job_id"],
    )
    assert freed.created


async def test_one_call_stores_a_hundred_jobs_and_refuses_the_bad_one_alone(api: Api) -> None:
    specs = [b.job_spec(job_id=f"j{n}", payload=bytes(20_000)) for n in range(100)]
    specs[7].queue = "BAD"
    results = (await api.jobs.SubmitJobs(b.submit_batch(*specs), timeout=10)).results

    refused = {index: result.error.code for index, result in enumerate(results) if result.HasField("error")}
    assert {7: grpc.StatusCode.INVALID_ARGUMENT.value[0]} == refused
    assert 99 == sum(result.created for result in results)
    assert "JOB_NOT_FOUND" == (await refusal(get(api, "j7"))).reason


# Fault cases 093, 094: each odd id is its own job, and none touches another.
async def test_odd_ids_round_trip_and_never_touch_each_other(api: Api) -> None:
    odd = [" ", ".", "..", "/", "//", "a/b", "a/", "../q", "é", "e\u0301", "😀", "\u200f", "\u2028", "%2F"]
    odd += ["*", "{x}", "x" * 256, "A", "a", "1", "10", "100", "%", "a b", "ab"]
    specs = [b.job_spec(job_id=text, payload=text.encode(), unique_key=text) for text in odd]
    results = (await api.jobs.SubmitJobs(b.submit_batch(*specs), timeout=10)).results
    assert odd == [result.job_id for result in results if result.created]

    etags = {text: (await get(api, text)).etag for text in odd}
    for index, text in enumerate(odd):
        job = (await api.jobs.CancelJob(j.CancelJobRequest(job_id=text), timeout=5)).job
        assert (text, CANCELLED) == (job.job_id, job.state)
        for later in odd[index + 1 :][:3]:
            assert etags[later] == (await get(api, later)).etag
    page = await api.jobs.ListJobs(j.ListJobsRequest(page_size=100), timeout=5)
    assert sorted(odd) == sorted(job.job_id for job in page.jobs)


async def test_lists_are_filtered_and_paged(api: Api, worker: OpenedWorker) -> None:
    specs = [b.job_spec(job_id=f"j{n}", labels={"odd": str(n % 2)}) for n in range(20)]
    specs[0].queue = "q2"
    await api.jobs.SubmitJobs(b.submit_batch(*specs), timeout=10)

    async def listed(**filters: Any) -> set[str]:
        found: list[str] = []
        token = ""
        for _ in range(300):
            request = j.ListJobsRequest(page_size=7, page_token=token, **filters)
            page = await api.jobs.ListJobs(request, timeout=5)
            assert len(page.jobs) <= 7
            found += [job.job_id for job in page.jobs]
            assert not any(job.spec.payload for job in page.jobs)
            token = page.next_page_token
            if not token:
                break
        assert len(found) == len(set(found))
        return set(found)

    assert {f"j{n}" for n in range(20)} == await listed()
    assert {"j0"} == await listed(queue="q2")
    assert {f"j{n}" for n in range(1, 20, 2)} == await listed(labels={"odd": "1"})
    assert set() == await listed(states=[RUNNING])
    held = {claim.job_id for claim in await worker.claim(max_jobs=3)}
    assert held == await listed(states=[RUNNING])
    assert set() == await listed(namespace="other")


async def test_a_page_token_that_is_not_ours_is_refused(api: Api) -> None:
    error = await refusal(api.jobs.ListJobs(j.ListJobsRequest(page_token="hello"), timeout=5))

    assert (grpc.StatusCode.INVALID_ARGUMENT, ["page_token"]) == (error.code, error.fields)


async def test_wait_answers_when_the_job_ends(api: Api, worker: OpenedWorker) -> None:
    await api.jobs.SubmitJob(b.submit(), timeout=5)
    waiting = asyncio.ensure_future(
        api.jobs.WaitJob(j.WaitJobRequest(job_id="j1", timeout=Duration(seconds=10)), timeout=15)
    )
    await finish(worker, "j1", b"result")
    answer = await waiting

    assert (True, SUCCEEDED, b"result") == (answer.finished, answer.job.state, answer.job.result)


async def test_wait_answers_when_its_time_is_up(api: Api) -> None:
    await api.jobs.SubmitJob(b.submit(), timeout=5)
    answer = await api.jobs.WaitJob(
        j.WaitJobRequest(job_id="j1", timeout=Duration(nanos=50_000_000)), timeout=5
    )
    # Without a timeout of its own the answer still comes before the deadline of the call.
    early = await api.jobs.WaitJob(j.WaitJobRequest(job_id="j1"), timeout=0.5)

    assert [(False, PENDING)] * 2 == [(one.finished, one.job.state) for one in (answer, early)]


async def test_a_watch_tells_every_change_and_resumes(api: Api, worker: OpenedWorker) -> None:
    call = api.jobs.WatchJobs(j.WatchJobsRequest(job_ids=["j1"]))
    start = await call.read()
    await api.jobs.SubmitJobs(b.submit_batch(b.job_spec(), b.job_spec(job_id="j10")), timeout=5)
    submitted = await call.read()
    await worker.claim()
    claimed = await call.read()
    call.cancel()
    resumed = api.jobs.WatchJobs(j.WatchJobsRequest(job_ids=["j1"], resume_revision=submitted.revision))
    again = [await resumed.read() for _ in range(2)]
    resumed.cancel()

    assert not start.HasField("job")
    assert [(PENDING, "j1"), (RUNNING, "j1")] == [(m.job.state, m.job.job_id) for m in (submitted, claimed)]
    assert start.revision < submitted.revision < claimed.revision
    assert (claimed.revision, RUNNING) == (again[-1].revision, again[-1].job.state)


async def test_update_changes_what_waits(api: Api, worker: OpenedWorker) -> None:
    await api.jobs.SubmitJob(b.submit(), timeout=5)
    later = Timestamp(seconds=int(time.time()) + 3600)
    job = (await api.jobs.UpdateJob(j.UpdateJobRequest(job_id="j1", run_at=later), timeout=5)).job
    assert (SCHEDULED, later.seconds) == (job.state, job.ready_time.seconds)

    stale = j.UpdateJobRequest(job_id="j1", etag="1", priority=1)
    mismatch = await refusal(api.jobs.UpdateJob(stale, timeout=5))
    assert (grpc.StatusCode.ABORTED, "ETAG_MISMATCH") == (mismatch.code, mismatch.reason)

    soon = j.UpdateJobRequest(job_id="j1", etag=job.etag, priority=1, run_at=Timestamp(seconds=1))
    job = (await api.jobs.UpdateJob(soon, timeout=5)).job
    assert (PENDING, 1) == (job.state, job.spec.priority)

    await worker.claim(wait=1)
    running = await refusal(api.jobs.UpdateJob(j.UpdateJobRequest(job_id="j1", priority=1), timeout=5))
    assert (grpc.StatusCode.FAILED_PRECONDITION, "NOT_CLAIMABLE") == (running.code, running.reason)


async def test_cancel_asks_a_running_job_and_its_worker_hears_of_it(api: Api, worker: OpenedWorker) -> None:
    await api.jobs.SubmitJob(b.submit(), timeout=5)
    [claim] = await worker.claim(wait=1)
    asked = (await api.jobs.CancelJob(j.CancelJobRequest(job_id="j1", reason="r" * 600), timeout=5)).job
    beat = await worker.beat(1, claim)
    released = w.ReleaseJobRequest(job_id="j1", fencing_token=claim.fencing_token)
    ended = await api.workers.ReleaseJob(released, timeout=5)
    again = (await api.jobs.CancelJob(j.CancelJobRequest(job_id="j1"), timeout=5)).job

    assert (RUNNING, True) == (asked.state, asked.cancel_requested)
    assert w.VERDICT_CANCEL_REQUESTED == beat.verdicts[0].verdict
    assert (CANCELLED, CANCELLED) == (ended.state, again.state)
    assert len(again.end_reason.encode()) <= 512


async def test_only_a_terminal_job_is_deleted_and_its_id_lives_on_with_larger_tokens(
    api: Api, worker: OpenedWorker
) -> None:
    await api.jobs.SubmitJob(b.submit(), timeout=5)
    waiting = await refusal(api.jobs.DeleteJob(j.DeleteJobRequest(job_id="j1"), timeout=5))
    await finish(worker, "j1")
    done = await get(api, "j1")
    stale = await refusal(api.jobs.DeleteJob(j.DeleteJobRequest(job_id="j1", etag="1"), timeout=5))
    await api.jobs.DeleteJob(j.DeleteJobRequest(job_id="j1", etag=done.etag), timeout=5)
    gone = await refusal(get(api, "j1"))
    created = await api.jobs.SubmitJob(b.submit(payload=b"new"), timeout=5)
    [claim] = await worker.claim(wait=1)

    assert ["NOT_CLAIMABLE", "ETAG_MISMATCH", "JOB_NOT_FOUND"] == [e.reason for e in (waiting, stale, gone)]
    assert created.created
    assert claim.fencing_token > done.fencing_token
    assert 1 == claim.attempt


@pytest.mark.parametrize("method", ["GetJob", "WaitJob", "CancelJob", "DeleteJob"])
async def test_a_job_that_is_not_there_is_not_found(api: Api, method: str) -> None:
    request = getattr(j, f"{method}Request")(job_id="nobody")
    error = await refusal(getattr(api.jobs, method)(request, timeout=5))

    assert (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND") == (error.code, error.reason)


# Fault case 089: above the limit nothing is stored, and the same channel works next.
async def test_the_size_ladder(api: Api) -> None:
    sizes = [0, 1, 262_144, 262_145, 1 << 20, (3 << 19) - 1024, 3 << 19, 2 << 20, (4 << 20) - 1, 10 << 20]
    for size in sizes:
        call = api.jobs.SubmitJob(b.submit(job_id=f"j{size}", payload=bytes(size)), timeout=10)
        if size <= 262_144:
            assert (await call).created
            assert size == len((await get(api, f"j{size}")).spec.payload)
        else:
            error = await refusal(call)
            assert ("PAYLOAD_TOO_LARGE", str(size)) == (error.reason, error.metadata["size"])
            assert "JOB_NOT_FOUND" == (await refusal(get(api, f"j{size}"))).reason


# Fault case 090: what was accepted can be delivered, to a client with gRPC's default limit of 4 MiB a reply.
async def test_jobs_at_the_limit_are_all_delivered(api: Api, worker: OpenedWorker) -> None:
    for n in range(10):
        await api.jobs.SubmitJob(b.submit(job_id=f"j{n}", payload=bytes(262_144)), timeout=10)
    delivered: list[str] = []
    for _ in range(10):
        claims = await worker.claim(max_jobs=10)
        assert all(262_144 == len(claim.payload) for claim in claims)
        delivered += [claim.job_id for claim in claims]
        if len(delivered) == 10:
            break
    running = (await api.jobs.ListJobs(j.ListJobsRequest(states=[RUNNING]), timeout=5)).jobs

    assert sorted(f"j{n}" for n in range(10)) == sorted(delivered)
    assert 10 == len(running)
