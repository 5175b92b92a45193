"""The API through its generated stubs, where the SDK would hide what is tested: retries, beats, replays."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from leasekeeper.v1 import job_service_pb2 as jobs
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as workers
from leasekeeper.v1.job_service_pb2_grpc import JobServiceStub
from leasekeeper.v1.queue_service_pb2_grpc import QueueServiceStub
from leasekeeper.v1.worker_service_pb2_grpc import WorkerServiceStub

__all__ = ["Calls", "Refused", "TimedCall", "available", "refusal", "seconds"]

T = TypeVar("T")
QUEUE, TYPE = "work", "effect"
_SLACK = 0.5


def seconds(value: float) -> Duration:
    """A Duration."""
    return Duration(seconds=int(value), nanos=int((value - int(value)) * 1e9))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """One call, its deadline and how long it took, in seconds."""

    method: str
    deadline: float
    took: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """How a call was refused."""

    code: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    retry_after: float | None = None
    message: str = ""


def told(error: grpc.RpcError) -> Refused:
    """What a failed call says."""
    assert isinstance(error, grpc.aio.AioRpcError)
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(bytes(trailers.get("grpc-status-details-bin", b"")))
    return refused_by(status, error.code().name, error.details() or "")


def refused_by(status: status_pb2.Status, code: str, message: str = "") -> Refused:
    """What a ``google.rpc.Status`` says."""
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            detail.Unpack(bad)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            found = error_details_pb2.RetryInfo()
            detail.Unpack(found)
            retry = found.retry_delay.ToTimedelta().total_seconds()
    return Refused(
        code=code,
        reason=info.reason,
        metadata=dict(info.metadata),
        fields=tuple(violation.field for violation in bad.field_violations),
        retry_after=retry,
        message=message or status.message,
    )


async def refusal(call: Awaitable[Any]) -> Refused:
    """How *call* was refused.

    Raises:
        AssertionError: it was not.
    """
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return told(error)
    raise AssertionError(f"not refused: {answer!r}")


async def available(call: Callable[[], Awaitable[T]], *, timeout: float = 10.0) -> T:
    """The answer of *call*, made again while the path or the coordinator says UNAVAILABLE.

    Raises:
        TimeoutError: not within *timeout* seconds.
        grpc.aio.AioRpcError: any other refusal.
    """
    async with asyncio.timeout(timeout):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.1)


class Calls:
    """One channel to one endpoint; an async context manager. Every call has a deadline and is timed: that
    none outlived it by more than half a second (oracle O5) is asserted at the end.

    Args:
        endpoint: a coordinator's, or a proxy's.
        namespace: of every call.
        timeout: of a call that names none.
    """

    def __init__(self, endpoint: str, namespace: str, *, timeout: float = 5.0) -> None:
        self._endpoint = endpoint
        self.namespace = namespace
        self._timeout = timeout
        self._beats = 0
        self.timed: list[TimedCall] = []

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(
            self._endpoint,
            options=(
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 200),
                ("grpc.max_reconnect_backoff_ms", 500),
            ),
        )
        self.jobs = JobServiceStub(self._channel)
        self.workers = WorkerServiceStub(self._channel)
        self.queues = QueueServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()
        if kind is None:
            assert self.late == [], f"calls outlived their deadlines: {self.late[:5]}"

    @property
    def late(self) -> list[TimedCall]:
        """Calls that outlived their deadline by more than half a second (oracle O5)."""
        return [call for call in self.timed if call.took > call.deadline + _SLACK]

    async def _call(self, stub: Any, method: str, request: Any, timeout: float | None) -> Any:
        deadline = self._timeout if timeout is None else timeout
        begin = time.monotonic()
        try:
            return await getattr(stub, method)(request, timeout=deadline)
        finally:
            self.timed.append(TimedCall(method=method, deadline=deadline, took=time.monotonic() - begin))

    async def job_call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """A call of JobService."""
        return await self._call(self.jobs, method, request, timeout)

    async def worker_call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """A call of WorkerService."""
        return await self._call(self.workers, method, request, timeout)

    # -- producers ---------------------------------------------------------------------------------

    def spec(self, job_id: str = "", payload: bytes | dict[str, Any] = b"", **fields: Any) -> types.JobSpec:
        """A job of queue ``work`` and type ``effect`` unless told otherwise."""
        content = json.dumps(payload).encode() if isinstance(payload, dict) else payload
        return types.JobSpec(**{"job_id": job_id, "queue": QUEUE, "type": TYPE, "payload": content, **fields})

    async def submit(
        self,
        job_id: str = "",
        payload: bytes | dict[str, Any] = b"",
        *,
        request_id: str = "",
        timeout: float | None = None,
        **fields: Any,
    ) -> jobs.SubmitJobResponse:
        """SubmitJob."""
        request = jobs.SubmitJobRequest(
            namespace=self.namespace,
            request_id=request_id or uuid.uuid4().hex,
            job=self.spec(job_id, payload, **fields),
        )
        return await self.job_call("SubmitJob", request, timeout)

    async def submit_many(
        self, specs: Iterable[types.JobSpec], *, timeout: float | None = None
    ) -> list[jobs.SubmitResult]:
        """SubmitJobs, 100 a call; all must be taken."""
        waiting = list(specs)
        results: list[jobs.SubmitResult] = []
        for start in range(0, len(waiting), 100):
            request = jobs.SubmitJobsRequest(
                namespace=self.namespace, request_id=uuid.uuid4().hex, jobs=waiting[start : start + 100]
            )
            results += (await self.job_call("SubmitJobs", request, timeout)).results
        refused = [result for result in results if result.HasField("error")]
        assert not refused, refused[:3]
        return results

    async def get(self, job_id: str) -> types.Job:
        """GetJob."""
        request = jobs.GetJobRequest(namespace=self.namespace, job_id=job_id)
        return (await self.job_call("GetJob", request)).job

    async def state(self, job_id: str) -> str:
        """Its state, without the prefix."""
        return types.JobState.Name((await self.get(job_id)).state).removeprefix("JOB_STATE_")

    async def cancel(self, job_id: str) -> types.Job:
        """CancelJob."""
        request = jobs.CancelJobRequest(
            namespace=self.namespace, request_id=uuid.uuid4().hex, job_id=job_id, reason="test"
        )
        return (await self.job_call("CancelJob", request)).job

    async def delete(self, job_id: str) -> None:
        """DeleteJob."""
        request = jobs.DeleteJobRequest(namespace=self.namespace, request_id=uuid.uuid4().hex, job_id=job_id)
        await self.job_call("DeleteJob", request)

    # -- workers -----------------------------------------------------------------------------------

    async def open(self, ttl: float = 2.0, identity: str = "raw") -> str:
        """OpenSession; the session's id."""
        request = workers.OpenSessionRequest(
            namespace=self.namespace, request_id=uuid.uuid4().hex, identity=identity, ttl=seconds(ttl)
        )
        return str((await self.worker_call("OpenSession", request)).session_id)

    async def close_session(self, session: str) -> None:
        """CloseSession."""
        request = workers.CloseSessionRequest(
            namespace=self.namespace, request_id=uuid.uuid4().hex, session_id=session
        )
        await self.worker_call("CloseSession", request)

    async def beat(
        self, session: str, claims: Iterable[workers.Claim] = (), *, timeout: float | None = None
    ) -> workers.HeartbeatResponse:
        """Heartbeat that lists *claims*."""
        self._beats += 1
        request = workers.HeartbeatRequest(
            namespace=self.namespace,
            session_id=session,
            number=self._beats,
            sent_at=seconds(time.monotonic()),
            claims=[
                workers.HeldClaim(
                    job_id=claim.job_id, fencing_token=claim.fencing_token, sequence=self._beats
                )
                for claim in claims
            ],
        )
        return await self.worker_call("Heartbeat", request, timeout)

    async def verdict(self, session: str, claim: workers.Claim) -> str:
        """What a confirmed beat says of *claim*: HELD, CANCEL_REQUESTED or LOST."""
        reply = await self.beat(session, [claim])
        assert reply.authority == workers.AUTHORITY_CONFIRMED, reply
        [one] = reply.verdicts
        return workers.Verdict.Name(one.verdict).removeprefix("VERDICT_")

    async def claim(
        self,
        session: str,
        *,
        wait: float = 0.0,
        most: int = 1,
        request_id: str = "",
        repeat: bool = False,
        queue: str = QUEUE,
        kinds: Iterable[str] = (TYPE,),
        timeout: float | None = None,
    ) -> list[workers.Claim]:
        """ClaimJobs."""
        request = workers.ClaimJobsRequest(
            namespace=self.namespace,
            request_id=request_id or uuid.uuid4().hex,
            session_id=session,
            queues=[workers.QueueTypes(queue=queue, types=list(kinds))],
            max_jobs=most,
            wait=seconds(wait),
            repeat=repeat,
        )
        limit = timeout if timeout is not None else self._timeout + wait
        return list((await self.worker_call("ClaimJobs", request, limit)).claims)

    async def claim_one(self, session: str, job_id: str, *, wait: float = 0.0) -> workers.Claim:
        """ClaimJob."""
        request = workers.ClaimJobRequest(
            namespace=self.namespace,
            request_id=uuid.uuid4().hex,
            session_id=session,
            job_id=job_id,
            wait=seconds(wait),
        )
        return (await self.worker_call("ClaimJob", request, self._timeout + wait)).claim

    async def complete(
        self, claim: workers.Claim, result: bytes = b"", *, timeout: float | None = None
    ) -> str:
        """CompleteJob; the state it left."""
        request = workers.CompleteJobRequest(
            namespace=self.namespace, job_id=claim.job_id, fencing_token=claim.fencing_token, result=result
        )
        return _state(await self.worker_call("CompleteJob", request, timeout))

    async def fail(
        self,
        claim: workers.Claim,
        message: str = "failed",
        *,
        no_retry: bool = False,
        delay: float | None = None,
    ) -> str:
        """FailJob; the state it left."""
        request = workers.FailJobRequest(
            namespace=self.namespace,
            job_id=claim.job_id,
            fencing_token=claim.fencing_token,
            failure=types.Failure(type="Told", message=message),
            no_retry=no_retry,
            retry_delay=None if delay is None else seconds(delay),
        )
        return _state(await self.worker_call("FailJob", request))

    async def release(self, claim: workers.Claim, *, timeout: float | None = None) -> str:
        """ReleaseJob; the state it left."""
        request = workers.ReleaseJobRequest(
            namespace=self.namespace, job_id=claim.job_id, fencing_token=claim.fencing_token, reason="told"
        )
        return _state(await self.worker_call("ReleaseJob", request, timeout))

    @asynccontextmanager
    async def beating(
        self, session: str, claims: Iterable[workers.Claim] = (), *, every: float = 0.5
    ) -> AsyncIterator[None]:
        """Beat for *session*, listing what *claims* holds at each beat, until the block ends."""

        async def run() -> None:
            while True:
                try:
                    await self.beat(session, list(claims), timeout=2.0)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        return
                await asyncio.sleep(every)

        task = asyncio.create_task(run(), name="beats")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _state(response: Any) -> str:
    return types.JobState.Name(response.state).removeprefix("JOB_STATE_")
