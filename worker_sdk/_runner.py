"""Runs handlers.

Coroutines as tasks of the event loop, plain functions in threads or child processes; ends each with an
outcome.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from worker_sdk._claims import ClaimBook, HeldClaim
from worker_sdk._handlers import Handler, HandlerTable
from worker_sdk._outcome import from_exception, from_result, with_follow_ups
from worker_sdk._process_child import ChildTask, Done
from worker_sdk._processes import HandlerProcesses
from worker_sdk._settler import Settler
from worker_sdk._threads import HandlerThreads
from worker_sdk._work import Failed, Outcome, Released, StopReason
from worker_sdk.context import Context, ContextHost, SyncContext
from worker_sdk.errors import JobCancelled

__all__ = ["Places", "Pool", "Runner"]

_log = logging.getLogger("worker_sdk.handlers")
_CHILD_RETURNED = 70


@dataclass(slots=True, kw_only=True)
class Pool:
    """Slots that some queues share.

    Attributes:
        limit: how many handlers may run.
        busy: slots in use, from the claim's arrival to the handler's end.
        promised: slots kept for claim calls under way.
        freed: set whenever a slot becomes free.
    """

    queues: tuple[str, ...]
    limit: int
    freed: asyncio.Event
    busy: int = 0
    promised: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where handlers run that are not on the event loop.

    Attributes:
        threads: for plain functions.
        processes, attendants: child processes, and a thread for each that talks with it.
    """

    threads: HandlerThreads
    processes: HandlerProcesses
    attendants: HandlerThreads

    def close(self) -> None:
        """End what can end by itself, and kill the child processes."""
        self.processes.close()
        self.threads.close()
        self.attendants.close()


class Runner:
    """Owner of all running handlers of one worker, on one event loop.

    Args:
        book: the claims; settler: takes the outcomes; host: what contexts need.
        places: where handlers run that are not on the loop.
        ended: told after each handler.
    """

    def __init__(
        self,
        table: HandlerTable,
        book: ClaimBook,
        settler: Settler,
        host: ContextHost,
        places: Places,
        ended: Callable[[HeldClaim, Outcome | None], None],
    ) -> None:
        self._table = table
        self._book = book
        self._settler = settler
        self._host = host
        self._places = places
        self._told = ended
        self._loop = host.loop
        self._running: dict[HeldClaim, Pool] = {}
        self._waiting: dict[HeldClaim, Pool] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """How many handlers run, or wait for their claim to be covered."""
        return len(self._running) + len(self._waiting)

    async def wait_idle(self) -> None:
        """Wait until no handler runs."""
        await self._idle.wait()

    def admit(self, claims: Iterable[HeldClaim], pool: Pool, covered: Callable[[HeldClaim], bool]) -> bool:
        """Take a slot for each claim and start it if it is *covered*.

        Return whether some must wait for a beat.
        """
        waits = False
        for claim in claims:
            pool.busy += 1
            self._idle.clear()
            if covered(claim):
                self._start(claim, pool)
            else:
                self._waiting[claim] = pool
                waits = True
        return waits

    def start_waiting(self, claims: Iterable[HeldClaim]) -> None:
        """Start claims that a beat has covered since."""
        for claim in claims:
            pool = self._waiting.pop(claim, None)
            if pool is not None:
                self._start(claim, pool)

    def _start(self, claim: HeldClaim, pool: Pool) -> None:
        self._running[claim] = pool
        handler = self._table.get(claim.job.type)
        if handler is None:
            # Asked for by nobody: a fault of the coordinator's. Somebody else may have the handler.
            _log.error("job %s has type %r, for which there is no handler", claim.job.job_id, claim.job.type)
            claim.started = True
            self._finish(claim, Released("no handler for this type"))
            return
        if claim.job.run_timeout is not None:
            claim.run_until = self._host.now() + claim.job.run_timeout
            claim.timer = self._loop.call_later(claim.job.run_timeout, self._time_out, claim)
        self._launch(claim, handler)

    def _launch(self, claim: HeldClaim, handler: Handler) -> None:
        if handler.on_loop is not None:
            claim.task = self._loop.create_task(self._run_on_loop(claim, handler.on_loop))
            return
        claim.on_loop = False
        claim.started = True
        if handler.in_process is not None:
            target = handler.in_process
            self._places.attendants.run(lambda: self._in_thread(claim, lambda: self._attend(claim, target)))
            return
        assert handler.in_thread is not None
        function = handler.in_thread
        self._places.threads.run(
            lambda: self._in_thread(claim, lambda: from_result(function(SyncContext(claim, self._host))))
        )

    async def _run_on_loop(self, claim: HeldClaim, function: Callable[[Context], Awaitable[object]]) -> None:
        outcome: Outcome | None
        try:
            if claim.stop_reason is None:
                claim.started = True
                outcome = from_result(await function(Context(claim, self._host)))
            else:
                # Told to stop before the first step: a task cancelled then would never come here.
                outcome = from_exception(asyncio.CancelledError(), claim.stop_reason)
        except BaseException as error:  # noqa: BLE001  see the table of `_outcome`: nothing escapes a handler
            self._leave_if_child(error)
            outcome = self._failed(claim, error)
        self._leave_if_child(None)
        self._finish(claim, outcome)

    def _in_thread(self, claim: HeldClaim, run: Callable[[], Outcome | None]) -> None:
        outcome: Outcome | None
        try:
            outcome = run()
        except BaseException as error:  # noqa: BLE001  see the table of `_outcome`: nothing escapes a handler
            self._leave_if_child(error)
            outcome = self._failed(claim, error)
        self._leave_if_child(None)
        try:
            self._loop.call_soon_threadsafe(self._finish, claim, outcome)
        except RuntimeError:
            _log.error("job %s ended after its worker: its outcome is lost", claim.job.job_id)

    def _attend(self, claim: HeldClaim, target: str) -> Outcome | None:
        """Run a handler in a child process, and kill it when the job is to stop."""
        context = SyncContext(claim, self._host)

        def sign(progress: tuple[float, str] | None) -> None:
            claim.advances += 1
            if progress is not None:
                claim.progress = progress

        def save(data: bytes, timeout: float | None) -> None:
            context.save_checkpoint(data, timeout=timeout)

        child = self._places.processes.take()
        try:
            claim.interrupt = child.kill
            if claim.cancelled.is_set():
                raise JobCancelled("told to stop before it began")
            done = child.run(ChildTask(target, claim.job, claim.run_until), sign, save)
        finally:
            claim.interrupt = None
            self._places.processes.give_back(child)
        return self._judged(claim, done)

    def _judged(self, claim: HeldClaim, done: Done) -> Outcome | None:
        """Return the outcome of a child; of one that was told to stop meanwhile, a failure says nothing."""
        if not isinstance(done.outcome, Failed):
            return done.outcome
        stop = self._stop_reason(claim)
        if stop is None:
            _log.info("job %s failed: %s\n%s", claim.job.job_id, done.outcome.type, done.trace)
            return done.outcome
        return from_exception(JobCancelled(stop.value), stop)

    @staticmethod
    def _stop_reason(claim: HeldClaim) -> StopReason | None:
        return StopReason.LOST if claim.lost.is_set() else claim.stop_reason

    def _failed(self, claim: HeldClaim, error: BaseException) -> Outcome | None:
        stop = self._stop_reason(claim)
        if stop is None:
            _log.info("job %s failed: %s", claim.job.job_id, type(error).__name__, exc_info=error)
        return from_exception(error, stop)

    def _leave_if_child(self, error: BaseException | None) -> None:
        """In a forked child.

        Leave the process. It holds a copy of the worker, but neither beats nor claims.
        """
        if os.getpid() != self._host.pid:
            _leave_child(error)

    def _finish(self, claim: HeldClaim, outcome: Outcome | None) -> None:
        pool = self._running.pop(claim, None)
        if pool is None:
            return  # it was given up, and its slot freed, before
        if claim.timer is not None:
            claim.timer.cancel()
            claim.timer = None
        claim.task = None
        pool.busy -= 1
        pool.freed.set()
        lost = self._book.ended(claim)
        if outcome is None and lost and not claim.given_away:
            # Only this process's own deadline has passed: if the claim still stands, others need not wait
            # for it.
            outcome = Released("the lease's safe deadline passed")
        if outcome is None:
            self._book.forget([claim])
        else:
            self._settler.put(claim, with_follow_ups(outcome, claim.follow_ups))
        self._told(claim, outcome)
        if not self._running and not self._waiting:
            self._idle.set()

    def _time_out(self, claim: HeldClaim) -> None:
        claim.timer = None
        self.stop([claim], StopReason.RUN_TIMEOUT)

    def stop(self, claims: Iterable[HeldClaim], reason: StopReason) -> None:
        """Tell handlers to stop; those on the loop are cancelled, once for each reason."""
        for claim in claims:
            told = claim.tell(reason)
            pool = self._waiting.pop(claim, None)
            if pool is not None:
                self._running[claim] = pool
                self._finish(claim, from_exception(asyncio.CancelledError(), claim.stop_reason))
            elif told and claim.started and claim.task is not None:
                claim.task.cancel()

    def stop_waiting(self, reason: StopReason) -> None:
        """Give back the claims that no beat has covered yet."""
        self.stop(list(self._waiting), reason)

    def stop_all(self, reason: StopReason) -> None:
        """Tell all handlers to stop."""
        self.stop([*self._running, *self._waiting], reason)

    def abandon(self) -> int:
        """Give up the handlers that do not end.

        Return how many. Their claims go back, their tokens are stale.
        """
        stuck = list(self._running)
        for claim in stuck:
            claim.set_lost()
            _log.error("job %s ignores its cancellation; it is given back while it runs", claim.job.job_id)
            self._finish(claim, Released(StopReason.SHUTDOWN.value))
        return len(stuck)


def _leave_child(error: BaseException | None) -> NoReturn:
    """End a forked child that came back from a handler; only its parent may settle the job."""
    code = error.code if isinstance(error, SystemExit) else None
    if error is None or isinstance(error, SystemExit):
        status = (
            code if isinstance(code, int) else 0 if code is None and error is not None else _CHILD_RETURNED
        )
    else:
        status = _CHILD_RETURNED
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # nothing can be said any more
    # Not sys.exit: it would unwind through the parent's event loop, and atexit would end the parent's things.
    os._exit(status)
