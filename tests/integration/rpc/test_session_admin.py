"""Sessions as operators see them: two coordinators on real etcd."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.app import running_coordinator
from coordinator.config import Settings
from leasekeeper.v1 import admin_service_pb2 as a
from leasekeeper.v1 import (
    admin_service_pb2_grpc,
    job_service_pb2_grpc,
    lock_service_pb2_grpc,
    worker_service_pb2_grpc,
)
from leasekeeper.v1 import lock_service_pb2 as k
from leasekeeper.v1 import worker_service_pb2 as w
from tests.integration.rpc.conftest import Api, OpenedWorker, open_worker
from tests.integration.rpc.patience import when_ready
from tests.support.polling import eventually
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal


class Side:
    """One coordinator and the stubs that a test needs."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.admin: Any = admin_service_pb2_grpc.AdminServiceStub(api.channel)
        self.locks: Any = lock_service_pb2_grpc.LockServiceStub(api.channel)

    async def get(self, session_id: str) -> a.GetSessionResponse:
        request = a.GetSessionRequest(session_id=session_id)
        found: a.GetSessionResponse = await self.admin.GetSession(request, timeout=5)
        return found

    async def drain(self, session_id: str, **more: Any) -> a.Session:
        request = a.DrainSessionRequest(session_id=session_id, **more)
        found: a.Session = (await self.admin.DrainSession(request, timeout=5)).session
        return found

    async def listed(self, **query: Any) -> a.ListSessionsResponse:
        request = a.ListSessionsRequest(**query)
        found: a.ListSessionsResponse = await when_ready(lambda: self.admin.ListSessions(request, timeout=5))
        return found


@contextlib.asynccontextmanager
async def one_side(settings: Settings) -> AsyncIterator[Side]:
    async with running_coordinator(settings) as address, grpc.aio.insecure_channel(address) as channel:
        yield Side(
            Api(
                address,
                channel,
                job_service_pb2_grpc.JobServiceStub(channel),
                worker_service_pb2_grpc.WorkerServiceStub(channel),
            )
        )


@pytest.fixture
async def sides(settings: Settings) -> AsyncIterator[tuple[Side, Side]]:
    async with one_side(settings) as one, one_side(settings) as other:
        yield one, other


def at(side: Side, worker: OpenedWorker) -> OpenedWorker:
    """The worker's session, served by another coordinator."""
    return OpenedWorker(side.api, worker.session_id)


async def test_a_session_is_shown_with_all_that_lies_on_its_lease(sides: tuple[Side, Side]) -> None:
    one, other = sides
    worker = await open_worker(one.api, labels={"zone": "a"})
    await one.api.jobs.SubmitJob(b.submit(job_id="a"), timeout=5)
    [claim] = await worker.claim(wait=5)
    locked = await one.locks.AcquireLock(
        k.AcquireLockRequest(
            session_id=worker.session_id, request_id="r", names=["press"], mode="LOCK_MODE_EXCLUSIVE"
        ),
        timeout=5,
    )
    await at(other, worker).beat(1, claim)

    details = await other.get(worker.session_id)
    assert dict(details.session.labels) == {"zone": "a"}
    assert (details.session.claim_count, details.session.lock_count) == (1, 1)
    assert details.session.HasField("last_beat_time")
    [held] = details.claims
    assert (held.job_id, held.fencing_token) == ("a", claim.fencing_token)
    assert (held.queue, held.type, held.attempt) == ("mail", "send", 1)
    [lock] = details.locks
    assert (lock.name, lock.fencing_token) == ("press", locked.locks[0].fencing_token)


async def test_sessions_are_listed_by_label_a_page_at_a_time(sides: tuple[Side, Side]) -> None:
    one, other = sides
    ids = {(await open_worker(one.api, labels={"zone": "a"})).session_id for _ in range(3)}
    await open_worker(one.api, labels={"zone": "b"})

    async def all_there() -> bool:
        return len((await other.listed()).sessions) == 4

    await eventually(all_there)
    first = await other.listed(labels={"zone": "a"}, page_size=2)
    second = await other.listed(labels={"zone": "a"}, page_size=2, page_token=first.next_page_token)
    assert {one.session_id for one in (*first.sessions, *second.sessions)} == ids
    assert (len(first.sessions), second.next_page_token) == (2, "")
    refused = await refusal(
        other.admin.ListSessions(a.ListSessionsRequest(page_token=first.next_page_token), timeout=5)
    )
    assert refused.reason == "VALIDATION_FAILED"


async def test_a_drain_is_told_by_the_next_beat_whichever_coordinator_serves_it(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    worker = await open_worker(one.api)
    await one.api.jobs.SubmitJob(b.submit(job_id="a"), timeout=5)
    [claim] = await worker.claim(wait=5)
    assert (await worker.beat(1, claim)).command == w.WORKER_COMMAND_UNSPECIFIED

    asked = await one.drain(worker.session_id)
    assert asked.command == w.WORKER_COMMAND_QUIET
    assert not asked.HasField("terminate_time")
    beat = await at(other, worker).beat(2, claim)
    assert beat.command == w.WORKER_COMMAND_QUIET
    assert [verdict.verdict for verdict in beat.verdicts] == [w.VERDICT_HELD]

    await other.drain(worker.session_id, terminate_after=Duration())
    assert (await worker.beat(3, claim)).command == w.WORKER_COMMAND_TERMINATE
    await one.drain(worker.session_id, resume=True)
    assert (await worker.beat(4, claim)).command == w.WORKER_COMMAND_UNSPECIFIED
    # The witness was written three times and compares as ever.
    await one.api.jobs.SubmitJob(b.submit(job_id="b"), timeout=5)
    assert [again.job_id for again in await at(other, worker).claim(wait=5)] == ["b"]


async def test_quiet_becomes_terminate_once_its_limit_has_passed(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    worker = await open_worker(one.api)
    later = await one.drain(worker.session_id, terminate_after=Duration(seconds=3_600))
    assert (await worker.beat(1)).command == w.WORKER_COMMAND_QUIET
    sooner = await one.drain(worker.session_id, terminate_after=Duration(nanos=1_000_000))
    assert sooner.terminate_time.ToMilliseconds() < later.terminate_time.ToMilliseconds()

    async def told() -> bool:
        return (await one.get(worker.session_id)).session.command == w.WORKER_COMMAND_TERMINATE

    await eventually(told)
    assert (await worker.beat(2)).command == w.WORKER_COMMAND_TERMINATE


async def test_a_session_that_has_ended_is_not_found_and_does_not_come_back(
    sides: tuple[Side, Side],
) -> None:
    one, _ = sides
    worker = await open_worker(one.api)
    await one.api.workers.CloseSession(w.CloseSessionRequest(session_id=worker.session_id), timeout=5)
    for call in (
        one.admin.DrainSession(a.DrainSessionRequest(session_id=worker.session_id), timeout=5),
        one.admin.GetSession(a.GetSessionRequest(session_id=worker.session_id), timeout=5),
    ):
        assert (await refusal(call)).reason == "SESSION_NOT_FOUND"


async def test_a_drain_that_contradicts_itself_is_refused(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    session_id = uuid.uuid4().hex[:16]
    request = a.DrainSessionRequest(session_id=session_id, resume=True, terminate_after=Duration(seconds=1))
    refused = await refusal(one.admin.DrainSession(request, timeout=5))
    assert (refused.reason, refused.fields) == ("VALIDATION_FAILED", ["resume"])
    request = a.DrainSessionRequest(session_id=session_id, terminate_after=Duration(seconds=86_401))
    refused = await refusal(one.admin.DrainSession(request, timeout=5))
    assert (refused.reason, refused.fields) == ("VALIDATION_FAILED", ["terminate_after"])
