"""The fake's own controls: its clock, losses, cuts and pauses, seen by the SDK's worker and client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from leasekeeper.v1 import worker_service_pb2 as w
from leasekeeper.v1 import worker_service_pb2_grpc
from tests.support.polling import eventually
from tests.unit.rpc import builders as b
from worker_sdk import (
    ClaimLost,
    ConfigError,
    ConnectionConfig,
    Context,
    DeadlineExceeded,
    JobCancelled,
    JobClient,
    JobNotFound,
    JobSpec,
    JobState,
    RetryPolicy,
    Timeouts,
    Unavailable,
    Worker,
    WorkerConfig,
)
from worker_sdk.testing import FakeCoordinator, running

S = JobState
JOB = JobSpec(job_id="a", queue="q", type="t")


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
async def client(fake: FakeCoordinator) -> AsyncIterator[JobClient]:
    async with JobClient(fake.endpoint) as made:
        yield made


def worker_of(fake: FakeCoordinator, **config: float) -> Worker:
    settings = WorkerConfig(handle_signals=False, **config)  # type: ignore[arg-type]
    return Worker(fake.endpoint, queues=["q"], config=settings)


@asynccontextmanager
async def at_work(worker: Worker) -> AsyncIterator[None]:
    run = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop(now=True)
        await run


async def state_of(fake: FakeCoordinator, state: JobState) -> None:
    await eventually(lambda: fake.states.get("a") is state, what=f"a {state.name}, is {fake.states}")


async def test_time_moves_by_advance_alone(fake: FakeCoordinator, client: JobClient) -> None:
    before = fake.now
    worker, attempts = worker_of(fake), []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            raise RuntimeError("not yet")

    async with at_work(worker):
        await client.submit(JOB)
        await state_of(fake, S.SCHEDULED)
        assert fake.now == before
        fake.advance(0.99)
        assert fake.states == {"a": S.SCHEDULED}
        fake.advance(timedelta(milliseconds=10))
        await eventually(lambda: attempts == [1, 2])
        await state_of(fake, S.SCHEDULED)
        fake.advance(2)
        job = await client.wait("a", timeout=5)

    assert (job.state, job.failures, attempts) == (S.SUCCEEDED, 2, [1, 2, 3])
    assert fake.now - before == timedelta(seconds=3)


async def test_every_moment_on_the_way_is_its_own(fake: FakeCoordinator, client: JobClient) -> None:
    start = fake.now
    later = JobSpec(job_id="a", queue="q", type="t", run_at=start + timedelta(hours=1), queue_timeout=300)
    await client.submit(later)
    fake.advance(2 * 3600)
    job = fake.job("a")

    assert (job.state, job.end_reason) == (S.DEAD, "queue timeout")
    assert job.settle_time == start + timedelta(hours=1, minutes=5)


async def test_the_clock_begins_where_it_is_told() -> None:
    start = datetime(2031, 5, 1, tzinfo=UTC)
    fake = FakeCoordinator(start=start)
    assert fake.now == start
    with pytest.raises(ValueError, match="does not go back"):
        fake.advance(-1)


async def test_a_worker_that_is_reached_keeps_its_session_however_far_time_goes(
    fake: FakeCoordinator, client: JobClient
) -> None:
    worker, go = worker_of(fake, session_ttl=2), asyncio.Event()

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        await go.wait()

    async with at_work(worker):
        await client.submit(JOB)
        await state_of(fake, S.RUNNING)
        fake.advance(3600)
        go.set()
        job = await client.wait("a", timeout=5)

    assert (job.state, job.attempt) == (S.SUCCEEDED, 1)


async def test_expire_lets_the_holder_hear_of_its_loss_and_the_job_run_again(
    fake: FakeCoordinator, client: JobClient
) -> None:
    worker, ends = worker_of(fake, session_ttl=2), []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        if ctx.attempt == 1:
            try:
                await asyncio.Event().wait()
            finally:
                with pytest.raises(ClaimLost):
                    ctx.check()
                ends.append(ctx.stop_reason)

    async with at_work(worker):
        await client.submit(JOB)
        await state_of(fake, S.RUNNING)
        await eventually(lambda: worker.health().running == 1)
        fake.expire("a")
        job = await client.wait("a", timeout=5)
        await eventually(lambda: ends == ["lost"])

    assert (job.state, job.attempt, job.lease_losses) == (S.SUCCEEDED, 2, 1)
    with pytest.raises(ValueError, match="nobody holds it"):
        fake.expire("a")


async def test_a_job_that_is_lost_too_often_is_quarantined(fake: FakeCoordinator, client: JobClient) -> None:
    worker = worker_of(fake)

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        await asyncio.Event().wait()

    async with at_work(worker):
        policy = RetryPolicy(max_lease_losses=1)
        await client.submit(JobSpec(job_id="a", queue="q", type="t", retry=policy))
        for _ in range(2):
            await state_of(fake, S.RUNNING)
            fake.expire("a")

    assert fake.states == {"a": S.QUARANTINED}


async def test_cancel_reaches_the_handler(fake: FakeCoordinator, client: JobClient) -> None:
    worker = worker_of(fake, session_ttl=2)
    began, told = threading.Event(), []

    @worker.handler("t")
    def handle(ctx: object) -> None:
        began.set()
        try:
            for _ in range(500):
                ctx.sleep(0.02)  # type: ignore[attr-defined]
        except JobCancelled:
            told.append(True)
            raise

    async with at_work(worker):
        await client.submit(JOB)
        await eventually(began.is_set)
        fake.cancel(JOB, "enough")
        job = await client.wait("a", timeout=5)

    assert (job.state, job.end_reason, told) == (S.CANCELLED, "enough", [True])


async def test_a_cut_changes_nothing_and_ends_sessions_once_their_time_is_up(
    fake: FakeCoordinator, client: JobClient
) -> None:
    timeouts = Timeouts(call=0.3, attempt=0.2)
    worker, attempts = worker_of(fake, session_ttl=2), []

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            await asyncio.Event().wait()

    async with (
        at_work(worker),
        JobClient(ConnectionConfig(endpoints=fake.endpoint, timeouts=timeouts)) as hasty,
    ):
        await client.submit(JOB)
        await eventually(lambda: attempts == [1])
        fake.partition()
        with pytest.raises(Unavailable):
            await hasty.get("a")
        fake.advance(1.9)
        assert fake.states == {"a": S.RUNNING}
        fake.advance(0.1)
        assert fake.states == {"a": S.PENDING}
        fake.heal()
        job = await client.wait("a", timeout=10)

    assert (job.state, attempts, job.lease_losses) == (S.SUCCEEDED, [1, 2], 1)


async def test_a_paused_queue_hands_out_nothing(fake: FakeCoordinator, client: JobClient) -> None:
    worker = worker_of(fake)

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        pass

    fake.pause("q")
    async with at_work(worker):
        await client.submit(JOB)
        await worker.ready()
        await asyncio.sleep(0.1)
        assert fake.states == {"a": S.PENDING}
        fake.resume("q")
        assert (await client.wait("a", timeout=5)).state is S.SUCCEEDED


async def test_jobs_are_told_whole_and_in_the_order_of_their_submission(
    fake: FakeCoordinator, client: JobClient
) -> None:
    for job_id in "cab":
        await client.submit(JobSpec(job_id=job_id, queue="q", type="t", payload=job_id.encode()))

    assert [(job.job_id, job.spec.payload) for job in fake.jobs()] == [(c, c.encode()) for c in "cab"]
    assert fake.jobs(namespace="other") == []
    with pytest.raises(JobNotFound):
        fake.job("nobody")


async def test_in_real_time_delays_and_silence_end_by_themselves() -> None:
    with FakeCoordinator(real_time=True) as fake:
        async with JobClient(fake.endpoint) as client:
            soon = datetime.now(UTC) + timedelta(seconds=0.3)
            await client.submit(JobSpec(job_id="a", queue="q", type="t", run_at=soon))
            assert fake.states == {"a": S.SCHEDULED}
            await state_of(fake, S.PENDING)
        async with grpc.aio.insecure_channel(fake.endpoint) as channel:
            silent: Any = worker_service_pb2_grpc.WorkerServiceStub(channel)
            opened = await silent.OpenSession(b.open_session(ttl=Duration(seconds=2)), timeout=5)
            wanted = [w.QueueTypes(queue="q", types=["t"])]
            await silent.ClaimJobs(b.claim_jobs(session_id=opened.session_id, queues=wanted), timeout=5)
        assert fake.states == {"a": S.RUNNING}
        await state_of(fake, S.PENDING)
        assert fake.job("a").lease_losses == 1
        with pytest.raises(ConfigError, match="wait instead"):
            fake.advance(1)


def test_without_any_event_loop_a_worker_runs_beside_the_test(fake: FakeCoordinator) -> None:
    worker = worker_of(fake)

    @worker.handler("t")
    def handle(ctx: object) -> str:
        return "done"

    async def submit() -> None:
        async with JobClient(fake.endpoint) as client:
            await client.submit(JOB)

    with running(worker):
        asyncio.run(submit())
        job = fake.wait("a")

    assert (job.state, job.result) == (S.SUCCEEDED, b"done")
    with pytest.raises(DeadlineExceeded, match="'b' does not exist"):
        fake.wait("b", timeout=0.01)
    with pytest.raises(DeadlineExceeded, match="'a' is SUCCEEDED"):
        fake.wait("a", S.DEAD, timeout=0.01)


def test_a_worker_that_cannot_start_says_why(fake: FakeCoordinator) -> None:
    with pytest.raises(ConfigError, match="no handler"), running(worker_of(fake)):
        pass


def test_a_fake_that_is_not_started_has_no_address() -> None:
    with pytest.raises(ConfigError, match="not started"):
        _ = FakeCoordinator().endpoint
