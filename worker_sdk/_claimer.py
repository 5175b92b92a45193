"""The claim loops of one pool: ask for as many jobs as there are free slots, never for more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from worker_sdk._machine import poll_size, retry_delay
from worker_sdk._runner import Pool
from worker_sdk._seams import Seams
from worker_sdk._transport.channel import repeatable
from worker_sdk._transport.worker_calls import WorkerCalls
from worker_sdk._work import ClaimedJob, QueueTypes
from worker_sdk.config import RetryConfig
from worker_sdk.errors import (
    DeadlineExceeded,
    Exhausted,
    LeasekeeperError,
    RequestError,
    SessionFull,
    SessionNotFound,
)

__all__ = ["SESSION_CAPACITY", "Claimer", "ClaimerConfig", "Holder"]

_log = logging.getLogger("worker_sdk.claims")
# Keys on one session's lease: claims, locks and waits. Some room is left for what is settled but not yet
# answered.
SESSION_CAPACITY = 480
_RECOVERY_TIMEOUT = 2.0
_RECOVERY_TRIES = 3
_CAPACITY_LOOK = 0.05

T = TypeVar("T")
_Answer = Coroutine[Any, Any, Sequence[ClaimedJob]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimerConfig:
    """How to ask: seconds to wait for a job, most jobs a call, claim loops of the pool."""

    poll_wait: float
    batch: int
    loops: int
    retry: RetryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What a claimer needs of its worker.

    Attributes:
        session: waits for a session; its generation and id.
        current: the generation of the session that is open, 0 if there is none.
        suspect: a coordinator says that this session is gone.
        held: claims on the present session.
        admit: takes over claimed jobs; a session that is over takes none.
        give_back: takes over jobs that were claimed too late, to release them at once.
        stopping: set when nothing more may be claimed.
    """

    session: Callable[[], Coroutine[Any, Any, tuple[int, str]]]
    current: Callable[[], int]
    suspect: Callable[[int], None]
    held: Callable[[], int]
    admit: Callable[[int, Sequence[ClaimedJob], Pool], None]
    give_back: Callable[[int, Sequence[ClaimedJob], Pool], None]
    stopping: asyncio.Event


@dataclass(frozen=True, slots=True)
class _Ask:
    generation: int
    session_id: str
    request_id: str
    max_jobs: int


class Claimer:
    """One claim loop of a pool. Its owner runs `run` as a task; it ends soon after `Holder.stopping`."""

    def __init__(
        self,
        pool: Pool,
        wanted: tuple[QueueTypes, ...],
        calls: WorkerCalls,
        holder: Holder,
        config: ClaimerConfig,
        seams: Seams,
    ) -> None:
        self._pool = pool
        self._wanted = wanted
        self._calls = calls
        self._holder = holder
        self._config = config
        self._seams = seams
        # Since when the call under way waits for its answer, repeats included; for health checks.
        self.asking_since: float | None = None
        # When it was sent last: young while coordinators are away, ever older in a loop that hangs.
        self.tried_at = 0.0

    async def run(self) -> None:
        """Claim until the worker stops.

        Raises:
            LeasekeeperError: an error that no repeat can mend, such as missing permission.
        """
        holder, pool = self._holder, self._pool
        stopping = asyncio.create_task(holder.stopping.wait())
        try:
            while not holder.stopping.is_set():
                session = await _unless(stopping, holder.session())
                if session is None:
                    return
                size = self._size()
                if size == 0:
                    await _unless(stopping, self._slot())
                    continue
                ask = _Ask(*session, self._seams.identifier(), size)
                pool.promised += size
                jobs: Sequence[ClaimedJob] = ()
                self.asking_since = self.tried_at = self._seams.now()
                try:
                    jobs = await self._ask(ask, stopping)
                finally:
                    self.asking_since = None
                    pool.promised -= size
                    if len(jobs) < size:
                        pool.freed.set()
                if jobs:
                    holder.admit(ask.generation, jobs, pool)
        finally:
            stopping.cancel()

    def _size(self) -> int:
        pool = self._pool
        return poll_size(
            limit=pool.limit,
            busy=pool.busy,
            promised=pool.promised,
            loops=self._config.loops,
            batch=self._config.batch,
            held=self._holder.held(),
            capacity=SESSION_CAPACITY,
        )

    async def _slot(self) -> None:
        """Wait until a slot may be free."""
        pool = self._pool
        pool.freed.clear()
        # The session's capacity is freed by answers to settlements, which set no event: look again now and
        # then.
        full = pool.busy + pool.promised >= pool.limit
        try:
            async with asyncio.timeout(None if full else _CAPACITY_LOOK):
                await pool.freed.wait()
        except TimeoutError:
            pass

    def _call(self, ask: _Ask, *, repeat: bool, wait: float, timeout: float | None = None) -> _Answer:
        self.tried_at = self._seams.now()
        return self._calls.claim(
            request_id=ask.request_id,
            session_id=ask.session_id,
            queues=self._wanted,
            max_jobs=ask.max_jobs,
            wait=wait,
            repeat=repeat,
            timeout=timeout,
        )

    async def _ask(self, ask: _Ask, stopping: asyncio.Task[bool]) -> Sequence[ClaimedJob]:
        """Ask until answered. A repeat says that it is one, and gets what the unanswered try has claimed."""
        failures = 0
        while True:
            try:
                jobs = await _unless(
                    stopping, self._call(ask, repeat=failures > 0, wait=self._config.poll_wait)
                )
            except (SessionNotFound, SessionFull) as error:
                if isinstance(error, SessionNotFound):
                    self._holder.suspect(ask.generation)
                await self._pause(1, error, stopping)
                return ()
            except (RequestError, DeadlineExceeded) as error:
                if not repeatable(error) and not isinstance(error, Exhausted):
                    raise
                failures += 1
                if failures in (3, 20) or failures % 100 == 0:
                    _log.warning("no answer to a claim after %d tries: %s", failures, error)
                await self._pause(failures, error, stopping)
                if stopping.done():
                    jobs = None
                else:
                    continue
            if jobs is None:
                await self._recover(ask)
                return ()
            if stopping.done():
                self._holder.give_back(ask.generation, jobs, self._pool)
                return ()
            return jobs

    async def _recover(self, ask: _Ask) -> None:
        """Give back at once what a poll claimed whose answer was not waited for, because the worker stops.

        Not certain to find everything: a coordinator may still be carrying out the first try. What is missed
        goes back when the session closes, or because no beat lists it.
        """
        # A repeat that finds nothing is answered like a first call: at most one job is claimed for nothing.
        ask = replace(ask, max_jobs=1)
        for attempt in range(1, _RECOVERY_TRIES + 1):
            try:
                jobs = await self._call(ask, repeat=True, wait=0.0, timeout=_RECOVERY_TIMEOUT)
            except LeasekeeperError as error:
                if not repeatable(error):
                    return
                await self._seams.sleep(self._delay(attempt))
            else:
                self._holder.give_back(ask.generation, jobs, self._pool)
                return

    def _delay(self, failures: int) -> float:
        retry = self._config.retry
        return retry_delay(retry, failures, self._seams.fraction())

    async def _pause(self, failures: int, error: LeasekeeperError, stopping: asyncio.Task[bool]) -> None:
        pause = max(self._delay(failures), getattr(error, "retry_after", None) or 0.0)
        await asyncio.wait({stopping}, timeout=pause)


async def _unless(stopping: asyncio.Task[bool], wanted: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of *wanted*; None if the worker stops first, and then *wanted* is cancelled."""
    task = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        # It may have ended with a result after all; an error of a call that nobody waits for says nothing.
        return None if task.cancelled() or task.exception() is not None else task.result()
    finally:
        if not task.done():
            task.cancel()
