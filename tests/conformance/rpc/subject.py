"""One coordinator under test, the service or the fake, and somebody who calls it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import job_service_pb2_grpc, worker_service_pb2_grpc
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.unit.rpc import builders as b

__all__ = ["Subject", "Worker", "span"]


def span(seconds: float) -> Duration:
    """Seconds as a Duration."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


@dataclass
class Subject:
    """A coordinator, and what differs between the two kinds.

    Attributes:
        pass_time: lets so many seconds pass; the fake's clock is advanced, the service is waited for.
        end_session: ends a session as if its worker had died.
    """

    kind: str
    jobs: Any
    workers: Any
    pass_time: Callable[[float], Awaitable[None]]
    end_session: Callable[[str], Awaitable[None]]
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def on(
        cls,
        kind: str,
        channel: grpc.aio.Channel,
        pass_time: Callable[[float], Awaitable[None]],
        end_session: Callable[[str], Awaitable[None]],
    ) -> Subject:
        """One behind a channel."""
        jobs = job_service_pb2_grpc.JobServiceStub(channel)
        return cls(kind, jobs, worker_service_pb2_grpc.WorkerServiceStub(channel), pass_time, end_session)

    def request_id(self) -> str:
        """A new one; the same in every run."""
        return f"r{next(self.numbers)}"

    async def submit(self, job_id: str = "j1", **more: Any) -> j.SubmitJobResponse:
        """Submit a job of queue mail, type send."""
        answer: j.SubmitJobResponse = await self.jobs.SubmitJob(b.submit(job_id=job_id, **more), timeout=5)
        return answer

    async def job(self, job_id: str = "j1") -> t.Job:
        """Read a job."""
        job: t.Job = (await self.jobs.GetJob(j.GetJobRequest(job_id=job_id), timeout=5)).job
        return job

    async def becomes(self, state: t.JobState.ValueType, job_id: str = "j1") -> t.Job:
        """Wait until a job is in a state."""
        job = await self.job(job_id)
        for _ in range(200):
            if job.state == state:
                break
            await asyncio.sleep(0.05)
            job = await self.job(job_id)
        assert job.state == state
        return job

    async def open(self, **more: Any) -> Worker:
        """Open a session."""
        request = b.open_session(**({"request_id": self.request_id()} | more))
        opened = await self.workers.OpenSession(request, timeout=5)
        return Worker(self, opened.session_id)


@dataclass
class Worker:
    """A session."""

    subject: Subject
    session_id: str
    beats: int = 0

    async def claim(self, *, wait: float = 3, max_jobs: int = 10, **more: Any) -> list[w.Claim]:
        """Claim of queue mail, type send."""
        fields = {"request_id": self.subject.request_id()} | more
        request = b.claim_jobs(
            session_id=self.session_id, max_jobs=max_jobs, wait=span(wait) if wait else None, **fields
        )
        return list((await self.subject.workers.ClaimJobs(request, timeout=10)).claims)

    async def claim_id(self, job_id: str = "j1", *, wait: float = 0, **more: Any) -> w.Claim:
        """Claim one job."""
        fields = {"request_id": self.subject.request_id()} | more
        request = w.ClaimJobRequest(
            session_id=self.session_id, job_id=job_id, wait=span(wait) if wait else None, **fields
        )
        claim: w.Claim = (await self.subject.workers.ClaimJob(request, timeout=10)).claim
        return claim

    async def beat(self, *claims: w.Claim, sequence: int | None = None, **more: Any) -> w.HeartbeatResponse:
        """A heartbeat that lists *claims*."""
        self.beats += 1
        held = [
            w.HeldClaim(
                job_id=claim.job_id,
                fencing_token=claim.fencing_token,
                sequence=self.beats if sequence is None else sequence,
                **more,
            )
            for claim in claims
        ]
        request = b.heartbeat(
            session_id=self.session_id, number=self.beats, sent_at=span(self.beats), claims=held
        )
        answer: w.HeartbeatResponse = await self.subject.workers.Heartbeat(request, timeout=5)
        return answer

    async def complete(self, claim: w.Claim, result: bytes = b"", **more: Any) -> w.CompleteJobResponse:
        """End an attempt with success."""
        request = b.complete(job_id=claim.job_id, fencing_token=claim.fencing_token, result=result, **more)
        answer: w.CompleteJobResponse = await self.subject.workers.CompleteJob(request, timeout=5)
        return answer

    async def fail(self, claim: w.Claim, type_: str = "Boom", **more: Any) -> w.FailJobResponse:
        """End an attempt with a failure."""
        failure = t.Failure(type=type_, message="went wrong")
        request = w.FailJobRequest(
            job_id=claim.job_id, fencing_token=claim.fencing_token, failure=failure, **more
        )
        answer: w.FailJobResponse = await self.subject.workers.FailJob(request, timeout=5)
        return answer

    async def release(self, claim: w.Claim, **more: Any) -> w.ReleaseJobResponse:
        """Give a job back."""
        request = w.ReleaseJobRequest(job_id=claim.job_id, fencing_token=claim.fencing_token, **more)
        answer: w.ReleaseJobResponse = await self.subject.workers.ReleaseJob(request, timeout=5)
        return answer

    async def save(self, claim: w.Claim, data: bytes, sequence: int, **more: Any) -> bool:
        """Store a checkpoint."""
        request = w.SaveCheckpointRequest(
            job_id=claim.job_id,
            fencing_token=claim.fencing_token,
            checkpoint=data,
            sequence=sequence,
            **more,
        )
        stored: bool = (await self.subject.workers.SaveCheckpoint(request, timeout=5)).stored
        return stored
