"""JobService in values: each method builds one request, sends it with retries, and converts the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime

from leasekeeper.v1 import job_service_pb2 as pb
from worker_sdk._convert.jobs import (
    attempts_from,
    change_from,
    job_from,
    redriven_from,
    spec_to,
    state_to,
    submitted_from,
    submitted_from_result,
)
from worker_sdk._convert.times import duration, timestamp
from worker_sdk._transport.channel import CoordinatorChannel
from worker_sdk._transport.methods import (
    CANCEL_JOB,
    DELETE_JOB,
    GET_JOB,
    LIST_ATTEMPTS,
    LIST_JOBS,
    REDRIVE_JOBS,
    RETRY_JOB,
    SUBMIT_JOB,
    SUBMIT_JOBS,
    UPDATE_JOB,
    WAIT_JOB,
    WATCH_JOBS,
)
from worker_sdk.errors import JobNotFound, OutcomeUnknown
from worker_sdk.jobs import Attempts, Job, JobChange, JobSpec, JobState, Redriven, Submitted

__all__ = ["JobCalls", "PreparedBatch"]

_POLL_GRACE = 5.0


class PreparedBatch:
    """Jobs of one SubmitJobs call, as bytes on the wire; sent again unchanged after an unknown outcome."""

    __slots__ = ("request", "size")

    def __init__(self, namespace: str, request_id: str) -> None:
        self.request = pb.SubmitJobsRequest(namespace=namespace, request_id=request_id)
        self.size = 0

    def __len__(self) -> int:
        return len(self.request.jobs)

    def add(self, spec: JobSpec, *, most_jobs: int, most_bytes: int) -> bool:
        """Add a job.

        False, and nothing added, if the batch would grow too large. A first job is always taken.
        """
        message = spec_to(spec)
        size = message.ByteSize() + 8
        if self.request.jobs and (len(self.request.jobs) >= most_jobs or self.size + size > most_bytes):
            return False
        self.request.jobs.append(message)
        self.size += size
        return True


class JobCalls:
    """Typed calls of JobService over *channel*, in one namespace."""

    def __init__(self, channel: CoordinatorChannel, namespace: str) -> None:
        self._channel = channel
        self._namespace = namespace

    def batch(self, request_id: str) -> PreparedBatch:
        """Return an empty batch."""
        return PreparedBatch(self._namespace, request_id)

    async def submit(self, spec: JobSpec, *, request_id: str, timeout: float) -> Submitted:
        """Submit one job."""
        request = pb.SubmitJobRequest(namespace=self._namespace, request_id=request_id, job=spec_to(spec))
        return submitted_from(
            await self._channel.call(SUBMIT_JOB, request, timeout=timeout, request_id=request_id)
        )

    async def submit_batch(self, batch: PreparedBatch, *, timeout: float) -> list[Submitted]:
        """Submit a batch; each job is stored or refused alone."""
        request_id = batch.request.request_id
        answer = await self._channel.call(SUBMIT_JOBS, batch.request, timeout=timeout, request_id=request_id)
        return [submitted_from_result(result) for result in answer.results]

    async def get(self, job_id: str, *, timeout: float) -> Job:
        """Read one job."""
        request = pb.GetJobRequest(namespace=self._namespace, job_id=job_id)
        return job_from((await self._channel.call(GET_JOB, request, timeout=timeout)).job)

    async def page(
        self,
        *,
        page_size: int,
        page_token: str,
        states: Sequence[JobState],
        queue: str,
        type: str,
        labels: Mapping[str, str],
        timeout: float,
    ) -> tuple[Sequence[Job], str]:
        """Read one page of a list; return its jobs and the token of the next page, empty at the end."""
        request = pb.ListJobsRequest(
            namespace=self._namespace,
            page_size=page_size,
            page_token=page_token,
            states=[state_to(state) for state in states],
            queue=queue,
            type=type,
            labels=labels,
        )
        answer = await self._channel.call(LIST_JOBS, request, timeout=timeout)
        return [job_from(job) for job in answer.jobs], answer.next_page_token

    async def wait(self, job_id: str, *, poll: float, timeout: float) -> tuple[Job, bool]:
        """Wait at the coordinator for at most *poll* seconds; return the job and whether it has ended."""
        request = pb.WaitJobRequest(
            namespace=self._namespace, job_id=job_id, timeout=duration(poll, "timeout")
        )
        answer = await self._channel.call(
            WAIT_JOB, request, timeout=timeout, attempt_timeout=poll + _POLL_GRACE
        )
        return job_from(answer.job), answer.finished

    async def cancel(self, job_id: str, *, reason: str, request_id: str, timeout: float) -> Job:
        """Cancel a job, or ask it to stop."""
        request = pb.CancelJobRequest(
            namespace=self._namespace, request_id=request_id, job_id=job_id, reason=reason
        )
        answer = await self._channel.call(CANCEL_JOB, request, timeout=timeout, request_id=request_id)
        return job_from(answer.job)

    async def retry(
        self, job_id: str, *, run_at: datetime | None, etag: str, request_id: str, timeout: float
    ) -> Job:
        """Run a job again that has failed for good."""
        request = pb.RetryJobRequest(
            namespace=self._namespace, request_id=request_id, job_id=job_id, etag=etag
        )
        if run_at is not None:
            request.run_at.CopyFrom(timestamp(run_at, "run_at"))
        answer = await self._channel.call(RETRY_JOB, request, timeout=timeout, request_id=request_id)
        return job_from(answer.job)

    async def redrive(
        self,
        *,
        states: Sequence[JobState],
        queue: str,
        type: str,
        labels: Mapping[str, str],
        failure_type: str,
        settled_before: datetime | None,
        max_jobs: int,
        jobs_per_second: int,
        validate_only: bool,
        page_token: str,
        request_id: str,
        timeout: float,
    ) -> tuple[Redriven, str]:
        """Retry a page of jobs; return what became of it and the token of the next page, empty at the end."""
        request = pb.RedriveJobsRequest(
            namespace=self._namespace,
            request_id=request_id,
            states=[state_to(state) for state in states],
            queue=queue,
            type=type,
            labels=labels,
            failure_type=failure_type,
            max_jobs=max_jobs,
            jobs_per_second=jobs_per_second,
            validate_only=validate_only,
            page_token=page_token,
        )
        if settled_before is not None:
            request.settled_before.CopyFrom(timestamp(settled_before, "settled_before"))
        answer = await self._channel.call(REDRIVE_JOBS, request, timeout=timeout, request_id=request_id)
        return redriven_from(answer), answer.next_page_token

    async def attempts(self, job_id: str, *, timeout: float) -> Attempts:
        """Read the attempts of a job."""
        request = pb.ListAttemptsRequest(namespace=self._namespace, job_id=job_id)
        return attempts_from(await self._channel.call(LIST_ATTEMPTS, request, timeout=timeout))

    async def delete(self, job_id: str, *, etag: str, request_id: str, timeout: float) -> None:
        """Delete a terminal job."""
        request = pb.DeleteJobRequest(
            namespace=self._namespace, request_id=request_id, job_id=job_id, etag=etag
        )
        try:
            await self._channel.call(
                DELETE_JOB, request, timeout=timeout, request_id=request_id, repeat_tells=False
            )
        except OutcomeUnknown as error:
            # An unanswered try, then a repeat that finds nothing: it is gone, which is what was asked for.
            if not isinstance(error.__cause__, JobNotFound):
                raise

    async def update(
        self,
        job_id: str,
        *,
        priority: int,
        due_time: datetime | None,
        run_at: datetime | None,
        etag: str,
        request_id: str,
        timeout: float,
    ) -> Job:
        """Change a waiting job."""
        request = pb.UpdateJobRequest(
            namespace=self._namespace, request_id=request_id, job_id=job_id, etag=etag, priority=priority
        )
        if due_time is not None:
            request.due_time.CopyFrom(timestamp(due_time, "due_time"))
        if run_at is not None:
            request.run_at.CopyFrom(timestamp(run_at, "run_at"))
        answer = await self._channel.call(
            UPDATE_JOB, request, timeout=timeout, request_id=request_id, repeat_tells=False
        )
        return job_from(answer.job)

    async def watch(
        self,
        *,
        job_ids: Sequence[str],
        queue: str,
        type: str,
        states: Sequence[JobState],
        resume_revision: int,
        timeout: float,
    ) -> AsyncGenerator[int | JobChange, None]:
        """Yield one stream's messages: a bare revision where it only tells how far it is, else a change."""
        request = pb.WatchJobsRequest(
            namespace=self._namespace,
            job_ids=job_ids,
            queue=queue,
            type=type,
            states=[state_to(state) for state in states],
            resume_revision=resume_revision,
        )
        async with aclosing(self._channel.stream(WATCH_JOBS, request, timeout=timeout)) as messages:
            async for message in messages:
                yield change_from(message) if message.HasField("job") else message.revision
