"""Workers of real processes on a real coordinator and etcd: pauses, deaths, blocked loops, drains."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

from tests.integration.sdk.conftest import Sink, StartWorker, exit_code
from tests.support.polling import eventually
from worker_sdk import Context, JobClient, JobSpec, JobState, Worker, WorkerConfig

TTL = 2.0


def job(kind: str, job_id: str, payload: bytes = b"") -> JobSpec:
    return JobSpec(queue="q", type=kind, job_id=job_id, payload=payload)


async def started(folder: Path, job_id: str, worker: str) -> None:
    await eventually((folder / f"{job_id}.started.{worker}").exists, timeout=15, what=f"{job_id} on {worker}")


async def test_031_a_handler_that_blocks_the_loop_for_three_ttls_keeps_its_claim(
    client: JobClient, start_worker: StartWorker, sink: Sink, tmp_path: Path
) -> None:
    start_worker("w1", ttl=TTL)
    await client.submit(job("block-loop", "j", str(3 * TTL).encode()))
    await started(tmp_path, "j", "w1")
    start_worker("w2", ttl=TTL)
    done = await client.wait("j", timeout=20)
    assert (done.state, done.result, done.attempt) == (JobState.SUCCEEDED, b"w1", 1)
    assert [row[2] for row in sink.rows("accepted")] == ["w1"]
    assert sink.rows("refused") == []
    assert "the event loop has not turned" in (tmp_path / "w1.log").read_text()


async def test_015_a_holder_paused_past_its_lease_changes_nothing_when_it_wakes(
    client: JobClient, start_worker: StartWorker, sink: Sink, tmp_path: Path
) -> None:
    paused = start_worker("w1", ttl=TTL)
    await client.submit(job("hold", "j"))
    await started(tmp_path, "j", "w1")
    paused.send_signal(signal.SIGSTOP)
    start_worker("w2", ttl=TTL)
    done = await client.wait("j", timeout=20)
    assert done.result == b"w2"
    (tmp_path / "j.go").touch()
    paused.send_signal(signal.SIGCONT)
    # It writes before any call of the SDK: only the store's check of the token stands in its way.
    await eventually((tmp_path / "j.wrote.w1").exists, timeout=10)
    await eventually((tmp_path / "j.ClaimLost.w1").exists, timeout=10)
    [accepted], [refused] = sink.rows("accepted"), sink.rows("refused")
    assert (accepted[2], refused[2]) == ("w2", "w1")
    assert refused[1] < accepted[1]
    after = await client.get("j")
    assert (after.result, after.etag, after.lease_losses) == (b"w2", done.etag, 1)
    # The woken worker goes on with a new session.
    await client.submit(job("write", "next"))
    assert (await client.wait("next", timeout=10)).state is JobState.SUCCEEDED


async def test_a_killed_workers_job_runs_elsewhere_after_about_a_ttl(
    client: JobClient, start_worker: StartWorker, sink: Sink, tmp_path: Path
) -> None:
    killed = start_worker("w1", ttl=TTL)
    await client.submit(job("hold", "j"))
    await started(tmp_path, "j", "w1")
    start_worker("w2", ttl=TTL)
    killed.kill()
    began = time.monotonic()
    await started(tmp_path, "j", "w2")
    assert time.monotonic() - began < TTL + 2.0 + 1.0
    done = await client.wait("j", timeout=10)
    assert (done.state, done.failures, done.lease_losses) == (JobState.SUCCEEDED, 0, 1)


async def test_141_a_drained_worker_ends_what_it_can_and_gives_back_the_rest_uncharged(
    client: JobClient, start_worker: StartWorker, sink: Sink, tmp_path: Path
) -> None:
    draining = start_worker("w1", ttl=TTL, slots=3, drain=1.0)
    await client.submit_many(
        [job("sleep", "short", b"0.5"), job("sleep", "long", b"600"), job("hold", "deaf")]
    )
    for name in ("short", "long", "deaf"):
        await started(tmp_path, name, "w1")
    draining.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert await exit_code(draining, 10) == 0
    assert time.monotonic() - began < 1.0 + 2.0
    assert (await client.get("short")).state is JobState.SUCCEEDED
    for name in ("long", "deaf"):
        back = await client.get(name)
        assert (back.state, back.failures, back.lease_losses, back.uncharged) == (JobState.PENDING, 0, 0, 1)
    start_worker("w2", ttl=TTL, slots=3)
    assert (await client.wait("deaf", timeout=10)).result == b"w2"


async def test_003_a_job_caught_by_a_stopping_worker_starts_elsewhere_within_a_second(
    client: JobClient, endpoint: str
) -> None:
    chance = random.Random(3)
    ran: dict[str, list[float]] = {}

    def worker() -> Worker:
        made = Worker(endpoint, queues={"q": 1}, config=WorkerConfig(session_ttl=5))

        @made.handler("write")
        async def handle(ctx: Context) -> None:
            ran.setdefault(ctx.job_id, []).append(time.monotonic())

        return made

    other = worker()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(other.run())
        await other.ready()
        for n in range(20):
            leaving = worker()
            run = group.create_task(leaving.run())
            await leaving.ready()
            await asyncio.sleep(chance.uniform(0, 0.02))
            submitted = time.monotonic()
            if chance.random() < 0.5:
                leaving.stop()
                await asyncio.sleep(chance.uniform(0, 0.01))
            await client.submit(job("write", f"j{n}"))
            leaving.stop()
            done = await client.wait(f"j{n}", timeout=10)
            assert done.state is JobState.SUCCEEDED
            assert ran[f"j{n}"][0] - submitted < 1.0
            await run
        other.stop()
    assert all(len(times) == 1 for times in ran.values())


async def test_cancel_reaches_a_running_handler(client: JobClient, endpoint: str) -> None:
    worker = Worker(endpoint, queues={"q": 1}, config=WorkerConfig(session_ttl=TTL))
    reasons: list[str] = []
    running = asyncio.Event()

    @worker.handler("write")
    async def handle(ctx: Context) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append(ctx.stop_reason)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        await client.submit(job("write", "j"))
        await running.wait()
        asked = await client.cancel("j", reason="not wanted")
        assert asked.cancel_requested
        done = await client.wait("j", timeout=10)
        worker.stop()
    assert done.state is JobState.CANCELLED
    assert reasons == ["cancelled"]


async def test_a_checkpoint_goes_to_the_next_attempt(client: JobClient, endpoint: str) -> None:
    worker = Worker(endpoint, queues={"q": 1}, config=WorkerConfig(session_ttl=TTL))
    found: list[bytes] = []

    @worker.handler("write")
    async def handle(ctx: Context) -> dict[str, int]:
        found.append(ctx.checkpoint)
        if ctx.attempt == 1:
            await ctx.save_checkpoint(b"half")
            ctx.progress(0.5, "half")
            raise RuntimeError("again")
        return {"attempt": ctx.attempt}

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        await client.submit(job("write", "j"))
        done = await client.wait("j", timeout=20)
        worker.stop()
    assert found == [b"", b"half"]
    assert (done.result, done.result_content_type, done.failures) == (
        b'{"attempt": 2}',
        "application/json",
        1,
    )


async def test_a_watch_sees_a_job_from_submission_to_its_end(client: JobClient, endpoint: str) -> None:
    worker = Worker(endpoint, queues={"q": 1})
    worker.handler("write")(lambda ctx: b"x")
    states: list[JobState] = []
    async with asyncio.timeout(30), asyncio.TaskGroup() as group, client.watch(job_ids=["j"]) as watch:
        await watch.ready()
        group.create_task(worker.run())
        await client.submit(job("write", "j"))
        async for change in watch:
            assert change.job is not None
            states.append(change.job.state)
            if change.job.state.terminal:
                break
        worker.stop()
    assert states[-1] is JobState.SUCCEEDED
    assert states[0] is JobState.PENDING
