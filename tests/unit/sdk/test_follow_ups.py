"""`submit` of a handler's context: jobs that go with the attempt's success, or not at all."""

from __future__ import annotations

import threading

import grpc
import pytest

from leasekeeper.v1 import worker_service_pb2 as pb
from tests.support.fake_worker_server import Answer, FakeCoordinator, status_of
from tests.support.polling import eventually
from tests.unit.sdk import process_handlers as handlers
from tests.unit.sdk.conftest import Working, make
from worker_sdk import (
    Context,
    JobSpec,
    LeasekeeperError,
    PayloadTooLarge,
    SyncContext,
    ValidationFailed,
)


def spec(job_id: str = "", **fields: object) -> JobSpec:
    return JobSpec(queue="next", type="t", job_id=job_id, **fields)  # type: ignore[arg-type]


def completion(server: FakeCoordinator, job_id: str = "j") -> pb.Completion:
    [settlement] = server.jobs[job_id].settlements
    return settlement.complete


async def test_follow_ups_go_with_the_completion_in_their_order(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> bytes:
        ctx.submit(spec("a", payload=b"1", unique_key="u"))
        ctx.submit(spec(run_timeout=5.0))
        return b"done"

    server.add("j")
    async with working(worker):
        await eventually(lambda: worker.stats.completed == 1)
    told = completion(server)
    assert told.result == b"done"
    assert [(job.job_id, job.queue) for job in told.follow_ups] == [("a", "next"), ("", "next")]
    assert told.follow_ups[0].unique_key == "u"
    assert told.follow_ups[1].run_timeout.seconds == 5


async def test_an_attempt_that_fails_submits_nothing(server: FakeCoordinator, working: Working) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        ctx.submit(spec("a"))
        raise ValueError("no")

    server.add("j")
    async with working(worker):
        await eventually(lambda: worker.stats.failed == 1)
    assert server.jobs["j"].settlements[0].WhichOneof("how") == "fail"


async def test_threads_of_one_handler_submit_twenty_jobs_and_no_more(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server)
    refused: list[LeasekeeperError] = []

    @worker.handler("t")
    def handle(ctx: SyncContext) -> None:
        def some() -> None:
            for _ in range(6):
                try:
                    ctx.submit(spec())
                except ValidationFailed as error:
                    refused.append(error)

        threads = [threading.Thread(target=some) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    server.add("j")
    async with working(worker):
        await eventually(lambda: worker.stats.completed == 1)
    assert len(completion(server).follow_ups) == 20
    assert len(refused) == 4


async def test_a_job_too_many_or_too_large_changes_nothing(server: FakeCoordinator, working: Working) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        ctx.submit(spec("a", payload=b"p" * 200_000))
        with pytest.raises(PayloadTooLarge):
            ctx.submit(spec("b", payload=b"p" * 100_000))
        with pytest.raises(ValidationFailed):
            ctx.submit(spec("c", run_timeout=float("nan")))
        ctx.submit(spec("d"))

    server.add("j")
    async with working(worker):
        await eventually(lambda: worker.stats.completed == 1)
    assert [job.job_id for job in completion(server).follow_ups] == ["a", "d"]


async def test_a_handler_in_a_child_process_submits_too(server: FakeCoordinator, working: Working) -> None:
    worker = make(server, slots=1)
    worker.handler("t", pool="process")(handlers.follow)
    server.add("j", payload=b"x")
    async with working(worker):
        await eventually(lambda: worker.stats.completed == 1, timeout=20)
    assert [(job.job_id, job.payload) for job in completion(server).follow_ups] == [("after-j", b"x")]


@pytest.mark.parametrize("reason", ["JOB_EXISTS", "DUPLICATE_JOB"])
async def test_a_follow_up_that_cannot_be_fails_the_attempt_and_says_so(
    server: FakeCoordinator, working: Working, reason: str
) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        ctx.submit(spec("a"))

    refusal = status_of(grpc.StatusCode.ALREADY_EXISTS, reason, metadata={"job_id": "a"})
    answer = pb.SettleJobsResponse(results=[pb.SettleResult(job_id="j", error=refusal)])
    server.add("j")
    server.script("SettleJobs", Answer(answer))
    async with working(worker):
        await eventually(lambda: bool(server.jobs["j"].settlements))
    [settlement] = server.jobs["j"].settlements
    assert settlement.WhichOneof("how") == "fail"
    assert (
        settlement.fail.failure.type == {"JOB_EXISTS": "JobExists", "DUPLICATE_JOB": "DuplicateJob"}[reason]
    )
    assert not settlement.fail.no_retry
