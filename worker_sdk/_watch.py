"""A watch of jobs that goes on over broken streams and restarted coordinators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self

from worker_sdk._machine import retry_delay
from worker_sdk._seams import Seams
from worker_sdk.config import RetryConfig
from worker_sdk.errors import (
    ClientClosed,
    DeadlineExceeded,
    OutcomeUnknown,
    RequestError,
    TooManyRequests,
    Unavailable,
)
from worker_sdk.jobs import JobChange

__all__ = ["JobWatch"]

OpenStream = Callable[[int], AsyncGenerator[int | JobChange, None]]


class JobWatch:
    """Changes of jobs in the order in which they were committed; iterate over it, once.

    The watch starts with the first iteration or `ready`. It resumes after the last revision that it has
    seen, so a broken stream loses nothing; of several changes of one job within one outage only the last may
    be seen.

    Attributes:
        revision: the last revision seen; 0 before the start. Pass it to `JobClient.watch` to go on later.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        *,
        resume_revision: int,
        timeout: float,
        retry: RetryConfig,
        seams: Seams,
    ) -> None:
        self.revision = resume_revision
        self._open = open_stream
        self._timeout = timeout
        self._retry = retry
        self._seams = seams
        self._early: list[JobChange] = []
        self._changes = self._follow()
        self._step: asyncio.Task[int | JobChange] | None = None
        self._closed = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[JobChange]:
        return self

    async def __anext__(self) -> JobChange:
        while True:
            change = self._early.pop(0) if self._early else await self._next()
            if isinstance(change, JobChange):
                return change

    async def ready(self) -> int:
        """Wait until the coordinator has told where the watch starts; return that revision.

        A job submitted afterwards is certainly seen.

        Raises:
            Unavailable, DeadlineExceeded: no coordinator answered in time.
            ClientClosed: the watch was closed.
        """
        while self.revision == 0:
            try:
                change = await self._next()
            except StopAsyncIteration:
                raise ClientClosed("the watch was closed") from None
            if isinstance(change, JobChange):
                self._early.append(change)
        return self.revision

    async def aclose(self) -> None:
        """End the watch; whoever waits for a change in another task is told that there are no more."""
        self._closed.set()
        step = self._step
        if step is not None:
            # A generator that runs cannot be closed; one whose waiter was cancelled ends by that.
            if not step.cancelling():
                step.cancel()
            await asyncio.wait({step})
        await self._changes.aclose()

    async def _next(self) -> int | JobChange:
        """Return what comes next. In a task of its own, which `aclose` ends without the caller's."""
        if self._closed.is_set():
            raise StopAsyncIteration

        async def step() -> int | JobChange:
            return await anext(self._changes)

        self._step = asyncio.ensure_future(step())
        try:
            return await self._step
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed.is_set() and not (caller is not None and caller.cancelling()):
                raise StopAsyncIteration from None
            raise
        finally:
            self._step = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _follow(self) -> AsyncGenerator[int | JobChange, None]:
        failures = 0
        failing_since: float | None = None
        while True:
            began = self._seams.now()
            pause: float | None = None
            try:
                async with aclosing(self._open(self.revision)) as stream:
                    # The first message comes at once, or the coordinator is deaf. Later silence is quiet.
                    limit: float | None = self._timeout
                    while True:
                        async with asyncio.timeout(limit):
                            message = await anext(stream)
                        failures, failing_since, limit = 0, None, None
                        self.revision = message if isinstance(message, int) else message.revision
                        yield message
            except StopAsyncIteration:
                pass
            except (Unavailable, OutcomeUnknown, TooManyRequests) as error:
                pause = error.retry_after
                self._give_up(failing_since, error)
            except (DeadlineExceeded, TimeoutError) as error:
                # The stream's own time is up, or its start took too long.
                self._give_up(failing_since, error)
            failing_since = began if failing_since is None else failing_since
            failures += 1
            await self._seams.sleep(max(pause or 0.0, self._pause(failures)))

    def _give_up(self, failing_since: float | None, error: Exception) -> None:
        if failing_since is not None and self._seams.now() - failing_since > self._timeout:
            if isinstance(error, RequestError | DeadlineExceeded):
                raise error
            raise DeadlineExceeded(f"no coordinator opened the watch within {self._timeout} s") from error

    def _pause(self, failures: int) -> float:
        retry = self._retry
        return retry_delay(retry, failures, self._seams.fraction())
