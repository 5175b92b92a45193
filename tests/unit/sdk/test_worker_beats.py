"""Beats and sessions: what a worker believes about its claims."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import threading
import time

import grpc
import pytest

from leasekeeper.v1 import worker_service_pb2 as pb
from tests.support.fake_worker_server import Answer, Fail, FakeCoordinator, Hang, LoseReply, status_of
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working, make
from worker_sdk import (
    Context,
    SyncContext,
    WorkerConfig,
)


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


async def test_033_a_worker_that_beats_but_gets_no_answer_to_its_claims_can_be_told(
    server: FakeCoordinator, working: Working
) -> None:
    server.interval = 0.05
    server.always("ClaimJobs", Hang())
    worker = make(server)
    worker.handler("t")(lambda ctx: None)
    assert worker.health().session_safe_for == 0.0
    async with working(worker):
        await worker.ready()
        await eventually(lambda: (worker.health().oldest_poll or 0.0) > 0.2)
        assert worker.health().session_safe_for > 5
        server.always("ClaimJobs", None)


async def test_031_a_process_in_which_no_thread_could_run_is_reported_with_its_jobs(
    server: FakeCoordinator, working: Working, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(server, config=WorkerConfig(stall_warning=0.3))

    @worker.handler("t")
    def hold(ctx: SyncContext) -> None:
        # PyDLL, unlike CDLL, keeps the interpreter's lock during the call. The thread sleeps up to a second.
        ctypes.PyDLL(None).usleep(1_500_000)

    server.add("j")
    with caplog.at_level(logging.WARNING):
        async with working(worker):
            await eventually(lambda: server.how("j") == ["complete"])
            await eventually(lambda: "stood still" in caplog.text)
