"""A proxy that knows etcd's calls, for what bytes alone cannot do: end a watch politely, lose an event.

Every call passes as it is. Watch streams can be ended with status OK, cancelled as a server cancels them, and
robbed of single events.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc

from leasekeeper.internal.etcd.v1.watch_pb2 import WatchResponse

__all__ = ["RpcProxy"]

_WATCH = "/etcdserverpb.Watch/Watch"
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


class RpcProxy(grpc.GenericRpcHandler):
    """Forwards gRPC calls to *target*; an async context manager.

    Attributes:
        loss: share of watch events that are lost, 0 to 1.
        lost: how many were.
        watches: watch streams that were opened.

    Args:
        target: ``host:port`` of an etcd.
        seed: of the losses.
    """

    def __init__(self, target: str, *, seed: int = 0) -> None:
        self._target = target
        self._chance = random.Random(seed)
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._ends: set[asyncio.Future[str]] = set()
        self.loss = 0.0
        self.lost = 0
        self.watches = 0

    @property
    def endpoint(self) -> str:
        """``127.0.0.1:<port>``."""
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        self._server = grpc.aio.server(options=(*_OPTIONS, ("grpc.so_reuseport", 0)))
        self._server.add_generic_rpc_handlers((self,))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
        await self._channel.close()

    def end_watches(self, how: str) -> int:
        """End every open watch stream: "ok" (status OK), or "cancelled" (the server's own word); how many."""
        ended = [one for one in self._ends if not one.done()]
        for one in ended:
            one.set_result(how)
        return len(ended)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Every path is taken as a stream, which on the wire a unary call is too; gRPC calls this."""
        path = handler_call_details.method
        assert isinstance(path, str)

        async def forward(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            call = self._channel.stream_stream(path)(
                requests, metadata=_plain(context), timeout=context.time_remaining()
            )
            try:
                replies = self._watched(call) if path == _WATCH else _all(call)
                async for reply in replies:
                    yield reply
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _watched(self, call: Any) -> AsyncIterator[bytes]:
        self.watches += 1
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            while True:
                reading = asyncio.ensure_future(call.read())
                await asyncio.wait({reading, end}, return_when=asyncio.FIRST_COMPLETED)
                if end.done():
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                    if end.result() == "cancelled":
                        yield WatchResponse(
                            watch_id=1, canceled=True, cancel_reason="told"
                        ).SerializeToString()
                    return
                reply = reading.result()
                if reply is grpc.aio.EOF:
                    return
                yield self._robbed(reply)
        finally:
            self._ends.discard(end)

    def _robbed(self, reply: bytes) -> bytes:
        if not self.loss:
            return reply
        response = WatchResponse.FromString(reply)
        kept = [event for event in response.events if self._chance.random() >= self.loss]
        self.lost += len(response.events) - len(kept)
        del response.events[:]
        response.events.extend(kept)
        return response.SerializeToString()


async def _all(call: Any) -> AsyncIterator[bytes]:
    async for reply in call:
        yield reply


def _plain(context: Any) -> tuple[tuple[str, str | bytes], ...]:
    """What the caller sent along, but for what every call has of its own."""
    metadata = context.invocation_metadata() or ()
    return tuple(
        (key, value) for key, value in metadata if key != "user-agent" and not key.startswith("grpc-")
    )
