"""Locks that jobs name, on real etcd, through two coordinators."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.app import running_coordinator
from coordinator.config import Settings
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import (
    job_service_pb2_grpc,
    lock_service_pb2_grpc,
    types_pb2,
    worker_service_pb2_grpc,
)
from leasekeeper.v1 import lock_service_pb2 as pb
from leasekeeper.v1 import worker_service_pb2 as w
from tests.support.polling import eventually
from tests.unit.rpc.fakes import refusal

SHARED, SEMAPHORE = types_pb2.LOCK_MODE_SHARED, types_pb2.LOCK_MODE_SEMAPHORE


def lock(name: str, **more: Any) -> types_pb2.JobLock:
    return types_pb2.JobLock(name=name, **more)


@dataclass
class Side:
    """One coordinator's stubs."""

    jobs: Any
    locks: Any
    workers: Any

    async def open(self, ttl: int = 10) -> str:
        request = w.OpenSessionRequest(request_id=uuid.uuid4().hex, ttl=Duration(seconds=ttl))
        return str((await self.workers.OpenSession(request, timeout=5)).session_id)

    async def submit(self, job_id: str, *locks: types_pb2.JobLock, type_: str = "t", **more: Any) -> None:
        spec = types_pb2.JobSpec(job_id=job_id, queue="q", type=type_, locks=locks, **more)
        await self.jobs.SubmitJob(j.SubmitJobRequest(job=spec), timeout=5)

    async def submit_all(self, specs: list[types_pb2.JobSpec]) -> None:
        for at in range(0, len(specs), 100):
            request = j.SubmitJobsRequest(request_id=uuid.uuid4().hex, jobs=specs[at : at + 100])
            await self.jobs.SubmitJobs(request, timeout=20)

    async def claim(
        self, session: str, *, wait: float = 0, max_jobs: int = 10, types: tuple[str, ...] = ("t",)
    ) -> list[w.Claim]:
        request = w.ClaimJobsRequest(
            session_id=session,
            request_id=uuid.uuid4().hex,
            queues=[w.QueueTypes(queue="q", types=types)],
            max_jobs=max_jobs,
            wait=Duration(seconds=int(wait), nanos=int(wait % 1 * 1e9)),
        )
        return list((await self.workers.ClaimJobs(request, timeout=wait + 10)).claims)

    async def claim_one(self, session: str, job_id: str, wait: float = 0) -> w.Claim:
        request = w.ClaimJobRequest(
            session_id=session,
            request_id=uuid.uuid4().hex,
            job_id=job_id,
            wait=Duration(seconds=int(wait), nanos=int(wait % 1 * 1e9)),
        )
        return (await self.workers.ClaimJob(request, timeout=wait + 10)).claim  # type: ignore[no-any-return]

    async def complete(self, claim: w.Claim) -> None:
        request = w.CompleteJobRequest(job_id=claim.job_id, fencing_token=claim.fencing_token)
        await self.workers.CompleteJob(request, timeout=5)

    async def take(self, session: str, name: str, wait: float = 0, **more: Any) -> list[pb.HeldLock]:
        request = pb.AcquireLockRequest(
            session_id=session,
            names=[name],
            wait=Duration(seconds=int(wait)),
            request_id=uuid.uuid4().hex,
            **more,
        )
        return list((await self.locks.AcquireLock(request, timeout=wait + 10)).locks)

    async def give(self, session: str, locks: list[pb.HeldLock]) -> None:
        await self.locks.ReleaseLock(pb.ReleaseLockRequest(session_id=session, locks=locks), timeout=5)

    async def owners(self, name: str) -> list[Any]:
        return list((await self.locks.GetLock(pb.GetLockRequest(name=name), timeout=5)).lock.owners)

    async def close(self, session: str) -> None:
        await self.workers.CloseSession(w.CloseSessionRequest(session_id=session), timeout=5)


@asynccontextmanager
async def running_side(settings: Settings) -> AsyncIterator[Side]:
    async with running_coordinator(settings) as address, grpc.aio.insecure_channel(address) as channel:
        yield Side(
            job_service_pb2_grpc.JobServiceStub(channel),
            lock_service_pb2_grpc.LockServiceStub(channel),
            worker_service_pb2_grpc.WorkerServiceStub(channel),
        )


@pytest.fixture
async def sides(settings: Settings) -> AsyncIterator[tuple[Side, Side]]:
    """Two coordinators on one etcd."""
    async with running_side(settings) as one, running_side(settings) as two:
        yield one, two


async def test_a_claim_takes_its_locks_under_its_token_and_its_end_gives_them_back(
    sides: tuple[Side, Side],
) -> None:
    one, two = sides
    session = await one.open()
    await one.submit("a", lock("item/42"), lock("pool", mode=SEMAPHORE, permits=2))
    [claim] = await one.claim(session, wait=5)
    assert list(claim.lock_names) == ["item/42", "pool"]
    for name in claim.lock_names:
        [owner] = await two.owners(name)
        assert (owner.job_id, owner.session_id) == ("a", session)
        assert owner.fencing_token == claim.fencing_token
        check = pb.CheckTokenRequest(name=name, fencing_token=claim.fencing_token)
        assert (await two.locks.CheckToken(check, timeout=5)).current
    await two.complete(claim)
    assert await one.owners("item/42") == await one.owners("pool") == []


async def test_the_end_of_a_session_frees_its_jobs_locks_at_once(sides: tuple[Side, Side]) -> None:
    one, two = sides
    dying, other = await one.open(ttl=2), await two.open()
    await one.submit("a", lock("l"))
    await one.claim(dying, wait=5)
    # No beats: the lease ends, and claim and entry with it.
    [held] = await two.take(other, "l", wait=20)
    assert held.fencing_token


async def test_a_job_waits_for_a_lock_that_a_session_holds_and_runs_as_soon_as_it_is_free(
    sides: tuple[Side, Side],
) -> None:
    one, two = sides
    owner, worker = await two.open(), await one.open()
    held = await two.take(owner, "l")
    await one.submit("a", lock("l"))
    await one.submit("b")
    assert [claim.job_id for claim in await one.claim(worker, wait=5)] == ["b"]
    waiting = asyncio.ensure_future(one.claim(worker, wait=20))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await two.give(owner, held)
    async with asyncio.timeout(1.0):
        [claim] = await waiting
    assert claim.job_id == "a"


async def test_a_session_waits_for_a_lock_that_a_job_holds(sides: tuple[Side, Side]) -> None:
    one, two = sides
    worker, other = await one.open(), await two.open()
    await one.submit("a", lock("l"))
    [claim] = await one.claim(worker, wait=5)
    refused = await refusal(two.take(other, "l"))
    assert (refused.reason, refused.metadata["holder"]) == ("LOCK_HELD", worker)
    waiting = asyncio.ensure_future(two.take(other, "l", wait=20))
    await eventually(lambda: _waiters(one, "l", 1))
    await one.complete(claim)
    [held] = await waiting
    assert held.fencing_token > claim.fencing_token


async def _waiters(side: Side, name: str, count: int) -> bool:
    return len((await side.locks.GetLock(pb.GetLockRequest(name=name), timeout=5)).lock.waiters) == count


async def test_a_job_is_not_admitted_past_those_who_wait_for_its_lock(sides: tuple[Side, Side]) -> None:
    one, two = sides
    reader, writer, worker = await one.open(), await two.open(), await one.open()
    held = await one.take(reader, "l", mode=SHARED)
    waiting = asyncio.ensure_future(two.take(writer, "l", wait=20))
    await eventually(lambda: _waiters(one, "l", 1))
    await one.submit("a", lock("l", mode=SHARED))
    assert await one.claim(worker, wait=0.5) == []
    await one.give(reader, held)
    await two.give(writer, await waiting)
    assert [claim.job_id for claim in await one.claim(worker, wait=5)] == ["a"]


async def test_jobs_of_one_lock_run_one_after_the_other_whichever_coordinator_serves_them(
    sides: tuple[Side, Side],
) -> None:
    one, two = sides
    spec = [types_pb2.JobSpec(job_id=f"j{n}", queue="q", type="t", locks=[lock("l")]) for n in range(30)]
    await one.submit_all(spec)
    running, most, done = set[str](), 0, list[int]()

    async def work(side: Side) -> None:
        nonlocal most
        session = await side.open()
        while len(done) < len(spec):
            for claim in await side.claim(session, wait=1, max_jobs=5):
                running.add(claim.job_id)
                most = max(most, len(running))
                await asyncio.sleep(0.002)
                running.discard(claim.job_id)
                await side.complete(claim)
                done.append(claim.fencing_token)

    async with asyncio.timeout(30):
        await asyncio.gather(*(work(side) for side in (one, two, one, two)))
    assert most == 1
    assert len(done) == len(spec)
    assert done == sorted(done)


async def test_a_semaphore_s_permits_are_never_exceeded_by_jobs_and_are_all_used(
    sides: tuple[Side, Side],
) -> None:
    one, two = sides
    pool = lock("pool", mode=SEMAPHORE, permits=3)
    await one.submit_all(
        [types_pb2.JobSpec(job_id=f"j{n}", queue="q", type="t", locks=[pool]) for n in range(30)]
    )
    running, most, done = set[str](), 0, set[str]()

    async def work(side: Side) -> None:
        nonlocal most
        session = await side.open()
        while len(done) < 30:
            for claim in await side.claim(session, wait=1, max_jobs=1):
                running.add(claim.job_id)
                most = max(most, len(running))
                await asyncio.sleep(0.05)
                running.discard(claim.job_id)
                await side.complete(claim)
                done.add(claim.job_id)

    async with asyncio.timeout(30):
        await asyncio.gather(*(work(side) for side in (one, two, one, two, one, two)))
    assert most == 3


async def test_a_job_wanted_by_its_id_says_which_lock_is_held_or_waits_for_it(
    sides: tuple[Side, Side],
) -> None:
    one, two = sides
    owner, worker = await two.open(), await one.open()
    held = await two.take(owner, "l")
    await one.submit("a", lock("free"), lock("l"))
    refused = await refusal(one.claim_one(worker, "a"))
    assert (refused.code, refused.reason) == (grpc.StatusCode.ABORTED, "LOCK_HELD")
    facts = {"name": "l", "holder": owner, "token": str(held[0].fencing_token)}
    assert refused.metadata == facts
    assert refused.retry_ms
    waiting = asyncio.ensure_future(one.claim_one(worker, "a", wait=20))
    await asyncio.sleep(0.2)
    await two.give(owner, held)
    async with asyncio.timeout(1.0):
        assert (await waiting).job_id == "a"


async def test_a_job_of_other_permits_waits_and_says_so_to_who_wants_it(sides: tuple[Side, Side]) -> None:
    one, two = sides
    owner, worker = await two.open(), await one.open()
    held = await two.take(owner, "pool", mode=SEMAPHORE, permits=2)
    await one.submit("a", lock("pool", mode=SEMAPHORE, permits=3))
    await one.submit("b", lock("pool", mode=SEMAPHORE, permits=2))
    [other] = await one.claim(worker, wait=5)
    assert other.job_id == "b"
    refused = await refusal(one.claim_one(worker, "a"))
    assert refused.reason == "PERMITS_MISMATCH"
    assert refused.metadata == {"name": "pool", "asked": "3", "current": "2"}
    await one.complete(other)
    await two.give(owner, held)
    assert [claim.job_id for claim in await one.claim(worker, wait=5)] == ["a"]


@pytest.mark.parametrize("count", [1_500])
async def test_jobs_that_wait_for_a_lock_hold_up_nobody_behind_them(
    sides: tuple[Side, Side], count: int
) -> None:
    one, two = sides
    owner, worker = await two.open(), await one.open()
    held = await two.take(owner, "l")
    await one.submit_all(
        [types_pb2.JobSpec(job_id=f"j{n}", queue="q", type="t", locks=[lock("l")]) for n in range(count)]
    )
    await one.submit("free", priority=5)
    async with asyncio.timeout(5):
        [claim] = await one.claim(worker, wait=5)
    assert claim.job_id == "free"
    await one.submit("other", lock("m"), priority=5)
    assert [claim.job_id for claim in await one.claim(worker, wait=5)] == ["other"]
    await two.give(owner, held)
    async with asyncio.timeout(2):
        [claim] = await one.claim(worker, wait=5)
    assert claim.job_id == "j0"


async def test_what_a_claim_holds_is_given_back_by_its_end_alone(sides: tuple[Side, Side]) -> None:
    one, two = sides
    session = await one.open()
    await one.submit("a", lock("l"))
    [claim] = await one.claim(session, wait=5)
    held = [pb.HeldLock(name="l", fencing_token=claim.fencing_token)]
    assert (await refusal(one.give(session, held))).reason == "LOCK_LOST"
    assert [owner.job_id for owner in await two.owners("l")] == ["a"]


async def test_beats_that_list_a_claim_keep_its_locks(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    session = await one.open(ttl=2)
    await one.submit("a", lock("l"))
    [claim] = await one.claim(session, wait=5)
    for number in range(1, 16):
        request = w.HeartbeatRequest(
            session_id=session,
            number=number,
            sent_at=Duration(seconds=number),
            claims=[w.HeldClaim(job_id="a", fencing_token=claim.fencing_token, sequence=number)],
        )
        await one.workers.Heartbeat(request, timeout=5)
        await asyncio.sleep(0.3)
    assert [owner.fencing_token for owner in await one.owners("l")] == [claim.fencing_token]


async def test_a_revoked_lock_of_a_job_takes_its_claim_away_with_all_its_locks(
    sides: tuple[Side, Side],
) -> None:
    one, two = sides
    session = await one.open(ttl=2)
    await one.submit("a", lock("l"), lock("m"))
    [claim] = await one.claim(session, wait=5)
    request = pb.RevokeLockRequest(name="l", fencing_token=claim.fencing_token, reason="maintenance")
    await two.locks.RevokeLock(request, timeout=5)
    assert await one.owners("l") == await one.owners("m") == []
    assert (await refusal(one.complete(claim))).reason == "CLAIM_LOST"
    beat = w.HeartbeatRequest(
        session_id=session,
        number=1,
        sent_at=Duration(seconds=1),
        claims=[w.HeldClaim(job_id="a", fencing_token=claim.fencing_token, sequence=1)],
    )
    [verdict] = (await one.workers.Heartbeat(beat, timeout=5)).verdicts
    assert verdict.verdict == w.VERDICT_LOST
    # A TTL later, so that its holder has heard of it.
    other = await two.open()
    [again] = await two.claim(other, wait=10)
    assert (again.job_id, again.attempt) == ("a", 2)
    listed = (await one.jobs.ListAttempts(j.ListAttemptsRequest(job_id="a"), timeout=5)).attempts
    assert "its lock l was revoked: maintenance" in listed[0].failure.message


@pytest.mark.parametrize(
    ("locks", "field"),
    [
        ([lock("l"), lock("l")], "job.locks[1].name"),
        ([lock("")], "job.locks[0].name"),
        ([lock(f"l{n}") for n in range(9)], "job.locks"),
        ([lock("l", permits=2)], "job.locks[0].permits"),
        ([lock("l", mode=SEMAPHORE)], "job.locks[0].permits"),
        ([lock("l", mode=9)], "job.locks[0].mode"),
    ],
)
async def test_locks_that_cannot_be_are_refused_with_their_field(
    sides: tuple[Side, Side], locks: list[types_pb2.JobLock], field: str
) -> None:
    refused = await refusal(sides[0].submit("a", *locks))
    assert (refused.reason, refused.fields) == ("VALIDATION_FAILED", [field])
