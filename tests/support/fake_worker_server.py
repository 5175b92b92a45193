"""A small coordinator for tests of the SDK: real gRPC on loopback, state in memory, faults by script.

It knows sessions, claims, fencing and replays as far as a worker can tell; it is no model of the service.
Runs in threads of its own, so that a test may block its event loop.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.duration_pb2 import Duration

from leasekeeper.v1 import worker_service_pb2 as pb
from leasekeeper.v1.job_service_pb2_grpc import add_JobServiceServicer_to_server
from leasekeeper.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)
from tests.support.fake_job_service import FakeJobs, Held, Record
from tests.support.scripted_faults import Answer, Fail, Hang, LoseReply, status_of

__all__ = ["Answer", "Fail", "FakeCoordinator", "Hang", "LoseReply", "status_of"]


class FakeCoordinator(FakeJobs, WorkerServiceServicer):
    """Start it with ``with``; `endpoint` is its address.

    Attributes:
        polling: claim calls that wait for a job.
    """

    def __init__(
        self,
        *,
        ttl: float = 10.0,
        interval: float = 0.0,
        safe: float | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        super().__init__()
        self.polling = 0
        self.ttl = ttl
        self.interval = interval
        self.safe = safe
        self._credentials = credentials
        self.sessions: dict[str, bool] = {}
        self.command = pb.WORKER_COMMAND_UNSPECIFIED
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
        address = f"127.0.0.1:{port}"
        if self._credentials is None:
            bound = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, self._credentials)
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

    def _give_back(self, record: Record) -> None:
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
            record.held = Held(request.session_id, token, request.request_id, record.spec, record.attempt)
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


def _span(seconds: float) -> Duration:
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def _claim(record: Record) -> pb.Claim:
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
