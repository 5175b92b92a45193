"""JobService: validate, convert, call the use case, convert back. No rule of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

from coordinator.errors import RequestError
from coordinator.ports import Clock
from coordinator.rpc import convert, limits, validation
from coordinator.rpc.field_checks import duration_ms, timestamp_ms
from coordinator.rpc.limits import CallLimits
from coordinator.services.api import (
    JobFilter,
    JobListing,
    JobView,
    NewJob,
    Redriven,
    RedriveQuery,
    SubmitOutcome,
    WatchedJob,
)
from leasekeeper.v1 import job_service_pb2 as pb

__all__ = [
    "JobChangesPort",
    "JobServicer",
    "JobUseCases",
    "QueriesPort",
    "RedrivePort",
    "RetryingPort",
    "SubmissionPort",
    "SubscriptionPort",
]


class SubmissionPort(Protocol):
    """What SubmitJob and SubmitJobs need."""

    async def submit(
        self, namespace: str, request_id: str, jobs: Sequence[NewJob], deadline: float
    ) -> list[SubmitOutcome | RequestError]:
        """Store jobs; results in their order."""


class JobChangesPort(Protocol):
    """What UpdateJob, CancelJob and DeleteJob need."""

    async def cancel(self, namespace: str, job_id: str, reason: str, who: str, deadline: float) -> JobView:
        """Cancel it, or ask it to stop."""

    async def update(
        self,
        namespace: str,
        job_id: str,
        etag: str,
        priority: int | None,
        due_ms: int | None,
        run_at_ms: int | None,
        deadline: float,
    ) -> JobView:
        """Change what may change while it waits; None leaves it as it is."""

    async def delete(self, namespace: str, job_id: str, etag: str, deadline: float) -> None:
        """Forget a terminal job."""


class RetryingPort(Protocol):
    """What RetryJob needs."""

    async def retry(
        self, namespace: str, job_id: str, *, etag: str, run_at_ms: int, request_id: str, deadline: float
    ) -> JobView:
        """Make a job claimable again that has failed for good."""


class RedrivePort(Protocol):
    """What RedriveJobs needs."""

    async def redrive(self, namespace: str, query: RedriveQuery, deadline: float) -> Redriven:
        """Retry those that match."""


class QueriesPort(Protocol):
    """What GetJob, ListAttempts and ListJobs need."""

    async def get(self, namespace: str, job_id: str, deadline: float) -> JobView:
        """One job."""

    async def attempts(self, namespace: str, job_id: str, deadline: float) -> JobView:
        """One job with its attempts and its claim, and no payload."""

    async def list(
        self, namespace: str, filter: JobFilter, page_size: int, cursor: str, deadline: float
    ) -> JobListing:
        """A page."""


class SubscriptionPort(Protocol):
    """What WaitJob and WatchJobs need."""

    async def wait(
        self, namespace: str, job_id: str, timeout_s: float, deadline: float
    ) -> tuple[JobView, bool]:
        """Wait until it is terminal."""

    def watch(self, namespace: str, filter: JobFilter, resume_revision: int) -> AsyncIterator[WatchedJob]:
        """Changes of jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUseCases:
    """The use cases behind JobService."""

    submission: SubmissionPort
    changes: JobChangesPort
    retrying: RetryingPort
    redrive: RedrivePort
    queries: QueriesPort
    subscription: SubscriptionPort


class JobServicer:
    """The methods of ``leasekeeper.v1.JobService``; request and absolute deadline in, response out."""

    def __init__(self, use_cases: JobUseCases, clock: Clock, call_limits: CallLimits) -> None:
        self._use = use_cases
        self._clock = clock
        self._limits = call_limits

    async def submit_job(self, request: pb.SubmitJobRequest, deadline: float) -> pb.SubmitJobResponse:
        """SubmitJob."""
        validation.check_submit(request)
        job = convert.new_job(request.job)
        [outcome] = await self._use.submission.submit(
            convert.namespace_of(request.namespace), request.request_id, [job], deadline
        )
        if isinstance(outcome, RequestError):
            raise outcome
        return convert.submit_response(outcome)

    async def submit_jobs(self, request: pb.SubmitJobsRequest, deadline: float) -> pb.SubmitJobsResponse:
        """SubmitJobs. Jobs of bad form are refused here, the others go on together.

        The place of a job in the call makes its id, if it has none, so a job keeps its place when another is
        refused.
        """
        errors = validation.check_submit_batch(request)
        jobs = [
            convert.new_job(spec, item)
            for item, (spec, error) in enumerate(zip(request.jobs, errors, strict=True))
            if error is None
        ]
        outcomes: list[SubmitOutcome | RequestError] = []
        if jobs:
            outcomes = await self._use.submission.submit(
                convert.namespace_of(request.namespace), request.request_id, jobs, deadline
            )
        answered = iter(outcomes)
        return pb.SubmitJobsResponse(
            results=[
                convert.submit_result(spec.job_id, error if error is not None else next(answered))
                for spec, error in zip(request.jobs, errors, strict=True)
            ]
        )

    async def get_job(self, request: pb.GetJobRequest, deadline: float) -> pb.GetJobResponse:
        """GetJob."""
        validation.check_get(request)
        view = await self._use.queries.get(convert.namespace_of(request.namespace), request.job_id, deadline)
        return pb.GetJobResponse(job=convert.viewed_job(view))

    async def list_jobs(self, request: pb.ListJobsRequest, deadline: float) -> pb.ListJobsResponse:
        """ListJobs."""
        validation.check_list(request)
        listing = await self._use.queries.list(
            convert.namespace_of(request.namespace),
            convert.list_filter(request, self._clock.now_ms()),
            request.page_size or limits.DEFAULT_PAGE_SIZE,
            request.page_token,
            deadline,
        )
        return pb.ListJobsResponse(
            jobs=[convert.listed_job(stored) for stored in listing.jobs], next_page_token=listing.cursor
        )

    async def wait_job(self, request: pb.WaitJobRequest, deadline: float) -> pb.WaitJobResponse:
        """WaitJob. Without ``timeout`` it waits as long as the call's deadline and the longest poll allow."""
        validation.check_wait(request, self._limits)
        wanted_ms = duration_ms(request.timeout) if request.HasField("timeout") else self._limits.wait_max_ms
        # The answer "not finished" must leave before the deadline.
        seconds = min(wanted_ms / 1000, max(0.0, deadline - self._clock.monotonic()) * 0.9)
        view, finished = await self._use.subscription.wait(
            convert.namespace_of(request.namespace), request.job_id, seconds, deadline
        )
        return pb.WaitJobResponse(job=convert.viewed_job(view), finished=finished)

    async def watch_jobs(self, request: pb.WatchJobsRequest) -> AsyncGenerator[pb.WatchJobsResponse, None]:
        """WatchJobs."""
        validation.check_watch(request)
        namespace = convert.namespace_of(request.namespace)
        changes = self._use.subscription.watch(
            namespace, convert.watch_filter(request), request.resume_revision
        )
        # Whatever iterator it is: if it can be closed, it is closed with the stream.
        async with aclosing(cast("Any", changes)):
            async for watched in changes:
                yield convert.watch_response(namespace, watched)

    async def update_job(self, request: pb.UpdateJobRequest, deadline: float) -> pb.UpdateJobResponse:
        """UpdateJob."""
        validation.check_update(request)
        view = await self._use.changes.update(
            convert.namespace_of(request.namespace),
            request.job_id,
            request.etag,
            request.priority or None,
            timestamp_ms(request.due_time) if request.HasField("due_time") else None,
            timestamp_ms(request.run_at) if request.HasField("run_at") else None,
            deadline,
        )
        return pb.UpdateJobResponse(job=convert.viewed_job(view))

    async def cancel_job(self, request: pb.CancelJobRequest, deadline: float) -> pb.CancelJobResponse:
        """CancelJob."""
        validation.check_cancel(request)
        view = await self._use.changes.cancel(
            convert.namespace_of(request.namespace),
            request.job_id,
            convert.cut_text(request.reason),
            request.request_id,
            deadline,
        )
        return pb.CancelJobResponse(job=convert.viewed_job(view))

    async def retry_job(self, request: pb.RetryJobRequest, deadline: float) -> pb.RetryJobResponse:
        """RetryJob."""
        validation.check_retry(request)
        view = await self._use.retrying.retry(
            convert.namespace_of(request.namespace),
            request.job_id,
            etag=request.etag,
            run_at_ms=convert.optional_ms(request.run_at, request.HasField("run_at")),
            request_id=request.request_id,
            deadline=deadline,
        )
        return pb.RetryJobResponse(job=convert.viewed_job(view))

    async def redrive_jobs(self, request: pb.RedriveJobsRequest, deadline: float) -> pb.RedriveJobsResponse:
        """RedriveJobs."""
        validation.check_redrive(request)
        done = await self._use.redrive.redrive(
            convert.namespace_of(request.namespace), convert.redrive_query(request), deadline
        )
        return convert.redrive_response(done)

    async def list_attempts(
        self, request: pb.ListAttemptsRequest, deadline: float
    ) -> pb.ListAttemptsResponse:
        """ListAttempts."""
        validation.check_list_attempts(request)
        view = await self._use.queries.attempts(
            convert.namespace_of(request.namespace), request.job_id, deadline
        )
        return convert.attempts_response(view)

    async def delete_job(self, request: pb.DeleteJobRequest, deadline: float) -> pb.DeleteJobResponse:
        """DeleteJob."""
        validation.check_delete(request)
        await self._use.changes.delete(
            convert.namespace_of(request.namespace), request.job_id, request.etag, deadline
        )
        return pb.DeleteJobResponse()
