"""A gRPC proxy before etcd that passes everything on and notes what is asked about one job, and when."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc

from leasekeeper.internal.etcd.v1 import kv_pb2 as kv

__all__ = ["EtcdSpy"]

_ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_ANY_PINGS = (("grpc.http2.min_ping_interval_without_data_ms", 1_000), ("grpc.http2.max_ping_strikes", 0))


class EtcdSpy(grpc.GenericRpcHandler):
    """Serves on 127.0.0.1; an async context manager.

    It knows nothing of what the coordinator counts: it reads the requests that reach etcd. Times are those of
    ``time.monotonic``, taken before a request is passed on.

    Args:
        target: ``host:port`` of etcd.
        job_id: the job that is watched, in any namespace; plain letters and digits.

    Attributes:
        looks: reads of the job's spec outside a claim, which a claim by id makes (and GetJob, and a sweep).
        claims: transactions that would put its claim.
        readied: transactions that make it wait.
    """

    def __init__(self, target: str, job_id: str) -> None:
        self._target = target
        self._job = job_id.encode()
        self._port = 0
        self.looks: list[float] = []
        self.claims: list[float] = []
        self.readied: list[float] = []

    @property
    def endpoint(self) -> str:
        """``127.0.0.1:<port>``."""
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._target, options=_ANY_SIZE)
        self._server = grpc.aio.server(options=(*_ANY_SIZE, *_ANY_PINGS))
        self._server.add_generic_rpc_handlers((self,))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def service(self, details: Any) -> Any:
        """Every method, as a stream both ways: on the wire a unary call looks the same."""
        method = details.method
        upstream = self._channel.stream_stream(method)

        async def passed_on(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async def noted() -> AsyncIterator[bytes]:
                async for request in requests:
                    self._note(method, request)
                    yield request

            call = upstream(noted(), timeout=context.time_remaining())
            try:
                async for reply in call:
                    yield reply
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(passed_on)

    def _note(self, method: str, request: bytes) -> None:
        now = time.monotonic()
        if self._job not in request:
            return
        if method.endswith("KV/Range"):
            self._read(kv.RangeRequest.FromString(request), now)
        elif method.endswith("KV/Txn"):
            self._walk(kv.TxnRequest.FromString(request), now)

    def _walk(self, txn: kv.TxnRequest, now: float) -> None:
        puts = {self._kind(op.request_put.key) for op in txn.success if op.HasField("request_put")}
        if "claim" in puts:
            self.claims.append(now)
        if "ready" in puts:
            self.readied.append(now)
        for op in txn.success:
            if op.HasField("request_txn"):
                self._walk(op.request_txn, now)
            elif op.HasField("request_range") and "claim" not in puts:
                self._read(op.request_range, now)

    def _read(self, request: kv.RangeRequest, now: float) -> None:
        if self._kind(request.key) == "job" and not request.range_end:
            self.looks.append(now)

    def _kind(self, key: bytes) -> str:
        """The kind of a key of the job (``/leasekeeper/<ns>/<kind>/…/<job>``), empty for another job's."""
        parts = key.split(b"/")
        return parts[3].decode() if len(parts) > 4 and parts[-1] == self._job else ""
