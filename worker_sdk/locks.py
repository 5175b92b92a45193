"""`LockClient`: named locks and leadership; `SyncLockClient`: the same for code without an event loop.

A lock is only as good as the check of its token: a process that was paused may go on writing after its lock
went to somebody else. Send `Lock.token` along with every write, and let the store refuse a smaller one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from worker_sdk._blocking import Blocking, Iterating, LoopThread
from worker_sdk._latch import Latch
from worker_sdk._lock_book import LockHold
from worker_sdk._lock_engine import LockEngine, LockWish, lock_lost
from worker_sdk._lock_mode import LockMode
from worker_sdk._machine import retry_delay
from worker_sdk._seams import Seams
from worker_sdk._transport.channel import repeatable
from worker_sdk.config import ConnectionConfig, WorkerConfig
from worker_sdk.errors import DeadlineExceeded, LeasekeeperError

__all__ = ["Lock", "LockClient", "LockMode", "Owner", "SyncLockClient"]

_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Owner:
    """One who owns a lock: the value that he put beside it, and his token."""

    value: bytes
    token: int


class Lock:
    """A lock, or several, as long as the block that took it runs. May be used from any thread."""

    __slots__ = ("_engine", "_hold")

    def __init__(self, engine: LockEngine, hold: LockHold) -> None:
        self._engine = engine
        self._hold = hold

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order asked."""
        return self._hold.names

    @property
    def token(self) -> int:
        """The fencing token, for every write to what the lock guards; of several names, that of the first."""
        return self._hold.tokens[self._hold.names[0]]

    @property
    def tokens(self) -> Mapping[str, int]:
        """The fencing token of each name."""
        return MappingProxyType(self._hold.tokens)

    @property
    def lost(self) -> Latch:
        """Set when somebody else may own it. Whatever runs on must write nothing without its token."""
        return self._hold.lost

    def check(self) -> None:
        """Return if the work may go on.

        Raises:
            LockLost: somebody else may own the lock; stop at once.
            ForkedProcess: this is a forked child, which holds no lock.
        """
        if self._engine.lost_now(self._hold):
            raise lock_lost(self._hold)


class LockClient:
    """Takes named locks; one object for one event loop, with a session of its own for all its locks.

    The session is opened at first use and beats in a thread, so that code which blocks the loop loses no
    lock. Where the session ends, all locks are lost, and say so; the next one opens another session.

    Args:
        endpoints: ``host:port[,host:port]``, or a whole `ConnectionConfig`.
        namespace: the namespace; not with a `ConnectionConfig`, which has its own.
        ttl: seconds after which a dead process's locks go to the next, 2 to 3,600.
        identity: who this is, for people; empty: host and pid.
        seams: clock, randomness, ids.
    """

    def __init__(
        self,
        endpoints: str | ConnectionConfig,
        *,
        namespace: str | None = None,
        ttl: float = 10.0,
        identity: str = "",
        seams: Seams | None = None,
    ) -> None:
        self._connection = ConnectionConfig.of(endpoints, namespace)
        self._seams = seams or Seams()
        config = WorkerConfig(session_ttl=ttl, identity=identity, stall_warning=float("inf"))
        self._engine = LockEngine(self._connection, config, self._seams)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session; locks that are still held are lost. Repeating it does nothing."""
        await self._engine.close()

    @asynccontextmanager
    async def lock(
        self,
        *names: str,
        mode: LockMode = LockMode.EXCLUSIVE,
        permits: int = 0,
        value: bytes = b"",
        wait: float | None = _WAIT_SECONDS,
    ) -> AsyncIterator[Lock]:
        """Hold locks for the length of a block: all of *names*, or none.

        Args:
            names: 1-8 different ones. Callers of several never block each other for good.
            mode: exclusive, shared, or a semaphore of *permits*.
            permits: owners beside each other, 1-1,000; the same for all users of a semaphore.
            value: what observers see, at most 1 KiB.
            wait: seconds to stand in line, first in, first out; 0: try once; None: for ever.

        Raises:
            LockHeld: somebody else owns it, to the end of *wait*.
            LockLost: at the end of the block, if it was lost meanwhile and no other error is on its way.
            RelockThrottled: tries without a wait come too fast; `retry_after` says when.
            PermitsMismatch: others use the semaphore with another size.
            ValidationFailed, SessionFull, TooManyRequests, Unavailable, OutcomeUnknown, Unauthenticated,
            PermissionDenied: as for `JobClient`; nothing is left behind.
            ClientClosed, WrongEventLoop, ForkedProcess: this object cannot be used here.
        """
        wish = LockWish(names=names, mode=int(mode), permits=permits, value=value, wait=wait)
        hold = await self._engine.acquire(wish)
        try:
            yield Lock(self._engine, hold)
        except BaseException:
            await self._give_back(hold)
            raise
        else:
            await self._engine.release(hold)

    async def _give_back(self, hold: LockHold) -> None:
        """Give back without hiding the error that ends the block."""
        try:
            await self._engine.release(hold)
        except LeasekeeperError:
            return

    def lead(
        self, name: str, value: bytes = b"", *, wait: float | None = None
    ) -> AbstractAsyncContextManager[Lock]:
        """Lead for the length of a block: an exclusive lock whose *value* tells who leads; see `lock`.

        Waits for ever unless *wait* says otherwise. Leadership can be lost at any moment: look at
        `Lock.lost`, and let stores check `Lock.token`.
        """
        return self.lock(name, value=value, wait=wait)

    async def check_token(self, name: str, token: int, *, timeout: float | None = None) -> bool:
        """Ask whether *token* is that of a present owner: for stores that cannot keep a number.

        The answer is as old as the call. Raises what `lock` raises for a call that is refused.
        """
        seconds = self._connection.timeouts.call if timeout is None else timeout
        return await self._engine.calls.check(name, token, timeout=seconds)

    async def observe(self, name: str, *, timeout: float | None = None) -> AsyncGenerator[list[Owner], None]:
        """Iterate over the owners of a lock: as they are, then at every change.

        States in between may be left out. *timeout*: how long coordinators may be out of reach before it
        gives up, seconds.
        """
        seconds = self._connection.timeouts.call if timeout is None else timeout
        stream = self._connection.timeouts.stream
        before: list[Owner] | None = None
        failures, failed_at = 0, 0.0
        while True:
            try:
                async with aclosing(self._engine.calls.observe(name, timeout=stream)) as states:
                    async for state in states:
                        failures = 0
                        owners = [Owner(value, token) for value, token in state]
                        if owners != before:
                            before = owners
                            yield owners
            except DeadlineExceeded:
                pass  # the stream's own end, in time
            except LeasekeeperError as error:
                if not repeatable(error):
                    raise
                now = self._seams.now()
                failed_at = now if not failures else failed_at
                failures += 1
                if now - failed_at >= seconds:
                    raise
            retry = self._connection.retry
            await self._seams.sleep(retry_delay(retry, max(1, failures), self._seams.fraction()))


class SyncLockClient:
    """`LockClient` for code without an event loop: the same engine, on a loop in a thread of its own.

    May be used from any thread of the process that made it. Arguments and errors are those of `LockClient`.
    Where an event loop runs, calls raise `WrongEventLoop`, in a forked child `ForkedProcess`, after `close`
    `ClientClosed`.
    """

    def __init__(
        self,
        endpoints: str | ConnectionConfig,
        *,
        namespace: str | None = None,
        ttl: float = 10.0,
        identity: str = "",
    ) -> None:
        self._client = LockClient(endpoints, namespace=namespace, ttl=ttl, identity=identity)
        self._thread = LoopThread("leasekeeper-locks")
        self._timeouts = ConnectionConfig.of(endpoints, namespace).timeouts

    check_token = Blocking(LockClient.check_token)
    observe = Iterating(LockClient.observe)

    def __enter__(self) -> Self:
        self._thread.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def lock(
        self,
        *names: str,
        mode: LockMode = LockMode.EXCLUSIVE,
        permits: int = 0,
        value: bytes = b"",
        wait: float | None = _WAIT_SECONDS,
    ) -> Iterator[Lock]:
        """Hold locks for the length of a block; see `LockClient.lock`."""
        block = self._client.lock(*names, mode=mode, permits=permits, value=value, wait=wait)

        async def enter() -> Lock:
            return await block.__aenter__()

        async def leave(error: BaseException | None) -> None:
            kind, trace = (type(error), error.__traceback__) if error is not None else (None, None)
            await block.__aexit__(kind, error, trace)

        held = self._thread.run(enter)
        try:
            yield held
        except BaseException as error:
            thrown = error  # the name of the clause is gone before the call
            self._thread.run(lambda: leave(thrown))
            raise
        else:
            self._thread.run(lambda: leave(None))

    def lead(
        self, name: str, value: bytes = b"", *, wait: float | None = None
    ) -> AbstractContextManager[Lock]:
        """Lead for the length of a block; see `LockClient.lead`."""
        return self.lock(name, value=value, wait=wait)

    def close(self) -> None:
        """End the session and the thread; calls under way in other threads end with ClientClosed.

        Repeating it does nothing.
        """
        self._thread.close(self._client.close, timeout=self._timeouts.close + 5.0)
