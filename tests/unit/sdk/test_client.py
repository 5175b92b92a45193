"""`JobClient` against a coordinator of real gRPC and scripted faults."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime

import grpc
import pytest

from tests.support.fake_worker_server import Fail, FakeCoordinator, Hang, LoseReply, status_of
from tests.support.polling import eventually
from worker_sdk import (
    ClientClosed,
    ConnectionConfig,
    DeadlineExceeded,
    Draining,
    ForkedProcess,
    JobChange,
    JobClient,
    JobNotFound,
    JobSpec,
    JobState,
    LeasekeeperError,
    OutcomeUnknown,
    RetryConfig,
    RollbackJob,
    StorageFull,
    Timeouts,
    Unavailable,
    ValidationFailed,
    WrongEventLoop,
)

JOB = JobSpec(queue="q", type="t", payload=b"x")
DRAINING = Fail(status_of(grpc.StatusCode.UNAVAILABLE, "DRAINING"))


def quick(endpoints: str, *, call: float = 2.0, attempt: float = 0.3) -> JobClient:
    return JobClient(
        ConnectionConfig(
            endpoints=endpoints,
            timeouts=Timeouts(call=call, attempt=attempt),
            retry=RetryConfig(initial=0.01, maximum=0.05),
        )
    )


@pytest.mark.parametrize("job_id", ["", "mine"])
async def test_007_a_repeated_submit_stores_one_job(server: FakeCoordinator, job_id: str) -> None:
    server.script("SubmitJob", LoseReply(), LoseReply())
    async with quick(server.endpoint) as client:
        submitted = await client.submit(JobSpec(queue="q", type="t", job_id=job_id))
    assert len(server.jobs) == 1
    assert submitted.job_id in server.jobs
    assert len({call.request_id for call in server.calls["SubmitJob"]}) == 1
    assert not submitted.created


async def test_an_outcome_that_stays_unknown_is_said_to_be_unknown(server: FakeCoordinator) -> None:
    server.always("SubmitJob", LoseReply())
    async with quick(server.endpoint, call=0.4) as client:
        with pytest.raises(OutcomeUnknown) as caught:
            await client.submit(JOB, request_id="r-1")
    assert caught.value.request_id == "r-1"


async def test_an_unknown_outcome_is_not_forgotten_over_later_refusals(server: FakeCoordinator) -> None:
    server.script("SubmitJob", LoseReply())
    server.always("SubmitJob", DRAINING)
    async with quick(server.endpoint, call=0.4) as client:
        with pytest.raises(OutcomeUnknown):
            await client.submit(JOB)


async def test_a_coordinator_that_refuses_to_the_end_leaves_nothing_unknown(server: FakeCoordinator) -> None:
    server.always("SubmitJob", DRAINING)
    async with quick(server.endpoint, call=0.3) as client:
        with pytest.raises(Draining):
            await client.submit(JOB)


async def test_no_coordinator_at_all_is_unavailable() -> None:
    async with quick("127.0.0.1:1", call=0.3) as client:
        with pytest.raises(Unavailable):
            await client.submit(JOB)


async def test_the_asked_for_delay_is_kept(server: FakeCoordinator) -> None:
    server.script("SubmitJob", Fail(status_of(grpc.StatusCode.UNAVAILABLE, "NOT_READY", retry_after=0.2)))
    async with quick(server.endpoint) as client:
        await client.submit(JOB)
    first, second = server.times["SubmitJob"]
    assert second - first >= 0.2


async def test_a_delay_beyond_the_deadline_is_not_waited_for(server: FakeCoordinator) -> None:
    server.always("GetJob", Fail(status_of(grpc.StatusCode.UNAVAILABLE, "NOT_READY", retry_after=60)))
    began = time.monotonic()
    async with quick(server.endpoint) as client:
        with pytest.raises(Unavailable):
            await client.get("j")
    assert time.monotonic() - began < 1


async def test_bad_input_and_a_full_store_are_not_repeated(server: FakeCoordinator) -> None:
    server.script(
        "SubmitJob",
        Fail(
            status_of(grpc.StatusCode.INVALID_ARGUMENT, "VALIDATION_FAILED", fields=[("job.queue", "empty")])
        ),
        Fail(status_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "STORAGE_FULL", retry_after=0.01)),
    )
    async with quick(server.endpoint) as client:
        with pytest.raises(ValidationFailed):
            await client.submit(JOB)
        with pytest.raises(StorageFull):
            await client.submit(JOB)
        # The channel is as good as before.
        await client.submit(JOB)
    assert len(server.calls["SubmitJob"]) == 3


async def test_a_dead_endpoint_is_left_for_the_next(server: FakeCoordinator) -> None:
    async with quick(f"127.0.0.1:1,{server.endpoint}") as client:
        for _ in range(3):
            await client.submit(JOB)
    assert len(server.jobs) == 3


async def test_a_silent_endpoint_is_left_for_the_next(server: FakeCoordinator) -> None:
    with FakeCoordinator() as deaf:
        deaf.always("GetJob", Hang())
        server.add("j")
        for endpoints in (f"{deaf.endpoint},{server.endpoint}", f"{server.endpoint},{deaf.endpoint}"):
            async with quick(endpoints) as client:
                assert (await client.get("j")).job_id == "j"


METHODS: dict[str, Callable[[JobClient], Awaitable[object]]] = {
    "SubmitJob": lambda client: client.submit(JOB),
    "SubmitJobs": lambda client: client.submit_many([JOB]),
    "GetJob": lambda client: client.get("j"),
    "ListJobs": lambda client: anext(client.list()),
    "WaitJob": lambda client: client.wait("j"),
    "CancelJob": lambda client: client.cancel("j"),
    "RetryJob": lambda client: client.retry("j"),
    "RedriveJobs": lambda client: anext(client.redrive()),
    "ListAttempts": lambda client: client.attempts("j"),
    "DeleteJob": lambda client: client.delete("j"),
    "UpdateJob": lambda client: client.update("j", priority=1),
}


@pytest.mark.parametrize("method", METHODS)
async def test_131_every_method_ends_by_its_deadline(server: FakeCoordinator, method: str) -> None:
    server.always(method, Hang())
    began = time.monotonic()
    async with quick(server.endpoint, call=0.5, attempt=5.0) as client:
        with pytest.raises((OutcomeUnknown, DeadlineExceeded)):
            await METHODS[method](client)
    assert time.monotonic() - began < 0.5 + 2.0


async def test_many_jobs_go_in_calls_of_a_hundred_and_come_back_in_order(server: FakeCoordinator) -> None:
    jobs = [JobSpec(queue="q", type="t", job_id=f"j{n}") for n in range(250)]
    async with quick(server.endpoint) as client:
        results = await client.submit_many(iter(jobs))
    assert [result.job_id for result in results] == [job.job_id for job in jobs]
    assert sorted(len(call.jobs) for call in server.calls["SubmitJobs"]) == [50, 100, 100]
    assert len({call.request_id for call in server.calls["SubmitJobs"]}) == 3


async def test_many_large_jobs_go_in_calls_below_three_mebibytes(server: FakeCoordinator) -> None:
    payload = b"x" * (256 * 1024)
    jobs = [JobSpec(queue="q", type="t", payload=payload, job_id=f"j{n}") for n in range(30)]
    async with quick(server.endpoint, attempt=5.0, call=10.0) as client:
        results = await client.submit_many(jobs)
    assert len(results) == 30
    assert all(call.ByteSize() <= 3 * 1024 * 1024 for call in server.calls["SubmitJobs"])


async def test_a_refused_call_of_many_raises_its_own_error(server: FakeCoordinator) -> None:
    server.always("SubmitJobs", Fail(status_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "STORAGE_FULL")))
    async with quick(server.endpoint) as client:
        with pytest.raises(StorageFull):
            await client.submit_many([JOB] * 300)


async def test_an_empty_submission_sends_nothing(server: FakeCoordinator) -> None:
    async with quick(server.endpoint) as client:
        assert await client.submit_many([]) == []
    assert not server.calls["SubmitJobs"]


async def test_a_list_goes_over_all_pages(server: FakeCoordinator) -> None:
    for n in range(25):
        server.add(f"j{n:02}")
    async with quick(server.endpoint) as client:
        found = [job.job_id async for job in client.list(page_size=10)]
    assert found == [f"j{n:02}" for n in range(25)]


async def test_a_wait_ends_with_the_job_or_with_its_deadline(server: FakeCoordinator) -> None:
    server.add("open")
    server.add("done").state = "complete"
    async with quick(server.endpoint) as client:
        assert (await client.wait("done")).state is JobState.SUCCEEDED
        with pytest.raises(DeadlineExceeded, match="PENDING"):
            await client.wait("open", timeout=0.1)
        with pytest.raises(JobNotFound):
            await client.wait("absent")


async def test_a_delete_whose_repeat_finds_nothing_has_succeeded(server: FakeCoordinator) -> None:
    server.add("j").state = "complete"
    server.script("DeleteJob", LoseReply())
    async with quick(server.endpoint) as client:
        await client.delete("j")
        with pytest.raises(JobNotFound):
            await client.delete("j")


async def test_a_dead_job_is_retried_under_one_request_id(server: FakeCoordinator) -> None:
    server.add("j").state = "fail"
    server.script("RetryJob", LoseReply())
    at = datetime(2030, 1, 1, tzinfo=UTC)
    async with quick(server.endpoint) as client:
        job = await client.retry("j", run_at=at, etag="7")
    assert job.state is JobState.PENDING
    first, second = server.calls["RetryJob"]
    assert first == second
    assert first.request_id
    assert (first.etag, first.run_at.ToDatetime(UTC)) == ("7", at)


async def test_a_redrive_goes_over_all_pages_under_one_request_id(server: FakeCoordinator) -> None:
    for n in range(5):
        server.add(f"j{n}").state = "fail"
    async with quick(server.endpoint) as client:
        dry = [done.job_ids async for done in client.redrive(jobs_per_call=2, validate_only=True)]
        real = [
            done.job_ids async for done in client.redrive(jobs_per_call=2, queue="q", failure_type="Broken")
        ]
    assert dry == real == [("j0", "j1"), ("j2", "j3"), ("j4",)]
    calls = server.calls["RedriveJobs"][3:]
    assert len({call.request_id for call in calls}) == 1
    assert {(call.queue, call.failure_type, call.jobs_per_second) for call in calls} == {("q", "Broken", 100)}


async def test_a_rollback_job_and_attempts_travel_as_values(server: FakeCoordinator) -> None:
    undo = RollbackJob(queue="undo", type="refund", payload=b"p", content_type="text/plain", priority=2)
    async with quick(server.endpoint) as client:
        await client.submit(JobSpec(queue="q", type="t", job_id="j", rollback=undo))
        server.jobs["j"].attempt = 2
        assert (await client.get("j")).spec.rollback == undo
        attempts = await client.attempts("j")
    assert ([one.number for one in attempts.attempts], attempts.total) == ([1, 2], 2)


async def test_an_update_refused_after_an_unanswered_try_is_of_unknown_outcome(
    server: FakeCoordinator,
) -> None:
    server.add("j")
    server.script("UpdateJob", LoseReply(), Fail(status_of(grpc.StatusCode.ABORTED, "ETAG_MISMATCH")))
    async with quick(server.endpoint) as client:
        with pytest.raises(OutcomeUnknown) as caught:
            await client.update("j", priority=1, etag="1")
    assert type(caught.value.__cause__).__name__ == "EtagMismatch"


async def test_a_watch_resumes_after_the_last_change_it_saw(server: FakeCoordinator) -> None:
    server.script("WatchJobs", LoseReply())
    async with quick(server.endpoint) as client, client.watch(queue="q") as watch:
        await watch.ready()
        server.change("a")
        first = await anext(watch)
        server.change("b", deleted=True)
        second = await anext(watch)
    assert (first.job_id, first.deleted) == ("a", False)
    assert (second.job_id, second.deleted) == ("b", True)
    assert server.calls["WatchJobs"][1].resume_revision == first.revision


@pytest.mark.parametrize("cancel", [False, True], ids=["waiting", "being cancelled"])
async def test_a_watch_that_is_closed_ends_whoever_waits_for_it(
    server: FakeCoordinator, cancel: bool
) -> None:
    async with JobClient(server.endpoint) as client:
        watch = client.watch(queue="q")
        await watch.ready()
        seen: list[JobChange] = []

        async def follow() -> str:
            async for change in watch:
                seen.append(change)  # noqa: PERF401  each is to be seen as it comes
            return "ended"

        following = asyncio.create_task(follow())
        server.change("a")
        await eventually(lambda: seen)
        if cancel:
            following.cancel()
        async with asyncio.timeout(5):
            await watch.aclose()
            await asyncio.wait({following})
        assert following.cancelled() if cancel else following.result() == "ended"
        assert [change async for change in watch] == []


async def test_a_watch_gives_up_after_its_timeout_without_coordinators() -> None:
    async with quick("127.0.0.1:1") as client, client.watch(timeout=0.2) as watch:
        with pytest.raises(Unavailable):
            await anext(watch)


async def test_a_time_without_zone_is_refused_before_anything_is_sent(server: FakeCoordinator) -> None:
    naive = datetime(2030, 1, 1)  # noqa: DTZ001  the point of the test
    async with quick(server.endpoint) as client:
        with pytest.raises(ValidationFailed, match="run_at"):
            await client.submit(JobSpec(queue="q", type="t", run_at=naive))
        with pytest.raises(ValidationFailed, match="run_timeout"):
            await client.submit(JobSpec(queue="q", type="t", run_timeout=float("nan")))
        await client.submit(JobSpec(queue="q", type="t", run_at=datetime(2030, 1, 1, tzinfo=UTC)))
    assert len(server.calls["SubmitJob"]) == 1


async def test_a_closed_client_says_so(server: FakeCoordinator) -> None:
    server.always("GetJob", Hang())
    client = quick(server.endpoint, attempt=5.0)
    waiting = asyncio.create_task(client.get("j"))
    await eventually(lambda: server.calls["GetJob"])
    await client.close()
    with pytest.raises(ClientClosed):
        await waiting
    with pytest.raises(ClientClosed):
        await client.get("j")
    await client.close()


def test_138_one_client_serves_one_loop_after_another(server: FakeCoordinator) -> None:
    server.add("j")
    client = quick(server.endpoint)

    async def use() -> str:
        return (await client.get("j")).job_id

    assert asyncio.run(use()) == "j"
    assert asyncio.run(use()) == "j"


def test_138_a_client_used_in_two_living_loops_raises_one_clear_error(server: FakeCoordinator) -> None:
    server.add("j")
    client = quick(server.endpoint)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        first.run_until_complete(client.get("j"))
        with pytest.raises(WrongEventLoop, match="one for each loop"):
            second.run_until_complete(client.get("j"))
        first.run_until_complete(client.close())
    finally:
        first.close()
        second.close()


async def test_139_a_forked_child_is_refused_and_the_parent_goes_on(server: FakeCoordinator) -> None:
    server.add("j")
    async with quick(server.endpoint) as client:
        await client.get("j")
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            # No pytest, no atexit: the child only tries the client.
            answer = b"nothing"
            try:
                client.get("j").send(None)
            except ForkedProcess:
                answer = b"refused"
            finally:
                os.write(tell, answer)
                os._exit(0)
        os.close(tell)
        assert await asyncio.to_thread(os.read, told, 100) == b"refused"
        os.close(told)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert (await client.get("j")).job_id == "j"


async def test_a_client_leaks_nothing_when_it_is_never_used() -> None:
    for _ in range(100):
        JobClient("127.0.0.1:1")
    async with quick("127.0.0.1:1") as client, aclosing(client.list()) as jobs:
        assert jobs is not None
        assert isinstance(client, JobClient)
    assert issubclass(ClientClosed, LeasekeeperError)
