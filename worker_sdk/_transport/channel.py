"""One asyncio channel to several coordinators: made lazily in the running loop, bound to loop and process."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from worker_sdk._convert.status import from_rpc_failure
from worker_sdk._machine import retry_delay
from worker_sdk._seams import Seams
from worker_sdk._transport.duplex import Duplex
from worker_sdk._transport.methods import Method
from worker_sdk._transport.options import channel_arguments, credentials, metadata
from worker_sdk.config import ConnectionConfig
from worker_sdk.errors import (
    ClientClosed,
    DeadlineExceeded,
    EtagMismatch,
    ForkedProcess,
    LeasekeeperError,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    RateLimited,
    RequestError,
    TooManyRequests,
    Unavailable,
    WrongEventLoop,
)

__all__ = ["CoordinatorChannel", "repeatable"]

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

_ELSEWHERE = (Unavailable, OutcomeUnknown, DeadlineExceeded)
_KINDS = {"unary": "unary_unary", "stream": "unary_stream", "duplex": "stream_stream"}
# The longest call, a long poll or a stream of changes, ends before; `Timeouts.stream` may be longer, and then
# its owner resumes it.
_RETIRED_SECONDS = 60.0


def repeatable(error: LeasekeeperError) -> bool:
    """Return whether the same call, sent again, may go better."""
    return isinstance(error, (*_ELSEWHERE, TooManyRequests, RateLimited))


class CoordinatorChannel:
    """Calls coordinators, one endpoint at a time, moving on to the next when one fails.

    Args:
        config: endpoints, credentials, timeouts, backoff.
        seams: clock, sleep and randomness.
    """

    def __init__(self, config: ConnectionConfig, seams: Seams) -> None:
        self._config = config
        self._seams = seams
        self._addresses = config.addresses()
        # Workers that start together spread over the coordinators.
        self._current = int(seams.fraction() * len(self._addresses)) % len(self._addresses)
        self._metadata = metadata(config)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._callables: dict[tuple[str, str], Any] = {}
        self._retired: deque[tuple[float, grpc.aio.Channel]] = deque()
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def endpoint_count(self) -> int:
        """How many endpoints there are."""
        return len(self._addresses)

    def check(self) -> None:
        """Return if it can be used here and now.

        Raises:
            ClientClosed, ForkedProcess, WrongEventLoop: it cannot.
        """
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise ClientClosed("it was closed")
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"made in process {self._pid}, used in {os.getpid()}: connections do not pass over a fork;"
                " make a new one in the child"
            )
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise WrongEventLoop(
                "first used in another event loop, which still exists: make one for each loop"
            )
        # A second asyncio.run of the same process: what belonged to the closed loop is of no use any more.
        self._channels.clear()
        self._callables.clear()
        self._retired.clear()
        self._loop = loop

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            arguments = channel_arguments(self._config)
            secure = credentials(self._config)
            if secure is None:
                channel = grpc.aio.insecure_channel(address, options=arguments)
            else:
                channel = grpc.aio.secure_channel(address, secure, options=arguments)
            self._channels[address] = channel
        return channel

    def _callable(
        self, method: Method[Q, A], address: str, kind: Literal["unary", "stream", "duplex"]
    ) -> Any:
        made = self._callables.get((method.path, address))
        if made is None:
            channel = self._channel(address)
            made = getattr(channel, _KINDS[kind])(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
            self._callables[(method.path, address)] = made
        return made

    def _move_on(self, address: str) -> None:
        if self._addresses[self._current] == address:
            self._current = (self._current + 1) % len(self._addresses)

    def _failure(self, method: Method[Q, A], error: grpc.aio.AioRpcError, address: str) -> LeasekeeperError:
        trailing = [(str(key), value) for key, value in (error.trailing_metadata() or ())]
        found = from_rpc_failure(error.code(), error.details() or "", trailing, changes=method.changes)
        if isinstance(found, _ELSEWHERE):
            self._move_on(address)
        return found

    async def attempt(self, method: Method[Q, A], request: Q, *, timeout: float) -> A:
        """Send one call to the present endpoint, once.

        Args:
            timeout: seconds; the deadline that the coordinator sees too.

        Raises:
            RequestError, DeadlineExceeded: what became of it.
            ClientClosed, WrongEventLoop, ForkedProcess: it cannot be used here.
        """
        self._check()
        address = self._addresses[self._current]
        call = self._callable(method, address, "unary")
        try:
            answer: A = await call(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failure(method, error, address) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise ClientClosed("it was closed while the call was under way") from None
            raise
        return answer

    async def call(
        self,
        method: Method[Q, A],
        request: Q,
        *,
        timeout: float,
        attempt_timeout: float | None = None,
        request_id: str = "",
        repeat_tells: bool = True,
    ) -> A:
        """Send a call, the same bytes again where that may help, until it is answered or *timeout* has
        passed.

        Args:
            timeout: seconds for everything.
            attempt_timeout: seconds for one try; None: the configured one.
            request_id: told with `OutcomeUnknown`.
            repeat_tells: whether a refusal of a repeat says what became of the first try. If not, such a
                refusal after an unanswered try raises OutcomeUnknown with the refusal as its cause.

        Raises:
            OutcomeUnknown: it changes something, and a try stayed unanswered.
            RequestError, DeadlineExceeded: as for `attempt`.
        """
        seams, retry = self._seams, self._config.retry
        deadline = seams.now() + timeout
        per_try = self._config.timeouts.attempt if attempt_timeout is None else attempt_timeout
        unknown: OutcomeUnknown | None = None
        failures = 0
        while True:
            left = deadline - seams.now()
            try:
                return await self.attempt(method, request, timeout=max(0.001, min(per_try, left)))
            except (RequestError, DeadlineExceeded) as error:
                if isinstance(error, OutcomeUnknown):
                    unknown = error
                if not repeatable(error):
                    if unknown and not repeat_tells and isinstance(error, _DOUBTFUL):
                        unknown.request_id = request_id
                        raise unknown from error
                    raise
                failures += 1
                pause = retry_delay(retry, failures, seams.fraction())
                if isinstance(error, _ELSEWHERE) and failures < len(self._addresses):
                    pause = 0.0
                elif isinstance(error, RequestError) and error.retry_after is not None:
                    pause = max(pause, error.retry_after)
                if seams.now() + pause >= deadline:
                    if unknown is not None:
                        unknown.request_id = request_id
                        raise unknown from error
                    raise
            await seams.sleep(pause)

    async def stream(self, method: Method[Q, A], request: Q, *, timeout: float) -> AsyncGenerator[A, None]:
        """Yield the messages of a stream of the present endpoint, once, for at most *timeout* seconds.

        Raises: as `attempt`; `DeadlineExceeded` at the end of *timeout*.
        """
        self._check()
        address = self._addresses[self._current]
        call = self._callable(method, address, "stream")(request, timeout=timeout, metadata=self._metadata)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._failure(method, error, address) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise ClientClosed("it was closed while the stream was open") from None
            raise
        finally:
            call.cancel()

    def duplex(self, method: Method[Q, A]) -> Duplex[Q, A]:
        """Begin a stream both ways to the present endpoint; see `Duplex`."""
        self._check()
        address = self._addresses[self._current]
        call = self._callable(method, address, "duplex")(metadata=self._metadata)
        return Duplex(call, lambda error: self._failure(method, error, address), address)

    async def leave(self, address: str) -> None:
        """Make a new connection for what comes next: that to *address* does not answer.

        The next call goes to the next endpoint. Calls under way keep the old connection; it is closed when
        they must have ended.
        """
        self._move_on(address)
        channel = self._channels.pop(address, None)
        if channel is None:
            return
        self._callables = {key: made for key, made in self._callables.items() if key[1] != address}
        now = self._seams.now()
        self._retired.append((now, channel))
        while self._retired and now - self._retired[0][0] > _RETIRED_SECONDS:
            await self._retired.popleft()[1].close()

    async def close(self) -> None:
        """Close all connections; calls under way end with `ClientClosed`. Repeating it does nothing."""
        if self._closed:
            return
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        channels += [channel for _, channel in self._retired]
        self._retired.clear()
        self._callables.clear()
        if self._loop is asyncio.get_running_loop() and os.getpid() == self._pid:
            for channel in channels:
                await channel.close()


# Refusals that an earlier, unanswered try of the same call may have brought about.
_DOUBTFUL = (NotFound, PreconditionFailed, EtagMismatch)
