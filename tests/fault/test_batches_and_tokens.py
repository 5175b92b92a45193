"""Tokens that cannot be, and batches with good and bad items in one call: each is answered for itself."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from leasekeeper.v1 import job_service_pb2 as jobs
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as workers
from tests.fault.support.calls import Calls, refusal, refused_by
from tests.fault.support.court import Court

METHODS = {
    "CompleteJob": workers.CompleteJobRequest,
    "FailJob": workers.FailJobRequest,
    "ReleaseJob": workers.ReleaseJobRequest,
    "SaveCheckpoint": workers.SaveCheckpointRequest,
}


def settling(calls: Calls, method: str, token: int) -> Any:
    """The request of *method* for ``j1`` under *token*."""
    request = METHODS[method](namespace=calls.namespace, job_id="j1", fencing_token=token)
    if method == "FailJob":
        request.failure.type = "Told"
    if method == "SaveCheckpoint":
        request.sequence = 1
    return request


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("token", [0, -1, -(2**63)])
async def test_no_token_never_means_no_check(method: str, token: int, calls: Calls, court: Court) -> None:
    """P2, sections D and J: absent, zero or negative is malformed, whoever holds the job."""
    session = await calls.open(ttl=20)
    await calls.submit("j1")
    [claim] = await calls.claim(session)

    refused = await refusal(calls.worker_call(method, settling(calls, method, token)))

    assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "VALIDATION_FAILED")
    assert refused.fields == ("fencing_token",)
    assert await calls.verdict(session, claim) == "HELD"
    assert await calls.complete(claim) == "SUCCEEDED"
    await court.judge(submitted=["j1"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("which", ["one below", "one above", "another epoch"])
async def test_a_token_near_the_right_one_is_refused(
    method: str, which: str, calls: Calls, court: Court
) -> None:
    """P2: only the very token settles; one that etcd cannot have given out says that etcd was set back."""
    session = await calls.open(ttl=20)
    await calls.submit("j1")
    [claim] = await calls.claim(session)
    token = claim.fencing_token
    wrong = {"one below": token - 1, "one above": token + 1, "another epoch": token + 2**44}[which]

    refused = await refusal(calls.worker_call(method, settling(calls, method, wrong)))

    assert refused.code == "FAILED_PRECONDITION"
    assert refused.reason in {"CLAIM_LOST", "EPOCH_REGRESSED"}
    assert (refused.reason == "EPOCH_REGRESSED") == (which == "another epoch") or which == "one above"
    assert await calls.verdict(session, claim) == "HELD"
    assert await calls.complete(claim) == "SUCCEEDED"
    await court.judge(submitted=["j1"])


async def test_a_batch_of_submissions_refuses_only_its_bad_items(calls: Calls, court: Court) -> None:
    """Sections G and J: per-item results; a repeat of the call finds the same jobs."""
    await calls.submit("there", b"content")
    request = jobs.SubmitJobsRequest(
        namespace=calls.namespace,
        request_id=uuid.uuid4().hex,
        jobs=[
            calls.spec("good"),
            calls.spec("bad\0"),
            calls.spec("large", bytes((256 << 10) + 1)),
            calls.spec("there", b"other content"),
            calls.spec("k1", unique_key="k"),
            calls.spec("k2", unique_key="k"),
            calls.spec("nowhere", queue="No Name"),
            calls.spec(""),
        ],
    )

    first = (await calls.job_call("SubmitJobs", request)).results
    again = (await calls.job_call("SubmitJobs", request)).results

    told = [refused_by(r.error, str(r.error.code)).reason if r.HasField("error") else "" for r in first]
    assert told == [
        "",
        "VALIDATION_FAILED",
        "PAYLOAD_TOO_LARGE",
        "JOB_EXISTS",
        "",
        "DUPLICATE_JOB",
        "VALIDATION_FAILED",
        "",
    ]
    assert [r.job_id for r in again if not r.HasField("error")] == [
        r.job_id for r in first if not r.HasField("error")
    ]
    assert not any(r.created for r in again)
    judgement = await court.judge(submitted=["there", "good", "k1", first[-1].job_id])
    assert judgement.states == {"PENDING": 4}


@pytest.mark.parametrize("count", [0, 101])
async def test_a_batch_with_too_few_or_too_many_items_stores_nothing(
    count: int, calls: Calls, court: Court
) -> None:
    """Section J."""
    items = [calls.spec(f"j{number}") for number in range(count)]
    submit = jobs.SubmitJobsRequest(namespace=calls.namespace, request_id="r", jobs=items)
    settle = workers.SettleJobsRequest(
        namespace=calls.namespace,
        settlements=[
            workers.Settlement(job_id=f"j{n}", fencing_token=1, complete=workers.Completion())
            for n in range(count)
        ],
    )

    submitted = await refusal(calls.job_call("SubmitJobs", submit))
    settled = await refusal(calls.worker_call("SettleJobs", settle))

    assert (submitted.code, submitted.fields) == ("INVALID_ARGUMENT", ("jobs",))
    assert (settled.code, settled.fields) == ("INVALID_ARGUMENT", ("settlements",))
    assert (await court.judge()).jobs == {}


async def test_a_batch_over_three_mebibytes_is_refused_whole_and_the_channel_lives(
    calls: Calls, court: Court
) -> None:
    """Section J: each item is good, together they are too large."""
    items = [calls.spec(f"j{number}", bytes(200 << 10)) for number in range(20)]
    request = jobs.SubmitJobsRequest(namespace=calls.namespace, request_id="r", jobs=items)

    refused = await refusal(calls.job_call("SubmitJobs", request))

    assert refused.code in {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert refused.reason in {"PAYLOAD_TOO_LARGE", "VALIDATION_FAILED"}
    assert (await court.judge()).jobs == {}
    assert (await calls.submit("small")).created


async def test_a_batch_of_settlements_answers_each_item_for_itself(calls: Calls, court: Court) -> None:
    """Section D: good, stale, malformed, twice and unknown in one call, and the call repeated."""
    session = await calls.open(ttl=20)
    for job_id in ("good", "stale", "fails", "zero"):
        await calls.submit(job_id)
    claims = {claim.job_id: claim for claim in await calls.claim(session, most=10)}
    await calls.release(claims["stale"])

    def item(job_id: str, token: int, **how: Any) -> workers.Settlement:
        return workers.Settlement(job_id=job_id, fencing_token=token, **how)

    request = workers.SettleJobsRequest(
        namespace=calls.namespace,
        settlements=[
            item("good", claims["good"].fencing_token, complete=workers.Completion(result=b"r")),
            item("stale", claims["stale"].fencing_token, complete=workers.Completion()),
            item(
                "fails",
                claims["fails"].fencing_token,
                fail=workers.FailureSettlement(failure=types.Failure(type="T", message="m"), no_retry=True),
            ),
            item("zero", 0, complete=workers.Completion()),
            item("unknown", claims["good"].fencing_token, complete=workers.Completion()),
        ],
    )

    first = (await calls.worker_call("SettleJobs", request)).results
    again = (await calls.worker_call("SettleJobs", request)).results

    def told(results: Any) -> list[str]:
        return [
            refused_by(r.error, "").reason if r.HasField("error") else types.JobState.Name(r.state)
            for r in results
        ]

    expected = ["JOB_STATE_SUCCEEDED", "CLAIM_LOST", "JOB_STATE_DEAD", "VALIDATION_FAILED"]
    assert told(first)[:4] == told(again)[:4] == expected
    assert told(first)[4] in {"JOB_NOT_FOUND", "CLAIM_LOST"}
    assert await calls.verdict(session, claims["zero"]) == "HELD"
    await calls.complete(claims["zero"])
    judgement = await court.judge(submitted=list(claims))
    assert judgement.states == {"SUCCEEDED": 2, "DEAD": 1, "PENDING": 1}


@pytest.mark.parametrize("most", [-1, 0, 101])
async def test_a_claim_for_an_impossible_number_of_jobs_claims_none(
    most: int, calls: Calls, court: Court
) -> None:
    """Section J."""
    await calls.submit("j1")
    session = await calls.open(ttl=20)

    refused = await refusal(calls.claim(session, most=most))

    assert (refused.code, refused.fields) == ("INVALID_ARGUMENT", ("max_jobs",))
    assert await court.claim_revision("j1") == 0


async def test_many_claims_of_one_job_by_id_have_one_winner(calls: Calls, court: Court) -> None:
    """O1: 40 sessions reach for one job at once; the others are told who holds it and when to ask again."""
    await calls.submit("j1")
    sessions = [await calls.open(ttl=20) for _ in range(40)]

    results = await asyncio.gather(
        *(calls.claim_one(session, "j1") for session in sessions), return_exceptions=True
    )

    won = [result for result in results if not isinstance(result, BaseException)]
    assert len(won) == 1
    refused = [await refusal(_raise(result)) for result in results if isinstance(result, BaseException)]
    assert {answer.reason for answer in refused} <= {"CLAIM_HELD", "RELOCK_THROTTLED"}
    assert await calls.complete(won[0]) == "SUCCEEDED"
    assert (await court.judge(submitted=["j1"])).claims == 1


async def _raise(error: BaseException) -> None:
    raise error
