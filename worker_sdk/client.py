"""`JobClient`: what producers of work call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self

from worker_sdk._machine import retry_delay
from worker_sdk._seams import Seams
from worker_sdk._transport.channel import CoordinatorChannel, repeatable
from worker_sdk._transport.job_calls import JobCalls, PreparedBatch
from worker_sdk._watch import JobWatch
from worker_sdk.config import ConnectionConfig
from worker_sdk.errors import DeadlineExceeded
from worker_sdk.jobs import Attempts, Job, JobSpec, JobState, Redriven, Submitted

__all__ = ["JobClient"]

_MOST_JOBS = 100
# A call may carry 3 MiB; the rest is room for the envelope.
_MOST_BYTES = 3 * 1024 * 1024 - 64 * 1024
_POLL_SECONDS = 20.0


class JobClient:
    """Submits jobs and looks after them; one object for one event loop.

    Every method has a deadline (``timeout``, seconds; default `Timeouts.call`). Calls that change something
    fix their ``request_id`` before the first try and are repeated with it while that may help; give your own
    to be able to repeat a call later. Connections are made at first use.

    All methods raise `ValidationFailed` for malformed input, `Unavailable` where nothing was done,
    `OutcomeUnknown` where a change may have been made, `Unauthenticated` and `PermissionDenied`, and
    `ClientClosed`, `WrongEventLoop` or `ForkedProcess` where this object cannot be used.

    Args:
        endpoints: ``host:port[,host:port]``, or a whole `ConnectionConfig`.
        namespace: the namespace; not with a `ConnectionConfig`, which has its own.
        seams: clock, randomness, ids.
    """

    def __init__(
        self,
        endpoints: str | ConnectionConfig,
        *,
        namespace: str | None = None,
        seams: Seams | None = None,
    ) -> None:
        config = ConnectionConfig.of(endpoints, namespace)
        self._config = config
        self._seams = seams or Seams()
        self._channel = CoordinatorChannel(config, self._seams)
        self._calls = JobCalls(self._channel, config.namespace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls under way end with `ClientClosed`."""
        await self._channel.close()

    def _timeout(self, timeout: float | None) -> float:
        return self._config.timeouts.call if timeout is None else timeout

    def _id(self, request_id: str) -> str:
        return request_id or self._seams.identifier()

    async def submit(self, job: JobSpec, *, request_id: str = "", timeout: float | None = None) -> Submitted:
        """Store one job. The same id with the same content is no error: `Submitted.created` is False.

        Raises:
            PayloadTooLarge, RequestIdReused: the call is wrong.
            JobExists: a job with this id and other content exists. DuplicateJob: the unique key is taken.
            StorageFull: etcd is near its quota.
        """
        return await self._calls.submit(job, request_id=self._id(request_id), timeout=self._timeout(timeout))

    async def submit_many(
        self,
        jobs: Iterable[JobSpec],
        *,
        request_id: str = "",
        concurrency: int = 4,
        timeout: float | None = None,
    ) -> Sequence[Submitted]:
        """Store many jobs, in calls of up to 100 jobs and 3 MiB; return what became of each, in their order.

        Each job is stored or refused alone, see `Submitted.error`. Raises what `submit` raises for a call as
        a whole; calls already answered stand, and repeating everything with the same *request_id* is safe.

        Args:
            jobs: read as they are needed.
            concurrency: calls under way at a time.
            timeout: seconds for each call, with its repeats.
        """
        base = self._id(request_id)
        outcomes: list[Sequence[Submitted]] = []
        batches = self._batches(jobs, base)

        async def send() -> None:
            # One iterator shared by all senders: a batch is built when somebody is free to send it.
            for batch in batches:
                place = len(outcomes)
                outcomes.append(())
                outcomes[place] = await self._send(batch, self._timeout(timeout))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, concurrency)):
                    group.create_task(send())
        except ExceptionGroup as errors:
            # One refused call cancels the others; callers look for the error itself, not for a group.
            raise errors.exceptions[0] from None
        return [one for batch in outcomes for one in batch]

    def _batches(self, jobs: Iterable[JobSpec], base: str) -> Iterable[PreparedBatch]:
        number = 0
        batch = self._calls.batch(f"{base}.{number}")
        for job in jobs:
            if not batch.add(job, most_jobs=_MOST_JOBS, most_bytes=_MOST_BYTES):
                yield batch
                number += 1
                batch = self._calls.batch(f"{base}.{number}")
                batch.add(job, most_jobs=_MOST_JOBS, most_bytes=_MOST_BYTES)
        if len(batch):
            yield batch

    async def _send(self, batch: PreparedBatch, timeout: float) -> Sequence[Submitted]:
        """Send a batch until no job's outcome is open.

        Jobs that were stored are found again by the repeat.
        """
        seams, retry = self._seams, self._config.retry
        deadline = seams.now() + timeout
        failures = 0
        while True:
            results = await self._calls.submit_batch(batch, timeout=max(0.001, deadline - seams.now()))
            open_errors = [one.error for one in results if one.error is not None and repeatable(one.error)]
            if not open_errors:
                return results
            failures += 1
            pause = retry_delay(retry, failures, seams.fraction())
            pause = max([pause, *(error.retry_after or 0.0 for error in open_errors)])
            if seams.now() + pause >= deadline:
                return results
            await seams.sleep(pause)

    async def get(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Read one job.

        Raises:
            JobNotFound: there is none.
        """
        return await self._calls.get(job_id, timeout=self._timeout(timeout))

    async def list(
        self,
        *,
        states: Iterable[JobState] = (),
        queue: str = "",
        type: str = "",
        labels: Mapping[str, str] | None = None,
        page_size: int = 100,
        timeout: float | None = None,
    ) -> AsyncIterator[Job]:
        """Iterate over jobs, in no useful order; empty filters mean all. *timeout* bounds each page."""
        wanted = tuple(states)
        token = ""
        while True:
            jobs, token = await self._calls.page(
                page_size=page_size,
                page_token=token,
                states=wanted,
                queue=queue,
                type=type,
                labels=labels or {},
                timeout=self._timeout(timeout),
            )
            for job in jobs:
                yield job
            if not token:
                return

    async def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Wait until the job has ended; return it as it then stands.

        Raises:
            DeadlineExceeded: it has not ended within *timeout*. JobNotFound: there is no such job.
        """
        deadline = self._seams.now() + self._timeout(timeout)
        while True:
            left = deadline - self._seams.now()
            poll = max(0.0, min(_POLL_SECONDS, left))
            job, finished = await self._calls.wait(job_id, poll=poll, timeout=max(left, 0.0) + 1.0)
            if finished:
                return job
            if self._seams.now() >= deadline:
                raise DeadlineExceeded(f"job {job_id!r} is {job.state.name} after {self._timeout(timeout)} s")

    def watch(
        self,
        *,
        job_ids: Iterable[str] = (),
        queue: str = "",
        type: str = "",
        states: Iterable[JobState] = (),
        resume_revision: int = 0,
        timeout: float | None = None,
    ) -> JobWatch:
        """Return the changes of jobs, to iterate over; empty filters mean all, revision 0 means from now.

        The watch itself has no end; *timeout* is how long coordinators may be out of reach before it gives
        up. Iterating raises `RevisionCompacted` where the revision to resume from is gone.
        """
        wanted_ids, wanted_states = tuple(job_ids), tuple(states)
        return JobWatch(
            lambda revision: self._calls.watch(
                job_ids=wanted_ids,
                queue=queue,
                type=type,
                states=wanted_states,
                resume_revision=revision,
                timeout=self._config.timeouts.stream,
            ),
            resume_revision=resume_revision,
            timeout=self._timeout(timeout),
            retry=self._config.retry,
            seams=self._seams,
        )

    async def cancel(
        self, job_id: str, *, reason: str = "", request_id: str = "", timeout: float | None = None
    ) -> Job:
        """Cancel a waiting job at once, or ask a running one to stop; a repeat is no error.

        Raises:
            JobNotFound: there is no such job. JobTerminal: it ended otherwise.
        """
        return await self._calls.cancel(
            job_id, reason=reason, request_id=self._id(request_id), timeout=self._timeout(timeout)
        )

    async def retry(
        self,
        job_id: str,
        *,
        run_at: datetime | None = None,
        etag: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Job:
        """Run a DEAD or QUARANTINED job again; one that waits or runs is left as it is.

        Raises:
            JobNotFound: there is no such job. JobTerminal: it has SUCCEEDED or is CANCELLED.
            DuplicateJob: another job has its unique key by now. EtagMismatch. StorageFull.
        """
        return await self._calls.retry(
            job_id,
            run_at=run_at,
            etag=etag,
            request_id=self._id(request_id),
            timeout=self._timeout(timeout),
        )

    async def redrive(
        self,
        *,
        states: Iterable[JobState] = (),
        queue: str = "",
        type: str = "",
        labels: Mapping[str, str] | None = None,
        failure_type: str = "",
        settled_before: datetime | None = None,
        jobs_per_second: int = 100,
        jobs_per_call: int = 100,
        validate_only: bool = False,
        request_id: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[Redriven]:
        """Retry all DEAD and QUARANTINED jobs that match, call after call; yield what each call did.

        Empty filters mean all. A call that is repeated after an unknown outcome does not name the jobs that
        its first try retried. *timeout* bounds each call.

        Args:
            failure_type: that of the last failure.
            settled_before: only jobs that failed before this time.
            jobs_per_second, jobs_per_call: 1 to 1,000.
            validate_only: change nothing, only say which jobs match.

        Raises:
            StorageFull: etcd is near its quota.
        """
        wanted, base = tuple(states), self._id(request_id)
        token = ""
        while True:
            done, token = await self._calls.redrive(
                states=wanted,
                queue=queue,
                type=type,
                labels=labels or {},
                failure_type=failure_type,
                settled_before=settled_before,
                max_jobs=jobs_per_call,
                jobs_per_second=jobs_per_second,
                validate_only=validate_only,
                page_token=token,
                request_id=base,
                timeout=self._timeout(timeout),
            )
            yield done
            if not token:
                return

    async def attempts(self, job_id: str, *, timeout: float | None = None) -> Attempts:
        """Read the attempts of a job: who ran it, under which token, from when to when, and how each ended.

        Raises:
            JobNotFound: there is no such job.
        """
        return await self._calls.attempts(job_id, timeout=self._timeout(timeout))

    async def delete(
        self, job_id: str, *, etag: str = "", request_id: str = "", timeout: float | None = None
    ) -> None:
        """Delete a job that has ended.

        Raises:
            JobNotFound, NotClaimable (it has not ended), EtagMismatch.
        """
        await self._calls.delete(
            job_id, etag=etag, request_id=self._id(request_id), timeout=self._timeout(timeout)
        )

    async def update(
        self,
        job_id: str,
        *,
        priority: int = 0,
        due_time: datetime | None = None,
        run_at: datetime | None = None,
        etag: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Job:
        """Change priority, due time or run_at of a job that waits; 0 and None leave them as they are.

        Raises:
            JobNotFound, JobTerminal, NotClaimable (it runs), EtagMismatch.
        """
        return await self._calls.update(
            job_id,
            priority=priority,
            due_time=due_time,
            run_at=run_at,
            etag=etag,
            request_id=self._id(request_id),
            timeout=self._timeout(timeout),
        )
