"""The part of the scripted coordinator that keeps jobs, meets faults, and serves JobService."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc.status_pb2 import Status

from leasekeeper.v1 import job_service_pb2 as job_pb
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as pb
from leasekeeper.v1.job_service_pb2_grpc import JobServiceServicer
from tests.support.scripted_faults import Answer, Fail, Fault, Hang, LoseReply, abort, status_of

__all__ = ["FakeJobs", "Held", "Record"]


@dataclass
class Held:
    """Who holds a job."""

    session_id: str
    token: int
    request_id: str
    spec: types.JobSpec
    attempt: int


@dataclass
class Record:
    """A job and all that was done to it."""

    spec: types.JobSpec
    attempt: int = 0
    state: str = "pending"
    held: Held | None = None
    settlements: list[pb.Settlement] = field(default_factory=list)
    cancel: bool = False
    checkpoint: bytes = b""
    answered: dict[int, bytes] = field(default_factory=dict)
    claimed_at: list[float] = field(default_factory=list)


class FakeJobs(JobServiceServicer):
    """Jobs in memory, behind real gRPC.

    Attributes:
        calls: every request that came in, by method; times: when.
        tokens: every ``authorization`` that came in.
        jobs: the jobs by id.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.tokens: set[str] = set()
        self.jobs: dict[str, Record] = {}
        self.changes: list[job_pb.WatchJobsResponse] = []
        self._pending: deque[str] = deque()
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._always: dict[str, Fault] = {}
        self._revision = itertools.count(101)
        self._now = 100
        self._changed = threading.Condition(threading.RLock())
        self._stopped = False

    def script(self, method: str, *faults: Fault) -> None:
        """Let the next calls of *method* meet these faults, one each."""
        self._faults[method].extend(faults)

    def always(self, method: str, fault: Fault | None) -> None:
        """Let all calls of *method* meet *fault*, until told None."""
        if fault is None:
            self._always.pop(method, None)
        else:
            self._always[method] = fault

    def add(self, job_id: str, *, queue: str = "q", type: str = "t", **spec: Any) -> Record:
        """Put a job in line."""
        with self._changed:
            record = Record(types.JobSpec(job_id=job_id, queue=queue, type=type, **spec))
            self.jobs[job_id] = record
            self._pending.append(job_id)
            self._changed.notify_all()
            return record

    def cancel(self, job_id: str) -> None:
        """Ask a running job to stop."""
        with self._changed:
            self.jobs[job_id].cancel = True

    def _next(self) -> int:
        self._now = next(self._revision)
        return self._now

    def _serve(self, method: str, request: Any, context: Any, work: Callable[[], Any]) -> Any:
        with self._changed:
            self.calls[method].append(request)
            self.times[method].append(time.monotonic())
            self.tokens.add(str(dict(context.invocation_metadata()).get("authorization", "")))
            fault = self._faults[method].popleft() if self._faults[method] else self._always.get(method)
        if isinstance(fault, Fail):
            abort(context, fault.status)
        if isinstance(fault, Answer):
            return fault.message
        if isinstance(fault, Hang):
            if fault.carried_out:
                work()
            while context.is_active() and not self._stopped:
                time.sleep(0.005)
            context.abort(grpc.StatusCode.CANCELLED, "gave up")
        answer = work()
        if isinstance(answer, Status):
            abort(context, answer)
        if isinstance(fault, LoseReply):
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return answer

    # JobService, as far as the client's tests need it.

    def SubmitJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            result = self._submit(request.job, f"{request.request_id}.0")
            return job_pb.SubmitJobResponse(
                job_id=result.job_id, created=result.created, state=types.JOB_STATE_PENDING, etag="1"
            )

        return self._serve("SubmitJob", request, context, work)

    def SubmitJobs(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            return job_pb.SubmitJobsResponse(
                results=[self._submit(job, f"{request.request_id}.{i}") for i, job in enumerate(request.jobs)]
            )

        return self._serve("SubmitJobs", request, context, work)

    def _submit(self, spec: types.JobSpec, made_id: str) -> job_pb.SubmitResult:
        with self._changed:
            job_id = spec.job_id or made_id
            created = job_id not in self.jobs
            if created:
                stored = types.JobSpec()
                stored.CopyFrom(spec)
                stored.job_id = job_id
                self.jobs[job_id] = Record(stored)
                self._pending.append(job_id)
                self._changed.notify_all()
            return job_pb.SubmitResult(
                job_id=job_id, created=created, state=types.JOB_STATE_PENDING, etag="1"
            )

    def _job(self, job_id: str) -> types.Job | Status:
        record = self.jobs.get(job_id)
        if record is None:
            return status_of(grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")
        state = {
            "pending": types.JOB_STATE_PENDING,
            "running": types.JOB_STATE_RUNNING,
            "complete": types.JOB_STATE_SUCCEEDED,
            "fail": types.JOB_STATE_DEAD,
            "cancelled": types.JOB_STATE_CANCELLED,
        }[record.state]
        return types.Job(job_id=job_id, state=state, spec=record.spec, attempt=record.attempt)

    def GetJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            job = self._job(request.job_id)
            return job if isinstance(job, Status) else job_pb.GetJobResponse(job=job)

        return self._serve("GetJob", request, context, work)

    def WaitJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            deadline = time.monotonic() + request.timeout.seconds + request.timeout.nanos / 1e9
            with self._changed:
                while True:
                    job = self._job(request.job_id)
                    if isinstance(job, Status):
                        return job
                    finished = job.state >= types.JOB_STATE_SUCCEEDED
                    left = deadline - time.monotonic()
                    if finished or left <= 0 or self._stopped or not context.is_active():
                        return job_pb.WaitJobResponse(job=job, finished=finished)
                    self._changed.wait(min(left, 0.02))

        return self._serve("WaitJob", request, context, work)

    def ListJobs(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            ids = sorted(self.jobs)
            start = int(request.page_token or 0)
            end = start + (request.page_size or 100)
            return job_pb.ListJobsResponse(
                jobs=[types.Job(job_id=i, spec=self.jobs[i].spec) for i in ids[start:end]],
                next_page_token=str(end) if end < len(ids) else "",
            )

        return self._serve("ListJobs", request, context, work)

    def DeleteJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            with self._changed:
                if self.jobs.pop(request.job_id, None) is None:
                    return status_of(grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")
                return job_pb.DeleteJobResponse()

        return self._serve("DeleteJob", request, context, work)

    def CancelJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            self.cancel(request.job_id)
            return job_pb.CancelJobResponse(job=self._job(request.job_id))

        return self._serve("CancelJob", request, context, work)

    def RetryJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            self._revive(request.job_id)
            job = self._job(request.job_id)
            return job if isinstance(job, Status) else job_pb.RetryJobResponse(job=job)

        return self._serve("RetryJob", request, context, work)

    def RedriveJobs(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            dead = [job_id for job_id, record in sorted(self.jobs.items()) if record.state == "fail"]
            page = [job_id for job_id in dead if job_id > request.page_token][: request.max_jobs]
            for job_id in page if not request.validate_only else []:
                self._revive(job_id)
            more = page and page[-1] != dead[-1]
            return job_pb.RedriveJobsResponse(job_ids=page, next_page_token=page[-1] if more else "")

        return self._serve("RedriveJobs", request, context, work)

    def ListAttempts(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            record = self.jobs[request.job_id]
            attempts = [types.Attempt(number=n + 1) for n in range(record.attempt)]
            return job_pb.ListAttemptsResponse(attempts=attempts, total=record.attempt)

        return self._serve("ListAttempts", request, context, work)

    def _revive(self, job_id: str) -> None:
        with self._changed:
            record = self.jobs.get(job_id)
            if record is not None and record.state == "fail":
                record.state = "pending"
                self._pending.append(job_id)
                self._changed.notify_all()

    def UpdateJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._serve(
            "UpdateJob", request, context, lambda: job_pb.UpdateJobResponse(job=self._job(request.job_id))
        )

    def change(self, job_id: str, *, deleted: bool = False) -> None:
        """Add a change for those who watch."""
        with self._changed:
            self.changes.append(
                job_pb.WatchJobsResponse(revision=self._next(), job=types.Job(job_id=job_id), deleted=deleted)
            )
            self._changed.notify_all()

    def WatchJobs(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._changed:
            self.calls["WatchJobs"].append(request)
            fault = self._faults["WatchJobs"].popleft() if self._faults["WatchJobs"] else None
            start = request.resume_revision or self._now
        if isinstance(fault, Fail):
            abort(context, fault.status)
        yield job_pb.WatchJobsResponse(revision=start)
        seen = start
        while context.is_active() and not self._stopped:
            with self._changed:
                fresh = [change for change in self.changes if change.revision > seen]
                if not fresh:
                    self._changed.wait(0.02)
            for change in fresh:
                seen = change.revision
                yield change
                if isinstance(fault, LoseReply):
                    context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
