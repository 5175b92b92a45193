"""Every method of WorkerService on real etcd, over gRPC."""

from __future__ import annotations

import asyncio
import time
import uuid

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.integration.rpc.conftest import Api, OpenedWorker, open_worker
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal

PENDING, RUNNING, SUCCEEDED = t.JOB_STATE_PENDING, t.JOB_STATE_RUNNING, t.JOB_STATE_SUCCEEDED
SCHEDULED, DEAD = t.JOB_STATE_SCHEDULED, t.JOB_STATE_DEAD


async def submit(api: Api, *job_ids: str) -> None:
    await api.jobs.SubmitJobs(b.submit_batch(*(b.job_spec(job_id=job_id) for job_id in job_ids)), timeout=5)


async def test_a_session_is_opened_once_for_each_request_id(api: Api) -> None:
    request = b.open_session(ttl=Duration(seconds=12), identity="host:1")
    first = await api.workers.OpenSession(request, timeout=5)
    again = await api.workers.OpenSession(request, timeout=5)
    reused = await refusal(api.workers.OpenSession(b.open_session(identity="host:2"), timeout=5))

    assert first.session_id == again.session_id
    assert (12, 4) == (first.ttl.seconds, first.heartbeat_interval.seconds)
    assert 0 < first.safe_duration.seconds < 12
    assert (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED") == (reused.code, reused.reason)


async def test_close_gives_back_uncharged_and_may_be_repeated(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a", "b")
    assert 2 == len(await worker.claim(wait=1))
    request = w.CloseSessionRequest(session_id=worker.session_id)
    released = (await api.workers.CloseSession(request, timeout=5)).released
    await api.workers.CloseSession(request, timeout=5)
    other = await open_worker(api)
    claims = await other.claim(wait=1)
    gone = await refusal(worker.beat(1))

    assert 2 == released
    assert [(0, 2), (0, 2)] == [(claim.failures, claim.attempt) for claim in claims]
    assert (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND") == (gone.code, gone.reason)


async def test_a_beat_says_claim_by_claim_what_is_held(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a")
    [held] = await worker.claim(wait=1)
    foreign = w.Claim(job_id="a", fencing_token=held.fencing_token - 1)
    beat = await worker.beat(1, held, foreign)

    assert w.AUTHORITY_CONFIRMED == beat.authority
    assert [w.VERDICT_HELD, w.VERDICT_LOST] == [verdict.verdict for verdict in beat.verdicts]
    assert [held.fencing_token, foreign.fencing_token] == [verdict.fencing_token for verdict in beat.verdicts]
    assert beat.revision >= held.fencing_token
    assert (1, 8) == (beat.number, beat.safe_duration.seconds)


async def test_a_claim_waits_for_a_job_and_gets_it_at_once(api: Api, worker: OpenedWorker) -> None:
    waiting = asyncio.ensure_future(worker.claim(wait=9))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await submit(api, "a")
    [claim] = await waiting

    assert "a" == claim.job_id
    assert time.monotonic() - started < 1


async def test_an_empty_answer_is_no_error(worker: OpenedWorker) -> None:
    assert [] == await worker.claim()
    assert [] == await worker.claim(wait=0.1)


async def test_a_repeat_of_a_claim_gets_what_the_first_got(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a", "b", "c")
    request = b.claim_jobs(
        session_id=worker.session_id, request_id="c1", max_jobs=2, wait=Duration(seconds=1)
    )
    first = await api.workers.ClaimJobs(request, timeout=5)
    request.repeat = True
    again = await api.workers.ClaimJobs(request, timeout=5)

    def tokens(answer: w.ClaimJobsResponse) -> list[tuple[str, int]]:
        return sorted((claim.job_id, claim.fencing_token) for claim in answer.claims)

    assert 2 == len(first.claims)
    assert tokens(first) == tokens(again)


async def test_a_claim_of_an_unknown_session_is_refused(api: Api) -> None:
    await submit(api, "a")
    error = await refusal(api.workers.ClaimJobs(b.claim_jobs(), timeout=5))

    assert (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND") == (error.code, error.reason)


async def test_a_job_is_claimed_by_its_id_or_its_holder_is_named(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a", "b")

    def request(session_id: str, wait: float = 0) -> w.ClaimJobRequest:
        return w.ClaimJobRequest(
            session_id=session_id,
            request_id=uuid.uuid4().hex,
            job_id="b",
            wait=Duration(nanos=round(wait * 1e9)),
        )

    claim = (await api.workers.ClaimJob(request(worker.session_id), timeout=5)).claim
    other = await open_worker(api)
    held = await refusal(api.workers.ClaimJob(request(other.session_id), timeout=5))
    waiting = asyncio.ensure_future(api.workers.ClaimJob(request(other.session_id, wait=0.9), timeout=5))
    await asyncio.sleep(0.1)
    release = w.ReleaseJobRequest(job_id="b", fencing_token=claim.fencing_token)
    await api.workers.ReleaseJob(release, timeout=5)
    taken = (await waiting).claim

    assert ("b", b"p") == (claim.job_id, claim.payload)
    assert (grpc.StatusCode.ABORTED, "CLAIM_HELD") == (held.code, held.reason)
    assert (worker.session_id, str(claim.fencing_token)) == (held.metadata["holder"], held.metadata["token"])
    assert held.retry_ms
    assert taken.fencing_token > claim.fencing_token


async def test_a_failure_backs_off_and_an_override_counts(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a", "b", "c")
    claims = {claim.job_id: claim for claim in await worker.claim(wait=1)}

    def fail(job_id: str, **changes: object) -> w.FailJobRequest:
        failure = t.Failure(type="ValueError", message="m" * 600)
        fields = {
            "job_id": job_id,
            "fencing_token": claims[job_id].fencing_token,
            "failure": failure,
        } | changes
        return w.FailJobRequest(**fields)  # type: ignore[arg-type]

    backed_off = await api.workers.FailJob(fail("a"), timeout=5)
    at_once = await api.workers.FailJob(fail("b", retry_delay=Duration()), timeout=5)
    dead = await api.workers.FailJob(fail("c", no_retry=True), timeout=5)
    job = (await api.jobs.GetJob(j.GetJobRequest(job_id="a"), timeout=5)).job

    assert (SCHEDULED, PENDING, DEAD) == (backed_off.state, at_once.state, dead.state)
    assert 0.5 < backed_off.ready_time.ToMilliseconds() / 1000 - time.time() < 1.5
    assert ("ValueError", 512, 1) == (job.failure.type, len(job.failure.message), job.failures)


async def test_a_backed_off_job_runs_again_when_it_is_due(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a")
    [claim] = await worker.claim(wait=1)
    fail = w.FailJobRequest(
        job_id="a", fencing_token=claim.fencing_token, retry_delay=Duration(nanos=300_000_000)
    )
    await api.workers.FailJob(fail, timeout=5)
    [again] = await worker.claim(wait=5)

    assert (2, 1) == (again.attempt, again.failures)
    assert again.fencing_token > claim.fencing_token


# Fault case 043: finishing twice. The same again is answered as the first time; anything else is refused.
LATER = Duration(seconds=9)
FINISHES = {
    "complete": lambda: {"complete": w.Completion(result=b"1")},
    "complete otherwise": lambda: {"complete": w.Completion(result=b"2")},
    "fail": lambda: {"fail": w.FailureSettlement(failure=t.Failure(type="E"), retry_delay=LATER)},
    "release": lambda: {"release": w.Release(delay=LATER)},
}


@pytest.mark.parametrize("first", FINISHES)
@pytest.mark.parametrize("second", FINISHES)
async def test_finishing_twice(api: Api, worker: OpenedWorker, first: str, second: str) -> None:
    await submit(api, "a")
    [claim] = await worker.claim(wait=1)

    async def settle(how: str) -> w.SettleResult:
        settlement = w.Settlement(job_id="a", fencing_token=claim.fencing_token, **FINISHES[how]())  # type: ignore[arg-type]
        answer = await api.workers.SettleJobs(w.SettleJobsRequest(settlements=[settlement]), timeout=5)
        result: w.SettleResult = answer.results[0]
        return result

    one = await settle(first)
    before = (await api.jobs.GetJob(j.GetJobRequest(job_id="a"), timeout=5)).job
    two = await settle(second)
    after = (await api.jobs.GetJob(j.GetJobRequest(job_id="a"), timeout=5)).job

    assert not one.HasField("error")
    assert before == after
    if first == second:
        assert one == two
    else:
        assert grpc.StatusCode.FAILED_PRECONDITION.value[0] == two.error.code


async def test_both_finishes_in_one_call(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a")
    [claim] = await worker.claim(wait=1)
    settlements = [
        w.Settlement(job_id="a", fencing_token=claim.fencing_token, **FINISHES[how]())  # type: ignore[arg-type]
        for how in ("complete", "complete", "fail")
    ]
    results = (await api.workers.SettleJobs(w.SettleJobsRequest(settlements=settlements), timeout=5)).results

    lost = grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert [0, 0, lost] == [result.error.code for result in results]
    assert [SUCCEEDED, SUCCEEDED, 0] == [result.state for result in results]


# Fault case 041: nobody ends what somebody else holds.
async def test_a_stale_token_is_told_who_holds_and_changes_nothing(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a")
    [stale] = await worker.claim(wait=1)
    await api.workers.CloseSession(w.CloseSessionRequest(session_id=worker.session_id), timeout=5)
    other = await open_worker(api)
    [held] = await other.claim(wait=1)
    token = stale.fencing_token
    errors = [
        await refusal(api.workers.CompleteJob(b.complete(job_id="a", fencing_token=token), timeout=5)),
        await refusal(api.workers.FailJob(w.FailJobRequest(job_id="a", fencing_token=token), timeout=5)),
        await refusal(
            api.workers.SaveCheckpoint(
                w.SaveCheckpointRequest(job_id="a", fencing_token=token, sequence=1), timeout=5
            )
        ),
    ]

    assert [(grpc.StatusCode.FAILED_PRECONDITION, "CLAIM_LOST")] * 3 == [(e.code, e.reason) for e in errors]
    assert {(str(token), str(held.fencing_token))} == {
        (e.metadata["held"], e.metadata["current"]) for e in errors
    }
    beat = await other.beat(1, held)
    assert w.VERDICT_HELD == beat.verdicts[0].verdict


async def test_a_token_from_the_future_is_told_as_a_store_that_went_back(
    api: Api, worker: OpenedWorker
) -> None:
    await submit(api, "a")
    [claim] = await worker.claim(wait=1)
    future = b.complete(job_id="a", fencing_token=claim.fencing_token + 10_000)
    error = await refusal(api.workers.CompleteJob(future, timeout=5))
    done = await api.workers.CompleteJob(b.complete(job_id="a", fencing_token=claim.fencing_token), timeout=5)

    assert (grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_REGRESSED") == (error.code, error.reason)
    assert SUCCEEDED == done.state


async def test_a_result_at_the_limit_is_kept_and_one_byte_more_changes_nothing(
    api: Api, worker: OpenedWorker
) -> None:
    await submit(api, "a")
    [claim] = await worker.claim(wait=1)
    large = b.complete(job_id="a", fencing_token=claim.fencing_token, result=bytes(65_537))
    error = await refusal(api.workers.CompleteJob(large, timeout=5))
    beat = await worker.beat(1, claim)
    fits = b.complete(
        job_id="a", fencing_token=claim.fencing_token, result=bytes(65_536), result_content_type="x/y"
    )
    await api.workers.CompleteJob(fits, timeout=5)
    job = (await api.jobs.GetJob(j.GetJobRequest(job_id="a"), timeout=5)).job

    assert "RESULT_TOO_LARGE" == error.reason
    assert w.VERDICT_HELD == beat.verdicts[0].verdict
    assert (65_536, "x/y") == (len(job.result), job.result_content_type)


async def test_a_checkpoint_goes_to_the_next_attempt_and_an_older_one_gives_way(
    api: Api, worker: OpenedWorker
) -> None:
    await submit(api, "a")
    [claim] = await worker.claim(wait=1)

    async def save(sequence: int, data: bytes) -> bool:
        request = w.SaveCheckpointRequest(
            job_id="a", fencing_token=claim.fencing_token, sequence=sequence, checkpoint=data
        )
        return bool((await api.workers.SaveCheckpoint(request, timeout=5)).stored)

    stored = [await save(2, bytes(262_144)), await save(1, b"old"), await save(3, b"newest")]
    release = w.ReleaseJobRequest(job_id="a", fencing_token=claim.fencing_token)
    await api.workers.ReleaseJob(release, timeout=5)
    [again] = await worker.claim(wait=1)

    assert [True, False, True] == stored
    assert b"newest" == again.checkpoint


async def test_a_dead_session_loses_its_job_to_another(api: Api) -> None:
    short = await open_worker(api, ttl=Duration(seconds=2))
    await submit(api, "a")
    [stale] = await short.claim(wait=1)
    other = await open_worker(api)
    [again] = await other.claim(wait=9)
    refused = await refusal(
        api.workers.CompleteJob(b.complete(job_id="a", fencing_token=stale.fencing_token), timeout=5)
    )
    job = (await api.jobs.GetJob(j.GetJobRequest(job_id="a"), timeout=5)).job

    assert again.fencing_token > stale.fencing_token
    assert "CLAIM_LOST" == refused.reason
    assert (1, 0) == (job.lease_losses, job.failures)
