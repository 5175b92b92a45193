"""What every call passes through, over a real channel: bad bytes, deadlines, cancellation, access, drain."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.core.job import JobState
from coordinator.errors import OutcomeUnknown, Reason, RequestError
from coordinator.rpc.auth import Caller, Scope, TokenTable
from coordinator.rpc.call_guard import GuardConfig
from coordinator.services.api import JobView, Settled, SubmitOutcome, WatchedJob
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import worker_service_pb2 as w
from tests.support.polling import eventually
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import names, refusal, served

SUBMIT = "/leasekeeper.v1.JobService/SubmitJob"
SUBMIT_BATCH = "/leasekeeper.v1.JobService/SubmitJobs"
BEARER = "s3cret"


def token_table(*scopes: Scope, namespaces: tuple[str, ...] = ("default",)) -> TokenTable:
    caller = Caller(name="test", namespaces=frozenset(namespaces), scopes=frozenset(scopes))
    return TokenTable({hashlib.sha256(BEARER.encode()).hexdigest(): caller})


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x1a\x04\x0a\x02\xc3\x28", b"\x12\x7fabc"])
async def test_bytes_that_are_no_message_are_the_callers_fault(data: bytes) -> None:
    async with served() as s:
        error = await refusal(s.channel.unary_unary(SUBMIT)(data, timeout=2))

        assert (grpc.StatusCode.INVALID_ARGUMENT, "VALIDATION_FAILED") == (error.code, error.reason)
        assert [] == s.use.calls


async def test_a_batch_over_3_mib_is_refused_as_a_whole_and_the_channel_still_works() -> None:
    batch = b.submit_batch(*(b.job_spec(job_id=f"j{n}", payload=bytes(250_000)) for n in range(13)))
    async with served() as s:
        error = await refusal(s.jobs.SubmitJobs(batch, timeout=2))
        s.use.answers["submit"] = [SubmitOutcome(b.stored(), True)]
        answer = await s.jobs.SubmitJob(b.submit(), timeout=2)

        assert (grpc.StatusCode.INVALID_ARGUMENT, ["jobs"]) == (error.code, error.fields)
        assert "3145728" == error.metadata["limit"]
        assert answer.created
        assert ["submit"] == names(s.use.calls)


async def test_ten_mib_are_told_as_our_limit_and_the_channel_still_works() -> None:
    async with served() as s:
        error = await refusal(s.jobs.SubmitJob(b.submit(payload=bytes(10 << 20)), timeout=5))
        s.use.answers["get"] = JobView(stored=b.stored())

        assert (grpc.StatusCode.INVALID_ARGUMENT, "PAYLOAD_TOO_LARGE") == (error.code, error.reason)
        assert "j1" == (await s.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=2)).job.job_id


async def test_a_deadline_is_handed_down_a_little_earlier() -> None:
    async with served() as s:
        s.use.answers["get"] = JobView(stored=b.stored())
        await s.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=2)

        deadline = s.use.calls[0][1][-1]
        assert 1.0 < deadline - time.monotonic() < 2.0


async def test_a_call_without_deadline_gets_one() -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with served(guard_config=GuardConfig(unary_timeout_s=0.1)) as s:
        s.use.answers["get"] = never
        error = await refusal(s.jobs.GetJob(j.GetJobRequest(job_id="j1")))

        assert (grpc.StatusCode.UNAVAILABLE, "OUTCOME_UNKNOWN") == (error.code, error.reason)


async def test_a_long_poll_without_deadline_gets_its_wait_on_top() -> None:
    async with served(guard_config=GuardConfig(unary_timeout_s=1)) as s:
        s.use.answers["claim_jobs"] = []
        await s.workers.ClaimJobs(b.claim_jobs(wait=Duration(seconds=20)))

        _, (_, query, deadline), _ = s.use.calls[0]
        assert 18 < deadline - time.monotonic() < 21
        assert 18_000 < query.wait_ms <= 20_000


async def test_a_long_poll_ends_before_the_callers_deadline() -> None:
    async with served() as s:
        s.use.answers["claim_jobs"] = []
        await s.workers.ClaimJobs(b.claim_jobs(wait=Duration(seconds=20)), timeout=2)

        assert 0 < s.use.calls[0][1][1].wait_ms < 2_000


# Fault case 079: grpc.aio sends no status when a handler ends with CancelledError.
async def test_a_cancellation_inside_does_not_hang_the_caller() -> None:
    async def cancelled(*_: Any) -> None:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    async with served() as s:
        s.use.answers["get"] = cancelled
        started = time.monotonic()
        error = await refusal(s.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=5))

        assert (grpc.StatusCode.UNAVAILABLE, "OUTCOME_UNKNOWN") == (error.code, error.reason)
        assert time.monotonic() - started < 1


async def test_a_caller_that_goes_ends_the_work() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(*_: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with served() as s:
        s.use.answers["get"] = wait
        call = s.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=5)
        await started.wait()
        call.cancel()

        await asyncio.wait_for(ended.wait(), 2)
        await eventually(lambda: s.guard.calls == 0)


async def test_an_unknown_outcome_stays_unknown_and_says_when_to_repeat() -> None:
    async with served() as s:
        s.use.answers["submit"] = OutcomeUnknown("lost")
        error = await refusal(s.jobs.SubmitJob(b.submit(), timeout=2))

        assert (grpc.StatusCode.UNAVAILABLE, "OUTCOME_UNKNOWN") == (error.code, error.reason)
        assert error.retry_ms


async def test_a_fault_of_ours_is_internal_with_an_incident() -> None:
    async with served() as s:
        s.use.answers["get"] = KeyError("secret")
        error = await refusal(s.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=2))

        assert (grpc.StatusCode.INTERNAL, {"incident": "incident-1"}) == (error.code, error.metadata)


async def test_before_the_store_is_known_every_call_is_told_to_come_again() -> None:
    async with served(opened=False) as s:
        error = await refusal(s.jobs.SubmitJob(b.submit(), timeout=2))

        assert (grpc.StatusCode.UNAVAILABLE, "NOT_READY") == (error.code, error.reason)
        assert error.retry_ms
        assert [] == s.use.calls


async def test_too_many_calls_are_refused_before_any_work() -> None:
    async with served(guard_config=GuardConfig(max_calls=0)) as s:
        error = await refusal(s.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=2))

        assert (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS") == (error.code, error.reason)
        assert [] == s.use.calls


async def test_a_refused_item_of_a_batch_stands_in_its_place() -> None:
    exists = RequestError(Reason.JOB_EXISTS, "other content")
    async with served() as s:
        s.use.answers["submit"] = [SubmitOutcome(b.stored("a"), True), exists]
        batch = b.submit_batch(
            b.job_spec(job_id="a"), b.job_spec(job_id="bad", queue=""), b.job_spec(job_id="c")
        )
        results = (await s.jobs.SubmitJobs(batch, timeout=2)).results

        codes = [grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS]
        assert [code.value[0] for code in codes] == [result.error.code for result in results]
        assert ["a", "bad", "c"] == [result.job_id for result in results]
        assert ["a", "c"] == [job.job_id for job in s.use.calls[0][1][2]]


async def test_a_refused_settlement_of_a_batch_stands_in_its_place() -> None:
    lost = RequestError(Reason.CLAIM_LOST, "gone", metadata={"held": "1", "current": "0"})
    settlements = [
        w.Settlement(job_id="a", fencing_token=0, complete=w.Completion()),
        w.Settlement(job_id="b", fencing_token=1, complete=w.Completion(result=b"r")),
        w.Settlement(job_id="c", fencing_token=1, fail=w.FailureSettlement(no_retry=True)),
    ]
    async with served() as s:
        s.use.answers["settle"] = [lost, Settled("c", JobState.DEAD, 0)]
        results = (
            await s.workers.SettleJobs(w.SettleJobsRequest(settlements=settlements), timeout=2)
        ).results

        codes = [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OK]
        assert [code.value[0] for code in codes] == [result.error.code for result in results]
        assert [0, 0, 5] == [result.state for result in results]


async def test_a_watch_ends_with_its_caller_and_leaves_nothing() -> None:
    async with served() as s:
        s.subscription.watched = [WatchedJob(7), WatchedJob(8, "j1", b.stored()), WatchedJob(9, "j2")]
        call = s.jobs.WatchJobs(j.WatchJobsRequest())
        seen = [await call.read() for _ in range(3)]
        call.cancel()

        await eventually(lambda: s.subscription.closed == 1 and s.guard.streams == 0)
        assert [(7, "", False), (8, "j1", False), (9, "j2", True)] == [
            (message.revision, message.job.job_id, message.deleted) for message in seen
        ]


async def test_a_watch_that_fails_says_why() -> None:
    compacted = RequestError(Reason.REVISION_COMPACTED, "gone", metadata={"oldest": "9"})
    async with served() as s:
        s.subscription.watched = [compacted]
        error = await refusal(s.jobs.WatchJobs(j.WatchJobsRequest(resume_revision=3)).read())

        assert (grpc.StatusCode.OUT_OF_RANGE, {"oldest": "9"}) == (error.code, error.metadata)


async def test_drain_ends_streams_and_refuses_new_ones_while_calls_go_on() -> None:
    async with served() as s:
        s.subscription.watched = [WatchedJob(7)]
        s.use.answers["get"] = JobView(stored=b.stored())
        call = s.jobs.WatchJobs(j.WatchJobsRequest())
        await call.read()
        s.guard.drain()

        assert "DRAINING" == (await refusal(call.read())).reason
        assert "DRAINING" == (await refusal(s.jobs.WatchJobs(j.WatchJobsRequest()).read())).reason
        assert "j1" == (await s.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=2)).job.job_id
        assert 1 == s.subscription.closed


async def test_too_many_streams_are_refused() -> None:
    async with served(guard_config=GuardConfig(max_streams=0)) as s:
        error = await refusal(s.jobs.WatchJobs(j.WatchJobsRequest()).read())

        assert "TOO_MANY_REQUESTS" == error.reason


@pytest.mark.parametrize(
    ("headers", "namespace", "reason"),
    [
        ((), "", "UNAUTHENTICATED"),
        ((("authorization", "Bearer wrong"),), "", "UNAUTHENTICATED"),
        ((("authorization", f"Basic {BEARER}"),), "", "UNAUTHENTICATED"),
        ((("authorization", f"Bearer {BEARER}"),), "other", "PERMISSION_DENIED"),
    ],
)
async def test_who_may_not_is_told_so_before_any_work(headers: Any, namespace: str, reason: str) -> None:
    async with served(tokens=token_table(Scope.READ)) as s:
        request = j.GetJobRequest(namespace=namespace, job_id="j1")
        error = await refusal(s.jobs.GetJob(request, timeout=2, metadata=headers))

        assert reason == error.reason
        assert [] == s.use.calls


async def test_a_token_allows_its_scopes_alone() -> None:
    headers = (("authorization", f"bearer {BEARER}"),)
    async with served(tokens=token_table(Scope.READ)) as s:
        s.use.answers["get"] = JobView(stored=b.stored())
        await s.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=2, metadata=headers)
        error = await refusal(s.jobs.SubmitJob(b.submit(), timeout=2, metadata=headers))

        assert ("PERMISSION_DENIED", "jobs:write") == (error.reason, error.metadata["scope"])
