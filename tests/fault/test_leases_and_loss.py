"""Leases that end, keys that vanish, holders that die: noticed in time, charged once, nothing left behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from coordinator.core.job import AttemptOutcome, JobState
from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1.worker_service_pb2 import Claim
from tests.fault.support.calls import Calls, refusal
from tests.fault.support.court import Court
from tests.fault.support.history import History, read_history
from tests.fault.support.processes import Coordinator, PollProcess, WorkerProcess
from tests.support.polling import eventually

TTL = 2.0


async def test_claims_that_lose_leave_no_lease(calls: Calls, court: Court) -> None:
    """Fault case 005: 500 losing claims by id, and a release; leases belong to sessions alone."""
    session, loser = await calls.open(ttl=300), await calls.open(ttl=300)
    await calls.submit("j1")
    [claim] = await calls.claim(session)
    before = await court.leases()

    refused = []
    for _ in range(10):
        refused += await asyncio.gather(*(refusal(calls.claim_one(loser, "j1")) for _ in range(50)))
    await calls.complete(claim)

    assert {answer.reason for answer in refused} <= {"CLAIM_HELD", "RELOCK_THROTTLED"}
    assert "CLAIM_HELD" in {answer.reason for answer in refused}
    assert all(answer.retry_after is not None for answer in refused)
    # The completion may have opened a retention bucket.
    assert await court.leases() <= before + 1
    await calls.close_session(session)
    await calls.close_session(loser)
    assert await court.leases() <= before - 1
    await court.judge(submitted=["j1"])


async def test_a_worker_killed_between_claim_and_start_loses_its_job_within_its_ttl(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 013: SIGKILL right after the reply, before any beat."""
    second = await calls.open(ttl=20)
    async with PollProcess(shared.endpoint, calls.namespace, tmp_path, name="dies", ttl=TTL) as dies:
        await calls.submit("j1")
        await dies.said("claimed ")
        await dies.kill()
        killed = time.monotonic()
        claim = await calls.claim_one(second, "j1", wait=10)

    assert time.monotonic() - killed < TTL + 2.0
    assert await calls.complete(claim) == "SUCCEEDED"
    job = (await court.judge(submitted=["j1"])).jobs["j1"]
    assert (job.failures, job.lease_losses) == (0, 1)


async def test_jobs_claimed_and_never_started_are_back_in_time_and_a_late_first_beat_saves_its_own(
    calls: Calls, court: Court
) -> None:
    """Fault case 013: 50 holders that never beat, and 10 whose first beat comes after 0.8 of the TTL."""
    silent, slow = [f"silent{n}" for n in range(50)], [f"slow{n}" for n in range(10)]
    await calls.submit_many([calls.spec(job_id) for job_id in [*silent, *slow]])

    async def take(job_id: str) -> tuple[str, Claim, float]:
        session = await calls.open(ttl=TTL)
        opened = time.monotonic()
        return session, await calls.claim_one(session, job_id), opened

    async def late(session: str, claim: Claim, opened: float) -> str:
        await asyncio.sleep(max(0.0, opened + 0.8 * TTL - time.monotonic()))
        verdict = await calls.verdict(session, claim)
        async with calls.beating(session, [claim], every=0.4):
            await back.wait()
            await calls.complete(claim)
        return verdict

    back = asyncio.Event()
    taken = await asyncio.gather(*(take(job_id) for job_id in silent))
    slow_taken = await asyncio.gather(*(take(job_id) for job_id in slow))
    async with asyncio.TaskGroup() as tasks:
        verdicts = [tasks.create_task(late(*one)) for one in slow_taken]
        saver = await calls.open(ttl=60)
        got: dict[str, float] = {}
        while len(got) < len(silent):
            for claim in await calls.claim(saver, most=100, wait=8):
                got[claim.job_id] = time.monotonic()
                await calls.complete(claim)
            assert time.monotonic() - taken[-1][2] < TTL + 8, f"only {len(got)} are back"
        back.set()

    assert set(got) == set(silent)
    assert max(got[claim.job_id] - opened for _, claim, opened in taken) < TTL + 2.0
    assert {task.result() for task in verdicts} == {"HELD"}
    judgement = await court.judge(submitted=[*silent, *slow])
    assert {judgement.jobs[job_id].attempt for job_id in slow} == {1}
    assert {judgement.jobs[job_id].lease_losses for job_id in silent} == {1}


async def test_a_claim_whose_key_was_deleted_is_called_lost_and_not_made_again(
    calls: Calls, court: Court
) -> None:
    """Fault case 022: the lease lives, the keepalive succeeds, the key is gone."""
    session = await calls.open(ttl=20)
    await calls.submit("j1")
    [claim] = await calls.claim(session)
    assert await calls.verdict(session, claim) == "HELD"
    async with court.etcd() as etcd:
        await etcd.delete_range(court.keys.claim("j1"), timeout=5)

    verdict = await calls.verdict(session, claim)
    settled = await refusal(calls.complete(claim))

    assert verdict == "LOST"
    assert (settled.code, settled.reason) == ("FAILED_PRECONDITION", "CLAIM_LOST")
    assert await court.claim_revision("j1") == 0
    await court.judge(submitted=["j1"], by_hand=["j1"], quiet=False)


@pytest.mark.slow
async def test_a_job_whose_claim_was_deleted_by_hand_is_found_by_the_sweep(
    calls: Calls, court: Court
) -> None:
    """Fault case 022: a deletion by hand ends with no session, so only the sweep may judge it."""
    session, second = await calls.open(ttl=90), await calls.open(ttl=90)
    await calls.submit("j1")
    [claim] = await calls.claim(session)
    async with court.etcd() as etcd:
        await etcd.delete_range(court.keys.claim("j1"), timeout=5)

    for _ in range(3):
        again = await calls.claim(second, wait=20)
        if again:
            break

    assert again[0].fencing_token > claim.fencing_token
    assert await calls.complete(again[0]) == "SUCCEEDED"
    await court.judge(submitted=["j1"], by_hand=["j1"])


async def test_a_session_whose_lease_was_revoked_is_gone_and_says_so(
    shared: Coordinator, calls: Calls, court: Court
) -> None:
    """Fault case 023: etcd answers the keepalive of a dead lease with TTL 0 and no error."""
    session, second = await calls.open(ttl=20), await calls.open(ttl=20)
    await calls.submit("j1")
    [claim] = await calls.claim(session)
    async with court.etcd() as etcd:
        await etcd.lease_revoke(int(session, 16), timeout=5)

    beat = await refusal(calls.beat(session, [claim]))
    settled = await refusal(calls.complete(claim))
    again = await calls.claim_one(second, "j1", wait=5)

    assert (beat.code, beat.reason) == ("NOT_FOUND", "SESSION_NOT_FOUND")
    assert settled.reason == "CLAIM_LOST"
    assert await calls.complete(again) == "SUCCEEDED"
    assert "Traceback" not in shared.log
    assert (await court.judge(submitted=["j1"])).jobs["j1"].lease_losses == 1


def most_held_at_once(history: History, court: Court) -> int:
    """The most claims that one session held at any revision."""
    claims = court.keys.all_claims().start
    holder: dict[bytes, int] = {}
    most = 0
    for step in history.steps:
        for key in step.deletes:
            holder.pop(key, None)
        for entry in step.puts:
            if entry.key.startswith(claims):
                holder[entry.key] = entry.lease
        held = list(holder.values())
        most = max([most, *(held.count(lease) for lease in set(held))])
    return most


async def test_a_worker_claims_no_more_than_it_has_slots_for_and_runs_each_job_once(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 011: handlers outlast the TTL, and no job waits in a worker's memory meanwhile.

    A claim that is being settled may still stand beside the next one, no more.
    """
    ttl = 4.0  # leaves 3 s to believe in, and so room for a slow machine
    ids = [f"j{number}" for number in range(4)]
    told = {"sink": court.sink.path, "queues": {"work": 1}, "ttl": ttl}
    async with (
        WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w1", **told),
        WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w2", **told),
    ):
        await calls.submit_many([calls.spec(job_id, {"work": ttl * 1.25}) for job_id in ids])
        await court.ended(ids, timeout=40)

    reading = court.read()
    assert sorted(start.job for start in reading.starts) == ids
    assert {start.worker for start in reading.starts} == {"w1", "w2"}
    judgement = await court.judge(submitted=ids)
    assert judgement.claims == len(ids)
    assert most_held_at_once(await read_history(court.endpoints, court.namespace), court) <= 2
    wall = time.time() - time.monotonic()
    for start in reading.starts:
        claimed = judgement.jobs[start.job].attempts[0].start_ms / 1000
        assert start.at + wall - claimed < 0.5


@pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.full)])
async def test_thousands_of_claims_that_end_together_are_back_soon_and_callers_hardly_notice(
    count: int, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 026: all holders die at once. A session holds at most 500 claims."""
    each = 250
    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        Calls(coordinator.endpoint, namespace, timeout=10.0) as calls,
    ):
        ids = [f"j{number:05}" for number in range(count)]
        await calls.submit_many([calls.spec(job_id) for job_id in ids])
        sessions = [await calls.open(ttl=30.0) for _ in range(count // each)]

        async def fill(session: str) -> None:
            held = 0
            while held < each:
                held += len(await calls.claim(session, most=min(100, each - held), wait=2))

        await asyncio.gather(*(fill(session) for session in sessions))
        async with own_court.etcd() as etcd:
            # All at one moment, as leases of workers that died together end.
            await asyncio.gather(*(etcd.lease_revoke(int(one, 16), timeout=10) for one in sessions))
            ended = time.monotonic()
            answered: list[float] = []
            watching = asyncio.create_task(look_on(calls, ids[0], answered))

            async def all_back() -> bool:
                found = await etcd.range(*own_court.keys.all_ready(), count_only=True, timeout=5)
                return found.count == count

            await eventually(all_back, timeout=count / 1000 + 10, interval=0.1, what="all jobs wait again")
            took = time.monotonic() - ended
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    answered.sort()
    assert took < count / 1000 + 10
    assert answered[int(len(answered) * 0.99)] < 0.5, answered[-5:]
    judgement = await own_court.judge(submitted=ids)
    assert judgement.states == {"PENDING": count}
    for job in judgement.jobs.values():
        assert (job.state, job.lease_losses, job.attempt) == (JobState.PENDING, 1, 1)
        assert job.attempts[0].outcome is AttemptOutcome.LOST


async def look_on(calls: Calls, job_id: str, answered: list[float]) -> None:
    """Ask for a job again and again; how long each answer takes, in seconds."""
    while True:
        begin = time.monotonic()
        await calls.get(job_id)
        answered.append(time.monotonic() - begin)
        await asyncio.sleep(0.01)
