"""A worker against a coordinator of real gRPC and scripted faults: claims, handlers, settlements, losses."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time

import grpc
import pytest

from leasekeeper.v1 import worker_service_pb2 as pb
from tests.support.fake_worker_server import Answer, Fail, FakeCoordinator, Hang, LoseReply, status_of
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working
from worker_sdk import (
    ClaimLost,
    ConnectionConfig,
    Context,
    ForkedProcess,
    JobCancelled,
    JobClient,
    JobSpec,
    NoRetry,
    PermissionDenied,
    Retry,
    RetryConfig,
    SyncContext,
    Timeouts,
    Worker,
    WorkerConfig,
)


def make(
    server: FakeCoordinator | str, *, slots: int = 4, attempt: float = 0.5, config: WorkerConfig | None = None
) -> Worker:
    endpoints = server if isinstance(server, str) else server.endpoint
    connection = ConnectionConfig(
        endpoints=endpoints,
        timeouts=Timeouts(attempt=attempt, call=3.0, close=1.0),
        retry=RetryConfig(initial=0.01, maximum=0.1),
    )
    return Worker(connection, queues={"q": slots}, config=config)


async def test_a_submitted_job_runs_and_its_result_is_settled(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> bytes:
        return ctx.payload.upper()

    async with working(worker), JobClient(server.endpoint) as client:
        submitted = await client.submit(JobSpec(queue="q", type="t", payload=b"abc"))
        job = await client.wait(submitted.job_id, timeout=5)
        assert job.state.name == "SUCCEEDED"
        assert server.jobs[submitted.job_id].settlements[0].complete.result == b"ABC"
    assert worker.stats.completed == 1
    assert len(server.calls["CloseSession"]) == 1


async def test_a_plain_function_runs_in_a_thread_of_the_workers_own(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server, slots=3)
    names: list[str] = []

    @worker.handler("t")
    def handle(ctx: SyncContext) -> str:
        names.append(threading.current_thread().name)
        ctx.progress(0.5, "half")
        ctx.save_checkpoint(b"here")
        return ctx.job_id

    for n in range(9):
        server.add(f"j{n}")
    async with working(worker):
        await eventually(lambda: worker.stats.completed == 9)
    assert all(name.startswith("leasekeeper-handler-") for name in names)
    assert len(set(names)) <= 3
    assert server.jobs["j0"].checkpoint == b"here"


async def test_context_tells_the_job(server: FakeCoordinator, working: Working) -> None:
    worker = make(server)
    seen: list[Context] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        seen.append(ctx)
        assert ctx.deadline is None
        assert ctx.remaining() is None
        assert 0 < ctx.lease_remaining() <= 8
        ctx.check()

    record = server.add("j", payload=b"p", content_type="text/plain", labels={"a": "b"})
    record.checkpoint = b"before"
    async with working(worker):
        await eventually(lambda: worker.stats.completed == 1)
    [ctx] = seen
    assert (ctx.job_id, ctx.queue, ctx.type, ctx.attempt) == ("j", "q", "t", 1)
    assert (ctx.payload, ctx.content_type, ctx.labels, ctx.checkpoint) == (
        b"p",
        "text/plain",
        {"a": "b"},
        b"before",
    )
    assert ctx.fencing_token == server.jobs["j"].settlements[0].fencing_token > 0


async def test_retry_and_no_retry_say_what_follows(server: FakeCoordinator, working: Working) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        if ctx.job_id == "later":
            raise Retry("busy", delay=7.5)
        if ctx.job_id == "never":
            raise NoRetry("poison")
        raise LookupError("gone")

    for name in ("later", "never", "other"):
        server.add(name)
    async with working(worker):
        await eventually(lambda: worker.stats.failed == 3)
    later, never, other = (server.jobs[name].settlements[0].fail for name in ("later", "never", "other"))
    assert (later.retry_delay.seconds, later.retry_delay.nanos) == (7, 500_000_000)
    assert never.no_retry
    assert (other.failure.type, other.failure.message) == ("LookupError", "gone")
    assert not other.HasField("retry_delay")


@pytest.mark.parametrize(
    "error",
    [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), StopIteration()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_049_no_exception_escapes_a_handler(
    server: FakeCoordinator, working: Working, error: BaseException, kind: str
) -> None:
    worker = make(server, slots=1)

    async def on_loop(ctx: Context) -> None:
        if ctx.job_id == "bad":
            raise error

    def in_thread(ctx: SyncContext) -> None:
        if ctx.job_id == "bad":
            raise error

    worker.handler("t")(on_loop if kind == "async" else in_thread)
    server.add("bad")
    server.add("good")
    async with working(worker):
        await eventually(lambda: server.how("good") == ["complete"], timeout=2)
    failure = server.jobs["bad"].settlements[0].fail.failure
    # A coroutine cannot let StopIteration out: Python itself makes it a RuntimeError.
    wrapped = kind == "async" and isinstance(error, StopIteration)
    assert failure.type == ("RuntimeError" if wrapped else type(error).__name__)


async def test_011_no_more_jobs_are_claimed_than_there_are_free_slots(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server, slots=3)
    running, most, go = 0, 0, asyncio.Event()

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1

    for n in range(10):
        server.add(f"j{n}")
    async with working(worker):
        await eventually(lambda: running == 3)
        assert sum(record.held is not None for record in server.jobs.values()) == 3
        go.set()
        await eventually(lambda: worker.stats.completed == 10)
    assert most == 3
    assert all(request.max_jobs <= 3 for request in server.calls["ClaimJobs"])


async def test_queues_with_slots_of_their_own_do_not_share(server: FakeCoordinator, working: Working) -> None:
    worker = Worker(server.endpoint, queues={"q": 2, "r": 1})
    running: dict[str, int] = {"q": 0, "r": 0}
    go = asyncio.Event()

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        running[ctx.queue] += 1
        await go.wait()

    for n in range(4):
        server.add(f"q{n}", queue="q")
        server.add(f"r{n}", queue="r")
    async with working(worker):
        await eventually(lambda: running == {"q": 2, "r": 1})
        go.set()
        await eventually(lambda: worker.stats.completed == 8)


async def test_001_a_claim_whose_reply_was_lost_is_claimed_again_with_the_same_request(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server, slots=1)
    tokens: list[int] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        tokens.append(ctx.fencing_token)
        assert ctx.attempt == 1

    server.add("j")
    server.script("ClaimJobs", LoseReply())
    async with working(worker):
        await eventually(lambda: worker.stats.completed == 1)
    first, second = server.calls["ClaimJobs"][:2]
    assert (first.request_id, first.repeat, second.repeat) == (second.request_id, False, True)
    assert first.max_jobs == second.max_jobs
    assert server.jobs["j"].attempt == 1
    assert len(tokens) == 1
    assert server.calls["ClaimJobs"][2].request_id != first.request_id


async def test_042_a_settlement_whose_answer_was_lost_is_repeated_with_the_same_content(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> bytes:
        return b"r"

    server.add("j")
    server.script(
        "SettleJobs", LoseReply(), LoseReply(), Fail(status_of(grpc.StatusCode.UNAVAILABLE, "DRAINING"))
    )
    async with working(worker):
        await eventually(lambda: len(server.calls["SettleJobs"]) == 4)
    assert len({call.SerializeToString(deterministic=True) for call in server.calls["SettleJobs"]}) == 1
    assert server.how("j") == ["complete"]
    assert worker.stats.refused == 0


async def test_a_claim_is_listed_until_its_settlement_is_answered(
    server: FakeCoordinator, working: Working
) -> None:
    server.interval = 0.05
    worker = make(server, attempt=0.2)

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        return

    server.add("j")
    server.always("SettleJobs", Hang())
    async with working(worker):
        await eventually(lambda: len(server.calls["SettleJobs"]) >= 2)
        beats = len(server.calls["Heartbeat"])
        await eventually(lambda: len(server.calls["Heartbeat"]) > beats + 1)
        assert [c.job_id for c in server.calls["Heartbeat"][-1].claims] == ["j"]
        server.always("SettleJobs", None)
        await eventually(lambda: server.how("j") == ["complete"])
        await eventually(lambda: not server.calls["Heartbeat"][-1].claims)


async def test_settlements_that_gather_go_together(server: FakeCoordinator, working: Working) -> None:
    worker = make(server, slots=100)
    go = asyncio.Event()

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        await go.wait()

    for n in range(100):
        server.add(f"j{n}")
    async with working(worker):
        await eventually(lambda: worker.stats.claimed == 100)
        go.set()
        await eventually(lambda: worker.stats.completed == 100)
        await eventually(lambda: all(server.how(f"j{n}") == ["complete"] for n in range(100)))
    assert len(server.calls["SettleJobs"]) <= 4


async def test_a_report_that_can_never_be_taken_becomes_a_failure_that_says_so(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> bytes:
        return b"r"

    refused = status_of(grpc.StatusCode.INVALID_ARGUMENT, "RESULT_TOO_LARGE", "too large")
    server.script(
        "SettleJobs", Answer(pb.SettleJobsResponse(results=[pb.SettleResult(job_id="j", error=refused)]))
    )
    server.add("j")
    async with working(worker):
        await eventually(lambda: server.how("j") == ["fail"])
    assert server.jobs["j"].settlements[0].fail.failure.type == "ResultTooLarge"


async def test_a_lost_claim_cancels_its_handler_and_every_call_of_it_raises(
    server: FakeCoordinator, working: Working
) -> None:
    server.interval = 0.05
    worker = make(server, slots=1)
    caught: list[BaseException] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        if ctx.attempt > 1:
            return
        try:
            await ctx.lost.wait()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for call in (ctx.check, lambda: ctx.progress(0.1)):
                with pytest.raises(ClaimLost) as lost:
                    call()
                caught.append(lost.value)
            with pytest.raises(ClaimLost):
                await ctx.save_checkpoint(b"x")
            assert ctx.stop_reason == "lost"
            raise

    server.add("j")
    async with working(worker):
        await eventually(lambda: server.jobs["j"].held)
        server.take_away("j")
        await eventually(lambda: server.how("j") == ["complete"])
    assert len(caught) == 2
    assert worker.stats.lost == 1
    # The first attempt reported nothing; the second one's report is the only one.
    assert server.jobs["j"].attempt == 2


async def test_a_checkpoint_that_is_refused_tells_the_handler_of_its_loss(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server, slots=1)
    lost: list[bool] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        if ctx.attempt == 1:
            server.take_away("j")
            try:
                await ctx.save_checkpoint(b"x")
            except ClaimLost:
                lost.append(ctx.lost.is_set())
                raise

    server.add("j")
    async with working(worker):
        await eventually(lambda: server.how("j") == ["complete"])
    assert lost == [True]


async def test_a_cancelled_job_stops_and_is_released(server: FakeCoordinator, working: Working) -> None:
    server.interval = 0.05
    worker = make(server)
    reasons: list[str] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append(ctx.stop_reason)

    @worker.handler("s")
    def in_thread(ctx: SyncContext) -> None:
        try:
            while True:
                ctx.sleep(5)
        except JobCancelled:
            reasons.append(ctx.stop_reason)
            raise

    server.add("a")
    server.add("b", type="s")
    async with working(worker):
        await eventually(lambda: worker.stats.claimed == 2)
        server.cancel("a")
        server.cancel("b")
        await eventually(lambda: server.jobs["a"].state == server.jobs["b"].state == "cancelled")
    assert reasons == ["cancelled", "cancelled"]


async def test_053_a_run_timeout_is_a_failure_of_its_own_kind(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        assert ctx.remaining() is not None
        await asyncio.sleep(100)

    record = server.add("j")
    record.spec.run_timeout.nanos = 100_000_000
    async with working(worker):
        await eventually(lambda: server.how("j") == ["fail"])
    assert server.jobs["j"].settlements[0].fail.failure.type == "RunTimeout"


async def test_a_cancel_before_the_first_step_still_frees_the_slot(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server, slots=1)
    ran: list[str] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        ran.append(ctx.job_id)

    @worker.handler("block")
    async def block(ctx: Context) -> None:
        return

    record = server.add("j")
    record.spec.run_timeout.nanos = 1
    server.add("k")
    async with working(worker):
        await eventually(lambda: server.how("k") == ["complete"])
        await eventually(lambda: len(server.how("j")) == 1)


async def test_037_beats_go_on_after_failures(server: FakeCoordinator, working: Working) -> None:
    server.interval = 0.05
    worker = make(server)
    go = asyncio.Event()

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        await go.wait()
        ctx.check()

    unknown = Answer(pb.HeartbeatResponse(authority=pb.AUTHORITY_UNKNOWN))
    denied = Fail(status_of(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"))
    server.add("j")
    async with working(worker):
        await eventually(lambda: server.jobs["j"].held)
        for fault in (LoseReply(), unknown, denied, Fail(status_of(grpc.StatusCode.INTERNAL, "INTERNAL"))):
            server.script("Heartbeat", fault, fault, fault)
            before = len(server.calls["Heartbeat"])
            await eventually(lambda before=before: len(server.calls["Heartbeat"]) > before + 4)
        go.set()
        await eventually(lambda: server.how("j") == ["complete"])
    assert worker.stats.sessions == 1


async def test_a_failed_beat_is_repeated_at_once_at_another_coordinator(
    server: FakeCoordinator, working: Working
) -> None:
    with FakeCoordinator() as other:
        for one in (server, other):
            one.ttl, one.interval = 30.0, 0.3
            one.sessions = server.sessions
            one.jobs = server.jobs
        worker = make(f"{server.endpoint},{other.endpoint}", config=WorkerConfig(session_ttl=30))
        worker.handler("t")(lambda ctx: None)
        async with working(worker):
            await worker.ready()
            await eventually(lambda: server.calls["Heartbeat"] or other.calls["Heartbeat"])
            for one in (server, other):
                one.script("Heartbeat", Fail(status_of(grpc.StatusCode.UNAVAILABLE, "NOT_READY")))
            both = server.times["Heartbeat"], other.times["Heartbeat"]
            count = sum(len(times) for times in both)
            await eventually(lambda: sum(len(times) for times in both) >= count + 3)
            times = sorted([*both[0], *both[1]])
            assert server.calls["Heartbeat"]
            assert other.calls["Heartbeat"]
            # Refused at one, then at once at the other: far less than an interval between the two.
            assert min(b - a for a, b in itertools.pairwise(times)) < 0.1


async def test_a_session_that_has_ended_is_followed_by_a_new_one(
    server: FakeCoordinator, working: Working
) -> None:
    server.interval = 0.05
    worker = make(server, slots=2)
    attempts: list[int] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            await asyncio.Event().wait()

    server.add("j")
    async with working(worker):
        await eventually(lambda: attempts == [1])
        server.end_sessions()
        await eventually(lambda: server.how("j") == ["complete"])
    assert attempts == [1, 2]
    assert worker.stats.sessions == 2
    assert worker.stats.lost == 1
    first, second = server.calls["OpenSession"]
    assert first.request_id != second.request_id


async def test_an_opening_whose_answer_was_lost_finds_the_same_session(
    server: FakeCoordinator, working: Working
) -> None:
    server.script("OpenSession", LoseReply())
    worker = make(server)
    worker.handler("t")(lambda ctx: None)
    async with working(worker):
        await worker.ready()
    first, second = server.calls["OpenSession"]
    assert first.request_id == second.request_id
    assert len(server.sessions) == 1


async def test_a_claim_that_no_beat_covers_starts_only_after_one_that_lists_it(
    server: FakeCoordinator, working: Working
) -> None:
    # Nothing is safe for any length of time until beats are confirmed for longer.
    server.safe, server.interval = 0.0, 60.0
    server.always("Heartbeat", Hang())
    worker = make(server)
    started = asyncio.Event()

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        started.set()

    server.add("j")
    async with working(worker):
        # The claim asks for a beat at once, though the next one is a minute away.
        await eventually(lambda: server.calls["Heartbeat"])
        assert [c.job_id for c in server.calls["Heartbeat"][0].claims] == ["j"]
        assert not started.is_set()
        server.safe = 8.0
        server.always("Heartbeat", None)
        await eventually(started.is_set)


async def test_a_deadline_that_passes_stops_the_work_and_gives_the_job_back(
    server: FakeCoordinator, working: Working
) -> None:
    server.safe, server.interval = 0.3, 60.0
    worker = make(server, slots=1)
    lost: list[float] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        if ctx.attempt == 1:
            began = time.monotonic()
            try:
                await asyncio.Event().wait()
            finally:
                lost.append(time.monotonic() - began)

    server.add("j")
    async with working(worker):
        await eventually(lambda: server.how("j")[:1] == ["release"])
    assert lost[0] < 0.3 + 0.2


async def test_a_finished_result_is_reported_even_late_and_etcd_judges(
    server: FakeCoordinator, working: Working, caplog: pytest.LogCaptureFixture
) -> None:
    server.interval = 0.05
    worker = make(server, slots=1)
    go = threading.Event()

    @worker.handler("t")
    def handle(ctx: SyncContext) -> bytes:
        if ctx.attempt == 1:
            ctx.lost.wait_blocking(5)
            go.wait(5)
        return str(ctx.attempt).encode()

    server.add("j")
    async with working(worker):
        await eventually(lambda: server.jobs["j"].held)
        with caplog.at_level(logging.WARNING):
            server.take_away("j")
            await eventually(lambda: worker.stats.lost == 1)
            go.set()
            await eventually(lambda: worker.stats.refused == 1)
        await eventually(lambda: server.how("j") == ["complete"])
    assert server.jobs["j"].settlements[0].complete.result == b"2"
    assert "settled by somebody else" in caplog.text


async def test_progress_goes_along_with_beats_and_moves_the_sequence(
    server: FakeCoordinator, working: Working
) -> None:
    server.interval = 0.05
    worker = make(server)
    go = threading.Event()

    @worker.handler("t")
    def handle(ctx: SyncContext) -> None:
        ctx.progress(0.25, "a quarter")
        go.wait(5)
        with pytest.raises(ValueError, match="0-1"):
            ctx.progress(float("nan"))

    server.add("j")
    async with working(worker):
        await eventually(lambda: any(call.claims for call in server.calls["Heartbeat"]))
        await eventually(lambda: server.calls["Heartbeat"][-1].claims[0].progress.ratio == 0.25)
        [claim] = server.calls["Heartbeat"][-1].claims
        assert claim.progress.note == "a quarter"
        assert claim.sequence == 1
        go.set()
        await eventually(lambda: server.how("j") == ["complete"])


async def test_the_coordinators_numbers_rule_the_beats(server: FakeCoordinator, working: Working) -> None:
    server.ttl, server.interval = 2.0, 0.1
    worker = make(server, config=WorkerConfig(session_ttl=3600))
    worker.handler("t")(lambda ctx: None)
    async with working(worker):
        await eventually(lambda: len(server.calls["Heartbeat"]) >= 3)
    numbers = [call.number for call in server.calls["Heartbeat"]]
    assert numbers == list(range(1, len(numbers) + 1))
    sent = [call.sent_at.seconds + call.sent_at.nanos / 1e9 for call in server.calls["Heartbeat"]]
    assert sent == sorted(sent)


async def test_missing_permission_ends_the_worker_with_its_error(server: FakeCoordinator) -> None:
    server.always("ClaimJobs", Fail(status_of(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")))
    worker = make(server)
    worker.handler("t")(lambda ctx: None)
    async with asyncio.timeout(5):
        with pytest.raises(PermissionDenied):
            await worker.run()
    assert len(server.calls["CloseSession"]) == 1


async def test_139_a_forked_child_neither_settles_nor_ends_its_parents_claim(
    server: FakeCoordinator, working: Working
) -> None:
    worker = make(server)
    children: list[int] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> str:
        child = os.fork()
        if child == 0:
            try:
                ctx.check()
            except ForkedProcess:
                raise SystemExit(7) from None
            raise SystemExit(8)
        children.append(child)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        ctx.check()
        return str(os.waitstatus_to_exitcode(status))

    server.add("j")
    async with working(worker):
        await eventually(lambda: server.how("j") == ["complete"])
    assert server.jobs["j"].settlements[0].complete.result == b"7"
    assert len(server.calls["CloseSession"]) == 1
