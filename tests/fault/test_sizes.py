"""Sizes: one documented limit each, refused by name, nothing stored, and the same channel goes on working."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as workers
from tests.fault.support.calls import Calls, refusal, seconds
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from worker_sdk import JobClient, JobSpec
from worker_sdk.errors import PayloadTooLarge, ValidationFailed

PAYLOAD, RESULT = 256 << 10, 64 << 10
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("size", [0, 1, PAYLOAD])
async def test_a_payload_up_to_the_limit_is_stored_whole(size: int, calls: Calls, court: Court) -> None:
    """Fault case 089."""
    content = bytes(number % 251 for number in range(size))
    await calls.submit("j1", content)
    [claim] = await calls.claim(await calls.open(ttl=20))

    assert claim.payload == content
    assert await calls.complete(claim) == "SUCCEEDED"
    await court.judge(submitted=["j1"])


TOO_LARGE = [PAYLOAD + 1, 512 * KIB, MIB, 3 * MIB // 2 - KIB, 3 * MIB // 2, 2 * MIB, 4 * MIB - 1]


@pytest.mark.parametrize("size", [*TOO_LARGE, 4 * MIB + 1, 10 * MIB])
async def test_a_payload_over_the_limit_is_refused_by_size_and_limit(
    size: int, shared: Coordinator, calls: Calls, court: Court
) -> None:
    """Fault case 089: by the coordinator, and by the SDK before the wire."""
    refused = await refusal(calls.submit("j1", bytes(size)))
    async with JobClient(shared.endpoint, namespace=calls.namespace) as client:
        with pytest.raises(PayloadTooLarge) as caught:
            await client.submit(JobSpec(queue="work", type="effect", payload=bytes(size), job_id="j1"))
    assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "PAYLOAD_TOO_LARGE")
    assert (refused.metadata["size"], refused.metadata["limit"]) == (str(size), str(PAYLOAD))
    assert refused.fields == ("job.payload",)
    assert str(PAYLOAD) in str(caught.value) or caught.value.metadata["limit"] == str(PAYLOAD)
    assert (await refusal(calls.get("j1"))).reason == "JOB_NOT_FOUND"
    assert (await calls.submit("j2")).created
    assert (await court.judge()).states == {"PENDING": 1}


async def test_every_job_at_the_limit_reaches_a_client_with_default_settings(
    calls: Calls, court: Court
) -> None:
    """Fault case 090: 20 x 256 KiB do not fit one reply; none is claimed that is not delivered."""
    ids = [f"j{number:02}" for number in range(20)]
    for job_id in ids:
        await calls.submit(job_id, job_id.encode() + bytes(PAYLOAD - 3))
    session = await calls.open(ttl=20)
    got: list[workers.Claim] = []

    while len(got) < len(ids):
        claims = await calls.claim(session, most=20)
        async with court.etcd() as etcd:
            held = await etcd.range(*court.keys.all_claims(), count_only=True, timeout=5)
        got += claims
        assert claims
        assert held.count == len(got)

    assert sorted(claim.job_id for claim in got) == ids
    assert all(claim.payload.startswith(claim.job_id.encode()) for claim in got)
    await asyncio.gather(*(calls.complete(claim) for claim in got))
    await court.judge(submitted=ids)


async def test_a_result_or_progress_over_the_limit_is_refused_and_the_claim_stays(
    calls: Calls, court: Court
) -> None:
    """Fault case 091: the holder can then end the job in another way; a long error is cut, not refused."""
    session = await calls.open(ttl=20)
    await calls.submit("j1")
    [claim] = await calls.claim(session)
    beat = workers.HeartbeatRequest(
        namespace=calls.namespace,
        session_id=session,
        number=1,
        sent_at=seconds(1),
        claims=[
            workers.HeldClaim(
                job_id="j1",
                fencing_token=claim.fencing_token,
                sequence=1,
                progress=types.Progress(ratio=0.5, note="n" * 3 * MIB),
            )
        ],
    )

    result = await refusal(calls.complete(claim, bytes(3 * MIB)))
    edge = await refusal(calls.complete(claim, bytes(RESULT + 1)))
    progress = await refusal(calls.worker_call("Heartbeat", beat))

    assert (result.code, result.reason) == ("INVALID_ARGUMENT", "RESULT_TOO_LARGE")
    assert (result.metadata["size"], result.metadata["limit"]) == (str(3 * MIB), str(RESULT))
    assert edge.reason == "RESULT_TOO_LARGE"
    assert (progress.code, progress.reason) == ("INVALID_ARGUMENT", "VALIDATION_FAILED")
    assert progress.fields == ("claims[0].progress.note",)
    assert await calls.verdict(session, claim) == "HELD"
    assert await calls.fail(claim, "e" * 3 * MIB, no_retry=True) == "DEAD"
    job = await calls.get("j1")
    assert 0 < len(job.failure.message) <= 512
    assert await court.claim_revision("j1") == 0
    await court.judge(submitted=["j1"])


async def test_a_result_at_the_limit_is_stored_whole(calls: Calls, court: Court) -> None:
    """Fault case 091."""
    content = bytes(number % 251 for number in range(RESULT))
    await calls.submit("j1")
    [claim] = await calls.claim(await calls.open(ttl=20))

    assert await calls.complete(claim, content) == "SUCCEEDED"

    assert (await calls.get("j1")).result == content
    await court.judge(submitted=["j1"])


async def test_a_handler_whose_result_is_too_large_ends_its_job_once(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 091: the work is done, so running it again for the same result helps nobody."""
    async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w1", sink=court.sink.path):
        await calls.submit("j1", {"result": 3 * MIB})
        jobs = await court.ended(["j1"], timeout=10)

    assert jobs["j1"].state.name == "DEAD"
    assert jobs["j1"].attempts[-1].failure_type == "ResultTooLarge"
    assert len(court.read().starts) == 1
    await court.judge(submitted=["j1"])


@pytest.mark.parametrize("ttl", [-1.0, 0.0, 0.5, 1.0, 1.999, 3600.5, 1e10])
async def test_a_ttl_out_of_range_is_refused_and_opens_nothing(
    ttl: float, calls: Calls, court: Court
) -> None:
    """Fault case 095: etcd would lift small ones silently and refuse large ones."""
    refused = await refusal(calls.open(ttl=ttl))

    assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "TTL_OUT_OF_RANGE")
    assert refused.fields == ("ttl",)
    assert {"ttl", "min", "max"} <= set(refused.metadata)
    assert await court.sessions() == 0


@pytest.mark.parametrize("ttl", [2.0, 2.5, 3600.0])
async def test_the_ttl_that_was_granted_is_the_one_that_is_told(
    ttl: float, calls: Calls, court: Court
) -> None:
    """Fault case 095: heartbeat interval and safe duration go by it."""
    request = workers.OpenSessionRequest(namespace=calls.namespace, request_id="r", ttl=seconds(ttl))

    reply = await calls.worker_call("OpenSession", request)

    async with court.etcd() as etcd:
        lease = await etcd.lease_time_to_live(int(reply.session_id, 16), timeout=5)
    granted = reply.ttl.ToTimedelta().total_seconds()
    assert granted == lease.granted_ttl
    assert ttl <= granted < ttl + 1
    assert reply.heartbeat_interval.ToTimedelta().total_seconds() <= granted / 3
    assert reply.safe_duration.ToTimedelta().total_seconds() <= granted - 1
    await calls.close_session(reply.session_id)


async def test_a_duration_that_is_no_number_is_refused(calls: Calls) -> None:
    """Fault case 095: NaN and infinity cannot be written as a Duration; the SDK says so, the wire cannot."""
    with pytest.raises(ValueError, match=r"NaN|nan|convert"):
        seconds(float("nan"))
    request = workers.OpenSessionRequest(namespace=calls.namespace, request_id="r", ttl={"nanos": -5})
    assert (await refusal(calls.worker_call("OpenSession", request))).code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("timeout", [-1.0, 0.0, float("inf"), float("nan"), 1e12])
async def test_the_sdk_refuses_durations_that_cannot_be(timeout: float, shared: Coordinator) -> None:
    """Fault case 095."""
    async with JobClient(shared.endpoint) as client:
        with pytest.raises((ValueError, ValidationFailed)):
            await client.submit(JobSpec(queue="work", type="effect", run_timeout=timeout))
