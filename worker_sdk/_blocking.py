"""Runs what is asynchronous for callers without an event loop: on one loop in a thread of its own.

A blocking client is made of its asynchronous one: `Blocking` and `Iterating` turn each method into one that
waits, with the same arguments, errors and docstring, so that the two cannot drift apart.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from worker_sdk.errors import ClientClosed, ForkedProcess, WrongEventLoop

__all__ = ["Blocking", "Facade", "Iterating", "LoopThread"]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class LoopThread:
    """An event loop in a daemon thread, started by the first call. Any thread of its process may call.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def check(self) -> None:
        """Return if the calling thread may wait here.

        Raises:
            ForkedProcess: this is a child of the process that made the client; the thread is not here.
            WrongEventLoop: an event loop runs in the calling thread; waiting would stop it.
        """
        if os.getpid() != self._pid:
            raise ForkedProcess("a forked child has none of its parent's threads: make a client of its own")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise WrongEventLoop(
            "a blocking client would stop the event loop that runs in this thread: use the asynchronous one"
        )

    def start(self, work: Callable[[], Coroutine[Any, Any, R]]) -> concurrent.futures.Future[R]:
        """Start *work* on the loop.

        Raises: as `check`; ClientClosed.
        """
        self.check()
        with self._lock:
            if self._closed:
                raise ClientClosed("it was closed")
            return asyncio.run_coroutine_threadsafe(work(), self._running())

    def run(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run *work* on the loop and wait for it; its own deadline bounds the wait.

        Raises: as `check`; ClientClosed, also if it is closed meanwhile; what *work* raises.
        """
        return self.result(self.start(work))

    def result(self, future: concurrent.futures.Future[R]) -> R:
        """Wait for what `start` has started."""
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientClosed("it was closed while the call was under way") from None
        except BaseException:
            future.cancel()  # a KeyboardInterrupt here must not leave the call running there
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], *, timeout: float) -> None:
        """Run *last*, then end loop and thread, at most *timeout* seconds later. Repeating does nothing.

        Calls under way end with ClientClosed. In a forked child it does nothing.
        """
        if os.getpid() != self._pid:
            return
        self.check()
        with self._lock:
            closed, self._closed = self._closed, True
            loop, stop, thread = self._loop, self._stop, self._thread
            if closed or loop is None or stop is None or thread is None:
                return
            future = asyncio.run_coroutine_threadsafe(last(), loop)
        try:
            future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()  # what it could not tell anybody, time will: leases end
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(timeout)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            started = threading.Event()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._serve(started)), name=self._name, daemon=True
            )
            self._thread.start()
            started.wait()
        assert self._loop is not None
        return self._loop

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._stop.wait()  # asyncio.run cancels what is left, so that nobody waits for ever


class Facade(Protocol[C_co]):
    """A blocking client over an asynchronous one."""

    @property
    def _client(self) -> C_co: ...

    @property
    def _thread(self) -> LoopThread: ...


class Blocking(Generic[C, P, R]):
    """A method that waits for the asynchronous *method* of the same name. Put it into a class body."""

    def __init__(self, method: Callable[Concatenate[C, P], Coroutine[Any, Any, R]]) -> None:
        @functools.wraps(method)
        def call(facade: Facade[C], /, *args: P.args, **kwargs: P.kwargs) -> R:
            return facade._thread.run(lambda: method(facade._client, *args, **kwargs))

        self._call = call
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, facade: None, owner: type) -> Callable[Concatenate[Any, P], R]: ...
    @overload
    def __get__(self, facade: object, owner: type) -> Callable[P, R]: ...
    def __get__(self, facade: object | None, owner: type) -> object:
        return self._call if facade is None else MethodType(self._call, facade)


class Iterating(Generic[C, P, R]):
    """A method that iterates over what the asynchronous *method* of the same name yields."""

    def __init__(self, method: Callable[Concatenate[C, P], AsyncIterator[R]]) -> None:
        @functools.wraps(method)
        def call(facade: Facade[C], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
            facade._thread.check()  # now, and not at the first step
            return _steps(facade._thread, method(facade._client, *args, **kwargs))

        self._call = call
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, facade: None, owner: type) -> Callable[Concatenate[Any, P], Iterator[R]]: ...
    @overload
    def __get__(self, facade: object, owner: type) -> Callable[P, Iterator[R]]: ...
    def __get__(self, facade: object | None, owner: type) -> object:
        return self._call if facade is None else MethodType(self._call, facade)


def _steps(thread: LoopThread, values: AsyncIterator[R]) -> Iterator[R]:
    async def step() -> tuple[R, ...]:
        # StopAsyncIteration may not leave a coroutine through a future.
        try:
            return (await anext(values),)
        except StopAsyncIteration:
            return ()

    async def end() -> None:
        close = getattr(values, "aclose", None)
        if close is not None:
            await close()

    try:
        while found := thread.run(step):
            yield found[0]
    finally:
        try:
            thread.run(end)
        except (ClientClosed, ForkedProcess, WrongEventLoop):
            pass  # nothing is left to be ended, or nobody here who could
