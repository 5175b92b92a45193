"""Beats that are starved, late, or told to stop: a claim is kept as long as its holder can prove itself."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.job import AttemptOutcome, JobState
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as workers
from tests.fault.support.calls import Calls, refusal, seconds
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy

TTL = 2.0


def spin(parent: int) -> None:
    """Take a core until the test has ended."""
    while os.getppid() == parent:
        sum(range(10_000))


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core of the machine busy."""
    context = multiprocessing.get_context("spawn")
    spinning = [
        context.Process(target=spin, args=(os.getpid(),), daemon=True) for _ in range(os.cpu_count() or 1)
    ]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


@pytest.mark.slow
async def test_a_handler_that_holds_the_gil_past_its_lease_changes_nothing_when_it_lets_go(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 031, the GIL half: no thread of the process can beat, so the job is taken over meanwhile.

    What the old holder writes and settles after it is refused, and its worker says what it was that hung.
    """
    told = {"sink": court.sink.path, "queues": {"work": 1}, "ttl": TTL}
    payload = {"wrong": "hold-gil", "span": 4 * TTL, "attempts": 1}
    async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w1", **told) as first:
        await calls.submit("j1", payload, type="effect-sync")
        await eventually(lambda: court.read().starts, timeout=10, what="the handler began")
        async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w2", **told):
            jobs = await court.ended(["j1"], timeout=20)
            await eventually(lambda: "settled by somebody else" in first.log, timeout=20, what="the refusal")
            said = [line for line in first.log.splitlines() if "stood still" in line]

    assert len(said) == 1
    assert "j1 (effect-sync)" in said[0]
    job = jobs["j1"]
    assert (job.state, job.lease_losses, job.attempt) == (JobState.SUCCEEDED, 1, 2)
    assert [one.worker for one in court.read().accepted_of("j1")] == ["w2"]
    await court.judge(submitted=["j1"])


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [20, pytest.param(100, marks=pytest.mark.full)])
async def test_jobs_of_several_ttls_keep_their_claims_on_a_busy_machine(
    jobs: int, shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 034: the interval follows from the granted TTL; nobody can set one that does not fit.

    Every core is busy, and each job lasts for two TTLs.
    """
    ttl = 6.0
    ids = [f"j{number:03}" for number in range(jobs)]
    told = {"sink": court.sink.path, "queues": {"work": jobs}, "ttl": ttl}
    async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w1", **told):
        with busy_cores():
            await calls.submit_many([calls.spec(job_id, {"work": 2 * ttl}) for job_id in ids])
            await court.ended(ids, timeout=60)

    judgement = await court.judge(submitted=ids)
    assert judgement.outcomes == {"SUCCEEDED": jobs}


@pytest.mark.slow
async def test_beats_go_on_until_the_last_handler_of_a_stopping_worker_has_ended(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 038: SIGTERM early in a handler that lasts for three TTLs, while somebody else waits."""
    told = {"sink": court.sink.path, "queues": {"work": 1}, "ttl": TTL, "drain": 6 * TTL}
    async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w1", **told) as stopping:
        await calls.submit("j1", {"work": 3 * TTL})
        await eventually(lambda: court.read().starts, timeout=10, what="the handler began")
        async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w2", **told):
            assert await stopping.terminate(timeout=30) == 0
            await court.ended(["j1"], timeout=10)

    assert [start.worker for start in court.read().starts] == ["w1"]
    judgement = await court.judge(submitted=["j1"])
    assert judgement.outcomes == {"SUCCEEDED": 1}


async def where_it_stands(court: Court) -> dict[bytes, tuple[int, int]]:
    """Every key of the namespace but sessions, with its revision and lease."""
    found = {}
    async with court.etcd() as etcd:
        sessions = court.keys.all_sessions()
        root = court.keys.all_states().start.partition(b"state/")[0]
        read = await etcd.range(root, root[:-1] + b"0", timeout=5)
    for entry in read.kvs:
        if not sessions.start <= entry.key < sessions.end:
            found[entry.key] = (entry.mod_revision, entry.lease)
    return found


@pytest.mark.parametrize("end", ["complete", "release", "cancelled"])
async def test_a_beat_that_arrives_after_the_end_revives_nothing(
    end: str, shared: Coordinator, calls: Calls, court: Court
) -> None:
    """Fault case 039: a beat with progress, and a checkpoint, are under way for a second."""
    await calls.submit("j1")
    session = await calls.open(ttl=20)
    claim = await calls.claim_one(session, "j1")
    progress = types.Progress(ratio=0.5, note="half")
    beat = workers.HeartbeatRequest(
        namespace=calls.namespace, session_id=session, number=7, sent_at=seconds(7.0),
        claims=[
            workers.HeldClaim(
                job_id="j1", fencing_token=claim.fencing_token, sequence=7, progress=progress
            )
        ],
    )  # fmt: skip
    checkpoint = workers.SaveCheckpointRequest(
        namespace=calls.namespace, job_id="j1", fencing_token=claim.fencing_token, checkpoint=b"old",
        sequence=7, progress=progress,
    )  # fmt: skip
    async with (
        TcpProxy(shared.endpoint, delay=1.0) as slow,
        Calls(slow.endpoint, calls.namespace, timeout=15) as late,
    ):
        await late.get("j1")
        slow.set_mode(ProxyMode.DELAY)
        sent = slow.bytes_up
        calls_under_way: list[Any] = [
            asyncio.create_task(late.worker_call("Heartbeat", beat)),
            asyncio.create_task(refusal(late.worker_call("SaveCheckpoint", checkpoint))),
        ]
        await eventually(lambda: slow.bytes_up > sent, what="the beat is under way")
        if end == "cancelled":
            await calls.cancel("j1")
        await (calls.complete(claim) if end == "complete" else calls.release(claim))
        before = await where_it_stands(court)

        reply, refused = await asyncio.gather(*calls_under_way)

    assert [one.verdict for one in reply.verdicts] == [workers.VERDICT_LOST]
    assert refused.reason == "CLAIM_LOST"
    assert await where_it_stands(court) == before
    job = (await court.judge(submitted=["j1"], raw=["j1"])).jobs["j1"]
    wanted = {"complete": JobState.SUCCEEDED, "release": JobState.PENDING, "cancelled": JobState.CANCELLED}
    assert job.state is wanted[end]
    assert job.attempts[0].outcome is not AttemptOutcome.RUNNING
