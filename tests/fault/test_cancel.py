"""Cancellation: races have one end that fits every answer, and what is cancelled stays so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.core.job import AttemptOutcome, JobState
from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import types_pb2 as types
from tests.fault.support.calls import Calls, Refused, available, told
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually

TTL = 2.0
ROUNDS = [30, pytest.param(300, marks=pytest.mark.full)]


async def somewhen(call: Callable[[], Awaitable[Any]], chance: random.Random) -> Any:
    """The answer of *call*, made within 10 ms, or how it was refused."""
    await asyncio.sleep(chance.uniform(0.0, 0.01))
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        return told(error)


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_of_cancel_and_complete_one_ends_the_job_and_the_answers_fit(
    rounds: int, calls: Calls, court: Court
) -> None:
    """Fault case 073: within 10 ms of each other, in each order.

    A cancellation of a running job is a request: OK means that the job was asked to stop, or had ended so.
    """
    chance = random.Random(73)
    session = await calls.open(ttl=300)
    ids = [f"j{number:03}" for number in range(rounds)]
    orders = set()
    for job_id in ids:
        await calls.submit(job_id)
        claim = await calls.claim_one(session, job_id)
        cancelled, completed = await asyncio.gather(
            somewhen(lambda job_id=job_id: calls.cancel(job_id), chance),
            somewhen(lambda claim=claim: calls.complete(claim), chance),
        )
        assert completed == "SUCCEEDED"
        assert await calls.state(job_id) == "SUCCEEDED"
        if isinstance(cancelled, Refused):
            assert (cancelled.reason, cancelled.metadata["state"]) == ("JOB_TERMINAL", "SUCCEEDED")
        else:
            assert cancelled.state == types.JOB_STATE_RUNNING
            assert cancelled.cancel_requested
        orders.add(type(cancelled))
    assert len(orders) == 2, "one was always first: proves nothing"
    judgement = await court.judge(submitted=ids)
    assert judgement.outcomes == {"SUCCEEDED": rounds}


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_of_cancel_and_claim_one_is_first_and_a_holder_is_told(
    rounds: int, calls: Calls, court: Court
) -> None:
    """Fault case 074: no job is called cancelled while somebody holds it."""
    chance = random.Random(74)
    session = await calls.open(ttl=300)
    ids = [f"j{number:03}" for number in range(rounds)]
    held = 0
    for job_id in ids:
        await calls.submit(job_id)
        cancelled, claimed = await asyncio.gather(
            somewhen(lambda job_id=job_id: calls.cancel(job_id), chance),
            somewhen(lambda job_id=job_id: calls.claim_one(session, job_id), chance),
        )
        if isinstance(claimed, Refused):
            assert claimed.reason in ("NOT_CLAIMABLE", "JOB_TERMINAL"), claimed
            assert cancelled.state == types.JOB_STATE_CANCELLED
        else:
            held += 1
            assert cancelled.state == types.JOB_STATE_RUNNING
            assert cancelled.cancel_requested
            assert await calls.verdict(session, claimed) == "CANCEL_REQUESTED"
            assert await calls.release(claimed) == "CANCELLED"
    assert 0 < held < rounds, "one was always first: proves nothing"
    judgement = await court.judge(submitted=ids)
    assert judgement.states == {"CANCELLED": rounds}
    assert judgement.claims == held


@pytest.mark.slow
async def test_what_was_cancelled_never_comes_back(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 075: cancelled in backoff, and under a holder that is frozen until its lease has ended.

    The coordinator is killed right after the calls.
    """
    told_ = {"sink": own_court.sink.path, "queues": {"work": 1}, "ttl": TTL, "gates": tmp_path}
    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        session = await calls.open(ttl=60)
        await calls.submit("backoff", queue="other", unique_key="k1")
        [claim] = await calls.claim(session, queue="other", wait=2)
        assert await calls.fail(claim, delay=1.0) == "SCHEDULED"
        assert (await calls.cancel("backoff")).state == types.JOB_STATE_CANCELLED
        async with WorkerProcess(coordinator.endpoint, namespace, tmp_path, name="w1", **told_) as worker:
            await calls.submit("frozen", {"gate": "never"}, unique_key="k2")
            await eventually(lambda: own_court.read().starts, timeout=10, what="the handler began")
            worker.pause()
            assert (await calls.cancel("frozen")).cancel_requested
            await coordinator.kill()
            await coordinator.start()
            jobs = await own_court.ended(["backoff", "frozen"], timeout=20)
            worker.resume()
            await calls.submit("after", unique_key="k2")
            await own_court.ended(["after"], timeout=20)
        await available(lambda: calls.submit("later", queue="other", unique_key="k1"))
        again = await calls.claim(session, most=10, queue="other", wait=3)
        assert [one.job_id for one in again] == ["later"]
        assert await calls.complete(again[0]) == "SUCCEEDED"

    assert {jobs[job_id].state for job_id in ("backoff", "frozen")} == {JobState.CANCELLED}
    assert [start.job for start in own_court.read().starts] == ["frozen", "after"]
    judgement = await own_court.judge(submitted=["backoff", "frozen", "after", "later"], raw=["later"])
    assert judgement.states == {"CANCELLED": 2, "SUCCEEDED": 2}


async def test_twenty_cancels_at_once_are_answered_alike(calls: Calls, court: Court) -> None:
    """Fault case 078: on a job that waits, one that runs, one that has ended, and one that never was."""
    session = await calls.open(ttl=60)
    for job_id in ("ended", "running", "waiting"):
        await calls.submit(job_id)
    ended = await calls.claim_one(session, "ended")
    await calls.complete(ended)
    running = await calls.claim_one(session, "running")
    answers: dict[str, list[Any]] = {}
    for job_id in ("waiting", "running", "ended", "nobody"):
        twenty = (somewhen(lambda job_id=job_id: calls.cancel(job_id), random.Random(n)) for n in range(20))
        answers[job_id] = await asyncio.gather(*twenty)

    assert {answer.state for answer in answers["waiting"]} == {types.JOB_STATE_CANCELLED}
    assert {answer.state for answer in answers["running"]} == {types.JOB_STATE_RUNNING}
    assert {(answer.code, answer.reason) for answer in answers["ended"]} == {
        ("FAILED_PRECONDITION", "JOB_TERMINAL")
    }
    assert {(answer.code, answer.reason) for answer in answers["nobody"]} == {("NOT_FOUND", "JOB_NOT_FOUND")}
    assert await calls.verdict(session, running) == "CANCEL_REQUESTED"
    assert await calls.release(running) == "CANCELLED"
    last = await calls.cancel("running")
    assert last.state == types.JOB_STATE_CANCELLED
    judgement = await court.judge(submitted=["ended", "running", "waiting"])
    assert judgement.states == {"CANCELLED": 2, "SUCCEEDED": 1}


@pytest.mark.slow
async def test_a_handler_that_swallows_its_cancellation_loses_its_job_after_the_grace(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 077: its claim is taken away; what it says when it ends at last changes nothing."""
    settings = {"RECONCILER__CANCEL_GRACE_S": "2"}
    told_ = {"sink": own_court.sink.path, "queues": {"work": 2}, "ttl": TTL, "gates": tmp_path}
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, settings=settings) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
        WorkerProcess(coordinator.endpoint, namespace, tmp_path, name="w1", **told_) as worker,
    ):
        await calls.submit("j1", {"wrong": "swallow"}, unique_key="k")
        await eventually(lambda: own_court.read().starts, timeout=10, what="the handler began")
        assert (await calls.cancel("j1")).state == types.JOB_STATE_RUNNING
        jobs = await own_court.ended(["j1"], timeout=20)
        await calls.submit("j2", unique_key="k")
        await own_court.ended(["j2"], timeout=20)
        (tmp_path / "let-go").touch()
        await eventually(
            lambda: "j1" in worker.log.rpartition("worker ready")[2],
            timeout=20,
            what="the end of the handler",
        )
        assert worker.running

    assert jobs["j1"].state is JobState.CANCELLED
    assert [one.outcome for one in jobs["j1"].attempts] == [AttemptOutcome.CANCELLED]
    judgement = await own_court.judge(submitted=["j1", "j2"])
    assert judgement.jobs["j1"] == jobs["j1"]
    assert [start.job for start in own_court.read().starts] == ["j1", "j2"]
