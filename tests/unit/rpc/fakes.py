"""Use cases that record what they are asked and answer what a test wants, and a server around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from coordinator.app.machine import SystemClock
from coordinator.errors import Reason, RequestError
from coordinator.rpc.admin_servicer import AdminServicer, AdminUseCases
from coordinator.rpc.auth import TokenTable
from coordinator.rpc.call_guard import CallGuard, GuardConfig
from coordinator.rpc.health import Health
from coordinator.rpc.job_servicer import JobServicer, JobUseCases
from coordinator.rpc.limits import CallLimits
from coordinator.rpc.lock_servicer import LockServicer, LockUseCases
from coordinator.rpc.methods import SERVICES
from coordinator.rpc.queue_servicer import QueueServicer, QueueUseCases
from coordinator.rpc.server import ListenConfig, RpcServer
from coordinator.rpc.work_servicer import WorkServicer, WorkStreamsPort
from coordinator.rpc.worker_servicer import WorkerServicer, WorkerUseCases
from coordinator.services.work_stream import WorkOpening, WorkStream
from leasekeeper.v1 import job_service_pb2_grpc, worker_service_pb2_grpc


class PlainEntropy:
    """Numbers that a test can foretell."""

    def fraction(self) -> float:
        return 0.5

    def identifier(self) -> str:
        return "incident-1"

    def counter(self) -> int:
        return 1


class Scripted:
    """Any use case: each call is recorded; `answers` holds what a method returns, raises, or awaits."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def called(*args: Any, **named: Any) -> Any:
            self.calls.append((name, args, named))
            answer = self.answers[name]
            if isinstance(answer, BaseException):
                raise answer
            return await answer(*args, **named) if asyncio.iscoroutinefunction(answer) else answer

        return called


class ScriptedSubscription(Scripted):
    """As `Scripted`, with a watch that gives `watched` and then waits for ever; `closed` counts its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[Any] = []
        self.closed = 0

    async def watch(self, *args: Any) -> AsyncIterator[Any]:
        self.calls.append(("watch", args, {}))
        try:
            for item in self.watched:
                if isinstance(item, Exception):
                    raise item
                yield item
            await asyncio.Event().wait()
        finally:
            self.closed += 1


class NoStreams:
    """Opens no stream of a worker."""

    @asynccontextmanager
    async def open(self, namespace: str, opening: WorkOpening) -> AsyncGenerator[WorkStream, None]:
        raise RequestError(Reason.TOO_MANY_REQUESTS, "there are no streams here")
        yield


@dataclass
class Served:
    """A running server with its fakes and stubs."""

    server: RpcServer
    guard: CallGuard
    health: Health
    jobs: Any
    workers: Any
    channel: grpc.aio.Channel
    use: Scripted = field(default_factory=Scripted)
    subscription: ScriptedSubscription = field(default_factory=ScriptedSubscription)


@asynccontextmanager
async def served(
    *,
    tokens: TokenTable | None = None,
    guard_config: GuardConfig | None = None,
    opened: bool = True,
    streams: WorkStreamsPort | None = None,
) -> AsyncIterator[Served]:
    """A server on a free port; everything of it has ended afterwards."""
    use, subscription = Scripted(), ScriptedSubscription()
    guard = CallGuard(SystemClock(), PlainEntropy(), tokens, guard_config or GuardConfig())
    health = Health(SERVICES, linger_s=0.1)
    jobs = JobServicer(
        JobUseCases(  # type: ignore[arg-type]
            submission=use, changes=use, retrying=use, redrive=use, queries=use, subscription=subscription
        ),
        SystemClock(),
        CallLimits(),
    )
    workers = WorkerServicer(
        WorkerUseCases(sessions=use, dispatch=use, settlement=use),  # type: ignore[arg-type]
        SystemClock(),
        CallLimits(),
        WorkServicer(
            streams or NoStreams(),
            use,  # type: ignore[arg-type]
            use,  # type: ignore[arg-type]
            SystemClock(),
            PlainEntropy(),
            coordinator_id="c1",
        ),
    )
    server = RpcServer(ListenConfig(address="127.0.0.1:0"))
    server.bind()
    server.register(
        guard,
        health,
        {
            "leasekeeper.v1.JobService": jobs,
            "leasekeeper.v1.WorkerService": workers,
            "leasekeeper.v1.LockService": LockServicer(
                LockUseCases(acquisition=use, locks=use),  # type: ignore[arg-type]
                SystemClock(),
                CallLimits(),
            ),
            "leasekeeper.v1.QueueService": QueueServicer(
                QueueUseCases(stats=use, circuits=use, queues=use)  # type: ignore[arg-type]
            ),
            "leasekeeper.v1.AdminService": AdminServicer(
                AdminUseCases(reconcile=use, notices=subscription, sessions=use)  # type: ignore[arg-type]
            ),
        },
    )
    await server.start()
    if opened:
        guard.open()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Served(
                server=server,
                guard=guard,
                health=health,
                jobs=job_service_pb2_grpc.JobServiceStub(channel),
                workers=worker_service_pb2_grpc.WorkerServiceStub(channel),
                channel=channel,
                use=use,
                subscription=subscription,
            )
    finally:
        await server.stop(0)


@dataclass(frozen=True)
class Told:
    """What a caller can read of an error."""

    code: grpc.StatusCode
    reason: str
    metadata: dict[str, str]
    fields: list[str]
    retry_ms: int | None


def told(error: grpc.aio.AioRpcError) -> Told:
    """Read the details as any client in any language does."""
    from google.rpc import error_details_pb2, status_pb2

    trailing = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    info, retry, bad = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.BadRequest(),
    )
    retry_ms = None
    for detail in status.details:
        if detail.Unpack(info):
            assert info.domain == "leasekeeper"
        elif detail.Unpack(retry):
            retry_ms = retry.retry_delay.ToMilliseconds()
        else:
            assert detail.Unpack(bad)
    return Told(
        error.code(), info.reason, dict(info.metadata), [v.field for v in bad.field_violations], retry_ms
    )


async def refusal(call: Awaitable[Any]) -> Told:
    """The error that *call* ends with."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return told(error)
    raise AssertionError(f"not refused: {answer!r}")


def names(calls: Iterator[Any] | list[tuple[str, Any, Any]]) -> list[str]:
    """Names of the recorded calls."""
    return [call[0] for call in calls]
