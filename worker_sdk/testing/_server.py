"""The fake's gRPC server: every method's bytes in, its answer or its refusal out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from leasekeeper.v1 import job_service_pb2, worker_service_pb2
from worker_sdk.testing._job_calls import JobCalls, WatchStream
from worker_sdk.testing._refusals import CODES, DETAILS_KEY, Field, Refused, to_status
from worker_sdk.testing._stage import Call, Stage, Unreachable
from worker_sdk.testing._work_calls import WorkCalls

__all__ = ["Server"]

_THREADS: Final = 256
"""Calls that may wait at once; threads are made as they are needed."""

_NO_DEADLINE_S: Final = 60.0
_UNBOUNDED_S: Final = 1e6
_STREAM_S: Final = 3600.0
_BATCHES: Final = {"SubmitJobs": "jobs", "SettleJobs": "settlements"}
_LARGEST_BATCH: Final = 3 << 20
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    # As the service: SDKs may ping every 5 s, also without a call.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class Server:
    """JobService and WorkerService on a loopback port.

    Args:
        stage: the world and its lock.
        jobs, work: the methods.
        turn: called with the lock held before each call, so that what is due is done.
    """

    def __init__(self, stage: Stage, jobs: JobCalls, work: WorkCalls, turn: Callable[[], None]) -> None:
        self._stage = stage
        self._turn = turn
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="leasekeeper-fake")
        self._server = grpc.server(self._pool, options=_OPTIONS)
        services = job_service_pb2.DESCRIPTOR.services_by_name, worker_service_pb2.DESCRIPTOR.services_by_name
        self._server.add_generic_rpc_handlers(
            (
                self._handler(services[0]["JobService"], jobs),
                self._handler(services[1]["WorkerService"], work),
            )
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def start(self) -> None:
        """Listen."""
        self._server.start()

    def stop(self) -> None:
        """Cut all connections. The stage has been told before, so that no call waits any more."""
        self._server.stop(0).wait(5)
        self._pool.shutdown(wait=False)

    def _handler(self, service: ServiceDescriptor, calls: object) -> grpc.GenericRpcHandler:
        handlers: dict[str, Any] = {}
        for method in service.methods:
            behaviour = getattr(calls, _snake(method.name), None)
            if behaviour is None:
                continue  # gRPC answers UNIMPLEMENTED
            if method.server_streaming:
                handlers[method.name] = grpc.unary_stream_rpc_method_handler(self._stream(method, behaviour))
            else:
                handlers[method.name] = grpc.unary_unary_rpc_method_handler(self._unary(method, behaviour))
        return grpc.method_handlers_generic_handler(service.full_name, handlers)

    def _unary(self, method: MethodDescriptor, behaviour: Callable[[Any, Call], Message]) -> Any:
        read = _reader(method)

        def serve(data: bytes, context: grpc.ServicerContext) -> bytes:
            call = self._call(context, _NO_DEADLINE_S)
            try:
                with self._stage.changed:
                    self._stage.check()
                    request = read(data)
                    self._turn()
                    before = self._stage.world.revision
                    try:
                        return behaviour(request, call).SerializeToString()
                    finally:
                        if self._stage.world.revision != before:
                            self._stage.changed.notify_all()
            except Refused as error:
                refused = error
            except Unreachable:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the fake coordinator is cut off")
            return _refuse(context, refused)

        return serve

    def _stream(self, method: MethodDescriptor, behaviour: Callable[[Any, Call], WatchStream]) -> Any:
        read = _reader(method)

        def serve(data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            call = self._call(context, _STREAM_S)
            try:
                with self._stage.changed:
                    self._stage.check()
                    stream = behaviour(read(data), call)
                for message in stream.messages(call):
                    yield message.SerializeToString()
                return
            except Refused as error:
                refused = error
            except Unreachable:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the fake coordinator is cut off")
            _refuse(context, refused)

        return serve

    def _call(self, context: grpc.ServicerContext, otherwise: float) -> Call:
        remaining = context.time_remaining()
        # gRPC tells a call without a deadline that nearly for ever remains.
        seconds = otherwise if remaining > _UNBOUNDED_S else remaining - min(0.1, remaining * 0.1)
        context.add_callback(self._left)
        return Call(time.monotonic() + seconds, context.is_active)

    def _left(self) -> None:
        """A caller has gone, or has its answer: let those that wait look whether it was theirs."""
        with self._stage.changed:
            self._stage.changed.notify_all()


def _reader(method: MethodDescriptor) -> Callable[[bytes], Message]:
    kind = GetMessageClass(method.input_type)
    field = _BATCHES.get(method.name)

    def read(data: bytes) -> Message:
        if field is not None and len(data) > _LARGEST_BATCH:
            text = f"the request has {len(data)} bytes, the limit of a call is {_LARGEST_BATCH}"
            metadata = {"size": str(len(data)), "limit": str(_LARGEST_BATCH)}
            raise Refused("VALIDATION_FAILED", text, metadata=metadata, fields=[Field(field, text)])
        try:
            return kind.FromString(data)
        except DecodeError:
            text = "the request is not a valid message (wrong wire format, or text that is not UTF-8)"
            raise Refused("VALIDATION_FAILED", text, fields=[Field("", text)]) from None

    return read


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _refuse(context: grpc.ServicerContext, refused: Refused) -> bytes:
    status = to_status(refused)
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
    context.abort(CODES[refused.reason], status.message)
