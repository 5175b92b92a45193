"""Lost replies, lost claims, cancels, timeouts and forks: what a worker does about them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import grpc
import pytest

from leasekeeper.v1 import worker_service_pb2 as pb
from tests.support.fake_worker_server import Answer, Fail, FakeCoordinator, LoseReply, status_of
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working, make
from worker_sdk import (
    ClaimLost,
    Context,
    ForkedProcess,
    JobCancelled,
    PermissionDenied,
    SyncContext,
)


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
        await asyncio.Event().wait()

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


async def test_missing_permission_ends_the_worker_with_its_error(server: FakeCoordinator) -> None:
    server.always("ClaimJobs", Fail(status_of(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")))
    worker = make(server)
    worker.handler("t")(lambda ctx: None)
    async with asyncio.timeout(5):
        with pytest.raises(PermissionDenied):
            await worker.run()
    assert len(server.calls["CloseSession"]) == 1


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_139_a_forked_child_can_neither_run_nor_stop_its_parents_worker(
    server: FakeCoordinator, working: Working, kind: str
) -> None:
    worker = make(server)

    def fork() -> str:
        child = os.fork()
        if child == 0:
            refusals = 0
            for call in (worker.stop, lambda: worker.run().send(None)):
                try:
                    call()
                except ForkedProcess:
                    refusals += 1
            os._exit(refusals)
        return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    async def on_loop(ctx: Context) -> str:
        return fork()

    worker.handler("t")(on_loop if kind == "async" else lambda ctx: fork())
    server.add("j")
    async with working(worker):
        await eventually(lambda: server.how("j") == ["complete"])
    assert server.jobs["j"].settlements[0].complete.result == b"2"


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
