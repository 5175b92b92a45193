"""Stuck event loops: noticed and named, kept or given back, told by the worker's health."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.beat_gaps import measure
from tests.support.fake_worker_server import FakeCoordinator, Hang
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working, make
from worker_sdk import ClaimLost, ConfigError, Context, WorkerConfig, WorkerHealth
from worker_sdk._health import HealthLimits, judged
from worker_sdk._stalls import Stall, StallWatch

ROOT = Path(__file__).resolve().parents[3]
LIMITS = HealthLimits(loop=30.0, tries=40.0, answers=35.0)


def get(address: str, path: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_stall_is_reported_once_and_hopeless_after_its_limit() -> None:
    watch = StallWatch(warn=5.0, limit=30.0)
    assert watch.look(1, 100.0) is None
    assert watch.look(1, 105.0) is None
    assert watch.look(1, 105.5) == Stall(5.5, report=True, hopeless=False)
    assert watch.look(1, 130.0) == Stall(30.0, report=False, hopeless=False)
    assert watch.look(1, 131.0) == Stall(31.0, report=False, hopeless=True)
    assert watch.look(2, 140.0) is None
    assert watch.look(2, 146.0) == Stall(6.0, report=True, hopeless=False)


def test_a_loop_without_a_warning_is_hopeless_in_silence() -> None:
    watch = StallWatch(warn=float("inf"), limit=30.0)
    assert watch.look(1, 0.0) is None
    assert watch.look(1, 31.0) == Stall(31.0, report=False, hopeless=True)


@pytest.mark.parametrize(
    ("health", "live", "ready"),
    [
        (WorkerHealth(session_safe_for=5.0), True, True),
        (WorkerHealth(session_safe_for=5.0, oldest_poll=19.0, oldest_try=19.0), True, True),
        (WorkerHealth(session_safe_for=5.0, loop_silent_for=31.0), False, False),
        (WorkerHealth(session_safe_for=5.0, oldest_poll=50.0, oldest_try=41.0), False, False),
        # No coordinator answers, but the loop tries: another process would do no better.
        (WorkerHealth(session_safe_for=5.0, oldest_poll=500.0, oldest_try=1.0), True, False),
        (WorkerHealth(session_safe_for=0.0), True, False),
        (WorkerHealth(session_safe_for=5.0, stopping=True), True, False),
    ],
)
def test_033_a_worker_is_live_while_it_tries_and_ready_while_it_is_answered(
    health: WorkerHealth, live: bool, ready: bool
) -> None:
    verdict = judged(health, LIMITS)
    assert (not verdict.not_live, not verdict.not_ready) == (live, ready)


async def test_a_stalled_loop_is_named_with_its_job_and_measured(
    server: FakeCoordinator, working: Working, caplog: pytest.LogCaptureFixture
) -> None:
    server.interval = 0.05
    worker = make(server, config=WorkerConfig(stall_warning=0.2))
    waits = asyncio.Event()

    @worker.handler("waits")
    async def innocent(ctx: Context) -> None:
        waits.set()
        await asyncio.sleep(0.2)

    @worker.handler("blocks")
    async def culprit(ctx: Context, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  the fault

    with caplog.at_level(logging.WARNING):
        async with working(worker):
            server.add("bystander", type="waits")
            async with asyncio.timeout(5):
                await waits.wait()
            server.add("blocker", type="blocks", payload=b"0.8")
            await eventually(lambda: server.how("blocker") == ["complete"])
            await eventually(lambda: "turns again" in caplog.text)
    [said] = [record.getMessage() for record in caplog.records if "has not turned" in record.getMessage()]
    assert "blocker (blocks)" in said
    assert "bystander" not in said
    assert 0.5 < worker.stats.longest_stall < 2.0


async def test_031_on_stall_release_gives_the_jobs_back_while_the_loop_is_still_blocked(
    server: FakeCoordinator, working: Working
) -> None:
    server.interval = 0.05
    config = WorkerConfig(stall_warning=0.1, stall_limit=0.3, on_stall="release")
    worker = make(server, slots=1, config=config)
    released_at: list[float] = []
    ends: list[float] = []
    raised: list[str] = []

    @worker.handler("t")
    async def block(ctx: Context) -> None:
        if ctx.attempt > 1:
            return
        end = time.monotonic() + 5
        while time.monotonic() < end and not server.jobs["j"].settlements:
            time.sleep(0.01)  # noqa: ASYNC251  the fault
        released_at.append(time.monotonic())
        assert ctx.lost.is_set()
        try:
            ctx.check()
        except ClaimLost as error:
            raised.append(type(error).__name__)
            raise
        finally:
            ends.append(time.monotonic())

    server.add("j")
    async with working(worker):
        await eventually(lambda: server.how("j")[-1:] == ["complete"], timeout=10)
    assert server.how("j") == ["release", "complete"]
    assert server.jobs["j"].settlements[0].release.reason == "worker_stalled"
    assert raised == ["ClaimLost"]
    assert ends[0] >= released_at[0]


async def test_031_on_stall_keep_beats_on_and_gives_nothing_back(
    server: FakeCoordinator, working: Working
) -> None:
    server.interval = 0.05
    worker = make(server, slots=1, config=WorkerConfig(stall_warning=0.1, stall_limit=0.2))

    @worker.handler("t")
    async def block(ctx: Context, seconds: float) -> bytes:
        time.sleep(seconds)  # noqa: ASYNC251  the fault
        ctx.check()
        return b"kept"

    server.add("j", payload=b"1.5")
    async with working(worker):
        await eventually(lambda: server.how("j") == ["complete"], timeout=10)
        assert server.jobs["j"].attempt == 1
    assert worker.stats.longest_beat_gap < 0.5


def test_031_beats_keep_their_pace_while_handlers_block_the_loop_and_hog_the_interpreter() -> None:
    # With all that the default TTL would show in ten times the time; see its command for the whole measure.
    gaps = measure(interval=0.2, block=1.0, hog=0.7)
    assert max(gaps.values()) <= gaps["interval"] + 0.5, gaps


async def test_health_is_served_and_turns_red_while_the_loop_is_stuck(
    server: FakeCoordinator, working: Working, tmp_path: Path
) -> None:
    file = tmp_path / "health"
    config = WorkerConfig(health_listen="127.0.0.1:0", health_file=file, stall_limit=0.6)
    worker = make(server, config=config)
    answers: list[tuple[int, dict[str, object]]] = []
    files: list[bool] = []

    @worker.handler("t")
    async def block(ctx: Context) -> None:
        address = worker.health_address
        end = time.monotonic() + 10
        while time.monotonic() < end and (not answers or answers[-1][0] == 200):
            answers.append(get(address, "/livez"))
        while time.monotonic() < end and file.exists():
            time.sleep(0.02)  # noqa: ASYNC251  the fault
        files.append(file.exists())

    assert worker.health().not_ready
    async with working(worker):
        await worker.ready()
        address = worker.health_address
        await eventually(lambda: worker.stats.sessions == 1 and not worker.health().not_ready)
        assert (await asyncio.to_thread(get, address, "/readyz"))[0] == 200
        await eventually(file.exists)
        server.add("j")
        await eventually(lambda: server.how("j") == ["complete"], timeout=15)
        status, body = answers[-1]
        assert status == 503
        assert "the event loop has not turned" in str(body["not_live"])
        assert answers[0][0] == 200
        assert files == [False]
        assert (await asyncio.to_thread(get, address, "/livez"))[0] == 200
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/other", timeout=5)
    assert not file.exists()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("leasekeeper-health")]


async def test_033_a_worker_whose_claims_nobody_answers_is_live_but_not_ready(
    server: FakeCoordinator, working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_sdk._worker_run._HEALTH_SLACK", 0.3)
    monkeypatch.setattr("worker_sdk._transport.worker_calls._POLL_GRACE", 0.1)
    server.interval = 0.05
    server.always("ClaimJobs", Hang())
    worker = make(server, attempt=0.2, config=WorkerConfig(poll_wait=0.1))
    worker.handler("t")(lambda ctx: None)
    async with working(worker):
        await worker.ready()
        await eventually(lambda: "no coordinator has answered" in str(worker.health().not_ready))
        assert worker.health().not_live == ()
        server.always("ClaimJobs", None)
        await eventually(lambda: not worker.health().not_ready)


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong in (
        {"on_stall": "ignore"},
        {"stall_limit": 0.0},
        {"health_listen": "8080"},
        {"exit_when_stuck_after": -1.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            WorkerConfig(**wrong)  # type: ignore[arg-type]


async def test_a_taken_health_port_is_told_and_starts_nothing(server: FakeCoordinator) -> None:
    worker = make(server, config=WorkerConfig(health_listen=server.endpoint))
    worker.handler("t")(lambda ctx: None)
    with pytest.raises(ConfigError, match="health_listen"):
        await worker.run()
    assert not server.calls["OpenSession"]


STUCK = """
import asyncio, sys, time
from pathlib import Path
from worker_sdk import ConnectionConfig, Worker, WorkerConfig

config = WorkerConfig(stall_limit=0.3, exit_when_stuck_after=0.5)
worker = Worker(ConnectionConfig.from_env(), queues=["q"], config=config)

@worker.handler("t")
async def block(ctx):
    time.sleep(600)

asyncio.run(worker.run())
"""


async def test_a_worker_that_is_stuck_for_good_ends_its_process_if_asked_to(server: FakeCoordinator) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}",
        "LEASEKEEPER_ENDPOINTS": server.endpoint,
    }
    server.add("j")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUCK, env=environment, stderr=subprocess.PIPE
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), 20)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 70
    assert b"stuck" in errors
