"""What a crash, a failure and a timeout cost, whom, and what becomes of the job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.core.job import AttemptOutcome, JobState
from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as workers
from tests.fault.support.calls import Calls, refusal
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually

TTL = 2.0


@asynccontextmanager
async def kept_running(*supervised: WorkerProcess) -> AsyncIterator[None]:
    """Start these workers, and start each again as soon as it has died."""

    async def supervise(worker: WorkerProcess) -> None:
        try:
            while True:
                worker.child.spawn()
                await eventually(lambda: not worker.running, timeout=600, interval=0.05)
                await worker.kill()  # lets go of what belonged to the dead one
        finally:
            await worker.kill()

    watching = [asyncio.create_task(supervise(worker)) for worker in supervised]
    try:
        yield
    finally:
        for task in watching:
            task.cancel()
        ended = await asyncio.gather(*watching, return_exceptions=True)
    assert [one for one in ended if not isinstance(one, asyncio.CancelledError)] == []


@pytest.mark.slow
async def test_a_job_that_kills_its_workers_is_set_aside_and_the_others_finish(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 046: three workers that are started again whenever they die; default policy.

    What was lost beside the pill is not claimed beside it each time, so it outlives the pill.
    """
    others = [f"j{number:02}" for number in range(50)]
    crew = [
        WorkerProcess(
            shared.endpoint, calls.namespace, tmp_path, name=f"w{n}", sink=court.sink.path,
            queues={"work": 4}, ttl=TTL,
        )
        for n in range(3)
    ]  # fmt: skip
    await calls.submit_many([calls.spec(job_id, {"work": 0.05}) for job_id in others[:25]])
    await calls.submit("pill", {"wrong": "die"})
    await calls.submit_many([calls.spec(job_id, {"work": 0.05}) for job_id in others[25:]])
    async with kept_running(*crew):
        jobs = await court.ended([*others, "pill"], timeout=60)

    assert {jobs[job_id].state for job_id in others} == {JobState.SUCCEEDED}
    assert {jobs[job_id].failures for job_id in others} == {0}
    pill = jobs["pill"]
    assert (pill.state, pill.failures, pill.attempt) == (JobState.QUARANTINED, 0, 4)
    assert {one.outcome for one in pill.attempts} == {AttemptOutcome.LOST}
    judgement = await court.judge(submitted=[*others, "pill"])
    assert judgement.states == {"SUCCEEDED": 50, "QUARANTINED": 1}


@pytest.mark.slow
async def test_a_crash_costs_no_bystander_a_retry(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 047: a pill and four long jobs in one process; one of the four may never be retried."""
    others = [f"j{number}" for number in range(4)]
    worker = WorkerProcess(
        shared.endpoint, calls.namespace, tmp_path, name="w1", sink=court.sink.path,
        queues={"work": 4, "pills": 1}, ttl=TTL,
    )  # fmt: skip
    specs = [calls.spec(job_id, {"work": 2.0}) for job_id in others]
    specs[0].retry_policy.CopyFrom(types.RetryPolicy(max_retries=0))
    async with kept_running(worker):
        await calls.submit_many(specs)
        await eventually(lambda: len(court.read().starts) == 4, timeout=20, what="the four run")
        once = types.RetryPolicy(max_lease_losses=0)
        await calls.submit("pill", {"wrong": "die"}, queue="pills", retry_policy=once)
        jobs = await court.ended([*others, "pill"], timeout=60)

    assert jobs["pill"].state is JobState.QUARANTINED
    for job_id in others:
        job = jobs[job_id]
        assert (job.state, job.failures, job.lease_losses) == (JobState.SUCCEEDED, 0, 1), job
    await court.judge(submitted=[*others, "pill"])


ESCAPES = ("SystemExit", "KeyboardInterrupt", "CancelledError", "GeneratorExit", "TwoArguments")


@pytest.mark.parametrize("kind", ["effect", "effect-sync"])
async def test_no_exception_of_a_handler_ends_its_worker_or_keeps_its_slot(
    kind: str, shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 049: each kind of exception in a worker with one slot; the job after it runs."""
    once = types.RetryPolicy(max_retries=0)
    told = {"sink": court.sink.path, "queues": {"work": 1}, "ttl": TTL}
    async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w1", **told) as worker:
        for wrong in ESCAPES:
            await calls.submit(wrong, {"wrong": wrong}, type=kind, retry_policy=once)
        await calls.submit("after", type=kind)
        jobs = await court.ended([*ESCAPES, "after"], timeout=10)
        assert worker.running

    assert jobs["after"].state is JobState.SUCCEEDED
    for wrong in ESCAPES:
        [attempt] = jobs[wrong].attempts
        assert (jobs[wrong].state, attempt.outcome) == (JobState.DEAD, AttemptOutcome.FAILED)
        assert attempt.failure_type == wrong
    await court.judge(submitted=[*ESCAPES, "after"])


@pytest.mark.slow
async def test_a_fleet_that_stood_still_takes_its_work_up_again_without_running_it_over_and_over(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 051: all workers are frozen for two TTLs amid a load that fills most of their slots.

    Each job that a frozen worker held is lost once, and hardly any job that comes later runs twice.
    """
    ttl = 4.0  # leaves 3 s to believe in, and so room for a slow machine
    before = [f"a{number:03}" for number in range(150)]
    later = [f"b{number:03}" for number in range(150)]
    async with AsyncExitStack() as stack:
        fleet = [
            await stack.enter_async_context(
                WorkerProcess(
                    shared.endpoint, calls.namespace, tmp_path, name=f"w{n}", sink=court.sink.path,
                    queues={"work": 4}, ttl=ttl,
                )
            )
            for n in range(5)
        ]  # fmt: skip
        await calls.submit_many([calls.spec(job_id, {"work": 0.4}) for job_id in before])
        await eventually(lambda: len(court.read().starts) > 40, timeout=20, what="the load runs")
        for worker in fleet:
            worker.pause()
        stopped = time.monotonic()
        await eventually(lambda: time.monotonic() - stopped > 2 * ttl, timeout=20, what="two TTLs")
        for worker in fleet:
            worker.resume()
        await calls.submit_many([calls.spec(job_id, {"work": 0.4}) for job_id in later])
        jobs = await court.ended([*before, *later], timeout=60)

    assert {job.state for job in jobs.values()} == {JobState.SUCCEEDED}
    assert max(job.lease_losses for job in jobs.values()) == 1
    twice = [job_id for job_id in later if len(court.read().starts_of(job_id)) > 1]
    assert len(twice) <= 0.05 * len(later), [jobs[job_id] for job_id in twice[:2]]
    await court.judge(submitted=[*before, *later])


@pytest.mark.slow
async def test_timeout_cancel_and_shutdown_are_told_apart_for_ever(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 053: the first is a charged failure, the second ends the job, the third is a free return."""
    told = {"sink": court.sink.path, "queues": {"work": 3}, "ttl": TTL, "drain": 0.2, "gates": tmp_path}
    waits = {"gate": "never"}
    policy = types.RetryPolicy(max_retries=1, initial_delay=Duration(seconds=3600))
    ids = ["timeout", "cancel", "shutdown"]
    async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w1", **told) as worker:
        limit = Duration(seconds=1)
        await calls.submit("timeout", waits, retry_policy=policy, run_timeout=limit)
        await calls.submit("cancel", waits, retry_policy=policy)
        await calls.submit("shutdown", waits, retry_policy=policy)
        await eventually(lambda: len(court.read().starts) == 3, timeout=10, what="all run")
        await calls.cancel("cancel")
        async with court.etcd() as etcd:

            async def two_ended() -> bool:
                found = await court.jobs(etcd)
                return [found[job_id].state is JobState.RUNNING for job_id in ids] == [False, False, True]

            await eventually(two_ended, timeout=10, what="timeout and cancel have ended")
        assert await worker.terminate(timeout=15) == 0

    jobs = (await court.judge(submitted=ids)).jobs
    [timeout], [cancel], [shutdown] = (jobs[job_id].attempts for job_id in ids)
    assert (timeout.outcome, timeout.failure_type) == (AttemptOutcome.FAILED, "RunTimeout")
    assert (jobs["timeout"].state, jobs["timeout"].failures) == (JobState.SCHEDULED, 1)
    assert (cancel.outcome, cancel.failure_message) == (AttemptOutcome.RELEASED, "cancelled")
    assert (jobs["cancel"].state, jobs["cancel"].end_reason) == (JobState.CANCELLED, "test")
    assert (shutdown.outcome, shutdown.failure_message) == (AttemptOutcome.RELEASED, "worker_shutdown")
    assert (jobs["shutdown"].state, jobs["shutdown"].failures) == (JobState.PENDING, 0)
    assert [note.text for note in court.read().notes if note.job == "cancel"] == ["stopped: cancelled"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "snoozes", [20, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
async def test_no_bookkeeping_of_a_job_ends_before_the_job(
    snoozes: int, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 054: put off again and again, with a clock that goes on by 30 hours each time.

    Nothing that stands for a waiting job has a lease, and no attempt is forgotten in the count.
    """
    clock = tmp_path / "clock"
    clock.write_text("0")
    async with (
        Coordinator(
            own_etcd.endpoints,
            tmp_path,
            plan={"clock": clock},
            # A type that does nothing but fail is held back, and here all of it is to run.
            settings={"CIRCUITS__ENABLED": "false"},
        ) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        patient = types.RetryPolicy(max_retries=1000)
        await calls.submit("j1", unique_key="k", retry_policy=patient)
        session = await calls.open(ttl=3600)
        for done in range(1, snoozes + 1):
            [claim] = await calls.claim(session, wait=15)
            assert claim.attempt == done
            assert await calls.fail(claim, delay=24 * 3600) == "SCHEDULED"
            leases = await leases_by_key(own_court)
            assert set(leases.values()) == {0}, leases
            clock.write_text(str(done * 30 * 3_600_000))
        [claim] = await calls.claim(session, wait=15)
        assert await calls.complete(claim) == "SUCCEEDED"
    job = (await own_court.judge(submitted=["j1"])).jobs["j1"]
    assert (job.failures, job.attempt) == (snoozes, snoozes + 1)


async def leases_by_key(court: Court) -> dict[bytes, int]:
    """The lease of each key that stands for a job in etcd, claims excepted."""
    keys = court.keys
    async with court.etcd() as etcd:
        root = keys.all_states().start.partition(b"state/")[0]
        found = await etcd.range(root, root[:-1] + b"0", timeout=5)
    job_kinds = {b"job", b"state", b"ready", b"due", b"unique", b"checkpoint", b"result"}
    read = {entry.key: entry.lease for entry in found.kvs}
    return {key: lease for key, lease in read.items() if key[len(root) :].split(b"/")[0] in job_kinds}


async def test_a_job_of_a_type_that_nobody_serves_any_more_waits_unharmed(calls: Calls, court: Court) -> None:
    """Fault case 055: the only worker of type b dies; those of type a are never given its job, nor end it."""
    ids = [f"b{number}" for number in range(5)]
    await calls.submit_many([calls.spec(job_id, type="b") for job_id in ids])
    dies, other = await calls.open(ttl=TTL), await calls.open(ttl=60)
    assert len(await calls.claim(dies, most=5, kinds=("b",), wait=2)) == 5

    async def all_wait() -> bool:
        assert await calls.claim(other, most=5, kinds=("a",), wait=0.2) == []
        async with court.etcd() as etcd:
            return {job.state for job in (await court.jobs(etcd)).values()} == {JobState.PENDING}

    await eventually(all_wait, timeout=10, what="the jobs of the dead worker wait")
    await calls.submit("a", type="a")
    assert [claim.job_id for claim in await calls.claim(other, most=5, kinds=("a",), wait=2)] == ["a"]

    back = await calls.open(ttl=60)
    claims = await calls.claim(back, most=5, kinds=("b",), wait=5)
    assert sorted(claim.job_id for claim in claims) == ids
    for claim in claims:
        assert await calls.complete(claim) == "SUCCEEDED"
    jobs = (await court.judge(submitted=[*ids, "a"], quiet=False)).jobs
    assert {(jobs[one].failures, jobs[one].lease_losses, jobs[one].attempt) for one in ids} == {(0, 1, 2)}


SPANS = {
    "zero": (Duration(), "PENDING"),
    "a-tenth-of-a-ms": (Duration(nanos=100_000), "SCHEDULED"),
    "a-second-less-than-none": (Duration(seconds=-1), ""),
    "ten-to-the-twelve": (Duration(seconds=10**12), ""),
    "signs-that-differ": (Duration(seconds=1, nanos=-1), ""),
}


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("end", ["FailJob", "ReleaseJob"])
async def test_a_delay_that_a_caller_names_is_taken_as_it_is_or_refused(
    end: str, span: str, calls: Calls, court: Court
) -> None:
    """Fault case 057: zero means at once; what cannot be is refused by its field and changes nothing.

    A released attempt is free, one that failed is charged whatever its delay.
    """
    delay, wanted = SPANS[span]
    await calls.submit("j1")
    session = await calls.open(ttl=20)
    claim = await calls.claim_one(session, "j1")
    request: workers.FailJobRequest | workers.ReleaseJobRequest
    if end == "FailJob":
        request = workers.FailJobRequest(retry_delay=delay, failure=types.Failure(type="Told"))
    else:
        request = workers.ReleaseJobRequest(delay=delay)
    request.namespace, request.job_id = calls.namespace, "j1"
    request.fencing_token = claim.fencing_token
    if wanted:
        reply = await calls.worker_call(end, request)
        assert types.JobState.Name(reply.state) == f"JOB_STATE_{wanted}"
    else:
        refused = await refusal(calls.worker_call(end, request))
        assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "VALIDATION_FAILED")
        assert refused.fields == (("retry_delay",) if end == "FailJob" else ("delay",))
        assert await calls.verdict(session, claim) == "HELD"
    judgement = await court.judge(submitted=["j1"], quiet=False)
    job = judgement.jobs["j1"]
    charged = bool(wanted) and end == "FailJob"
    assert (job.attempt, job.failures, job.lease_losses) == (1, int(charged), 0)
    if wanted == "PENDING":
        assert [again.job_id for again in await calls.claim(session, wait=2)] == ["j1"]
