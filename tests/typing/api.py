"""The public API as its users write it. Type-checked only, by `mypy --strict`; never run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_type

from worker_sdk import (
    Attempts,
    ClaimLost,
    ConnectionConfig,
    Context,
    DuplicateJob,
    Job,
    JobChange,
    JobClient,
    JobSpec,
    JobState,
    Lock,
    LockClient,
    LockMode,
    NoRetry,
    OutcomeUnknown,
    ProcessContext,
    Redriven,
    Result,
    Retry,
    RetryPolicy,
    Submitted,
    SyncContext,
    SyncJobClient,
    SyncJobWatch,
    SyncLockClient,
    TlsConfig,
    ValidationFailed,
    Worker,
    WorkerConfig,
)

worker = Worker("localhost:7420,localhost:7421", queues={"email": 8}, namespace="n")
shared = Worker(
    ConnectionConfig(endpoints="localhost:7420", tls=TlsConfig()), queues=["a", "b"], concurrency=4
)
tuned = Worker("localhost:7420", queues=["a"], config=WorkerConfig(session_ttl=5.0, labels={"zone": "a"}))


@worker.handler("email.send")
async def send(ctx: Context) -> bytes:
    assert_type(ctx.fencing_token, int)
    assert_type(ctx.payload, bytes)
    assert_type(ctx.remaining(), float | None)
    assert_type(ctx.lost.is_set(), bool)
    ctx.progress(0.5, "half")
    await ctx.save_checkpoint(b"half")
    ctx.submit(JobSpec(queue="email", type="email.receipt"))
    ctx.check()
    if ctx.attempt > 3:
        raise NoRetry("no such address")
    raise Retry("greylisted", delay=60)


@dataclass
class Mail:
    to: str


@worker.handler("email.typed")
async def typed(ctx: Context, mail: Mail) -> Mail:
    return mail


@worker.handler("email.threaded", pool="thread")
def threaded(ctx: SyncContext, mail: dict[str, int]) -> list[int]:
    return list(mail.values())


@worker.handler("email.crunch", pool="process")
def crunch(ctx: ProcessContext, mail: Mail) -> None:
    ctx.progress(0.5)
    ctx.save_checkpoint(mail.to.encode())
    ctx.submit(JobSpec(queue="email", type="email.receipt"))


@worker.handler("email.render", queues=["email"])
def render(ctx: SyncContext) -> Result:
    ctx.save_checkpoint(b"x")
    ctx.sleep(0.1)
    if ctx.cancelled.wait_blocking(0.1):
        ctx.check()
    return Result(b"<html/>", "text/html")


async def hold() -> None:
    async with LockClient("localhost:7420", namespace="n", ttl=5) as locks:
        async with locks.lock("a", "b", mode=LockMode.SEMAPHORE, permits=3, wait=None) as lock:
            assert_type(lock, Lock)
            assert_type(lock.token, int)
            assert_type(lock.tokens["a"], int)
            lock.check()
        async with locks.lead("leader", b"me") as lead:
            assert_type(lead, Lock)
            await lead.lost.wait()
        async for owners in locks.observe("leader", timeout=60):
            assert_type([owner.value for owner in owners], list[bytes])
        assert_type(await locks.check_token("a", 1), bool)


def hold_without_a_loop() -> None:
    with SyncLockClient("localhost:7420") as locks, locks.lock("a", wait=0) as lock:
        assert_type(lock, Lock)


async def produce() -> None:
    async with JobClient("localhost:7420") as client:
        spec = JobSpec(
            queue="email",
            type="email.send",
            payload=b"{}",
            content_type="application/json",
            run_at=datetime.now(UTC),
            run_timeout=30,
            retry=RetryPolicy(max_retries=3, initial_delay=1.5),
            unique_key="welcome:1",
        )
        try:
            submitted = await client.submit(spec, request_id="r", timeout=5)
        except DuplicateJob as error:
            assert_type(error.job_id, str)
            return
        except ValidationFailed as error:
            assert_type([violation.field for violation in error.fields], list[str])
            return
        except OutcomeUnknown as error:
            assert_type(error.request_id, str)
            return
        assert_type(submitted, Submitted)
        assert_type(await client.submit_many([spec]), Sequence[Submitted])
        assert_type(await client.get(submitted.job_id), Job)
        assert_type(await client.wait(submitted.job_id, timeout=60), Job)
        assert_type(await client.cancel(submitted.job_id, reason="not needed"), Job)
        assert_type(await client.update(submitted.job_id, priority=1), Job)
        assert_type(await client.retry(submitted.job_id), Job)
        async for done in client.redrive(queue="email", failure_type="Timeout", jobs_per_second=50):
            assert_type(done, Redriven)
        assert_type(await client.attempts(submitted.job_id), Attempts)
        await client.delete(submitted.job_id)
        async for job in client.list(states=[JobState.PENDING], labels={"a": "b"}):
            assert_type(job, Job)
        async with client.watch(queue="email") as watch:
            assert_type(await watch.ready(), int)
            async for change in watch:
                assert_type(change, JobChange)


def produce_without_a_loop() -> None:
    with SyncJobClient("localhost:7420", namespace="n") as client:
        spec = JobSpec(queue="email", type="email.send")
        assert_type(client.submit(spec, request_id="r", timeout=5), Submitted)
        assert_type(client.submit_many([spec], concurrency=2), Sequence[Submitted])
        assert_type(client.get("a"), Job)
        assert_type(client.wait("a", timeout=60), Job)
        assert_type(client.cancel("a", reason="not needed"), Job)
        assert_type(client.update("a", priority=1), Job)
        assert_type(client.retry("a"), Job)
        assert_type(client.attempts("a"), Attempts)
        client.delete("a", etag="e")
        client.submit("a")  # type: ignore[arg-type]
        client.get("a", wait=1)  # type: ignore[call-arg]
        for done in client.redrive(queue="email", jobs_per_second=50):
            assert_type(done, Redriven)
        for job in client.list(states=[JobState.PENDING]):
            assert_type(job, Job)
        with client.watch(queue="email") as watch:
            assert_type(watch, SyncJobWatch)
            assert_type(watch.ready(), int)
            for change in watch:
                assert_type(change, JobChange)


def lost(error: ClaimLost) -> tuple[int, int]:
    return error.held, error.current


async def embedded() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        await worker.ready()
        worker.stop()
