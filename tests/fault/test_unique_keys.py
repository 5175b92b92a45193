"""A unique key belongs to one live job, and goes with it in the Txn that ends it. Job ids start afresh."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import types_pb2 as types
from tests.fault.support.calls import Calls, available, refusal, seconds
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator
from tests.support.tcp_proxy import ProxyMode, TcpProxy

ONCE = types.RetryPolicy(max_retries=0)


def in_an_hour() -> Timestamp:
    """A time that does not come during a test."""
    return Timestamp(seconds=int(time.time()) + 3600)


async def test_a_dead_job_does_not_hold_its_unique_key(calls: Calls, court: Court) -> None:
    """Fault case 065: after the retries are used up the key is free, and periodic submissions go on."""
    session = await calls.open(ttl=20)
    first = (await calls.submit(unique_key="k", retry_policy=ONCE)).job_id
    [claim] = await calls.claim(session)
    assert await calls.fail(claim) == "DEAD"

    second = await calls.submit(unique_key="k")
    [claim] = await calls.claim(session)

    assert second.created
    assert claim.job_id == second.job_id != first
    assert await calls.complete(claim) == "SUCCEEDED"
    assert (await calls.submit(unique_key="k")).created
    assert await calls.state(first) == "DEAD"
    await court.judge()


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_a_cancelled_or_deleted_job_frees_its_key_at_once(how: str, calls: Calls, court: Court) -> None:
    """Fault case 066: the judge finds the key freed in the very revision that ends the job.

    Only jobs that have ended can be deleted, so the way to delete this one is to cancel it first.
    """
    first = (await calls.submit(unique_key="k", run_at=in_an_hour())).job_id

    live = await refusal(calls.delete(first))
    await calls.cancel(first)
    if how == "delete":
        await calls.delete(first)
    second = await calls.submit(unique_key="k")

    assert (live.code, live.reason) == ("FAILED_PRECONDITION", "NOT_CLAIMABLE")
    assert second.created
    assert second.job_id != first
    judgement = await court.judge(submitted=[second.job_id])
    assert judgement.states == ({"PENDING": 1} if how == "delete" else {"PENDING": 1, "CANCELLED": 1})


async def test_a_cancelled_holder_frees_its_key_with_its_last_call(calls: Calls, court: Court) -> None:
    """Fault case 066, while the job runs: the key stays until the holder has let go."""
    session = await calls.open(ttl=20)
    first = (await calls.submit(unique_key="k")).job_id
    [claim] = await calls.claim(session)
    await calls.cancel(first)

    still = await refusal(calls.submit(unique_key="k"))
    assert await calls.verdict(session, claim) == "CANCEL_REQUESTED"
    assert await calls.release(claim) == "CANCELLED"

    assert (still.code, still.reason) == ("ALREADY_EXISTS", "DUPLICATE_JOB")
    assert (await calls.submit(unique_key="k")).created
    await court.judge()


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(600)])])
async def test_no_kill_leaves_a_key_without_a_job_or_a_job_without_its_key(
    kills: int, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 067: SIGKILL of the coordinator amid Submit, Complete, Cancel and Delete."""
    chance = random.Random(67)
    stopping = asyncio.Event()
    done = 0

    async def once(calls: Calls, session: str, key: str) -> None:
        nonlocal done
        submitted = await calls.submit(unique_key=key, request_id=uuid.uuid4().hex, type=key)
        end = chance.choice(("complete", "fail", "cancel", "delete", "leave"))
        if end in ("cancel", "delete"):
            await calls.cancel(submitted.job_id)
            if end == "delete":
                await calls.delete(submitted.job_id)
        else:
            for claim in await calls.claim(session, kinds=[key]):
                if end == "complete":
                    await calls.complete(claim)
                elif end == "fail":
                    await calls.fail(claim, no_retry=True)
                else:
                    await calls.release(claim)
        done += 1

    async def live(calls: Calls, session: str, key: str) -> None:
        while not stopping.is_set():
            try:
                await once(calls, session, key)
            except grpc.aio.AioRpcError as error:
                told = error.code()
                if told is grpc.StatusCode.UNAVAILABLE or told is grpc.StatusCode.DEADLINE_EXCEEDED:
                    await asyncio.sleep(0.05)
                elif told is grpc.StatusCode.ALREADY_EXISTS:
                    # A job of an earlier try, whose answer was lost, holds the key: end it.
                    for claim in await available(lambda: calls.claim(session, kinds=[key])):
                        await available(lambda claim=claim: calls.complete(claim))
                elif told is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise

    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        Calls(coordinator.endpoint, namespace, timeout=3.0) as calls,
    ):
        session = await calls.open(ttl=900)
        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(live(calls, session, f"k{number}"))
            for _ in range(kills):
                target = done + chance.randrange(50, 150)
                async with asyncio.timeout(20):
                    while done < target:  # noqa: ASYNC110 - a count, not an event
                        await asyncio.sleep(0.002)
                await coordinator.kill()
                await coordinator.start()
            stopping.set()
    judgement = await own_court.judge()
    assert judgement.claims > 20 * kills


@pytest.fixture
async def two(own_etcd: EtcdProcess, tmp_path: Path) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two coordinators of one etcd."""
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, name="c1") as first,
        Coordinator(own_etcd.endpoints, tmp_path, name="c2") as second,
    ):
        yield first, second


async def test_of_many_submissions_of_one_key_one_makes_the_job_and_the_others_are_told_which(
    two: tuple[Coordinator, Coordinator], own_court: Court, namespace: str
) -> None:
    """Fault case 069: 50 at once over two coordinators, and one that arrives after the job has ended.

    The window of a key is its job's life: what arrives later is a new job.
    """
    async with (
        TcpProxy(two[1].endpoint, delay=1.0) as proxy,
        Calls(two[0].endpoint, namespace) as one,
        Calls(two[1].endpoint, namespace) as other,
        Calls(proxy.endpoint, namespace) as slow,
    ):
        session = await slow.open(ttl=20)  # connects
        results = await asyncio.gather(
            *((one, other)[number % 2].submit(unique_key="k") for number in range(50)),
            return_exceptions=True,
        )
        made = [result.job_id for result in results if not isinstance(result, BaseException)]
        refused = [
            await refusal(raised(result)) for result in results if isinstance(result, grpc.aio.AioRpcError)
        ]

        assert len(made) == 1
        assert len(refused) == 49
        assert {(one_.code, one_.reason, one_.metadata["job_id"]) for one_ in refused} == {
            ("ALREADY_EXISTS", "DUPLICATE_JOB", made[0])
        }
        proxy.set_mode(ProxyMode.DELAY)
        late = asyncio.create_task(slow.submit(unique_key="k"))
        [claim] = await one.claim(session, wait=3)
        assert await one.complete(claim) == "SUCCEEDED"
        after = await late
        assert after.created
        assert after.job_id != made[0]
    await own_court.judge(submitted=[made[0], after.job_id])


async def raised(error: BaseException) -> None:
    """Raise it again."""
    raise error


async def test_the_same_key_with_other_content_is_never_taken_silently(calls: Calls, court: Court) -> None:
    """Fault case 070: by unique key, by job id, and by request id."""
    first = await calls.submit(payload=b"p1", unique_key="k", request_id="r1")
    await calls.submit("mine", b"p1")

    same = await calls.submit(payload=b"p1", unique_key="k", request_id="r1")
    other_key = await refusal(calls.submit(payload=b"p2", unique_key="k"))
    same_key = await refusal(calls.submit(payload=b"p1", unique_key="k"))
    other_id = await refusal(calls.submit("mine", b"p2"))
    other_request = await refusal(calls.submit(payload=b"p2", unique_key="k2", request_id="r1"))

    assert (same.job_id, same.created) == (first.job_id, False)
    for refused in (other_key, same_key):
        assert (refused.code, refused.reason) == ("ALREADY_EXISTS", "DUPLICATE_JOB")
        assert refused.metadata["job_id"] == first.job_id
    assert (other_id.code, other_id.reason) == ("ALREADY_EXISTS", "JOB_EXISTS")
    assert (other_request.code, other_request.reason) == ("INVALID_ARGUMENT", "REQUEST_ID_REUSED")
    assert (await calls.get("mine")).spec.payload == b"p1"
    assert (await court.judge()).states == {"PENDING": 2}


@pytest.mark.parametrize("end", ["complete", "dead", "cancel"])
async def test_an_id_used_again_inherits_nothing(end: str, calls: Calls, court: Court) -> None:
    """Fault case 071: before deletion it is the old job or a refusal, after it a fresh one."""
    session = await calls.open(ttl=20)
    timeouts = {"run_timeout": seconds(3600), "total_timeout": seconds(7200)}
    await calls.submit("x", b"old", **timeouts)
    [claim] = await calls.claim(session)
    if end == "complete":
        await calls.complete(claim, b"result")
    elif end == "dead":
        await calls.fail(claim, "broken", no_retry=True)
    else:
        await calls.cancel("x")
        await calls.release(claim)
    ended = await calls.get("x")

    repeat = await calls.submit("x", b"old", **timeouts)
    other = await refusal(calls.submit("x", b"new", **timeouts))
    await calls.delete("x")
    fresh = await calls.submit("x", b"new", **timeouts)
    job = await calls.get("x")

    assert (repeat.created, repeat.state) == (False, ended.state)
    assert other.reason == "JOB_EXISTS"
    assert fresh.created
    assert (job.attempt, job.failures, job.lease_losses, job.uncharged) == (0, 0, 0, 0)
    assert not job.cancel_requested
    assert (job.result, job.end_reason, list(job.attempts)) == (b"", "", [])
    assert not any(job.HasField(name) for name in ("progress", "failure", "claim_time", "settle_time"))
    assert job.submit_time.ToMilliseconds() >= ended.submit_time.ToMilliseconds()
    [again] = await calls.claim(session)
    assert again.payload == b"new"
    assert again.checkpoint == b""
    assert await calls.verdict(session, again) == "HELD"
    assert await calls.complete(again) == "SUCCEEDED"
    await court.judge(submitted=["x"])
