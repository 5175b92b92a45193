"""How a worker stops: drain, cancel, give back; nothing stays behind claimed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from types import FrameType

import pytest

from leasekeeper.v1 import worker_service_pb2 as pb
from tests.support.fake_worker_server import FakeCoordinator, Hang, LoseReply
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working, make
from worker_sdk import Context, JobClient, SyncContext, Worker, WorkerConfig

QUICK = WorkerConfig(drain_timeout=0.2, cancel_grace=0.1)


async def ended(task: asyncio.Task[None], within: float) -> float:
    began = time.monotonic()
    async with asyncio.timeout(within):
        await task
    return time.monotonic() - began


def reasons(server: FakeCoordinator, job_id: str) -> list[str]:
    return [s.release.reason for s in server.jobs[job_id].settlements if s.WhichOneof("how") == "release"]


async def test_003_a_job_claimed_by_a_stopping_worker_starts_elsewhere_at_once(
    server: FakeCoordinator,
) -> None:
    chance = random.Random(3)
    started: dict[str, list[float]] = {}
    added: dict[str, float] = {}

    def worker(slots: int) -> Worker:
        made = make(server, slots=slots)

        @made.handler("t")
        async def handle(ctx: Context) -> None:
            started.setdefault(ctx.job_id, []).append(time.monotonic())

        return made

    other = worker(4)
    staying = asyncio.create_task(other.run())
    await other.ready()
    for n in range(30):
        leaving = worker(1)
        run = asyncio.create_task(leaving.run())
        await leaving.ready()
        polls = len(server.calls["ClaimJobs"])
        await eventually(lambda polls=polls: len(server.calls["ClaimJobs"]) >= polls)
        stop_first = chance.random() < 0.5
        name = f"j{n}"
        for step in ("stop", "add") if stop_first else ("add", "stop"):
            if step == "stop":
                leaving.stop()
            else:
                added[name] = time.monotonic()
                server.add(name)
            await asyncio.sleep(chance.uniform(0, 0.02))
        await ended(run, 5)
    await eventually(lambda: all(server.how(name)[-1:] == ["complete"] for name in added))
    other.stop()
    await ended(staying, 5)
    for name, when in added.items():
        assert len(started[name]) == 1
        assert started[name][0] - when < 1.0
        assert set(server.how(name)[:-1]) <= {"release"}


async def test_003_the_answer_of_a_poll_under_way_is_fetched_and_given_back(server: FakeCoordinator) -> None:
    worker = make(server, slots=1)
    ran: list[str] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        ran.append(ctx.job_id)

    server.script("ClaimJobs", Hang(carried_out=True))
    server.add("j")
    run = asyncio.create_task(worker.run())
    await eventually(lambda: server.jobs["j"].held)
    worker.stop()
    await ended(run, 5)
    assert ran == []
    assert reasons(server, "j") == ["worker_shutdown"]
    assert server.calls["ClaimJobs"][-1].repeat
    assert server.calls["ClaimJobs"][-1].request_id == server.calls["ClaimJobs"][0].request_id


async def test_038_beats_go_on_until_the_last_handler_has_settled(server: FakeCoordinator) -> None:
    server.interval = 0.03
    worker = make(server)
    started, go = asyncio.Event(), asyncio.Event()

    @worker.handler("t")
    async def handle(ctx: Context) -> bytes:
        started.set()
        await go.wait()
        return b"done"

    server.add("j")
    run = asyncio.create_task(worker.run())
    async with asyncio.timeout(5):
        await started.wait()
    worker.stop()
    beats = len(server.calls["Heartbeat"])
    await eventually(lambda: len(server.calls["Heartbeat"]) > beats + 3)
    assert [claim.job_id for claim in server.calls["Heartbeat"][-1].claims] == ["j"]
    assert not server.calls["CloseSession"]
    go.set()
    await ended(run, 5)
    assert server.how("j") == ["complete"]
    assert server.times["CloseSession"][0] > server.times["SettleJobs"][0]


async def test_141_a_drain_lets_some_end_and_gives_the_rest_back_uncharged(server: FakeCoordinator) -> None:
    worker = make(server, slots=5, config=WorkerConfig(drain_timeout=0.4, cancel_grace=0.2))
    release = threading.Event()
    durations = {"a": 0.0, "b": 0.05, "c": 0.2}

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        if ctx.job_id in durations:
            await asyncio.sleep(durations[ctx.job_id])
        elif ctx.job_id == "long":
            await asyncio.Event().wait()

    @worker.handler("deaf")
    def deaf(ctx: SyncContext) -> None:
        release.wait(10)

    for name in (*durations, "long"):
        server.add(name)
    server.add("deaf", type="deaf")
    run = asyncio.create_task(worker.run())
    await eventually(lambda: worker.stats.claimed == 5)
    worker.stop()
    server.add("late")
    took = await ended(run, 5)
    release.set()
    assert took < 0.4 + 0.2 + 2.0
    assert [server.how(name) for name in durations] == [["complete"]] * 3
    assert reasons(server, "long") == ["worker_shutdown"]
    assert reasons(server, "deaf") == ["worker_shutdown"]
    # Fetching what a poll may have claimed can claim a job anew; then it goes back at once, and never runs.
    assert set(server.how("late")) <= {"release"}
    assert server.jobs["late"].state == "pending"
    assert worker.stats.abandoned == 1
    assert worker.stats.failed == 0


async def test_142_the_last_result_is_delivered_though_the_first_try_fails(server: FakeCoordinator) -> None:
    worker = make(server)
    client = JobClient(server.endpoint)
    started, go = asyncio.Event(), asyncio.Event()

    @worker.handler("t")
    async def handle(ctx: Context) -> bytes:
        started.set()
        await go.wait()
        return b"late"

    server.add("j")
    server.script("SettleJobs", LoseReply())
    run = asyncio.create_task(worker.run())
    async with asyncio.timeout(5):
        await started.wait()
    worker.stop()
    # The user's own client has nothing to do with the worker's connections.
    await client.close()
    go.set()
    await ended(run, 5)
    assert server.how("j") == ["complete"]
    assert len(server.calls["SettleJobs"]) == 2


async def test_142_a_result_that_cannot_be_delivered_is_said_loudly(
    server: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(server, attempt=0.1, config=QUICK)

    @worker.handler("t")
    async def handle(ctx: Context) -> bytes:
        return b"lost"

    server.always("SettleJobs", Hang())
    server.add("j")
    run = asyncio.create_task(worker.run())
    await eventually(lambda: worker.stats.completed == 1)
    worker.stop()
    await ended(run, 5)
    assert "1 settlements were never answered" in caplog.text
    # The session's end gave the claim back: the job runs again, once.
    assert server.jobs["j"].state == "pending"


async def test_143_a_second_stop_does_not_wait_for_handlers(server: FakeCoordinator) -> None:
    worker = make(server, config=WorkerConfig(drain_timeout=60, cancel_grace=60))
    release = threading.Event()

    @worker.handler("t")
    def deaf(ctx: SyncContext) -> None:
        release.wait(10)

    server.add("j")
    run = asyncio.create_task(worker.run())
    await eventually(lambda: worker.stats.claimed == 1)
    worker.stop()
    await asyncio.sleep(0.05)
    worker.stop(now=True)
    assert await ended(run, 5) < 2.0
    release.set()
    assert reasons(server, "j") == ["worker_shutdown"]
    assert worker.stats.cut_short


async def test_143_signals_stop_the_worker_and_the_users_handler_is_still_called(
    server: FakeCoordinator,
) -> None:
    heard: list[int] = []

    def users(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, users)
    try:
        worker = make(server, config=WorkerConfig(drain_timeout=60, cancel_grace=0.1))

        @worker.handler("t")
        async def handle(ctx: Context) -> None:
            await asyncio.Event().wait()

        server.add("j")
        run = asyncio.create_task(worker.run())
        await eventually(lambda: worker.stats.claimed == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: heard == [signal.SIGTERM])
        assert not run.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert await ended(run, 5) < 2.0
        assert signal.getsignal(signal.SIGTERM) is users
    finally:
        signal.signal(signal.SIGTERM, before)
    assert reasons(server, "j") == ["worker_shutdown"]


async def test_143_a_worker_in_a_thread_works_without_signals(server: FakeCoordinator) -> None:
    worker = make(server)
    loops: list[asyncio.AbstractEventLoop] = []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        return

    async def work() -> None:
        loops.append(asyncio.get_running_loop())
        await worker.run()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    server.add("j")
    await eventually(lambda: server.how("j") == ["complete"])
    loops[0].call_soon_threadsafe(worker.stop)
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive()
    assert len(server.calls["CloseSession"]) == 1


async def test_a_cancelled_run_gives_back_and_closes(server: FakeCoordinator) -> None:
    worker = make(server, config=WorkerConfig(drain_timeout=60))

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        await asyncio.Event().wait()

    server.add("j")
    run = asyncio.create_task(worker.run())
    await eventually(lambda: worker.stats.claimed == 1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(run, 5)
    assert set(reasons(server, "j")) == {"worker_shutdown"}
    assert server.jobs["j"].state == "pending"
    assert len(server.calls["CloseSession"]) == 1


async def test_a_worker_stops_without_any_coordinator() -> None:
    worker = make("127.0.0.1:1", config=QUICK)
    worker.handler("t")(lambda ctx: None)
    run = asyncio.create_task(worker.run())
    await asyncio.sleep(0.1)
    worker.stop()
    assert await ended(run, 8) < 6


async def test_a_worker_may_run_again(server: FakeCoordinator, working: Working) -> None:
    worker = make(server)
    worker.handler("t")(lambda ctx: None)
    for n in range(2):
        server.add(f"j{n}")
        async with working(worker):
            await eventually(lambda n=n: server.how(f"j{n}") == ["complete"])


async def test_quiet_stops_claiming_and_terminate_ends(server: FakeCoordinator) -> None:
    server.interval = 0.03
    worker = make(server)
    worker.handler("t")(lambda ctx: None)
    run = asyncio.create_task(worker.run())
    await worker.ready()
    server.command = pb.WORKER_COMMAND_QUIET
    await eventually(lambda: server.calls["ClaimJobs"] and server.calls["ClaimJobs"][-1].repeat)
    await eventually(lambda: server.polling == 0)
    server.add("j")
    beats = len(server.calls["Heartbeat"])
    await eventually(lambda: len(server.calls["Heartbeat"]) > beats + 3)
    assert server.jobs["j"].attempt == 0
    assert not run.done()
    server.command = pb.WORKER_COMMAND_TERMINATE
    await ended(run, 5)


async def test_a_worker_whose_quiet_is_taken_back_claims_again(server: FakeCoordinator) -> None:
    server.interval = 0.03
    worker = make(server)
    worker.handler("t")(lambda ctx: None)
    run = asyncio.create_task(worker.run())
    await worker.ready()
    for n in range(3):
        server.command = pb.WORKER_COMMAND_QUIET
        await eventually(lambda: worker.health().stopping)
        server.add(f"j{n}")
        beats = len(server.calls["Heartbeat"])
        await eventually(lambda beats=beats: len(server.calls["Heartbeat"]) > beats + 3)
        assert server.how(f"j{n}") in ([], ["release"])
        server.command = pb.WORKER_COMMAND_UNSPECIFIED
        await eventually(lambda n=n: server.how(f"j{n}")[-1:] == ["complete"])
        assert not worker.health().stopping
    server.command = pb.WORKER_COMMAND_TERMINATE
    await ended(run, 5)


async def test_nothing_is_left_behind(server: FakeCoordinator, working: Working) -> None:
    worker = make(server, slots=8)
    worker.handler("t")(lambda ctx: None)
    async with working(worker):
        for n in range(20):
            server.add(f"j{n}")
        await eventually(lambda: worker.stats.completed == 20)
    names = [thread.name for thread in threading.enumerate()]
    assert "leasekeeper-beats" not in names
    await eventually(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("leasekeeper-handler")]
    )
    assert asyncio.all_tasks() == {asyncio.current_task()}
