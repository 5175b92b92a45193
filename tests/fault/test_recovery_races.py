"""Two that would both bring a job back, or bring it back while its holder settles: one of them wins."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import grpc

from coordinator.core.job import JobState
from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1.worker_service_pb2 import Claim
from tests.fault.support.calls import Calls
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy

TTL = 2.0


async def test_of_two_recoverers_one_wins_and_the_job_is_charged_once(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 009: the first coordinator reads the lost job, and commits after the second's recovery.

    Its path to etcd is slow: for a job that it prefers it reads after 0.5 s and would commit after 1.1 s,
    while the other one, which waits 1 s for it, has committed and handed the job to a new holder by then.
    """
    ids = [f"j{number}" for number in range(40)]
    async with (
        TcpProxy(own_etcd.endpoint, delay=0.27) as slow_path,
        Coordinator([slow_path.endpoint], tmp_path, name="c1"),
        Coordinator(own_etcd.endpoints, tmp_path, name="c2") as quick,
        Calls(quick.endpoint, namespace) as calls,
    ):
        await calls.submit_many([calls.spec(job_id) for job_id in ids])
        dying, saver = await calls.open(ttl=30), await calls.open(ttl=60)
        held: list[Claim] = []
        while len(held) < len(ids):
            held += await calls.claim(dying, most=40, wait=2)
        slow_path.set_mode(ProxyMode.DELAY)
        async with own_court.etcd() as etcd:
            await etcd.lease_revoke(int(dying, 16), timeout=5)
        saved: dict[str, Claim] = {}
        begin = time.monotonic()
        while len(saved) < len(ids):
            for claim in await calls.claim(saver, most=40, wait=5):
                assert claim.job_id not in saved, "the new holder's lock was broken"
                saved[claim.job_id] = claim
            assert time.monotonic() - begin < 15, f"only {len(saved)} are back"
        revisions = {job_id: await own_court.claim_revision(job_id) for job_id in ids}

        # What the slow one still had on its way arrives now.
        await eventually(lambda: time.monotonic() - begin > 4.0, what="the slow coordinator's Txns")

        assert {job_id: await own_court.claim_revision(job_id) for job_id in ids} == revisions
        for claim in saved.values():
            assert await calls.complete(claim) == "SUCCEEDED"
        slow_path.set_mode(ProxyMode.PASS)
    judgement = await own_court.judge(submitted=ids)
    for job in judgement.jobs.values():
        assert (job.attempt, job.lease_losses, job.failures) == (2, 1, 0)


async def test_a_failure_told_as_the_lease_ends_is_counted_or_the_loss_is_never_both(
    calls: Calls, court: Court
) -> None:
    """Fault case 010: 100 holders fail their jobs about the end of their leases."""
    chance = random.Random(10)
    retry = types.RetryPolicy(max_retries=5)
    ids = [f"j{number}" for number in range(100)]
    await calls.submit_many([calls.spec(job_id, retry_policy=retry) for job_id in ids])

    async def fail_late(job_id: str) -> bool:
        session, opened = await calls.open(ttl=TTL), time.monotonic()
        claim = await calls.claim_one(session, job_id)
        # etcd looks for expired leases every 500 ms, so they end from the TTL on until half a second later.
        until = opened + TTL + chance.uniform(-0.5, 0.6)
        await asyncio.sleep(max(0.0, until - time.monotonic()))
        try:
            await calls.fail(claim, delay=3600)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION, error  # noqa: PT017
            return False
        return True

    counted = dict(zip(ids, await asyncio.gather(*(fail_late(job_id) for job_id in ids)), strict=True))

    async def all_settled() -> bool:
        async with court.etcd() as etcd:
            jobs = await court.jobs(etcd)
        return all(job.state is not JobState.RUNNING for job in jobs.values())

    await eventually(all_settled, timeout=10, interval=0.1, what="every loss is recovered")
    judgement = await court.judge(submitted=ids)
    for job_id, job in judgement.jobs.items():
        assert job.attempt == 1
        assert (job.failures, job.lease_losses) == ((1, 0) if counted[job_id] else (0, 1))
        assert job.state is (JobState.SCHEDULED if counted[job_id] else JobState.PENDING)
    assert len(set(counted.values())) == 2, "the lease ended before all or after all: prove nothing"


async def test_a_worker_that_wakes_at_the_end_of_its_lease_and_fails_its_job_charges_it_once(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    """Fault case 010 with processes: SIGSTOP until about the end of the lease, then the handler raises."""
    chance = random.Random(11)
    frozen = [
        WorkerProcess(
            shared.endpoint, calls.namespace, tmp_path, name=f"w{n}", sink=court.sink.path, gates=tmp_path,
            queues={f"q{n}": 1}, ttl=TTL,
        )
        for n in range(5)
    ]  # fmt: skip
    once = types.RetryPolicy(max_retries=0)
    payload = {"gate": "open", "deaf": True, "fail": True}
    for worker in frozen:
        await worker.__aenter__()
    try:
        ids = [f"j{n}" for n in range(5)]
        for n, job_id in enumerate(ids):
            await calls.submit(job_id, payload, queue=f"q{n}", type="effect-sync", retry_policy=once)
        await eventually(lambda: len(court.read().starts) == 5, what="all handlers began", timeout=10)
        for worker in frozen:
            worker.signal(signal.SIGSTOP)
        (tmp_path / "open").touch()
        await asyncio.gather(*(wake(worker, TTL + chance.uniform(-0.1, 0.6)) for worker in frozen))
        jobs = await court.ended(ids, timeout=20)
    finally:
        for worker in frozen:
            await worker.kill()

    for job_id in ids:
        job = jobs[job_id]
        # Whoever lost it ran again, by the same worker in a new session, and failed then.
        assert job.state is JobState.DEAD
        assert job.failures == 1
        assert job.attempt == job.failures + job.lease_losses
    await court.judge(submitted=ids)


async def wake(worker: WorkerProcess, after: float) -> None:
    """SIGCONT after so many seconds."""
    await asyncio.sleep(after)
    worker.signal(signal.SIGCONT)
