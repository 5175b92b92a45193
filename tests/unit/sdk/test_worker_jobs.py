"""Jobs through a worker: handlers, slots, how attempts end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support.fake_worker_server import FakeCoordinator
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working, make
from worker_sdk import (
    Context,
    JobClient,
    JobSpec,
    NoRetry,
    Retry,
    SyncContext,
    Worker,
)


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
