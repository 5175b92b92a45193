"""A gRPC server that answers etcd's paths as a test tells it to: for answers that a real etcd gives only
rarely."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc

__all__ = ["FakeEtcd"]

UnaryBehaviour = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]
StreamBehaviour = Callable[
    [AsyncIterator[bytes], "grpc.aio.ServicerContext[bytes, bytes]"], AsyncIterator[bytes]
]


class FakeEtcd(grpc.GenericRpcHandler):
    """Set `unary` and `streams` by path; unknown paths are UNIMPLEMENTED. An async context manager."""

    def __init__(self) -> None:
        self.unary: dict[str, UnaryBehaviour] = {}
        self.streams: dict[str, StreamBehaviour] = {}
        self.calls: list[str] = []
        self._server: grpc.aio.Server | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        """``127.0.0.1:<port>``."""
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Find the handler; gRPC calls this."""
        path = handler_call_details.method
        assert isinstance(path, str)
        self.calls.append(path)
        if path in self.unary:
            return grpc.unary_unary_rpc_method_handler(self.unary[path])
        if path in self.streams:
            return grpc.stream_stream_rpc_method_handler(self.streams[path])
        return None

    def refuse(self, path: str, code: grpc.StatusCode, details: str) -> None:
        """Answer every call of the unary *path* with an error."""

        async def behaviour(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            await context.abort(code, details)
            raise AssertionError("unreachable")

        self.unary[path] = behaviour

    def hang(self, path: str) -> None:
        """Never answer the unary *path*."""

        async def behaviour(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

        self.unary[path] = behaviour
