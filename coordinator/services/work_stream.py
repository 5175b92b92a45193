"""One worker's stream: a standing claim for each lane, and what is to be written.

A lane asks dispatch as a long poll does, stands in the same lines, and asks again as soon as it was answered;
its credits say for how much. What it claimed goes to the outbox. What the writer had not taken when the
stream ends goes back at once; what it had may have reached the worker, and is left to the session's beats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from coordinator.errors import FieldViolation, Reason, RequestError
from coordinator.ports import Clock
from coordinator.services.api import ClaimedJob, ClaimQuery
from coordinator.services.work_credit import Credit
from coordinator.services.work_outbox import Outbox, StopAsked, claimed_bytes

__all__ = ["Claims", "LaneOpening", "WorkOpening", "WorkStream", "WorkStreamConfig"]

_MENDABLE: Final = frozenset(
    {Reason.ETCD_UNAVAILABLE, Reason.OUTCOME_UNKNOWN, Reason.NOT_READY, Reason.TOO_MANY_REQUESTS}
)
"""What another try may mend. A try of unknown outcome is repeated as a repeat: it answers what it claimed."""


class Claims(Protocol):
    """What claims; ``services.dispatch.Dispatch`` is one."""

    async def claim_jobs(self, namespace: str, query: ClaimQuery, deadline: float) -> list[ClaimedJob]:
        """Up to ``query.max_jobs`` jobs; waits for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOpening:
    """A lane as asked for: (queue, type) pairs, and the credit to begin with (bytes 0: enough)."""

    queues: tuple[tuple[str, str], ...]
    jobs: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOpening:
    """A stream as asked for."""

    session_id: str
    request_id: str
    lanes: tuple[LaneOpening, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkStreamConfig:
    """Bounds of streams. Spans are seconds.

    Args:
        max_streams: under way at once.
        batch: jobs of one claim.
        batch_bytes: bytes of one claim.
        loops: claims of one lane under way at most, one for each ``jobs_per_loop`` of credit at hand.
        jobs_per_loop: see ``loops``.
        unwritten: claims that may wait to be written; with more, the lanes wait for the writer.
        wait_s: how long a lane stands in line before it asks anew.
        call_s: bound of a call to the store.
        patience_s: how long a lane's tries may fail before the stream ends with the last error.
        pause_s: first pause after a failed try; it doubles.
        look_s: how often a stream's session and namespace are looked at.
        stale_looks: looks in a row that find the namespace's watch dead, until its streams end.
        remembered_s: how long a request to stop is remembered for a claim that is not known yet.
    """

    max_streams: int = 10_000
    batch: int = 100
    batch_bytes: int = 3 << 20
    loops: int = 4
    jobs_per_loop: int = 50
    unwritten: int = 100
    wait_s: float = 60.0
    call_s: float = 5.0
    patience_s: float = 5.0
    pause_s: float = 0.05
    look_s: float = 1.0
    stale_looks: int = 3
    remembered_s: float = 5.0


@dataclass(slots=True)
class _Lane:
    queues: tuple[tuple[str, str], ...]
    credit: Credit
    more: asyncio.Event
    loops: int = 0
    number: int = 0


class WorkStream:
    """One stream. Its owner calls ``start``, and ``close`` at the end, whatever happened.

    Args:
        asked: called with the claims that are about to be sent; the requests to stop that they need to hear.
        give_back: called with a claim that was never handed to the transport.
    """

    def __init__(
        self,
        namespace: str,
        opening: WorkOpening,
        claims: Claims,
        clock: Clock,
        config: WorkStreamConfig,
        *,
        asked: Callable[[Sequence[ClaimedJob]], Sequence[StopAsked]],
        give_back: Callable[[ClaimedJob], None],
    ) -> None:
        self.namespace = namespace
        self.session_id = opening.session_id
        self.outbox = Outbox()
        self.session_known = False
        self.command = 0
        self._request_id = opening.request_id
        self._claims = claims
        self._clock = clock
        self._config = config
        self._asked = asked
        self._give_back = give_back
        self._lanes: list[_Lane] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self._last_words: Exception | None = None
        for index, lane in enumerate(opening.lanes):
            credit = Credit(f"lanes[{index}].credit")
            credit.add(lane.jobs, lane.bytes)
            self._lanes.append(_Lane(lane.queues, credit, asyncio.Event()))

    def start(self) -> None:
        """Begin to claim."""
        for lane in self._lanes:
            self._staff(lane)

    def _staff(self, lane: _Lane) -> None:
        """As many loops as its credit gives work to; none is taken away."""
        wanted = max(1, min(self._config.loops, lane.credit.jobs // self._config.jobs_per_loop))
        for _ in range(wanted - lane.loops):
            lane.loops += 1
            task = asyncio.create_task(self._guarded(lane), name=f"work lane of {self.session_id}")
            task.add_done_callback(self._finished)
            self._tasks.append(task)

    def add_credit(self, lane: int, jobs: int, size: int) -> None:
        """Leave for more.

        Raises:
            RequestError: VALIDATION_FAILED: no such lane, or too much.
        """
        if not 0 <= lane < len(self._lanes):
            text = f"there are {len(self._lanes)} lanes, and no lane {lane}"
            raise RequestError(
                Reason.VALIDATION_FAILED,
                f"credit.lane: {text}",
                fields=(FieldViolation("credit.lane", text),),
            )
        one = self._lanes[lane]
        one.credit.add(jobs, size)
        one.more.set()
        if not self.outbox.ended and not self._ending:
            self._staff(one)

    def end(self, error: Exception | None = None) -> None:
        """Claim no more, and end: with ``error``, or as its caller wished."""
        self.outbox.end(error)
        for task in self._tasks:
            task.cancel()

    def finish(self, error: Exception) -> None:
        """Begin no claim, deliver what is being claimed, then end with ``error``.

        A claim that is cut off between its commit and the stream costs its job an attempt.
        """
        if self._last_words is None:
            self._last_words, self._ending = error, True
            for lane in self._lanes:
                lane.more.set()
            self._finished()

    def _finished(self, _: asyncio.Task[None] | None = None) -> None:
        if self._last_words is not None and all(task.done() for task in self._tasks):
            self.outbox.end(self._last_words, deliver=True)

    async def stop_claiming(self) -> None:
        """Claim no more, and give back what was not handed to the transport; what else waits is written."""
        self._ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for claimed in self.outbox.withdraw():
            self._give_back(claimed)

    async def close(self) -> None:
        """End it, if it has not ended, and wait for the lanes."""
        self.end()
        await self.stop_claiming()

    async def _guarded(self, lane: _Lane) -> None:
        try:
            await self._claim(lane)
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream ends with it
            if self._last_words is None:
                self.end(error)

    async def _claim(self, lane: _Lane) -> None:
        """Claim for one lane until cancelled.

        Raises:
            RequestError: nothing can be claimed here: what the stream is to end with.
        """
        config = self._config
        while self._last_words is None:
            if self.outbox.waiting_claims > config.unwritten:
                await self.outbox.drained.wait()
                continue
            reserved = lane.credit.reserve(config.batch, config.batch_bytes)
            if not reserved[0]:
                lane.more.clear()
                if self._last_words is None:
                    await lane.more.wait()
                continue
            claimed: list[ClaimedJob] = []
            try:
                claimed = await self._round(lane, *reserved)
            finally:
                lane.credit.spend(reserved, len(claimed), sum(map(claimed_bytes, claimed)))
                lane.more.set()
            if claimed:
                self._send(claimed)

    async def _round(self, lane: _Lane, jobs: int, size: int) -> list[ClaimedJob]:
        """One claim, and its repeats as long as they may help."""
        config, clock = self._config, self._clock
        lane.number += 1
        request_id = f"{self._request_id}#{self._lanes.index(lane)}.{lane.number}"
        repeat, pause = False, config.pause_s
        until: float | None = None
        while True:
            query = ClaimQuery(
                session_id=self.session_id,
                request_id=request_id,
                queues=lane.queues,
                max_jobs=jobs,
                max_bytes=size,
                wait_ms=0 if repeat else round(config.wait_s * 1000),
                repeat=repeat,
            )
            span = config.call_s if repeat else config.wait_s + config.call_s
            try:
                return await self._claims.claim_jobs(self.namespace, query, clock.monotonic() + span)
            except RequestError as error:
                now = clock.monotonic()
                until = now + config.patience_s if until is None else until
                if error.reason not in _MENDABLE or now >= until:
                    raise
                repeat = repeat or error.reason is Reason.OUTCOME_UNKNOWN
            await clock.sleep(pause)
            pause *= 2

    def _send(self, claimed: list[ClaimedJob]) -> None:
        if not self.outbox.put_claims(claimed):
            for one in claimed:
                self._give_back(one)
            return
        for stop in self._asked(claimed):
            self.outbox.put_stop(stop)
