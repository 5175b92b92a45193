"""What every call passes through.

Readable or not, allowed or not, its deadline, and errors turned into statuses.

One function around each method, and no interceptors: an interceptor costs every call more than this whole
module.

A call without a deadline gets one. A deadline is handed down as an absolute time that lies a little before
the caller's own, so that the answer "the outcome is unknown" still reaches it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from coordinator.errors import FieldViolation, Reason, RequestError
from coordinator.ports import Clock, Entropy
from coordinator.rpc.auth import Scope, TokenTable
from coordinator.rpc.convert import namespace_of
from coordinator.rpc.field_checks import Violations, check_well_formed, duration_ms
from coordinator.rpc.status import CODES, DETAILS_KEY, to_request_error, to_status

__all__ = [
    "CallGuard",
    "DuplexBehaviour",
    "GuardConfig",
    "Method",
    "StreamBehaviour",
    "UnaryBehaviour",
    "Unreadable",
]

_LOG = logging.getLogger(__name__)
_LARGEST_MARGIN: Final = 0.1
_MARGIN_SHARE: Final = 0.1

UnaryBehaviour = Callable[[Any, float], Awaitable[Message]]
"""A method of a servicer: request and absolute deadline in, response out."""

StreamBehaviour = Callable[[Any], AsyncGenerator[Message, None]]
"""A streaming method of a servicer.

Request in, responses out. Streams end by the caller, by an error, or by drain.
"""

DuplexBehaviour = Callable[[Any, AsyncIterator[Any]], AsyncGenerator[Message, None]]
"""A method of a servicer with streams both ways.

The opening message and the requests after it in, responses out. It bounds how many there are, and ends
them at a drain itself.
"""


class Context(Protocol):
    """The parts of a ``grpc.aio`` servicer context that are used here."""

    def time_remaining(self) -> float | None: ...
    def invocation_metadata(self) -> Any: ...
    async def write(self, message: Any) -> None: ...
    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """Bounds of calls.

    Args:
        unary_timeout_s: what a unary call without a deadline gets, on top of the wait that it asks for.
        max_calls: unary calls under way at once; more are refused with TOO_MANY_REQUESTS.
        max_streams: streams of answers under way at once.
        opening_s: how long a stream of requests may take to send its first.
        unread_s: how long one response of such a stream may stay unread.
    """

    unary_timeout_s: float = 10.0
    max_calls: int = 20_000
    max_streams: int = 2_000
    opening_s: float = 10.0
    unread_s: float = 20.0


class Method(NamedTuple):
    """How one method is served, besides its behaviour.

    ``wait_field`` names the request's Duration that a long poll waits; ``batch_field`` the repeated field
    of a batch, whose whole request may have at most ``largest`` bytes (0: no such limit); ``opening`` the
    field of a stream's first request that opens it, and names the namespace.
    """

    scope: Scope
    wait_field: str = ""
    batch_field: str = ""
    largest: int = 0
    opening: str = ""


class Unreadable:
    """Stands for a request that was refused while it was read; the bytes are gone."""

    __slots__ = ("error",)

    def __init__(self, error: RequestError) -> None:
        self.error = error


class CallGuard:
    """Serves methods. One per server.

    Args:
        clock: deadlines are in its monotonic time.
        entropy: makes incident ids.
        tokens: who may call what; None: everybody everything.
        config: see ``GuardConfig``.
    """

    def __init__(
        self, clock: Clock, entropy: Entropy, tokens: TokenTable | None, config: GuardConfig
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self.tokens = tokens
        self._config = config
        self._calls = 0
        self._streams = 0
        self._drained = asyncio.Event()
        self._open = False

    def open(self) -> None:
        """Serve. Before that every call is told NOT_READY: the process listens before it knows the store."""
        self._open = True

    @property
    def calls(self) -> int:
        """Unary calls under way."""
        return self._calls

    @property
    def streams(self) -> int:
        """Streams under way."""
        return self._streams

    def drain(self) -> None:
        """End all streams with DRAINING, and refuse new ones. Unary calls go on."""
        self._drained.set()

    @staticmethod
    def reader(parse: Callable[[bytes], Message], method: Method) -> Callable[[bytes], Message | Unreadable]:
        """A deserializer that says precisely why it refuses; grpc.aio would answer UNKNOWN."""

        def read(data: bytes) -> Message | Unreadable:
            if method.largest and len(data) > method.largest:
                size, field = len(data), method.batch_field
                text = f"the request has {size} bytes, the limit of a call is {method.largest}"
                return Unreadable(
                    RequestError(
                        Reason.VALIDATION_FAILED,
                        text,
                        metadata={"size": str(size), "limit": str(method.largest)},
                        fields=(FieldViolation(field, text),),
                    )
                )
            try:
                return parse(data)
            except DecodeError:
                # Also text that is not UTF-8: protobuf refuses the whole message and does not say where.
                text = "the request is not a valid message (wrong wire format, or text that is not UTF-8)"
                return Unreadable(
                    RequestError(Reason.VALIDATION_FAILED, text, fields=(FieldViolation("", text),))
                )

        return read

    def unary(self, method: Method, behaviour: UnaryBehaviour) -> Callable[[Any, Any], Awaitable[Any]]:
        """The handler of a unary method."""

        async def serve(request: Any, context: Context) -> Any:
            self._calls += 1
            try:
                self._admit(request, context, method)
                remaining = context.time_remaining()
                if remaining is None:
                    return await self._bounded(request, method, behaviour)
                margin = min(_LARGEST_MARGIN, remaining * _MARGIN_SHARE)
                return await behaviour(request, self._clock.monotonic() + remaining - margin)
            except asyncio.CancelledError as error:
                refusal = self._cancelled(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets a status
                refusal = to_request_error(error, self._entropy.identifier)
            finally:
                self._calls -= 1
            return await _refuse(context, refusal)

        return serve

    def stream(self, method: Method, behaviour: StreamBehaviour) -> Callable[[Any, Any], Awaitable[None]]:
        """The handler of a method that answers with a stream.

        It writes, and is no generator: grpc.aio leaves a generator open when its caller goes.
        """

        async def serve(request: Any, context: Context) -> None:
            self._streams += 1
            try:
                self._admit(request, context, method)
                if self._drained.is_set():
                    raise _draining()
                if self._streams > self._config.max_streams:
                    raise RequestError(
                        Reason.TOO_MANY_REQUESTS, f"there are {self._config.max_streams} streams already"
                    )
                # The responses are closed here, at once, whoever ends the stream; their queues go with them.
                async with aclosing(behaviour(request)) as responses:
                    while (response := await self._next(responses)) is not None:
                        await context.write(response)
                return
            except asyncio.CancelledError as error:
                refusal = self._cancelled(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets a status
                refusal = to_request_error(error, self._entropy.identifier)
            finally:
                self._streams -= 1
            await _refuse(context, refusal)

        return serve

    def duplex(self, method: Method, behaviour: DuplexBehaviour) -> Callable[[Any, Any], Awaitable[None]]:
        """The handler of a method with streams both ways."""

        async def serve(requests: AsyncIterator[Any], context: Context) -> None:
            try:
                first = await self._first(requests)
                opening = first if type(first) is Unreadable else getattr(first, method.opening)
                self._admit(opening, context, method)
                if self._drained.is_set():
                    raise _draining()
                async with aclosing(behaviour(first, requests)) as responses:
                    async for response in responses:
                        await self._write(context, response)
                return
            except asyncio.CancelledError as error:
                refusal = self._cancelled(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets a status
                refusal = to_request_error(error, self._entropy.identifier)
            await _refuse(context, refusal)

        return serve

    async def _first(self, requests: AsyncIterator[Any]) -> Any:
        """The first request of a stream.

        Raises:
            RequestError: VALIDATION_FAILED: there is none.
        """
        try:
            async with asyncio.timeout(self._config.opening_s):
                first = await anext(requests, None)
        except TimeoutError:
            first = None
        if first is None:
            text = f"the stream has no first request within {self._config.opening_s:g} s"
            raise RequestError(Reason.VALIDATION_FAILED, text, fields=(FieldViolation("", text),))
        return first

    async def _write(self, context: Context, response: Message) -> None:
        """Write one response.

        Raises:
            RequestError: TOO_MANY_REQUESTS: its reader does not read.
        """
        try:
            async with asyncio.timeout(self._config.unread_s):
                await context.write(response)
        except TimeoutError:
            raise RequestError(
                Reason.TOO_MANY_REQUESTS, f"a response was not read within {self._config.unread_s:g} s"
            ) from None

    async def _next(self, responses: AsyncGenerator[Message, None]) -> Message | None:
        """The next response, None at the end.

        A drain interrupts this wait and never a write: grpc.aio cannot end a stream whose write was
        cancelled, and its caller would hang.

        Raises:
            RequestError: DRAINING.
        """
        coming = asyncio.ensure_future(anext(responses, None))
        draining = asyncio.ensure_future(self._drained.wait())
        try:
            await asyncio.wait((coming, draining), return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                raise _draining()
            return coming.result()
        finally:
            draining.cancel()
            if not coming.done():
                coming.cancel()
                await asyncio.wait((coming,))

    def _admit(self, request: Any, context: Context, method: Method) -> None:
        if type(request) is Unreadable:
            raise request.error
        if not self._open:
            raise RequestError(Reason.NOT_READY, "this coordinator is starting, or etcd does not answer")
        if self.tokens is not None:
            headers = context.invocation_metadata() or ()
            self.tokens.check(headers, method.scope, namespace_of(request.namespace))
        if self._calls > self._config.max_calls:
            raise RequestError(
                Reason.TOO_MANY_REQUESTS,
                f"{self._config.max_calls} calls are under way; try another coordinator",
            )

    async def _bounded(self, request: Any, method: Method, behaviour: UnaryBehaviour) -> Message:
        seconds = self._config.unary_timeout_s
        if method.wait_field and request.HasField(method.wait_field):
            wait = getattr(request, method.wait_field)
            if check_well_formed(Violations(), "", wait):
                seconds += min(max(duration_ms(wait) / 1000, 0.0), 60.0)
        try:
            async with asyncio.timeout(seconds):
                return await behaviour(request, self._clock.monotonic() + seconds * (1 - _MARGIN_SHARE))
        except TimeoutError as error:
            raise RequestError(
                Reason.OUTCOME_UNKNOWN, f"not answered within {seconds:g} s; the call named no deadline"
            ) from error

    def _cancelled(self, error: asyncio.CancelledError) -> RequestError:
        # grpc.aio sends no status for a handler that ends with CancelledError: if the caller has not gone,
        # it would hang.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise error
        _LOG.warning("an inner task was cancelled under a call")
        return RequestError(
            Reason.OUTCOME_UNKNOWN,
            "work under the call was cancelled: repeat it with the same request_id or token",
        )


def _draining() -> RequestError:
    return RequestError(Reason.DRAINING, "this coordinator is stopping; use another, and resume there")


async def _refuse(context: Context, refusal: RequestError) -> Any:
    status = to_status(refusal)
    details = status.SerializeToString()
    return await context.abort(CODES[refusal.reason], status.message, ((DETAILS_KEY, details),))
