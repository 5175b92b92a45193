"""Load through the generated stubs: what the coordinator does with a client that costs next to nothing.

A caller here is a whole worker all the same: it has a session, beats, lists what it holds, and settles with
its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from coordinator.cli.bench_numbers import Measured
from leasekeeper.v1 import job_service_pb2, types_pb2, worker_service_pb2
from leasekeeper.v1.job_service_pb2_grpc import JobServiceStub
from leasekeeper.v1.worker_service_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from leasekeeper.v1.job_service_pb2_grpc import JobServiceAsyncStub
    from leasekeeper.v1.worker_service_pb2_grpc import WorkerServiceAsyncStub

__all__ = ["PAYLOAD", "RawLoad", "raw_load"]

PAYLOAD = b"p" * 100
QUEUE, TYPE = "bench", "noop"

_CALL_SECONDS = 30.0
_WAIT_SECONDS = 2
_TTL_SECONDS = 30


class LoadVoid(RuntimeError):
    """A job was refused, or a claim lost, in the middle of a load: its numbers mean nothing."""


@dataclass(slots=True, kw_only=True)
class _Ledger:
    """When each job was sent, and how long it took."""

    sent: dict[str, float] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    last: float = 0.0

    def settled(self, job_ids: Sequence[str]) -> None:
        self.last = time.perf_counter()
        for job_id in job_ids:
            self.latencies.append(self.last - self.sent.pop(job_id))


class RawLoad:
    """One client process against one coordinator; made by `raw_load`."""

    def __init__(self, channel: grpc.aio.Channel, namespace: str) -> None:
        # The async stubs exist for the type checker alone.
        self._jobs = cast("JobServiceAsyncStub", JobServiceStub(channel))
        self._workers = cast("WorkerServiceAsyncStub", WorkerServiceStub(channel))
        self._namespace = namespace
        self._session = ""
        self._held: dict[str, int] = {}

    # --- rounds ---------------------------------------------------------------------------------------------

    async def batch_round(
        self, jobs: int, *, batch: int = 100, submitters: int = 4, claimers: int = 4
    ) -> Measured:
        """Submit, claim and complete ``jobs`` jobs, ``batch`` a call, everything at the same time.

        Raises:
            LoadVoid: a job went wrong.
            TimeoutError: jobs are missing at the end.
        """
        ledger = _Ledger()
        batches = self._specs(jobs, batch)
        start = time.perf_counter()

        async def submitter() -> None:
            for specs in batches:
                request = job_service_pb2.SubmitJobsRequest(
                    namespace=self._namespace, request_id=uuid.uuid4().hex, jobs=specs
                )
                now = time.perf_counter()
                ledger.sent.update((spec.job_id, now) for spec in specs)
                reply = await self._jobs.SubmitJobs(request, timeout=_CALL_SECONDS)
                _all_good(result.error for result in reply.results)

        async def claimer() -> None:
            while len(ledger.latencies) < jobs:
                claims = await self.claim(batch)
                if claims:
                    await self.settle(claims)
                    ledger.settled([claim.job_id for claim in claims])

        async with asyncio.timeout(_CALL_SECONDS + jobs / 200), asyncio.TaskGroup() as tasks:
            for _ in range(submitters):
                tasks.create_task(submitter())
            for _ in range(claimers):
                tasks.create_task(claimer())
        return Measured(count=jobs, seconds=ledger.last - start, latencies=ledger.latencies)

    async def unary_round(self, jobs: int, *, callers: int = 64) -> Measured:
        """Let ``callers`` submit one job, claim one and complete it, ``jobs`` times in all.

        A caller claims whichever job is next, so its own job's latency ends with whoever completes it.
        Errors as of `batch_round`.
        """
        ledger = _Ledger()
        batches = self._specs(jobs, 1)
        start = time.perf_counter()

        async def caller() -> None:
            for (spec,) in batches:
                request = job_service_pb2.SubmitJobRequest(
                    namespace=self._namespace, request_id=uuid.uuid4().hex, job=spec
                )
                ledger.sent[spec.job_id] = time.perf_counter()
                await self._jobs.SubmitJob(request, timeout=_CALL_SECONDS)
                claims = await self.claim(1)
                while not claims:
                    claims = await self.claim(1)
                await self._complete(claims[0])
                ledger.settled([claims[0].job_id])

        async with asyncio.timeout(_CALL_SECONDS + jobs / 50), asyncio.TaskGroup() as tasks:
            for _ in range(callers):
                tasks.create_task(caller())
        return Measured(count=jobs, seconds=ledger.last - start, latencies=ledger.latencies)

    async def idle_round(self, jobs: int, *, gap: float = 0.01, pollers: int = 2) -> Measured:
        """Submit one job every ``gap`` seconds to an idle queue, and time it until a claim call brings it."""
        sent: dict[str, float] = {}
        latencies: list[float] = []
        start = time.perf_counter()

        async def poller() -> None:
            while len(latencies) < jobs:
                for claim in await self.claim(1):
                    latencies.append(time.perf_counter() - sent[claim.job_id])
                    await self._complete(claim)

        async with asyncio.timeout(_CALL_SECONDS + jobs), asyncio.TaskGroup() as tasks:
            for _ in range(pollers):
                tasks.create_task(poller())
            for (spec,) in self._specs(jobs, 1):
                sent[spec.job_id] = time.perf_counter()
                await self._jobs.SubmitJob(
                    job_service_pb2.SubmitJobRequest(
                        namespace=self._namespace, request_id=uuid.uuid4().hex, job=spec
                    ),
                    timeout=_CALL_SECONDS,
                )
                await asyncio.sleep(gap)
        return Measured(count=jobs, seconds=time.perf_counter() - start, latencies=latencies)

    # --- session --------------------------------------------------------------------------------------------

    async def open(self) -> float:
        """Open the session; returns the seconds between beats."""
        reply = await self._workers.OpenSession(
            worker_service_pb2.OpenSessionRequest(
                namespace=self._namespace,
                request_id=uuid.uuid4().hex,
                identity="bench",
                ttl=Duration(seconds=_TTL_SECONDS),
            ),
            timeout=_CALL_SECONDS,
            wait_for_ready=True,
        )
        self._session = reply.session_id
        return reply.heartbeat_interval.ToNanoseconds() / 1e9

    async def beat(self, interval: float) -> None:
        """Beat until cancelled."""
        number = 0
        while True:
            await asyncio.sleep(interval)
            number += 1
            request = worker_service_pb2.HeartbeatRequest(
                namespace=self._namespace,
                session_id=self._session,
                number=number,
                claims=[
                    worker_service_pb2.HeldClaim(job_id=job_id, fencing_token=token, sequence=number)
                    for job_id, token in self._held.items()
                ],
            )
            request.sent_at.FromNanoseconds(time.monotonic_ns())
            await self._workers.Heartbeat(request, timeout=_CALL_SECONDS)

    async def close(self) -> None:
        """Close the session."""
        await self._workers.CloseSession(
            worker_service_pb2.CloseSessionRequest(
                namespace=self._namespace, request_id=uuid.uuid4().hex, session_id=self._session
            ),
            timeout=_CALL_SECONDS,
        )

    # --- calls ----------------------------------------------------------------------------------------------

    def _specs(self, jobs: int, batch: int) -> Iterator[list[types_pb2.JobSpec]]:
        run = uuid.uuid4().hex[:8]
        for first in range(0, jobs, batch):
            yield [
                types_pb2.JobSpec(job_id=f"{run}-{number:07d}", queue=QUEUE, type=TYPE, payload=PAYLOAD)
                for number in range(first, min(first + batch, jobs))
            ]

    async def claim(self, most: int, queue: str = QUEUE) -> Sequence[worker_service_pb2.Claim]:
        """Claim up to ``most`` jobs of ``queue``; waits a little for the first."""
        reply = await self._workers.ClaimJobs(
            worker_service_pb2.ClaimJobsRequest(
                namespace=self._namespace,
                request_id=uuid.uuid4().hex,
                session_id=self._session,
                queues=[worker_service_pb2.QueueTypes(queue=queue, types=[TYPE])],
                max_jobs=most,
                wait=Duration(seconds=_WAIT_SECONDS),
            ),
            timeout=_CALL_SECONDS,
        )
        self._held.update((claim.job_id, claim.fencing_token) for claim in reply.claims)
        return reply.claims

    async def release(self, claim: worker_service_pb2.Claim) -> None:
        """Give a job back."""
        await self._workers.ReleaseJob(
            worker_service_pb2.ReleaseJobRequest(
                namespace=self._namespace, job_id=claim.job_id, fencing_token=claim.fencing_token
            ),
            timeout=_CALL_SECONDS,
        )
        del self._held[claim.job_id]

    async def settle(self, claims: Sequence[worker_service_pb2.Claim]) -> None:
        """Complete all of them in one call.

        Raises:
            LoadVoid: one was refused.
        """
        done = worker_service_pb2.Completion()
        reply = await self._workers.SettleJobs(
            worker_service_pb2.SettleJobsRequest(
                namespace=self._namespace,
                settlements=[
                    worker_service_pb2.Settlement(
                        job_id=claim.job_id, fencing_token=claim.fencing_token, complete=done
                    )
                    for claim in claims
                ],
            ),
            timeout=_CALL_SECONDS,
        )
        _all_good(result.error for result in reply.results)
        for claim in claims:
            del self._held[claim.job_id]

    async def _complete(self, claim: worker_service_pb2.Claim) -> None:
        await self._workers.CompleteJob(
            worker_service_pb2.CompleteJobRequest(
                namespace=self._namespace, job_id=claim.job_id, fencing_token=claim.fencing_token
            ),
            timeout=_CALL_SECONDS,
        )
        del self._held[claim.job_id]


def _all_good(errors: Iterator[object]) -> None:
    for error in errors:
        code = getattr(error, "code", 0)
        if code:
            raise LoadVoid(f"a job was refused: {error}")


@contextlib.asynccontextmanager
async def raw_load(address: str, namespace: str) -> AsyncIterator[RawLoad]:
    """A load with an open, beating session; closed at the end."""
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        load = RawLoad(channel, namespace)
        interval = await load.open()
        beats = asyncio.create_task(load.beat(interval), name="bench beats")
        try:
            yield load
        finally:
            beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beats
            await load.close()
