"""One run of a worker: makes its parts, connects them, and stops them in order."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker_sdk._claim_feed import ClaimFeed
from worker_sdk._claimer import Claimer, ClaimerConfig, Holder
from worker_sdk._claims import BeatEffects, ClaimBook, HeldClaim
from worker_sdk._handlers import HandlerTable
from worker_sdk._health import HealthLimits, HealthWatch, judged
from worker_sdk._machine import ClaimPhase
from worker_sdk._processes import HandlerProcesses
from worker_sdk._runner import Places, Pool, Runner
from worker_sdk._seams import Seams
from worker_sdk._session import Session
from worker_sdk._settler import Settler, SettlerConfig
from worker_sdk._signals import StopSignals
from worker_sdk._stream_link import Lane, StreamConfig, StreamLink, StreamListener
from worker_sdk._threads import HandlerThreads
from worker_sdk._transport.channel import CoordinatorChannel
from worker_sdk._transport.worker_calls import WorkerCalls
from worker_sdk._work import (
    ClaimedJob,
    Command,
    Completed,
    Failed,
    OpenedSession,
    Outcome,
    Released,
    StopReason,
)
from worker_sdk.config import ConnectionConfig, WorkerConfig
from worker_sdk.context import ContextHost
from worker_sdk.errors import ClaimLost, JobNotFound
from worker_sdk.stats import WorkerHealth, WorkerStats

__all__ = ["RunPlan", "WorkerRun"]

_log = logging.getLogger("worker_sdk.worker")
_TURN_SECONDS = 0.25
_SLOTS_PER_LOOP = 50
_MOST_LOOPS = 4
_HURRIED_GRACE = 0.3
_HURRIED_CLOSE = 0.8
_CLAIMERS_GRACE = 1.0
# More than a claim call may take, before its loop counts as stuck or its coordinators as away.
_HEALTH_SLACK = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run is made from; ``limits``: slots of each group of queues."""

    connection: ConnectionConfig
    config: WorkerConfig
    drain_timeout: float
    limits: Mapping[tuple[str, ...], int]
    table: HandlerTable
    stats: WorkerStats
    seams: Seams


class WorkerRun:
    """Owner of all parts of a running worker, on one event loop; also their `SessionListener`."""

    def __init__(self, plan: RunPlan, ready: asyncio.Event) -> None:
        self._plan = plan
        self._config = plan.config
        self._seams = plan.seams
        self._stats = plan.stats
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._now = asyncio.Event()
        self._claim_no_more = asyncio.Event()
        self._lifted = asyncio.Event()
        self._session_open = asyncio.Event()
        self._current = (0, "")
        self._error: Exception | None = None
        self._turns = 0
        self._turned_at = plan.seams.now()
        self._ticker: asyncio.TimerHandle | None = None
        self._book = ClaimBook()
        self._channel = CoordinatorChannel(plan.connection, plan.seams)
        self._calls = WorkerCalls(self._channel, plan.connection.namespace)
        timeouts = plan.connection.timeouts
        self._lanes = [
            Lane(
                pool=Pool(queues=queues, limit=limit, freed=asyncio.Event()),
                wanted=plan.table.wanted(queues),
            )
            for queues, limit in plan.limits.items()
        ]
        holder = Holder(
            session=self._open_session,
            current=lambda: self._current[0],
            suspect=self._suspect,
            held=self._book.__len__,
            admit=self._admit,
            give_back=self._give_back,
            stopping=self._claim_no_more,
        )
        self._link = self._make_link(holder) if plan.config.transport == "stream" else None
        self._feed = ClaimFeed(self._claimers, holder, self._link)
        self._settler = Settler(
            self._calls.settle if self._link is None else self._link.settle,
            answered=self._book.forget,
            refused=self._settlement_refused,
            config=SettlerConfig(
                attempt_timeout=timeouts.attempt,
                give_up=self._config.settle_give_up,
                retry=plan.connection.retry,
            ),
            seams=plan.seams,
        )
        slots = sum(plan.limits.values())
        self._places = Places(
            threads=HandlerThreads(self._config.threads or slots),
            processes=HandlerProcesses(),
            attendants=HandlerThreads(slots),
        )
        host = ContextHost(
            book=self._book,
            now=plan.seams.now,
            loop=self._loop,
            pid=os.getpid(),
            save_checkpoint=self._save_checkpoint,
            call_timeout=timeouts.call,
        )
        self._runner = Runner(plan.table, self._book, self._settler, host, self._places, self._handler_ended)
        self._session = Session(
            plan.connection, self._config, self._book, self, lambda: self._turns, plan.seams
        )
        config = self._config
        self._health = HealthWatch(
            self.health,
            listen=config.health_listen,
            file=config.health_file,
            exit_after=config.exit_when_stuck_after,
        )
        wait = config.poll_wait + _HEALTH_SLACK
        self._limits = HealthLimits(loop=config.stall_limit, tries=wait + timeouts.attempt, answers=wait)

    @property
    def health_address(self) -> str:
        """``host:port`` of the health server, or empty."""
        return self._health.address

    # The run.

    async def work(self) -> None:
        """Work until stopped, then shut down.

        Raises:
            Exception: what made the worker end by itself.
        """
        signals = StopSignals(self._signalled)
        if self._config.handle_signals:
            signals.__enter__()
        self._tick()
        self._session.start()
        self._health.start()
        try:
            async with asyncio.TaskGroup() as group:
                settling = group.create_task(self._settler.run())
                claiming = group.create_task(self._claim())
                if self._link is not None:
                    group.create_task(self._guard(self._link.run()))
                try:
                    await self._stopping.wait()
                except asyncio.CancelledError:
                    self.stop(now=True)
                    await self._shut_down([claiming])
                    raise
                await self._shut_down([claiming])
                self._settler.stop()
                if self._link is not None:
                    self._link.close()
                await settling
        finally:
            if self._ticker is not None:
                self._ticker.cancel()
            await self._session.close(_HURRIED_CLOSE if self._now.is_set() else self._close_timeout)
            await self._channel.close()
            self._places.close()
            self._health.close()
            self._stats.longest_beat_gap = max(self._stats.longest_beat_gap, self._session.longest_gap)
            signals.__exit__(None, None, None)
        if self._error is not None:
            raise self._error

    async def _claim(self) -> None:
        """Claim until the worker stops; while it is told to be quiet, wait."""
        while not self._stopping.is_set():
            await self._guard(self._feed.run())
            lifted = asyncio.create_task(self._lifted.wait())
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                await asyncio.wait({lifted, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                lifted.cancel()
                stopping.cancel()
            if self._stopping.is_set():
                return
            self._lifted.clear()
            self._claim_no_more.clear()

    @property
    def _close_timeout(self) -> float:
        return self._plan.connection.timeouts.close

    def _claimers(self, holder: Holder) -> list[Claimer]:
        claimers = []
        for lane in self._lanes:
            loops = self._config.claim_loops or max(1, min(_MOST_LOOPS, lane.pool.limit // _SLOTS_PER_LOOP))
            config = ClaimerConfig(
                poll_wait=self._config.poll_wait,
                batch=self._config.claim_batch,
                loops=loops,
                retry=self._plan.connection.retry,
            )
            claimers += [
                Claimer(lane.pool, lane.wanted, self._calls, holder, config, self._seams)
                for _ in range(loops)
            ]
        return claimers

    def _make_link(self, holder: Holder) -> StreamLink:
        connection = self._plan.connection
        return StreamLink(
            self._lanes,
            self._channel,
            connection.namespace,
            holder,
            StreamListener(
                asked=lambda claims: self.beat_answered(self._book.asked_to_stop(claims)),
                commanded=self.commanded,
                joined=lambda: self._session.hurry(),
            ),
            self._calls.settle,
            StreamConfig(retry=connection.retry),
            self._seams,
        )

    def _tick(self) -> None:
        # The sign that the event loop turns, and with it the handlers on it.
        now = self._seams.now()
        if self._turns:
            late = now - self._turned_at - _TURN_SECONDS
            self._stats.longest_stall = max(self._stats.longest_stall, late)
            if late > self._config.stall_warning:
                _log.warning("the event loop turns again, after %.1f s", late)
        self._turns += 1
        self._turned_at = now
        self._ticker = self._loop.call_later(_TURN_SECONDS, self._tick)

    async def _guard(self, claiming: Coroutine[Any, Any, None]) -> None:
        """Let an error in a claim loop end the worker in order, with its drain."""
        try:
            await claiming
        except Exception as error:  # noqa: BLE001  raised again by `work`, after the drain
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            _log.error("the worker ends: %s: %s", type(error).__name__, error)
            self._error = error
        self.stop()

    def health(self) -> WorkerHealth:
        """How the worker does now; from any thread."""
        now = self._seams.now()
        asking = [(c.asking_since, c.tried_at) for c in self._feed.asking()]
        polls = [(now - since, now - tried) for since, tried in asking if since is not None]
        health = WorkerHealth(
            session_safe_for=max(0.0, self._book.session_deadline - now),
            oldest_poll=max((poll for poll, _ in polls), default=None),
            running=self._runner.running,
            loop_silent_for=max(0.0, now - self._turned_at - _TURN_SECONDS),
            oldest_try=max((tried for _, tried in polls), default=None),
            stopping=self._claim_no_more.is_set(),
        )
        return judged(health, self._limits)

    # Stopping.

    def stop(self, *, now: bool = False) -> None:
        """Begin the shutdown; *now*: cut it short."""
        self._claim_no_more.set()
        self._stopping.set()
        if now:
            self._now.set()
            self._stats.cut_short = True

    def _signalled(self) -> None:
        now = self._stopping.is_set()
        _log.info("signal: %s", "ending now" if now else "draining; a second signal ends at once")
        self.stop(now=now)

    async def _shut_down(self, claiming: Sequence[asyncio.Task[None]]) -> None:
        """Drain, cancel, give back the rest; beats go on meanwhile."""
        runner = self._runner
        runner.stop_waiting(StopReason.SHUTDOWN)
        if not await self._idle(self._plan.drain_timeout):
            _log.warning("%d handlers still run: they are cancelled", runner.running)
            runner.stop_all(StopReason.SHUTDOWN)
            grace = self._config.cancel_grace
            await self._idle(grace, hurried=min(grace, _HURRIED_GRACE))
        if claiming:
            _, late = await asyncio.wait(claiming, timeout=_CLAIMERS_GRACE)
            for task in late:
                task.cancel()
        self._stats.abandoned += runner.abandon()
        await self._settler.flush(_HURRIED_CLOSE if self._now.is_set() else self._close_timeout)

    async def _idle(self, timeout: float, *, hurried: float = 0.0) -> bool:
        """Wait until no handler runs, at most *timeout* seconds, or *hurried* once the stop is to be now."""
        idle = asyncio.create_task(self._runner.wait_idle())
        now = asyncio.create_task(self._now.wait())
        try:
            await asyncio.wait({idle, now}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not idle.done() and now.done() and hurried:
                await asyncio.wait({idle}, timeout=hurried)
            return idle.done()
        finally:
            idle.cancel()
            now.cancel()

    # For the claimers.

    async def _open_session(self) -> tuple[int, str]:
        await self._session_open.wait()
        return self._current

    def _suspect(self, generation: int) -> None:
        if generation == self._current[0]:
            self._session.hurry()

    def _admit(self, generation: int, jobs: Sequence[ClaimedJob], pool: Pool) -> None:
        claims = self._book.admit(generation, jobs, self._seams.now())
        self._stats.claimed += len(claims)
        if self._runner.admit(claims, pool, _covered):
            self._session.hurry()

    def _give_back(self, generation: int, jobs: Sequence[ClaimedJob], pool: Pool) -> None:
        claims = self._book.admit(generation, jobs, self._seams.now())
        self._stats.claimed += len(claims)
        for claim in claims:
            self._book.ended(claim)
            self._settler.put(claim, Released(StopReason.SHUTDOWN.value))
            self._stats.released += 1

    # SessionListener.

    def session_opened(self, generation: int, opened: OpenedSession) -> None:
        """Let the claim loops go on."""
        self._stats.sessions += 1
        self._current = (generation, opened.session_id)
        self._session_open.set()
        self._ready.set()

    def session_ended(self, lost: list[HeldClaim]) -> None:
        """Stop what ran; the claim loops wait for the next session."""
        self._session_open.clear()
        self._current = (0, "")
        self._stats.lost += len(lost)
        self._runner.stop(lost, StopReason.LOST)

    def beat_answered(self, effects: BeatEffects) -> None:
        """Start, stop and cancel as the beat says."""
        self._runner.start_waiting(effects.startable)
        self._stats.lost += len(effects.lost)
        self._runner.stop(effects.lost, StopReason.LOST)
        self._runner.stop(effects.cancelled, StopReason.CANCELLED)

    def commanded(self, command: Command) -> None:
        """Obey the coordinator; NONE takes an earlier QUIET back."""
        if self._stopping.is_set():
            return
        if command is Command.NONE:
            if self._claim_no_more.is_set() and not self._lifted.is_set():
                _log.info("the coordinator no longer wants it to be quiet")
                self._lifted.set()
            return
        if command is Command.QUIET:
            self._lifted.clear()
            if self._claim_no_more.is_set():
                return
        _log.info("the coordinator says %s", command.name)
        if command is Command.TERMINATE:
            self.stop()
        else:
            self._claim_no_more.set()

    def session_failed(self, error: Exception) -> None:
        """End: no session can be had."""
        self._fail(error)

    # For handlers and settlements.

    async def _save_checkpoint(self, claim: HeldClaim, data: bytes, timeout: float) -> None:
        claim.checkpoint_sequence += 1
        job = claim.job
        try:
            await self._calls.save_checkpoint(
                job_id=job.job_id,
                fencing_token=job.fencing_token,
                data=data,
                sequence=claim.checkpoint_sequence,
                progress=claim.progress,
                timeout=timeout,
            )
        except (ClaimLost, JobNotFound) as error:
            if self._book.give_away(claim):
                self._stats.lost += 1
                self._runner.stop([claim], StopReason.LOST)
            if isinstance(error, ClaimLost):
                raise
            metadata = {"held": str(job.fencing_token), "current": "0"}
            raise ClaimLost(str(error), reason="CLAIM_LOST", metadata=metadata) from error

    def _settlement_refused(self, claim: HeldClaim) -> None:
        self._stats.refused += 1

    def _handler_ended(self, claim: HeldClaim, outcome: Outcome | None) -> None:
        if isinstance(outcome, Completed):
            self._stats.completed += 1
        elif isinstance(outcome, Failed):
            self._stats.failed += 1
        elif isinstance(outcome, Released):
            self._stats.released += 1


def _covered(claim: HeldClaim) -> bool:
    return claim.phase is ClaimPhase.RUNNING
