"""What a caller was told is so: it outlives the process that said it, and no later answer contradicts it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import types_pb2 as types
from tests.fault.support.calls import Calls
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator

AFTER = {
    "submit": "PENDING",
    "complete": "SUCCEEDED",
    "fail": "DEAD",
    "release": "PENDING",
    "cancel": "CANCELLED",
}


@pytest.mark.parametrize("what", AFTER)
async def test_what_was_answered_outlives_the_coordinator(
    what: str, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """SIGKILL right after the answers: what they said stands in etcd."""
    ids = [f"j{number}" for number in range(10)]
    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        if what == "submit":
            await asyncio.gather(*(calls.submit(job_id) for job_id in ids))
        elif what == "cancel":
            await calls.submit_many([calls.spec(job_id) for job_id in ids])
            await asyncio.gather(*(calls.cancel(job_id) for job_id in ids))
        else:
            await calls.submit_many([calls.spec(job_id) for job_id in ids])
            session = await calls.open(ttl=60)
            claims = [await calls.claim_one(session, job_id) for job_id in ids]
            ends = {
                "complete": calls.complete,
                "fail": lambda claim: calls.fail(claim, no_retry=True),
                "release": calls.release,
            }
            told = await asyncio.gather(*(ends[what](claim) for claim in claims))
            assert set(told) == {AFTER[what]}
        await coordinator.kill()
    judgement = await own_court.judge(submitted=ids, raw=ids)
    assert {job_id: judgement.jobs[job_id].state.name for job_id in ids} == dict.fromkeys(ids, AFTER[what])


async def test_a_job_asked_to_stop_that_fails_is_cancelled(calls: Calls, court: Court) -> None:
    """However its attempt ends but for success, with retries left or none: the cancellation stands."""
    session = await calls.open(ttl=60)
    ends = {
        "fails": lambda claim: calls.fail(claim),
        "fails for good": lambda claim: calls.fail(claim, no_retry=True),
        "is released": lambda claim: calls.release(claim),
    }
    for job_id, end in ends.items():
        await calls.submit(job_id, retry_policy=types.RetryPolicy(max_retries=5))
        claim = await calls.claim_one(session, job_id)
        await calls.cancel(job_id)

        assert (job_id, await end(claim)) == (job_id, "CANCELLED")
    await court.judge(submitted=ends)


@pytest.mark.parametrize("first", ["complete", "cancel"])
async def test_of_a_completion_and_a_cancellation_at_once_the_end_is_what_its_caller_was_told(
    first: str, calls: Calls, court: Court
) -> None:
    """Sent together, in either order: SUCCEEDED whenever the completion was answered so, else CANCELLED."""
    session = await calls.open(ttl=60)
    ids = [f"j{number}" for number in range(30)]
    await calls.submit_many([calls.spec(job_id) for job_id in ids])
    claims = {job_id: await calls.claim_one(session, job_id) for job_id in ids}

    async def race(job_id: str) -> str:
        sent = [calls.complete(claims[job_id]), calls.cancel(job_id)]
        if first == "cancel":
            sent.reverse()
        told = await asyncio.gather(*sent, return_exceptions=True)
        return str(told[sent.index(sent[0])] if first == "complete" else told[1])

    told = dict(zip(ids, await asyncio.gather(*(race(job_id) for job_id in ids)), strict=True))

    judgement = await court.judge(submitted=ids, raw=ids)
    # A request to stop does not refuse a holder that is done: it succeeds, whoever was first.
    assert {job_id: judgement.jobs[job_id].state.name for job_id in ids} == told
    assert set(told.values()) == {"SUCCEEDED"}
