"""Circuits as callers meet them: two coordinators on real etcd."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from coordinator.app import running_coordinator
from coordinator.config import CircuitSettings, Settings
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdClient, EtcdConfig
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import job_service_pb2_grpc, queue_service_pb2_grpc, worker_service_pb2_grpc
from leasekeeper.v1 import queue_service_pb2 as q
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.integration.rpc.conftest import Api, OpenedWorker, open_worker
from tests.support.polling import eventually
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal

EAGER = CircuitSettings(
    min_outcomes=4, min_lost_sessions=2, first_pause_s=0.2, longest_pause_s=0.2, probes_to_close=2
)
PATIENT = dataclasses.replace(EAGER, first_pause_s=600.0, longest_pause_s=600.0)


@dataclasses.dataclass
class Side:
    api: Api
    queues: Any

    async def stats(self, type_: str = "send") -> q.TypeStats:
        answer = await self.queues.GetQueueStats(q.GetQueueStatsRequest(queue="mail"), timeout=5)
        found: q.TypeStats = next((one for one in answer.types if one.type == type_), q.TypeStats(type=type_))
        return found

    async def is_open(self) -> bool:
        return (await self.stats()).circuit.state == q.CIRCUIT_STATE_OPEN

    async def submit(self, job_id: str, **spec: Any) -> None:
        await self.api.jobs.SubmitJob(b.submit(job_id=job_id, **spec), timeout=5)

    async def fail(self, claim: Any) -> None:
        request = w.FailJobRequest(job_id=claim.job_id, fencing_token=claim.fencing_token, no_retry=True)
        await self.api.workers.FailJob(request, timeout=5)

    async def complete(self, claim: Any) -> None:
        request = b.complete(job_id=claim.job_id, fencing_token=claim.fencing_token)
        await self.api.workers.CompleteJob(request, timeout=5)


@contextlib.asynccontextmanager
async def side(settings: Settings, circuits: CircuitSettings) -> AsyncIterator[Side]:
    with_circuits = dataclasses.replace(settings, circuits=circuits)
    async with running_coordinator(with_circuits) as address, grpc.aio.insecure_channel(address) as channel:
        api = Api(
            address,
            channel,
            job_service_pb2_grpc.JobServiceStub(channel),
            worker_service_pb2_grpc.WorkerServiceStub(channel),
        )
        yield Side(api, queue_service_pb2_grpc.QueueServiceStub(channel))


async def fail_four(on: Side, worker: OpenedWorker) -> None:
    for number in range(4):
        await on.submit(f"f{number}")

    async def claimed() -> list[Any]:
        return await worker.claim(max_jobs=4, wait=1)

    failed = 0
    while failed < 4:
        for claim in await claimed():
            await on.fail(claim)
            failed += 1


async def test_a_failing_type_is_held_everywhere_shown_and_closed_by_hand(settings: Settings) -> None:
    async with side(settings, PATIENT) as first, side(settings, PATIENT) as second:
        worker = await open_worker(first.api)
        other = await open_worker(second.api)
        await fail_four(first, worker)
        await eventually(second.is_open)
        await second.submit("held")
        await second.submit("free", type="other")

        both = [w.QueueTypes(queue="mail", types=["send", "other"])]
        assert [claim.job_id for claim in await other.claim(queues=both, wait=2)] == ["free"]
        request = w.ClaimJobRequest(session_id=worker.session_id, request_id="r1", job_id="held")
        error = await refusal(first.api.workers.ClaimJob(request, timeout=5))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CIRCUIT_OPEN")
        assert error.retry_ms is not None
        assert 400_000 < error.retry_ms <= 600_000, "up to a fifth of the pause is chance"

        shown = await second.stats()
        assert (shown.pending, shown.running) == (1, 0)
        assert shown.circuit.reason == "4 of 4 attempts failed"
        assert shown.circuit.HasField("probe_time")
        assert (await second.stats("other")).running == 1

        reset = q.ResetCircuitRequest(queue="mail", type="send", request_id="r")
        closed = await second.queues.ResetCircuit(reset, timeout=5)
        assert closed.circuit.state == q.CIRCUIT_STATE_CLOSED
        assert [claim.job_id for claim in await worker.claim(wait=5)] == ["held"]
        assert await second.queues.ResetCircuit(reset, timeout=5) == closed


async def test_workers_that_wait_probe_it_and_close_it_without_a_hand(settings: Settings) -> None:
    async with side(settings, EAGER) as only:
        worker = await open_worker(only.api)
        await fail_four(only, worker)
        await eventually(only.is_open)
        for name in ("a", "b", "c", "d"):
            await only.submit(name)
        for _ in range(2):
            [probe] = await worker.claim(max_jobs=4, wait=5)
            assert await worker.claim(max_jobs=4) == []
            await only.complete(probe)
        left = [claim.job_id for claim in await worker.claim(max_jobs=4, wait=5)]
        assert len(left) == 2
        assert (await only.stats()).circuit.state == q.CIRCUIT_STATE_CLOSED


async def test_an_open_circuit_is_open_after_a_restart(settings: Settings) -> None:
    async with side(settings, PATIENT) as first:
        worker = await open_worker(first.api)
        await fail_four(first, worker)
        await eventually(first.is_open)
        await first.submit("held")
    async with side(settings, PATIENT) as again:
        worker = await open_worker(again.api)
        assert await worker.claim() == []
        assert await again.is_open()
        assert (await again.stats()).pending == 1


async def kill_a_holder(only: Side, etcd: EtcdProcess) -> None:
    """A worker claims one job, and its lease ends."""
    victim = await open_worker(only.api)
    [_] = await victim.claim(max_jobs=1, wait=8)  # what is lost again comes back after up to 4 s
    async with EtcdClient(EtcdConfig(endpoints=(etcd.endpoint,))) as client:
        await client.lease_revoke(int(victim.session_id, 16), timeout=5)


async def test_a_type_that_kills_its_workers_is_held_and_others_go_on(
    settings: Settings, etcd_server: EtcdProcess
) -> None:
    async with side(settings, PATIENT) as only:
        for name in ("poison-1", "poison-2"):
            await only.submit(name)
        for _ in range(4):  # a job that was lost goes behind the other: each is lost twice
            await kill_a_holder(only, etcd_server)
        await eventually(only.is_open)
        assert "were lost" in (await only.stats()).circuit.reason
        await only.submit("well", type="other")
        worker = await open_worker(only.api)
        both = [w.QueueTypes(queue="mail", types=["send", "other"])]
        assert [claim.job_id for claim in await worker.claim(queues=both, wait=5)] == ["well"]


async def test_a_job_that_is_lost_again_and_again_is_quarantined_and_opens_nothing_alone(
    settings: Settings, etcd_server: EtcdProcess
) -> None:
    async with side(settings, CircuitSettings()) as only:
        await only.submit("poison")
        for _ in range(4):
            await kill_a_holder(only, etcd_server)

        async def quarantined() -> bool:
            answer = await only.api.jobs.GetJob(j.GetJobRequest(job_id="poison"), timeout=5)
            return bool(answer.job.state == t.JOB_STATE_QUARANTINED)

        await eventually(quarantined)
        shown = (await only.stats()).circuit
        assert shown.state == q.CIRCUIT_STATE_CLOSED
        assert (shown.attempts, shown.lease_losses) == (4, 3)
