"""A small coordinator for tests of the SDK: real gRPC on loopback, state in memory, faults by script.

It knows sessions, claims, fencing and replays as far as a worker can tell; it is no model of the service.
Runs in threads of its own, so that a test may block its event loop.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from leasekeeper.v1 import job_service_pb2 as job_pb
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as pb
from leasekeeper.v1.job_service_pb2_grpc import JobServiceServicer, add_JobServiceServicer_to_server
from leasekeeper.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)

__all__ = ["Answer", "Fail", "FakeCoordinator", "Hang", "LoseReply", "status_of"]

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_of(
    code: grpc.StatusCode,
    reason: str,
    message: str = "",
    *,
    metadata: dict[str, str] | None = None,
    retry_after: float | None = None,
    fields: Iterable[tuple[str, str]] = (),
) -> Status:
    """Return a status with ErrorInfo, and with RetryInfo and BadRequest where asked for."""
    details = []

    def pack(detail: Any) -> None:
        packed = AnyMessage()
        packed.Pack(detail)
        details.append(packed)

    pack(ErrorInfo(reason=reason, domain="leasekeeper", metadata=metadata or {}))
    if retry_after is not None:
        nanos = round(retry_after * 1e9)
        pack(RetryInfo(retry_delay=Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)))
    violations = [BadRequest.FieldViolation(field=name, description=text) for name, text in fields]
    if violations:
        pack(BadRequest(field_violations=violations))
    return Status(code=code.value[0], message=message or reason, details=details)


@dataclass(frozen=True)
class Fail:
    """Refuse the call; nothing is done."""

    status: Status


@dataclass(frozen=True)
class LoseReply:
    """Carry the call out, then let the caller see a broken connection."""


@dataclass(frozen=True)
class Hang:
    """Answer nothing until the caller gives up; nothing is done. ``done``: it is carried out all the same."""

    carried_out: bool = False


@dataclass(frozen=True)
class Answer:
    """Answer this in place of what would be answered."""

    message: Any


Fault = Fail | LoseReply | Hang | Answer


@dataclass
class _Held:
    session_id: str
    token: int
    request_id: str
    spec: types.JobSpec
    attempt: int


@dataclass
class _Record:
    """A job and all that was done to it."""

    spec: types.JobSpec
    attempt: int = 0
    state: str = "pending"
    held: _Held | None = None
    settlements: list[pb.Settlement] = field(default_factory=list)
    cancel: bool = False
    checkpoint: bytes = b""
    answered: dict[int, bytes] = field(default_factory=dict)
    claimed_at: list[float] = field(default_factory=list)


class FakeCoordinator(WorkerServiceServicer, JobServiceServicer):
    """Start it with ``with``; `endpoint` is its address.

    Attributes:
        calls: every request that came in, by method.
        jobs: the jobs by id.
        polling: claim calls that wait for a job.
    """

    def __init__(self, *, ttl: float = 10.0, interval: float = 0.0, safe: float | None = None) -> None:
        self.ttl = ttl
        self.interval = interval
        self.safe = safe
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.jobs: dict[str, _Record] = {}
        self.sessions: dict[str, bool] = {}
        self.command = pb.WORKER_COMMAND_UNSPECIFIED
        self.changes: list[job_pb.WatchJobsResponse] = []
        self._pending: deque[str] = deque()
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._always: dict[str, Fault] = {}
        self._revision = itertools.count(101)
        self._now = 100
        self._changed = threading.Condition(threading.RLock())
        self.polling = 0
        self._stopped = False
        self._server: grpc.Server | None = None
        self.endpoint = ""

    # Life.

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, port: int = 0) -> None:
        """Listen, on *port* or a free one."""
        self._stopped = False
        self._server = grpc.server(
            ThreadPoolExecutor(32),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        add_WorkerServiceServicer_to_server(self, self._server)
        add_JobServiceServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.endpoint = f"127.0.0.1:{bound}"
        self._server.start()

    def stop(self) -> None:
        """Cut all connections; the state stays."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._server is not None:
            self._server.stop(0).wait(5)

    # What tests do to it.

    def script(self, method: str, *faults: Fault) -> None:
        """Let the next calls of *method* meet these faults, one each."""
        self._faults[method].extend(faults)

    def always(self, method: str, fault: Fault | None) -> None:
        """Let all calls of *method* meet *fault*, until told None."""
        if fault is None:
            self._always.pop(method, None)
        else:
            self._always[method] = fault

    def add(self, job_id: str, *, queue: str = "q", type: str = "t", **spec: Any) -> _Record:
        """Put a job in line."""
        with self._changed:
            record = _Record(types.JobSpec(job_id=job_id, queue=queue, type=type, **spec))
            self.jobs[job_id] = record
            self._pending.append(job_id)
            self._changed.notify_all()
            return record

    def cancel(self, job_id: str) -> None:
        """Ask a running job to stop."""
        with self._changed:
            self.jobs[job_id].cancel = True

    def take_away(self, job_id: str) -> None:
        """Take a job from its holder and let it wait again."""
        with self._changed:
            self._give_back(self.jobs[job_id])

    def end_sessions(self) -> None:
        """Let all sessions end, as if their TTL had passed."""
        with self._changed:
            for session_id in self.sessions:
                self._end(session_id)

    def how(self, job_id: str) -> list[str]:
        """Return how the job's attempts ended, as far as they counted."""
        return [settlement.WhichOneof("how") for settlement in self.jobs[job_id].settlements]

    # Inside.

    def _next(self) -> int:
        self._now = next(self._revision)
        return self._now

    def _give_back(self, record: _Record) -> None:
        record.held = None
        record.state = "pending"
        self._pending.append(record.spec.job_id)
        self._changed.notify_all()

    def _end(self, session_id: str) -> int:
        self.sessions[session_id] = False
        held = [r for r in self.jobs.values() if r.held is not None and r.held.session_id == session_id]
        for record in held:
            self._give_back(record)
        return len(held)

    def _serve(self, method: str, request: Any, context: Any, work: Callable[[], Any]) -> Any:
        with self._changed:
            self.calls[method].append(request)
            self.times[method].append(time.monotonic())
            fault = self._faults[method].popleft() if self._faults[method] else self._always.get(method)
        if isinstance(fault, Fail):
            self._abort(context, fault.status)
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
            self._abort(context, answer)
        if isinstance(fault, LoseReply):
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return answer

    def _abort(self, context: Any, status: Status) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(_CODES[status.code], status.message)

    # WorkerService.

    def OpenSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            with self._changed:
                session_id = f"s-{request.request_id}"
                self.sessions.setdefault(session_id, True)
                return pb.OpenSessionResponse(
                    session_id=session_id,
                    ttl=_span(self.ttl),
                    heartbeat_interval=_span(self.interval or min(self.ttl / 3, 5.0)),
                    safe_duration=_span(self._safe()),
                    revision=self._now,
                )

        return self._serve("OpenSession", request, context, work)

    def _safe(self) -> float:
        return self.ttl - max(1.0, self.ttl / 5) if self.safe is None else self.safe

    def CloseSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            with self._changed:
                return pb.CloseSessionResponse(released=self._end(request.session_id))

        return self._serve("CloseSession", request, context, work)

    def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            with self._changed:
                if not self.sessions.get(request.session_id):
                    return status_of(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
                verdicts = []
                for claim in request.claims:
                    record = self.jobs[claim.job_id]
                    verdict = pb.VERDICT_LOST
                    if record.held is not None and record.held.token == claim.fencing_token:
                        verdict = pb.VERDICT_CANCEL_REQUESTED if record.cancel else pb.VERDICT_HELD
                    verdicts.append(
                        pb.ClaimVerdict(
                            job_id=claim.job_id, fencing_token=claim.fencing_token, verdict=verdict
                        )
                    )
                return pb.HeartbeatResponse(
                    authority=pb.AUTHORITY_CONFIRMED,
                    verdicts=verdicts,
                    safe_duration=_span(self._safe()),
                    revision=self._now,
                    command=self.command,
                    number=request.number,
                )

        return self._serve("Heartbeat", request, context, work)

    def ClaimJobs(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            deadline = time.monotonic() + request.wait.seconds + request.wait.nanos / 1e9
            with self._changed:
                if request.repeat:
                    mine = [
                        r
                        for r in self.jobs.values()
                        if r.held is not None and r.held.request_id == request.request_id
                    ]
                    if mine:
                        return pb.ClaimJobsResponse(claims=[_claim(r) for r in mine])
                while True:
                    if not self.sessions.get(request.session_id):
                        return status_of(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
                    gone = self._stopped or not context.is_active()
                    claims = [] if gone else self._take(request)
                    left = deadline - time.monotonic()
                    if claims or left <= 0 or gone:
                        return pb.ClaimJobsResponse(claims=claims)
                    self.polling += 1
                    self._changed.wait(min(left, 0.02))
                    self.polling -= 1

        return self._serve("ClaimJobs", request, context, work)

    def _take(self, request: Any) -> list[pb.Claim]:
        wanted = {(q.queue, kind) for q in request.queues for kind in q.types}
        claims: list[pb.Claim] = []
        token = 0
        for job_id in list(self._pending):
            record = self.jobs[job_id]
            if len(claims) == request.max_jobs or (record.spec.queue, record.spec.type) not in wanted:
                continue
            self._pending.remove(job_id)
            token = token or self._next()
            record.attempt += 1
            record.state = "running"
            record.claimed_at.append(time.monotonic())
            record.held = _Held(request.session_id, token, request.request_id, record.spec, record.attempt)
            claims.append(_claim(record))
        return claims

    def SettleJobs(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            with self._changed:
                return pb.SettleJobsResponse(results=[self._settle(one) for one in request.settlements])

        return self._serve("SettleJobs", request, context, work)

    def _settle(self, one: pb.Settlement) -> pb.SettleResult:
        record = self.jobs[one.job_id]
        content = one.SerializeToString(deterministic=True)
        if record.answered.get(one.fencing_token) == content:
            return pb.SettleResult(job_id=one.job_id)
        if record.held is None or record.held.token != one.fencing_token:
            lost = status_of(
                grpc.StatusCode.FAILED_PRECONDITION,
                "CLAIM_LOST",
                metadata={
                    "held": str(one.fencing_token),
                    "current": str(record.held.token if record.held else 0),
                },
            )
            return pb.SettleResult(job_id=one.job_id, error=lost)
        record.answered[one.fencing_token] = content
        record.settlements.append(one)
        record.held = None
        how = one.WhichOneof("how")
        if how == "release" and not record.cancel:
            self._give_back(record)
        else:
            record.state = "cancelled" if record.cancel and how != "complete" else str(how)
        self._next()
        self._changed.notify_all()
        return pb.SettleResult(job_id=one.job_id)

    def SaveCheckpoint(self, request: Any, context: Any) -> Any:  # noqa: N802
        def work() -> Any:
            with self._changed:
                record = self.jobs[request.job_id]
                if record.held is None or record.held.token != request.fencing_token:
                    return status_of(grpc.StatusCode.FAILED_PRECONDITION, "CLAIM_LOST")
                record.checkpoint = request.checkpoint
                return pb.SaveCheckpointResponse(stored=True)

        return self._serve("SaveCheckpoint", request, context, work)

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
                self.jobs[job_id] = _Record(stored)
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
            self._abort(context, fault.status)
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


def _span(seconds: float) -> Duration:
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def _claim(record: _Record) -> pb.Claim:
    assert record.held is not None
    spec = record.spec
    claim = pb.Claim(
        job_id=spec.job_id,
        fencing_token=record.held.token,
        queue=spec.queue,
        type=spec.type,
        attempt=record.attempt,
        payload=spec.payload,
        content_type=spec.content_type,
        labels=spec.labels,
        checkpoint=record.checkpoint,
    )
    if spec.HasField("run_timeout"):
        claim.run_timeout.CopyFrom(spec.run_timeout)
    return claim
