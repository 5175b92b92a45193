"""What both lock clients share: one session with its beat thread, and the calls that take locks.

Lives on one event loop. A lock is listed in the beats from before it is asked for until its release was
answered, so that neither a lost answer nor a caller that went away leaves anything behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from worker_sdk._claims import BeatEffects, HeldClaim
from worker_sdk._lock_book import ListedLock, LockBook, LockHold, LockPhase
from worker_sdk._machine import retry_delay
from worker_sdk._seams import Seams
from worker_sdk._session import Session
from worker_sdk._transport.channel import CoordinatorChannel, repeatable
from worker_sdk._transport.lock_calls import LockCalls
from worker_sdk._work import Command, OpenedSession
from worker_sdk.config import ConnectionConfig, WorkerConfig
from worker_sdk.errors import (
    ClientClosed,
    DeadlineExceeded,
    ForkedProcess,
    LeasekeeperError,
    LockHeld,
    LockLost,
    OutcomeUnknown,
    RequestError,
    SessionNotFound,
    Unavailable,
)

__all__ = ["LockEngine", "LockWish"]

_log = logging.getLogger("worker_sdk.locks")

_LONGEST_WAIT = 30.0
"""One call waits at most so long (AcquireLock's limit, seconds)."""

_NEXT_SESSION = 0.2
"""Seconds between two looks for a new session after one has ended."""

_LOOK_WAIT = 0.001
"""Seconds that a call waits which only wants to know what stands: only tries without a wait are throttled."""

_PERHAPS = (asyncio.CancelledError, Unavailable, OutcomeUnknown, DeadlineExceeded)
"""Ends of a call after which its locks may be owned, or stand in line."""

_OVERLAP = 5.0
"""So many seconds before a call's wait ends, the next one takes over its place in the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockWish:
    """What a caller wants; ``wait`` in seconds, 0: try once, None: for ever; ``mode`` as on the wire."""

    names: tuple[str, ...]
    mode: int
    permits: int
    value: bytes
    wait: float | None


class LockEngine:
    """Takes and gives back locks, and keeps their session.

    Args:
        connection: where the coordinators are.
        config: TTL, identity and labels of the session.
        seams: clock, randomness, ids.
    """

    def __init__(self, connection: ConnectionConfig, config: WorkerConfig, seams: Seams) -> None:
        self._connection = connection
        self._config = config
        self._seams = seams
        self._pid = os.getpid()
        self._channel = CoordinatorChannel(connection, seams)
        self._calls = LockCalls(self._channel, connection.namespace)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        # Locks that go back behind callers who are gone; each ends by its calls' deadlines, or with `close`.
        self._going_back: set[asyncio.Task[None]] = set()
        self._begin()

    @property
    def calls(self) -> LockCalls:
        """Calls that need no session."""
        return self._calls

    def _begin(self) -> None:
        self._going_back.clear()
        self._book = LockBook()
        self._session: Session[ListedLock] | None = None
        self._current: tuple[int, str] | None = None
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    # What the session tells; always on the loop.

    def session_opened(self, generation: int, opened: OpenedSession) -> None:
        """Locks may be asked for."""
        self._current = (generation, opened.session_id)
        self._changed.set()

    def session_ended(self, lost: list[HeldClaim]) -> None:
        """All locks are lost, and know it; another session will be opened."""
        self._current = None
        self._changed.clear()

    def beat_answered(self, effects: BeatEffects) -> None:
        """Nothing to do: holders wait on latches."""

    def commanded(self, command: Command) -> None:
        """Commands are for workers, who claim jobs; whoever holds locks decides himself."""

    def session_failed(self, error: Exception) -> None:
        """No session can be had: whoever asks is told."""
        self._failure = error
        self._changed.set()

    # Taking.

    async def _opened(self, deadline: float) -> tuple[int, str]:
        """Return generation and id of the session, opening one if there is none."""
        if self._closed:
            raise ClientClosed("it was closed")
        self._channel.check()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # A second asyncio.run of the same process: what belonged to the first loop has ended with it.
            self._begin()
            self._loop = loop
        if self._session is None:
            self._session = Session(self._connection, self._config, self._book, self, lambda: 0, self._seams)
            self._session.start()
        try:
            async with asyncio.timeout(max(0.001, deadline - self._seams.now())):
                await self._changed.wait()
        except TimeoutError:
            raise Unavailable("no session could be opened in time") from None
        if self._failure is not None:
            raise self._failure
        if self._current is None:
            raise ClientClosed("it was closed")
        return self._current

    async def acquire(self, wish: LockWish) -> LockHold:
        """Take locks, all or none; what comes back may be used at once.

        Raises:
            LockHeld: not within the wait. LockLost: taken away before it could be used.
            LeasekeeperError: any other refusal; nothing is left behind.
        """
        begun = self._seams.now()
        until = float("inf") if wish.wait is None else begun + wish.wait
        give_up = max(until, begun + self._connection.timeouts.call)
        while True:
            generation, session_id = await self._opened(give_up)
            try:
                return await self._acquire(wish, generation, session_id, until)
            except SessionNotFound:
                # Its place in the line has gone with the session; the next session stands at the end.
                if self._seams.now() + _NEXT_SESSION >= give_up:
                    raise
            if self._session is not None:
                self._session.hurry()
            await self._seams.sleep(_NEXT_SESSION)

    async def _acquire(self, wish: LockWish, generation: int, session_id: str, until: float) -> LockHold:
        """Take locks with one session."""
        seams, call_timeout = self._seams, self._connection.timeouts.call
        hold = self._book.ask(generation, seams.identifier(), wish.names)
        if hold is None:
            raise SessionNotFound("the session ended while the lock was asked for")
        sends = _Sends()
        try:
            tokens = await self._tokens(hold, session_id, wish, until, sends)
            if not self._book.owned(hold, tokens, seams.now()):
                await self._covered(hold, call_timeout)
            if hold.lost.is_set():
                raise lock_lost(hold)
        except BaseException as error:
            if isinstance(error, _PERHAPS):
                self._go_back(hold, session_id, wish, sends)
            else:
                self._book.forget(hold)
            raise
        return hold

    def _go_back(
        self, hold: LockHold, session_id: str, wish: LockWish | None = None, sends: _Sends | None = None
    ) -> None:
        """Give back behind a caller who is gone; ``wish``: by what it may just own, or stand in line."""
        if self._closed or not self._book.releasing(hold):
            self._book.forget(hold)
            return
        task = asyncio.create_task(self._withdraw(hold, session_id, wish, sends))
        self._going_back.add(task)
        task.add_done_callback(self._going_back.discard)

    async def _withdraw(
        self, hold: LockHold, session_id: str, wish: LockWish | None, sends: _Sends | None
    ) -> None:
        """Have nothing stand of a call whose caller is gone, at once and not after a TTL.

        If no answer has told the tokens, another send of the request asks for them: it owns by what stands,
        or takes it out. A coordinator that is away costs another try, at the next one.
        """
        tokens: Mapping[str, int] = hold.tokens or (sends.tokens() if sends is not None else {})
        request_id = self._seams.identifier()
        failures = 0
        give_up = self._seams.now() + self._connection.timeouts.call
        try:
            while True:
                try:
                    if not tokens and wish is not None and sends is not None:
                        tokens = await self._ask(hold, session_id, wish, _LOOK_WAIT, sends.count + failures)
                    await self._calls.release(
                        request_id=request_id,
                        session_id=session_id,
                        tokens=tokens,
                        repeat=True,
                        timeout=self._connection.timeouts.attempt,
                    )
                except (RequestError, DeadlineExceeded) as error:
                    failures += 1
                    pause = self._pause(failures, error)
                    if not repeatable(error) or self._seams.now() + pause >= give_up:
                        raise
                else:
                    return
                await self._seams.sleep(pause)
        except LockHeld:
            return  # and nothing stands any more
        except LeasekeeperError as error:
            _log.debug("locks %s go back with a beat, giving back failed: %s", hold.names, error)
        finally:
            # From then on the beats leave it out: whatever still stands is taken away.
            self._book.forget(hold)

    async def _covered(self, hold: LockHold, timeout: float) -> None:
        """Wait until a confirmed beat vouches for the locks, or they are lost."""
        assert self._session is not None
        self._session.hurry()
        try:
            async with asyncio.timeout(timeout):
                await hold.decided.wait()
        except TimeoutError:
            raise Unavailable("no beat could confirm the lock in time") from None

    async def _tokens(
        self, hold: LockHold, session_id: str, wish: LockWish, until: float, sends: _Sends
    ) -> Mapping[str, int]:
        """Ask, again where that may help, and keep the place in the line from one call to the next.

        A call of the same request takes the place over, so that the one before leaves it alone when its own
        wait is over.
        """
        failures = 0
        give_up = max(until, self._seams.now() + self._connection.timeouts.call)
        try:
            while True:
                left = max(0.0, until - self._seams.now())
                asking = self._ask(hold, session_id, wish, min(left, _LONGEST_WAIT), sends.count)
                task = sends.begun(asyncio.create_task(asking))
                if left > _LONGEST_WAIT:
                    await asyncio.wait([task], timeout=_LONGEST_WAIT - _OVERLAP)
                    if not task.done():
                        continue
                try:
                    return await asyncio.shield(task)
                except (RequestError, DeadlineExceeded) as error:
                    if not repeatable(error) and not (isinstance(error, LockHeld) and left > _LONGEST_WAIT):
                        raise
                    failures += 1
                    pause = self._pause(failures, error)
                    if hold.lost.is_set():
                        raise SessionNotFound("the session ended while the lock was waited for") from error
                    if self._seams.now() + pause >= give_up:
                        raise
                await self._seams.sleep(pause)
        finally:
            await sends.end()

    async def _ask(
        self, hold: LockHold, session_id: str, wish: LockWish, wait: float, repeats: int
    ) -> Mapping[str, int]:
        return await self._calls.acquire(
            request_id=hold.request_id,
            session_id=session_id,
            names=wish.names,
            mode=wish.mode,
            permits=wish.permits,
            value=wish.value,
            wait=wait,
            repeats=repeats,
            timeout=None if wait > 0 else self._connection.timeouts.attempt,
        )

    def _pause(self, failures: int, error: LeasekeeperError) -> float:
        retry = self._connection.retry
        pause = retry_delay(retry, failures, self._seams.fraction())
        return max(pause, getattr(error, "retry_after", None) or 0.0)

    # Holding.

    def check_process(self) -> None:
        """Return if this is the process that made it.

        Raises:
            ForkedProcess: a forked child holds no lock.
        """
        if os.getpid() != self._pid:
            raise ForkedProcess("a forked child holds no lock: only its parent may act for it")

    def lost_now(self, hold: LockHold) -> bool:
        """Return whether the hold is lost, by what was heard or by the clock alone; from any thread.

        Raises:
            ForkedProcess: a forked child holds no lock.
        """
        self.check_process()
        return hold.lost.is_set() or self._book.lost_now(hold, self._seams.now())

    # Giving back.

    async def release(self, hold: LockHold) -> None:
        """Give locks back.

        Raises:
            LockLost: one of them was lost before: somebody else may have owned it meanwhile.
        """
        late = self.lost_now(hold)
        if hold.phase is LockPhase.LOST or not self._book.releasing(hold):
            self._book.forget(hold)
            raise lock_lost(hold)
        current = self._current
        if current is None or current[0] != hold.generation:
            self._book.forget(hold)
            raise lock_lost(hold)
        try:
            await self._release(hold, current[1])
        except asyncio.CancelledError:
            self._go_back(hold, current[1])
            raise
        except BaseException:
            self._book.forget(hold)
            raise
        self._book.forget(hold)
        if late:
            raise lock_lost(hold)

    async def _release(self, hold: LockHold, session_id: str) -> None:
        request_id = self._seams.identifier()
        timeouts = self._connection.timeouts
        deadline = self._seams.now() + timeouts.call
        failures = 0
        while True:
            try:
                await self._calls.release(
                    request_id=request_id,
                    session_id=session_id,
                    tokens=hold.tokens,
                    repeat=failures > 0,
                    timeout=max(0.001, min(timeouts.attempt, deadline - self._seams.now())),
                )
            except SessionNotFound:
                raise lock_lost(hold) from None
            except LeasekeeperError as error:
                failures += 1
                pause = self._pause(failures, error)
                if not repeatable(error):
                    raise
                if self._seams.now() + pause >= deadline:
                    # The work is done and was covered; the beats leave the lock out, and that gives it back.
                    _log.warning("locks %s go back with a beat, giving back failed: %s", hold.names, error)
                    return
            else:
                return
            await self._seams.sleep(pause)

    async def close(self) -> None:
        """End the session, and with it every lock that is still held. Repeating it does nothing."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid and self._loop is asyncio.get_running_loop():
            for task in self._going_back:
                task.cancel()  # what they give back goes with the session
            if self._session is not None:
                await self._session.close(self._connection.timeouts.close)
            self._book.lose_all()
            self._current = None
            self._changed.set()
        await self._channel.close()


class _Sends:
    """The sends of one call: how many there were, and those that are still under way."""

    def __init__(self) -> None:
        self.count = 0
        self._tasks: list[asyncio.Task[Mapping[str, int]]] = []

    def begun(self, task: asyncio.Task[Mapping[str, int]]) -> asyncio.Task[Mapping[str, int]]:
        """One more."""
        self.count += 1
        self._tasks = [*(one for one in self._tasks if not one.done()), task]
        return task

    def tokens(self) -> Mapping[str, int]:
        """What the last send was answered, even if nobody took it; nothing, if it was not."""
        last = self._tasks[-1] if self._tasks else None
        if last is None or not last.done() or last.cancelled() or last.exception() is not None:
            return {}
        return last.result()

    async def end(self) -> None:
        """Cancel what is under way, and see it end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def lock_lost(hold: LockHold) -> LockLost:
    """Return the error of a hold that is lost."""
    names = ", ".join(repr(name) for name in hold.names)
    token = max(hold.tokens.values(), default=0)
    return LockLost(
        f"lock {names} is lost: somebody else may own it",
        reason="LOCK_LOST",
        metadata={"name": hold.names[0], "held": str(token), "current": "0"},
    )
