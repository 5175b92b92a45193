"""The worker's stream to a coordinator: jobs are pushed down as slots become free, settlements go up.

A stream that breaks takes nothing with it: handlers go on, settlements that were not answered are sent again,
and another stream is opened, at another coordinator where there is one. Beats have their own thread and
connection and do not depend on it. A stream on which nothing comes is asked for a sign of life, and left if
none comes: a worker that beats and hears of no job would look well and be deaf.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker_sdk._claimer import SESSION_CAPACITY, Holder
from worker_sdk._convert.stream import (
    Commanded,
    Opened,
    Pushed,
    Settled,
    StopsAsked,
    WorkAnswer,
    WorkRequest,
    credit_to,
    opening_to,
    settle_to,
    work_from,
)
from worker_sdk._convert.work import SettlementMessage
from worker_sdk._machine import credit_size, poll_size, retry_delay
from worker_sdk._runner import Pool
from worker_sdk._seams import Seams
from worker_sdk._settler import SettleCall
from worker_sdk._transport.channel import CoordinatorChannel, repeatable
from worker_sdk._transport.duplex import Duplex
from worker_sdk._transport.methods import WORK
from worker_sdk._work import ClaimedJob, Command, QueueTypes
from worker_sdk.config import RetryConfig
from worker_sdk.errors import (
    InternalError,
    LeasekeeperError,
    OutcomeUnknown,
    RequestError,
    SessionFull,
    SessionNotFound,
)

__all__ = ["Lane", "StreamConfig", "StreamLink", "StreamListener"]

_log = logging.getLogger("worker_sdk.stream")
_CAPACITY_LOOK = 0.05
# For how long jobs are asked for by polls before a stream is tried again: where streams fail, and where the
# coordinator does not know them.
_POLLS_SECONDS = 10.0
_POLLS_FOR_LONG_SECONDS = 300.0
_PROBE = 0
"""Number of the empty settlement that asks for a sign of life; others count from 1."""


@dataclass(slots=True, kw_only=True)
class Lane:
    """Queues that share a pool of slots; ``outstanding``: jobs that may still be sent for them."""

    pool: Pool
    wanted: tuple[QueueTypes, ...]
    outstanding: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Times of the stream, seconds.

    Attributes:
        opening: until an opened stream must have said so.
        quiet: without a message until a sign of life is asked for.
        answer: until that must have come.
        tick: between two looks at this.
        finish: for what is under way when the worker stops.
        tries: failures in a row after which jobs are asked for by polls meanwhile.
        retry: pauses between streams.
    """

    opening: float = 5.0
    quiet: float = 6.0
    answer: float = 3.0
    tick: float = 0.5
    finish: float = 0.8
    tries: int = 3
    retry: RetryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamListener:
    """Whom the stream tells, on the event loop.

    Attributes:
        asked: claims, as (job id, token), whose handlers are asked to stop.
        commanded: what the coordinator wants the worker to do.
        joined: a stream is open: what was asked before is to be learned by a beat.
    """

    asked: Callable[[frozenset[tuple[str, int]]], None]
    commanded: Callable[[Command], None]
    joined: Callable[[], None]


@dataclass(slots=True)
class _Open:
    """One stream that is open."""

    call: Duplex[WorkRequest, WorkAnswer]
    generation: int
    lanes: tuple[Lane, ...]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    going: deque[WorkRequest] = field(default_factory=deque)
    pending: dict[int, asyncio.Future[Settled]] = field(default_factory=dict)
    silence: float = 0.0
    probed: bool = False
    finishing: bool = False


class StreamLink:
    """Owner of the stream. `run` is to be run as a task; `close` ends it.

    Args:
        lanes: what to claim, and into which slots.
        holder: the worker; its ``stopping`` ends the claiming, not the stream.
        fallback: settles while no stream is open.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        channel: CoordinatorChannel,
        namespace: str,
        holder: Holder,
        listener: StreamListener,
        fallback: SettleCall,
        config: StreamConfig,
        seams: Seams,
    ) -> None:
        self._lanes = tuple(lanes)
        self._channel = channel
        self._namespace = namespace
        self._holder = holder
        self._listener = listener
        self._fallback = fallback
        self._config = config
        self._seams = seams
        self._open: _Open | None = None
        self._numbers = 0
        self._failures = 0
        self._opened_before = False
        self._closing = asyncio.Event()
        # Set while a stream is open.
        self.joined = asyncio.Event()
        # Set while they must be asked for by polls.
        self.needs_polls = asyncio.Event()
        # Set while no stream may bring any.
        self.quiet = asyncio.Event()
        self.quiet.set()
        # For health checks: since when nothing was heard, None while it says nothing of claims.
        self.asking_since: float | None = None
        self.tried_at = seams.now()
        self.streams = 0

    def close(self) -> None:
        """End `run`."""
        self._closing.set()

    async def settle(
        self, settlements: Sequence[SettlementMessage], *, timeout: float
    ) -> Sequence[RequestError | None]:
        """Settle up to 100 attempts, on the stream if there is one; as `WorkerCalls.settle`.

        Raises:
            OutcomeUnknown: no answer in time, or the stream broke: send them again.
            RequestError: nothing was looked at.
        """
        stream = self._open
        if stream is None or stream.finishing:
            return await self._fallback(settlements, timeout=timeout)
        self._numbers += 1
        number = self._numbers
        answered: asyncio.Future[Settled] = asyncio.get_running_loop().create_future()
        stream.pending[number] = answered
        stream.going.append(settle_to(number, settlements))
        stream.wake.set()
        try:
            async with asyncio.timeout(timeout):
                answer = await answered
        except TimeoutError:
            raise OutcomeUnknown(f"not answered within {timeout:g} s", reason="OUTCOME_UNKNOWN") from None
        finally:
            stream.pending.pop(number, None)
        if answer.error is not None:
            raise answer.error
        if len(answer.results) != len(settlements):
            raise InternalError(f"{len(answer.results)} results for {len(settlements)} settlements")
        return answer.results

    async def run(self) -> None:
        """Keep a stream open until `close`. No failure of a stream ends it."""
        closing = asyncio.create_task(self._closing.wait())
        try:
            while not self._closing.is_set():
                await _first_of(self._one_session(), closing)
        finally:
            closing.cancel()
            self._want_polls(False)

    async def _one_session(self) -> None:
        generation, session_id = await self._holder.session()
        if self.asking_since is None:
            self._mark_asking(self._seams.now())
        lanes = () if self._holder.stopping.is_set() else self._lanes
        pause = 0.0
        try:
            await self._one_stream(generation, session_id, lanes)
        except LeasekeeperError as error:
            pause = self._failed(generation, error)
        if pause:
            await self._seams.sleep(pause)

    def _failed(self, generation: int, error: LeasekeeperError) -> float:
        """Note that a stream has failed; return the pause before the next."""
        self._failures += 1
        failures, retry = self._failures, self._config.retry
        pause = retry_delay(retry, failures, self._seams.fraction())
        if isinstance(error, SessionNotFound):
            self._holder.suspect(generation)
        elif not isinstance(error, SessionFull):
            mends = repeatable(error)
            if failures >= self._config.tries or not mends:
                self._want_polls(True)
                spread = 0.5 + self._seams.fraction() / 2
                pause = max(pause, spread * (_POLLS_SECONDS if mends else _POLLS_FOR_LONG_SECONDS))
        if failures in (1, self._config.tries) or failures % 100 == 0:
            how = "polls meanwhile" if self.needs_polls.is_set() else "trying again"
            _log.info("the stream ended (%s: %s); %s", type(error).__name__, error, how)
        return max(pause, getattr(error, "retry_after", None) or 0.0)

    async def _one_stream(self, generation: int, session_id: str, lanes: tuple[Lane, ...]) -> None:
        """Open a stream and serve it until it ends, the session ends, or the worker stops claiming.

        Raises:
            LeasekeeperError: why it ended, if not in order.
        """
        stream = _Open(self._channel.duplex(WORK), generation, lanes)
        self.tried_at = self._seams.now()
        if lanes:
            self.quiet.clear()
        for lane in lanes:
            self._promise(lane, self._size(lane))
        opening = opening_to(
            namespace=self._namespace,
            session_id=session_id,
            request_id=self._seams.identifier(),
            lanes=[(lane.wanted, lane.outstanding) for lane in lanes],
        )
        reading: asyncio.Task[None] | None = None
        parts: list[asyncio.Task[None]] = []
        try:
            await self._join(stream, opening)
            reading = asyncio.create_task(self._read(stream))
            parts = [reading] + [
                asyncio.create_task(part)
                for part in (
                    self._write(stream),
                    self._watch(stream),
                    self._watch_session(stream),
                    *(self._watch_slots(stream, lane) for lane in lanes),
                )
            ]
            stops = asyncio.create_task(self._holder.stopping.wait()) if lanes else None
            try:
                waits: set[asyncio.Task[Any]] = {*parts, *((stops,) if stops is not None else ())}
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if stops in done and not any(part.done() for part in parts):
                    await self._finish(stream, reading)
                    return
            finally:
                if stops is not None:
                    stops.cancel()
            for part in parts:
                if part.done():
                    part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            self._leave(stream)

    async def _join(self, stream: _Open, opening: WorkRequest) -> None:
        try:
            async with asyncio.timeout(self._config.opening):
                await stream.call.write(opening)
                message = await stream.call.read()
        except TimeoutError:
            await self._channel.leave(stream.call.address)
            raise _silent(f"no answer within {self._config.opening:g} s") from None
        opened = work_from(message) if message is not None else None
        if not isinstance(opened, Opened):
            raise InternalError("the coordinator did not open the stream first of all")
        self._open = stream
        self._mark_asking(self._seams.now() if stream.lanes else None)
        self._want_polls(False)
        self.streams += 1
        self.joined.set()
        if self._opened_before or not stream.lanes:
            _log.info("the stream is open again, at coordinator %s", opened.coordinator_id)
            self._listener.joined()
        self._opened_before = True

    def _leave(self, stream: _Open) -> None:
        stream.call.cancel()
        if self._open is stream:
            self._open = None
        self.joined.clear()
        self.quiet.set()
        for lane in stream.lanes:
            self._promise(lane, -lane.outstanding)
            lane.pool.freed.set()
        for answered in stream.pending.values():
            if not answered.done():
                answered.set_exception(
                    OutcomeUnknown("the stream broke before the answer", reason="OUTCOME_UNKNOWN")
                )

    # What comes down.

    async def _read(self, stream: _Open) -> None:
        while True:
            message = await stream.call.read()
            if message is None:
                if not stream.finishing:
                    raise _silent("the coordinator ended it")
                return
            stream.silence, stream.probed = 0.0, False
            self._failures = 0
            if stream.lanes:
                self._mark_asking(self._seams.now())
            self._take(stream, message)

    def _take(self, stream: _Open, message: WorkAnswer) -> None:
        came = work_from(message)
        if isinstance(came, Pushed):
            self._admit(stream, came.jobs)
        elif isinstance(came, Settled):
            answered = stream.pending.get(came.number)
            if answered is not None and not answered.done():
                answered.set_result(came)
                # Answers make room on the session.
                stream.wake.set()
        elif isinstance(came, StopsAsked):
            self._listener.asked(came.claims)
        elif isinstance(came, Commanded) and came.command is not Command.NONE:
            self._listener.commanded(came.command)

    def _admit(self, stream: _Open, jobs: Sequence[ClaimedJob]) -> None:
        for lane in stream.lanes:
            queues = {wanted.queue for wanted in lane.wanted}
            mine = [job for job in jobs if job.queue in queues]
            if not mine:
                continue
            self._promise(lane, -min(len(mine), lane.outstanding))
            if self._holder.stopping.is_set():
                self._holder.give_back(stream.generation, mine, lane.pool)
            else:
                self._holder.admit(stream.generation, mine, lane.pool)

    # What goes up.

    async def _write(self, stream: _Open) -> None:
        """The one writer: drains what waits, credits after settlements, which make room for them."""
        while True:
            stream.wake.clear()
            while stream.going:
                await self._send(stream, stream.going.popleft())
            if stream.finishing:
                await stream.call.done_writing()
                await asyncio.Event().wait()
            for number, lane in enumerate(stream.lanes):
                size = credit_size(limit=lane.pool.limit, outstanding=lane.outstanding, free=self._size(lane))
                if size:
                    self._promise(lane, size)
                    await self._send(stream, credit_to(number, size))
            if not stream.going:
                await stream.wake.wait()

    async def _send(self, stream: _Open, message: WorkRequest) -> None:
        await stream.call.write(message)
        self.tried_at = self._seams.now()

    def _size(self, lane: Lane) -> int:
        pool = lane.pool
        others = sum(one.pool.promised for one in self._lanes if one is not lane)
        return poll_size(
            limit=pool.limit,
            busy=pool.busy,
            promised=pool.promised,
            loops=1,
            batch=pool.limit,
            held=self._holder.held() + others,
            capacity=SESSION_CAPACITY,
        )

    @staticmethod
    def _promise(lane: Lane, jobs: int) -> None:
        lane.outstanding += jobs
        lane.pool.promised += jobs

    async def _watch_slots(self, stream: _Open, lane: Lane) -> None:
        """Wake the writer when a slot of *lane* may be free, or the session may have room again."""
        pool = lane.pool
        while True:
            pool.freed.clear()
            blocked = pool.busy + pool.promised < pool.limit and not self._size(lane)
            try:
                async with asyncio.timeout(_CAPACITY_LOOK if blocked else None):
                    await pool.freed.wait()
            except TimeoutError:
                pass
            stream.wake.set()

    # What is watched.

    async def _watch(self, stream: _Open) -> None:
        """Ask for a sign of life where nothing comes, and end the stream if none is given.

        Counts looks, not the clock: where the loop stood still, what came meanwhile is not yet read.
        """
        config = self._config
        while True:
            await self._seams.sleep(config.tick)
            stream.silence += config.tick
            if stream.probed and stream.silence > config.quiet + config.answer:
                await self._channel.leave(stream.call.address)
                raise _silent(f"no sign of life for {stream.silence:g} s")
            if not stream.probed and stream.silence > config.quiet:
                stream.probed = True
                stream.going.append(settle_to(_PROBE, ()))
                stream.wake.set()

    async def _watch_session(self, stream: _Open) -> None:
        """Return when the next stream is to be another: for the next session, or with lanes again."""
        while self._holder.current() == stream.generation and (
            stream.lanes or self._holder.stopping.is_set()
        ):
            await self._seams.sleep(self._config.tick / 2)

    async def _finish(self, stream: _Open, reading: asyncio.Task[None]) -> None:
        """The worker claims no more: let what is under way come, and end this stream."""
        stream.finishing = True
        self._open = None
        stream.wake.set()
        await asyncio.wait({reading}, timeout=self._config.finish)

    def _mark_asking(self, since: float | None) -> None:
        stopping = self._holder.stopping.is_set() or self.needs_polls.is_set()
        self.asking_since = None if stopping else since

    def _want_polls(self, wanted: bool) -> None:
        if wanted:
            self.asking_since = None
            self.needs_polls.set()
        else:
            self.needs_polls.clear()


def _silent(why: str) -> RequestError:
    return OutcomeUnknown(why, reason="OUTCOME_UNKNOWN")


async def _first_of(wanted: Coroutine[Any, Any, None], closing: asyncio.Task[bool]) -> None:
    """Run *wanted* to its end, or until *closing*; then it is cancelled."""
    task = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
