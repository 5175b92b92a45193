"""Tokens only grow, and nobody ends what is no longer theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coordinator.core.job import AttemptOutcome
from leasekeeper.v1.worker_service_pb2 import Claim, SaveCheckpointRequest
from tests.fault.support.calls import Calls, Refused, available, refusal
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy

TTL = 2.0


async def checkpoint(calls: Calls, claim: Claim) -> object:
    """SaveCheckpoint under the claim's token."""
    request = SaveCheckpointRequest(
        namespace=calls.namespace,
        job_id=claim.job_id,
        fencing_token=claim.fencing_token,
        checkpoint=b"late",
        sequence=99,
    )
    return await calls.worker_call("SaveCheckpoint", request)


async def refused_everywhere(calls: Calls, session: str, old: Claim) -> None:
    """Every call with the old token is refused as lost, and changes nothing."""
    answers = [
        await refusal(calls.complete(old, b"late")),
        await refusal(calls.fail(old, "late")),
        await refusal(calls.release(old)),
        await refusal(checkpoint(calls, old)),
    ]
    assert {(answer.code, answer.reason) for answer in answers} == {("FAILED_PRECONDITION", "CLAIM_LOST")}
    assert {answer.metadata["held"] for answer in answers} == {str(old.fencing_token)}
    assert await calls.verdict(session, old) == "LOST"


async def test_the_token_grows_over_deletion_and_resubmission_of_an_id(calls: Calls, court: Court) -> None:
    """Fault case 018."""
    session = await calls.open(ttl=20)
    await calls.submit("x")
    [first] = await calls.claim(session)
    await calls.complete(first, b"one")
    await calls.delete("x")
    await calls.submit("x")
    [second] = await calls.claim(session)

    await refused_everywhere(calls, session, first)

    assert second.fencing_token > first.fencing_token
    assert await calls.verdict(session, second) == "HELD"
    assert await calls.complete(second, b"two") == "SUCCEEDED"
    assert (await calls.get("x")).result == b"two"
    await court.judge(submitted=["x"])


async def test_the_token_grows_over_release_and_claim_in_one_session(calls: Calls, court: Court) -> None:
    """Fault cases 018 and 019: the worker is the same, the incarnation is not."""
    session = await calls.open(ttl=20)
    await calls.submit("x")
    [first] = await calls.claim(session)
    assert await calls.release(first) == "PENDING"
    [second] = await calls.claim(session)

    answers = [await refusal(calls.complete(first, b"late")), await refusal(calls.fail(first))]

    assert {answer.reason for answer in answers} == {"CLAIM_LOST"}
    assert answers[0].metadata["current"] == str(second.fencing_token)
    assert second.fencing_token > first.fencing_token
    # The same settlement again is a replay, not a release of what the second incarnation holds.
    assert await calls.release(first) == "PENDING"
    assert await calls.verdict(session, second) == "HELD"
    assert await calls.complete(second, b"two") == "SUCCEEDED"
    await court.judge(submitted=["x"])


async def test_a_blocked_handler_ends_nothing_of_its_successor_in_the_same_process(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 019: one worker process runs two incarnations of a job, the first blocked in its thread."""
    payload = {"gate": "attempt-{attempt}", "deaf": True}
    async with WorkerProcess(
        shared.endpoint,
        calls.namespace,
        tmp_path,
        name="w1",
        sink=court.sink.path,
        gates=tmp_path,
        queues={"work": 2},
    ):
        await calls.submit("j1", payload, type="effect-sync")
        await eventually(lambda: len(court.read().starts) == 1, what="the first handler began")
        async with court.etcd() as etcd:
            await etcd.lease_revoke(int((await calls.get("j1")).session_id, 16), timeout=5)
        await eventually(lambda: len(court.read().starts) == 2, timeout=15, what="the second handler began")
        second = (await calls.get("j1")).fencing_token
        (tmp_path / "attempt-1").touch()
        await eventually(lambda: len(court.read().effects) == 1, what="the first handler wrote")
        still = (await calls.get("j1")).fencing_token
        (tmp_path / "attempt-2").touch()
        jobs = await court.ended(["j1"], timeout=10)

    late, good = court.read().effects
    assert still == second
    assert (late.accepted, good.accepted) == (False, True)
    assert late.token < good.token == second
    assert jobs["j1"].attempts[-1].token == second
    assert (await court.judge(submitted=["j1"])).outcomes == {"LOST": 1, "SUCCEEDED": 1}


async def test_a_worker_frozen_past_its_lease_writes_and_ends_nothing_when_it_wakes(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 041 with processes: SIGSTOP in mid-handler; the job has ended elsewhere before SIGCONT."""
    told = {"sink": court.sink.path, "gates": tmp_path, "ttl": TTL, "queues": {"work": 1}}
    payload = {"gate": "attempt-{attempt}", "deaf": True}
    async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="sleeps", **told) as sleeps:
        await calls.submit("j1", payload, type="effect-sync")
        await eventually(lambda: len(court.read().starts) == 1, what="the first handler began")
        sleeps.pause()
        frozen = time.monotonic()
        async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="saves", **told):
            await eventually(lambda: len(court.read().starts) == 2, timeout=10, what="it runs elsewhere")
            recovered = time.monotonic() - frozen
            (tmp_path / "attempt-2").touch()
            await court.ended(["j1"], timeout=10)
            (tmp_path / "attempt-1").touch()
            sleeps.resume()
            await eventually(lambda: len(court.read().effects) == 2, timeout=10, what="it wakes and writes")
            # It goes on to work: what it lost does not hold it up.
            await calls.submit("j2", type="effect-sync")
            await court.ended(["j2"], timeout=10)

    good, late = [effect for effect in court.read().effects if effect.job == "j1"]
    assert recovered < TTL + 2.0
    assert (good.worker, good.accepted) == ("saves", True)
    assert (late.worker, late.accepted) == ("sleeps", False)
    judgement = await court.judge(submitted=["j1", "j2"])
    assert judgement.outcomes == {"LOST": 1, "SUCCEEDED": 2}


async def test_a_holder_that_is_cut_off_stops_before_its_job_runs_elsewhere(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """P8: nobody can tell the worker, so its own deadline must pass before etcd gives the job away."""
    told = {"sink": court.sink.path, "gates": tmp_path, "ttl": 3.0, "queues": {"work": 1}}
    async with (
        TcpProxy(shared.endpoint) as proxy,
        WorkerProcess(proxy.endpoint, calls.namespace, tmp_path, name="cut", **told),
    ):
        await calls.submit("j1", {"gate": "attempt-{attempt}"})
        await eventually(lambda: len(court.read().starts) == 1, what="the handler began")
        proxy.set_mode(ProxyMode.DROP)
        async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="next", **told):
            await eventually(lambda: len(court.read().starts) == 2, timeout=12, what="it runs elsewhere")
            (tmp_path / "attempt-2").touch()
            await court.ended(["j1"], timeout=10)

    reading = court.read()
    [note] = reading.notes
    assert (note.worker, note.text) == ("cut", "stopped: lost")
    assert note.at < reading.starts[1].at
    assert (await court.judge(submitted=["j1"])).outcomes == {"LOST": 1, "SUCCEEDED": 1}


async def expired(calls: Calls, court: Court, job_id: str) -> tuple[str, Claim]:
    """A session that claimed the job and fell silent, once its claim is gone."""
    await calls.submit(job_id)
    session = await calls.open(ttl=TTL)
    claim = await calls.claim_one(session, job_id)

    async def gone() -> bool:
        return await court.claim_revision(job_id) == 0

    await eventually(gone, timeout=TTL + 4, what="the claim went with its lease")
    return session, claim


@pytest.mark.parametrize("how", ["release", "fail", "complete"])
async def test_a_holder_that_slept_past_its_lease_ends_nothing_of_the_next_one(
    how: str, calls: Calls, court: Court
) -> None:
    """Fault case 041."""
    _, old = await expired(calls, court, "j1")
    second = await calls.open(ttl=20)
    new = await calls.claim_one(second, "j1", wait=5)
    held = await court.claim_revision("j1")
    late: dict[str, Callable[[Claim], Awaitable[str]]] = {
        "release": calls.release,
        "fail": calls.fail,
        "complete": calls.complete,
    }

    answer = await refusal(late[how](old))

    assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "CLAIM_LOST")
    assert answer.metadata["held"] == str(old.fencing_token)
    assert answer.metadata["current"] == str(new.fencing_token)
    assert await court.claim_revision("j1") == held
    assert await calls.complete(new) == "SUCCEEDED"
    job = (await court.judge(submitted=["j1"])).jobs["j1"]
    assert (job.failures, job.lease_losses) == (0, 1)


async def test_a_release_whose_answer_was_lost_can_be_repeated(
    shared: Coordinator, calls: Calls, court: Court, namespace: str
) -> None:
    """Fault case 042: with a TTL of a minute, so that only the repeated release can explain it."""
    await calls.submit("j1")
    async with TcpProxy(shared.endpoint) as proxy, Calls(proxy.endpoint, namespace) as cut:
        session = await cut.open(ttl=60)
        [claim] = await cut.claim(session)
        proxy.set_mode(ProxyMode.HALF_DROP)
        releasing = asyncio.create_task(refusal(cut.release(claim, timeout=5)))

        async def gone() -> bool:
            return await court.claim_revision("j1") == 0

        begin = time.monotonic()
        await eventually(gone, timeout=2, what="the lock went")
        proxy.set_mode(ProxyMode.RESET)
        lost = await releasing
        proxy.set_mode(ProxyMode.PASS)

        answer = await available(lambda: cut.release(claim))

    assert lost.code == "UNAVAILABLE"
    assert answer == "PENDING"
    assert time.monotonic() - begin < 5
    [new] = await calls.claim(await calls.open(ttl=20))
    await calls.complete(new)
    assert (await court.judge(submitted=["j1"])).outcomes == {"RELEASED": 1, "SUCCEEDED": 1}


Settle = Callable[[Calls, Claim], Awaitable[str]]


def completes(result: bytes) -> Settle:
    """CompleteJob with this result."""

    async def settle(calls: Calls, claim: Claim) -> str:
        return await calls.complete(claim, result)

    return settle


def fails(message: str) -> Settle:
    """FailJob for good."""

    async def settle(calls: Calls, claim: Claim) -> str:
        return await calls.fail(claim, message, no_retry=True)

    return settle


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (completes(b"r"), completes(b"r"), True),
        (fails("f"), fails("f"), True),
        (completes(b"r"), fails("f"), False),
        (fails("f"), completes(b"r"), False),
        (completes(b"r"), completes(b"other"), False),
        (fails("f"), fails("other"), False),
    ],
)
async def test_the_first_settlement_stands_and_the_same_again_is_answered_alike(
    first: Settle, second: Settle, same: bool, calls: Calls, court: Court
) -> None:
    """Fault case 043."""
    session = await calls.open(ttl=20)
    await calls.submit("j1")
    [claim] = await calls.claim(session)
    answer = await first(calls, claim)
    before = await calls.get("j1")

    if same:
        assert await second(calls, claim) == answer
    else:
        refused = await refusal(second(calls, claim))
        assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "CLAIM_LOST")

    assert await calls.get("j1") == before
    assert before.failures == (answer == "DEAD")
    await court.judge(submitted=["j1"])


async def test_a_success_told_after_the_lease_ended_is_always_refused_and_the_loss_stays_on_record(
    calls: Calls, court: Court
) -> None:
    """Fault case 045: the rule is refusal, whether somebody has claimed the job since or not."""
    count = 8
    lost = await asyncio.gather(*(expired(calls, court, f"j{number}") for number in range(count)))
    claims = [claim for _, claim in lost]

    async def late(number: int) -> Refused:
        if number % 2:
            session = await calls.open(ttl=20)
            await calls.claim_one(session, claims[number].job_id, wait=5)
        return await refusal(calls.complete(claims[number], b"late"))

    answers = await asyncio.gather(*(late(number) for number in range(count)))

    assert {(answer.code, answer.reason) for answer in answers} == {("FAILED_PRECONDITION", "CLAIM_LOST")}
    judgement = await court.judge(submitted=[claim.job_id for claim in claims])
    for job in judgement.jobs.values():
        assert job.attempts[0].outcome is AttemptOutcome.LOST
        assert (job.failures, job.lease_losses) == (0, 1)
