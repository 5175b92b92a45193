"""``grpc.health.v1``, per service and live.

"" says that the process is alive, and depends on nothing: a liveness probe must not restart coordinators
because etcd is down. A service is SERVING while ``ready`` says so (feeds fresh, etcd reachable). Redis
plays no part: without it the service is degraded, not unhealthy. Drain sets NOT_SERVING for ever, before
anything else stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

__all__ = ["HEALTH_SERVICE", "Health"]

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
_Status = health_pb2.HealthCheckResponse
_SERVING: Final[int] = _Status.SERVING
_NOT_SERVING: Final[int] = _Status.NOT_SERVING


class Health:
    """The servicer, and the switch.

    grpcio-health-checking has one as well, whose switch waits for every watcher's socket: a peer that reads
    nothing would hold up the drain.

    Args:
        services: full names of the services whose health goes with readiness.
        linger_s: how long a watcher's stream stays open after the last NOT_SERVING.
    """

    def __init__(self, services: Sequence[str], *, linger_s: float = 0.5) -> None:
        self._services = frozenset(services)
        self._linger_s = linger_s
        self._ready = False
        self._draining = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether the services are SERVING."""
        return self._ready and not self._draining

    def set_ready(self, ready: bool) -> None:
        """Say whether the services can serve. After `drain` it changes nothing."""
        if ready != self._ready:
            self._ready = ready
            self._tell()

    def drain(self) -> None:
        """NOT_SERVING, for the process too, and for ever."""
        if not self._draining:
            self._draining = True
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def status(self, service: str) -> int | None:
        """The status of a service, None if there is no such service."""
        if service == "":
            return _NOT_SERVING if self._draining else _SERVING
        if service in self._services:
            return _SERVING if self.ready else _NOT_SERVING
        return None

    async def check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        """Health.Check. NOT_FOUND for an unknown service."""
        status = self.status(request.service)
        if status is None:
            return await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return _Status(status=status)

    async def watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Health.Watch.

        An unknown service is SERVICE_UNKNOWN and the stream goes on, as the protocol wants it.
        """
        last = None
        while True:
            changed = self._changed
            status = self.status(request.service)
            if status is None:
                status = _Status.SERVICE_UNKNOWN
            if status != last:
                await context.write(_Status(status=status))
                last = status
                continue  # it may have changed during the write
            if self._draining:
                # grpc.aio's callers drop a message that arrives together with the end of its stream.
                await asyncio.sleep(self._linger_s)
                return
            await changed.wait()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to ``server``."""
        read = health_pb2.HealthCheckRequest.FromString
        write = _Status.SerializeToString
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(self.check, read, write),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch, read, write),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH_SERVICE, handlers),))
