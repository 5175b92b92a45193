"""Ids, names and payloads that are odd, near each other, or no text at all."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from typing import Any

import grpc
import pytest

from leasekeeper.v1 import job_service_pb2 as jobs
from leasekeeper.v1 import types_pb2 as types
from tests.fault.support.calls import Calls, refusal
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator
from worker_sdk import ConnectionConfig, JobClient, JobSpec, WorkerConfig
from worker_sdk.errors import ConfigError, LeasekeeperError

ODD = [
    " ", ".", "..", "/", "//", "a/b", "a/", "../q", "é", unicodedata.normalize("NFD", "é"), "😀",
    "\u200f", "\u2028", "%2F", "%2f", "%", "*", "{x}", "A", "a", "ab", "1", "10", "100", "x" * 255, "x" * 256,
]  # fmt: skip
REFUSED = ["a\0b", "\0", "a\nb", "a\r\nb", "\x1b[2J", "\x7f", "\x85", "x" * 257, "x" * 10_000, "é" * 129]
BAD_NAMES = [
    "",
    " ",
    ".",
    "..",
    "/",
    "a/b",
    "../q",
    "A",
    "é",
    "a b",
    "%2f",
    "*",
    "{x}",
    "a\0b",
    "a\n",
    "x" * 64,
]


async def test_odd_ids_are_just_text_and_never_touch_each_other(calls: Calls, court: Court) -> None:
    """Fault case 093: submitted all, cancelled one by one, the others unchanged; as id and as unique key."""
    for text in ODD:
        assert (
            await calls.submit(text, text.encode(), unique_key=text, labels={"l": text[:255]})
        ).job_id == text
    assert {job_id: (await calls.get(job_id)).spec.payload.decode() for job_id in ODD} == {
        text: text for text in ODD
    }
    left = list(ODD)
    async with court.etcd() as etcd:
        while left:
            gone = left.pop(len(left) // 2)
            others = {job_id: job for job_id, job in (await court.jobs(etcd)).items() if job_id in left}

            assert (await calls.cancel(gone)).job_id == gone

            now = await court.jobs(etcd)
            assert now[gone].state.name == "CANCELLED"
            assert {job_id: now[job_id] for job_id in left} == others
    judgement = await court.judge(submitted=ODD)
    assert judgement.states == {"CANCELLED": len(ODD)}


async def test_a_unique_key_that_looks_like_another_blocks_only_itself(calls: Calls) -> None:
    """Fault cases 093 and 094: ``a`` is not ``ab``, NFC is not NFD, ``%2F`` is not a slash."""
    for text in ODD:
        await calls.submit(unique_key=text)

    answers = [await refusal(calls.submit(unique_key=text)) for text in ODD]

    assert {answer.reason for answer in answers} == {"DUPLICATE_JOB"}
    assert len({answer.metadata["job_id"] for answer in answers}) == len(ODD)


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text)[:12])
async def test_text_with_control_characters_or_too_long_is_refused_by_its_field(
    text: str, calls: Calls, court: Court
) -> None:
    """Fault case 093."""
    answers = {
        "job.job_id": await refusal(calls.submit(text)),
        "job.unique_key": await refusal(calls.submit(unique_key=text)),
        "identity": await refusal(calls.open(identity=text)),
        "job_id": await refusal(calls.get(text)),
    }

    for field, refused in answers.items():
        assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "VALIDATION_FAILED")
        assert refused.fields == (field,)
    assert (await court.judge()).jobs == {}


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda text: ascii(text)[:12])
async def test_a_queue_or_type_that_is_no_name_is_refused(name: str, calls: Calls, court: Court) -> None:
    """Fault case 093."""
    queue = await refusal(calls.submit(queue=name))
    kind = await refusal(calls.submit(type=name))

    assert (queue.code, queue.fields) == ("INVALID_ARGUMENT", ("job.queue",))
    assert (kind.code, kind.fields) == ("INVALID_ARGUMENT", ("job.type",))
    assert (await court.judge()).jobs == {}


async def test_queues_and_jobs_whose_names_begin_alike_do_not_meet(calls: Calls, court: Court) -> None:
    """Fault case 094: claims of queue ``a``, cancellation and watch of job ``1`` touch no neighbour."""
    for queue in ("a", "ab", "a-b", "a0", "a.b"):
        for job_id in ("1", "10", "100"):
            await calls.submit(f"{queue}:{job_id}", queue=queue)
    for job_id in ("1", "10", "100"):
        await calls.submit(job_id, queue="b")
    async with court.etcd() as etcd:
        before = dict(await revisions(court, etcd))
        watch = calls.jobs.WatchJobs(
            jobs.WatchJobsRequest(namespace=calls.namespace, job_ids=["1"]), timeout=10
        )
        seen: list[str] = []
        started = await watch.read()

        async def look() -> None:
            state = None
            while state != types.JOB_STATE_CANCELLED:
                change = await watch.read()
                seen.append(change.job.job_id)
                state = change.job.state

        looking = asyncio.create_task(look())
        session = await calls.open(ttl=20)
        claimed = await calls.claim(session, queue="a", most=100)
        await calls.cancel("10")
        await calls.cancel("1")
        await looking
        watch.cancel()
        after = dict(await revisions(court, etcd))

    assert {claim.job_id for claim in claimed} == {"a:1", "a:10", "a:100"}
    assert not started.HasField("job")
    assert set(seen) == {"1"}
    touched = {"a:1", "a:10", "a:100", "1", "10"}
    changed = {job_id for job_id in before if before[job_id] != after[job_id]}
    assert changed == touched
    for claim in claimed:
        await calls.release(claim)
    await court.judge()


async def revisions(court: Court, etcd: Any) -> list[tuple[str, int]]:
    """Mod revision of each job's record."""
    found = await etcd.range(*court.keys.all_states(), timeout=5)
    return [(court.keys.parse_state(entry.key), entry.mod_revision) for entry in found.kvs]


PAYLOADS = {
    "all bytes": bytes(range(256)),
    "no UTF-8": b"\xff\xfe\xed\xa0\x80",
    "NaN": b'{"a": NaN, "b": Infinity, "c": 1e400}',
    "large number": str(2**63).encode(),
    "keys twice": b'{"a": 1, "a": 2}',
    "deep": b"[" * 300 + b"]" * 300,
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
async def test_a_payload_is_bytes_and_can_be_looked_at_whatever_it_holds(
    payload: bytes, shared: Coordinator, calls: Calls, court: Court
) -> None:
    """Fault case 097."""
    await calls.submit("j1", payload, labels={"odd": '\u2028"\\<'})
    async with JobClient(shared.endpoint, namespace=calls.namespace) as client:
        one = await client.get("j1")
        listed = [job async for job in client.list()]

    assert one.spec.payload == payload
    assert [job.job_id for job in listed] == ["j1"]
    assert listed[0].spec.labels["odd"] == '\u2028"\\<'
    [claim] = await calls.claim(await calls.open(ttl=20))
    assert claim.payload == payload
    await calls.fail(claim, "\x1b[2J\r\n2026-01-01 CRITICAL forged \u2028", no_retry=True)
    assert (await calls.get("j1")).failure.message
    assert [line for line in shared.log.splitlines() if not _is_json(line)] == []
    await court.judge(submitted=["j1"])


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


async def test_bytes_that_are_no_text_in_a_text_field_are_refused_and_the_channel_lives(
    shared: Coordinator, calls: Calls, court: Court
) -> None:
    """Fault case 097: protobuf's own clients cannot send them, others can."""
    job = types.JobSpec(job_id="??", queue="work", type="effect")
    good = jobs.SubmitJobRequest(namespace=calls.namespace, request_id="r", job=job).SerializeToString()
    async with grpc.aio.insecure_channel(shared.endpoint) as channel:
        send = channel.unary_unary("/leasekeeper.v1.JobService/SubmitJob")
        for bad in (good.replace(b"??", b"\xff\xfe"), good.replace(b"??", b"\xed\xa0"), b"\xff\xff\xff"):
            refused = await refusal(send(bad, timeout=5))
            assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "VALIDATION_FAILED")
        await send(good, timeout=5)
    assert list((await court.judge()).jobs) == ["??"]


@pytest.mark.parametrize("text", ["\ud800", "a\ud800b"])
async def test_the_sdk_refuses_text_that_cannot_be_sent(text: str, shared: Coordinator) -> None:
    """Fault case 097: a lone surrogate is a typed error before the wire."""
    async with JobClient(shared.endpoint) as client:
        with pytest.raises((ValueError, LeasekeeperError)):
            await client.submit(JobSpec(queue="work", type="effect", job_id=text))
        with pytest.raises((ValueError, LeasekeeperError)):
            await client.submit(JobSpec(queue="work", type="effect", labels={"l": text}))


@pytest.mark.parametrize("text", ["a\r\nb", "a\nx-forged: 1", "a\0b", "\x1b[2J"])
def test_a_worker_with_an_identity_or_token_that_no_header_can_carry_does_not_start(text: str) -> None:
    """Fault case 098: refused where it is configured, and the secret is not repeated."""
    with pytest.raises(ConfigError, match="identity"):
        WorkerConfig(identity=text)
    with pytest.raises(ConfigError, match="token") as caught:
        ConnectionConfig(endpoints="127.0.0.1:1", token=text, allow_plaintext_token=True)
    assert text not in str(caught.value)
