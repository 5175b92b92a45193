"""Queues as callers meet them: two coordinators on real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.app import running_coordinator
from coordinator.config import Settings
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import job_service_pb2_grpc, queue_service_pb2_grpc, worker_service_pb2_grpc
from leasekeeper.v1 import queue_service_pb2 as q
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.integration.rpc.conftest import Api, OpenedWorker, open_worker
from tests.integration.rpc.patience import when_ready
from tests.support.polling import eventually
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal


@dataclasses.dataclass
class Side:
    api: Api
    queues: Any
    worker: OpenedWorker

    async def submit(self, job_id: str, **spec: Any) -> None:
        await self.api.jobs.SubmitJob(b.submit(job_id=job_id, **spec), timeout=5)

    async def job(self, job_id: str) -> t.Job:
        answer = await self.api.jobs.GetJob(j.GetJobRequest(job_id=job_id), timeout=5)
        found: t.Job = answer.job
        return found

    async def pause(self, reason: str = "") -> q.Queue:
        answer = await self.queues.PauseQueue(q.PauseQueueRequest(queue="mail", reason=reason), timeout=5)
        found: q.Queue = answer.queue
        return found

    async def resume(self) -> None:
        await self.queues.ResumeQueue(q.ResumeQueueRequest(queue="mail"), timeout=5)

    async def update(self, settings: q.QueueSettings, **more: Any) -> q.Queue:
        request = q.UpdateQueueRequest(queue="mail", settings=settings, **more)
        found: q.Queue = (await self.queues.UpdateQueue(request, timeout=5)).queue
        return found

    async def stats(self) -> q.GetQueueStatsResponse:
        request = q.GetQueueStatsRequest(queue="mail")
        found: q.GetQueueStatsResponse = await when_ready(
            lambda: self.queues.GetQueueStats(request, timeout=5)
        )
        return found

    async def is_paused(self) -> bool:
        return (await self.stats()).paused


@contextlib.asynccontextmanager
async def one_side(settings: Settings) -> AsyncIterator[Side]:
    async with running_coordinator(settings) as address, grpc.aio.insecure_channel(address) as channel:
        api = Api(
            address,
            channel,
            job_service_pb2_grpc.JobServiceStub(channel),
            worker_service_pb2_grpc.WorkerServiceStub(channel),
        )
        yield Side(api, queue_service_pb2_grpc.QueueServiceStub(channel), await open_worker(api))


@pytest.fixture
async def sides(settings: Settings) -> AsyncIterator[tuple[Side, Side]]:
    async with one_side(settings) as one, one_side(settings) as other:
        yield one, other


async def test_a_pause_reaches_all_coordinators_running_work_ends_and_submissions_go_on(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    await one.submit("a")
    [held] = await one.worker.claim(wait=5)
    paused = await one.pause("stocktaking")
    assert (paused.paused, paused.pause_reason) == (True, "stocktaking")
    await eventually(other.is_paused)

    await other.submit("b")
    await eventually(lambda: waits(one, 1))
    assert await one.worker.claim() == []
    assert await other.worker.claim() == []
    by_id = w.ClaimJobRequest(session_id=other.worker.session_id, job_id="b", request_id="r")
    refused = await refusal(other.api.workers.ClaimJob(by_id, timeout=5))
    assert refused.reason == "QUEUE_PAUSED"
    assert refused.metadata["reason"] == "stocktaking"
    await one.api.workers.CompleteJob(b.complete(job_id="a", fencing_token=held.fencing_token), timeout=5)

    poll = asyncio.ensure_future(other.worker.claim(wait=9))
    await one.resume()
    assert [claim.job_id for claim in await poll] == ["b"]


async def waits(side: Side, count: int) -> bool:
    return (await side.stats()).pending == count


async def test_jobs_take_what_they_leave_out_from_their_queue_on_every_coordinator(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    settings = q.QueueSettings(
        target_waits=[Duration(seconds=seconds) for seconds in (1, 2, 3, 4, 5)],
        retry_policy=t.RetryPolicy(max_retries=1),
        run_timeout=Duration(seconds=60),
        total_timeout=Duration(seconds=600),
    )
    first = await one.update(settings, etag="0", request_id="u1")
    assert first.settings.run_timeout.seconds == 60
    assert await one.update(settings, etag="0", request_id="u1") == first
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await other.update(q.QueueSettings(), etag="0")
    assert caught.value.code() is grpc.StatusCode.ABORTED
    await eventually(lambda: knows(other, first))

    await other.submit("left-out")
    await other.submit("own", run_timeout=Duration(seconds=7), retry_policy=t.RetryPolicy(max_retries=9))
    left_out, own = (await other.job("left-out")).spec, (await other.job("own")).spec
    assert (left_out.run_timeout.seconds, left_out.total_timeout.seconds) == (60, 600)
    assert left_out.retry_policy.max_retries == 1
    assert (own.run_timeout.seconds, own.total_timeout.seconds) == (7, 600)
    assert own.retry_policy.max_retries == 9


async def knows(side: Side, queue: q.Queue) -> bool:
    listed = await when_ready(lambda: side.queues.ListQueues(q.ListQueuesRequest(), timeout=5))
    return queue in listed.queues


async def test_a_queue_without_record_has_the_defaults_and_asking_makes_nothing(
    sides: tuple[Side, Side],
) -> None:
    one, _ = sides
    answer = await one.queues.GetQueue(q.GetQueueRequest(namespace="nowhere", queue="none"), timeout=5)
    assert answer.queue == q.Queue(queue="none", settings=q.QueueSettings(), etag="0")
    request = q.ListQueuesRequest(namespace="nowhere")
    listed = await when_ready(lambda: one.queues.ListQueues(request, timeout=5))
    assert list(listed.queues) == []


async def test_stats_tell_who_waits_by_priority_and_for_how_long(sides: tuple[Side, Side]) -> None:
    one, other = sides
    for number in range(3):
        await one.submit(f"j{number}", priority=1 + number // 2)
    await eventually(lambda: waits(other, 3))
    stats = await other.stats()
    assert [(each.priority, each.pending) for each in stats.priorities] == [(1, 2), (2, 1)]
    assert stats.all_at_hand
    assert stats.HasField("oldest_age")
    assert stats.add_rate > 0


async def test_new_jobs_do_not_overtake_a_backlog_of_their_priority(sides: tuple[Side, Side]) -> None:
    """Case 082, by polls on two coordinators while jobs are added at half the pace."""
    one, other = sides
    backlog = [f"old{number:03}" for number in range(300)]
    added: list[str] = []
    for start in range(0, len(backlog), 100):
        specs = [b.job_spec(job_id=name) for name in backlog[start : start + 100]]
        await one.api.jobs.SubmitJobs(j.SubmitJobsRequest(request_id=f"r{start}", jobs=specs), timeout=5)
    await eventually(lambda: waits(other, len(backlog)))

    claimed: list[str] = []
    for _ in range(100):
        if len(claimed) >= len(backlog):
            break
        for side in (one, other):
            got = await side.worker.claim(max_jobs=2, wait=1)
            claimed += [claim.job_id for claim in got]
            for claim in got:
                await side.api.workers.CompleteJob(
                    b.complete(job_id=claim.job_id, fencing_token=claim.fencing_token), timeout=5
                )
            name = f"new{len(added):03}"
            added.append(name)
            await side.submit(name)
    places = {name: place for place, name in enumerate([*backlog, *added])}
    # A job that is claimed overtakes those before it that are claimed later, or not yet.
    left = set(places) - set(claimed)
    for at, name in enumerate(claimed):
        later = [*claimed[at + 1 :], *left]
        overtaken = sum(places[behind] < places[name] for behind in later)
        assert overtaken <= 50, f"{name} overtook {overtaken}"
