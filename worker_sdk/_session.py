"""The beat thread: opens a session, keeps it alive, and carries verdicts to the event loop.

A thread with connections of its own, because user code may block the event loop for longer than a TTL. It
goes on until the worker says that its last handler has settled; a failed beat is repeated at once at another
coordinator, and no failure ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Generic, Protocol, TypeVar

from worker_sdk._claims import BeatEffects, HeldClaim
from worker_sdk._machine import BeatPlan, beat_interval, beat_timeout, retry_delay
from worker_sdk._seams import Seams, default_identity
from worker_sdk._stalls import StallWatch
from worker_sdk._transport.beat_channel import BeatChannel
from worker_sdk._transport.channel import repeatable
from worker_sdk._work import BeatAnswer, BeatLine, Command, OpenedSession
from worker_sdk.config import ConnectionConfig, WorkerConfig
from worker_sdk.errors import ClientClosed, LeasekeeperError, SessionNotFound

__all__ = ["Book", "Session", "SessionListener"]

_log = logging.getLogger("worker_sdk.session")
_OPEN_TIMEOUT = 5.0
_JOIN_GRACE = 2.0
_RELEASE_TIMEOUT = 1.0


H = TypeVar("H")


class Book(Protocol[H]):
    """What a session holds, shared with the event loop; see `_claims.ClaimBook` and `_lock_book.LockBook`."""

    @property
    def session_deadline(self) -> float:
        """Until when the session is safe."""

    def opened(self, *, sent: float, safe_duration: float, revision: int) -> int:
        """A new session; its generation."""

    def snapshot(self, loop_turns: int) -> Sequence[tuple[H, BeatLine]]:
        """Everything held, with the line that a beat has for it."""

    def confirm(
        self, generation: int, claims: Sequence[H], answer: BeatAnswer, *, sent: float
    ) -> BeatEffects:
        """A beat that listed *claims* was confirmed."""

    def expire(self, now: float) -> list[HeldClaim]:
        """What has passed its deadline is lost; those that the listener must hear of."""

    def next_deadline(self, now: float) -> float:
        """After which something must be stopped."""

    def lose_all(self) -> list[HeldClaim]:
        """The session has ended."""

    def running(self, current: object) -> list[str]:
        """What runs on the event loop, for a warning; what *current*, a task, runs comes alone."""

    def lose_on_loop(self) -> list[HeldClaim]:
        """Give up what runs on the event loop; the claims that somebody must be told of."""

    def begun(self) -> list[str]:
        """What was begun, for a warning."""


class SessionListener(Protocol):
    """What the event loop is told; every method is called on the loop."""

    def session_opened(self, generation: int, opened: OpenedSession) -> None:
        """A session is there; claims may be made with it."""

    def session_ended(self, lost: list[HeldClaim]) -> None:
        """The session is gone, and *lost* with it; another will be opened."""

    def beat_answered(self, effects: BeatEffects) -> None:
        """A beat, or the clock, has changed what is known of some claims."""

    def commanded(self, command: Command) -> None:
        """The coordinator wants the worker to stop claiming, to end, or neither; told with each beat."""

    def session_failed(self, error: Exception) -> None:
        """No session can be opened, or the thread has failed; the worker must end."""


def _sdk_name() -> str:
    try:
        return f"leasekeeper-python/{version('leasekeeper')}"
    except PackageNotFoundError:
        return "leasekeeper-python"


class Session(Generic[H]):
    """Owner of the beat thread. Made, started and closed on one event loop.

    Args:
        connection: where the coordinators are.
        config: TTL, identity, labels, stall warning.
        book: what to list.
        listener: told, on the loop that calls `start`.
        loop_turns: reads how often the event loop has turned, the sign of life of handlers that run on it.
        seams: clock, randomness, ids.
    """

    def __init__(
        self,
        connection: ConnectionConfig,
        config: WorkerConfig,
        book: Book[H],
        listener: SessionListener,
        loop_turns: Callable[[], int],
        seams: Seams,
    ) -> None:
        self._connection = connection
        self._config = config
        self._book = book
        self._listener = listener
        self._loop_turns = loop_turns
        self._seams = seams
        self._wake = threading.Condition()
        self._hurried = False
        self._closing = False
        self._close_timeout = connection.timeouts.close
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._stalls = StallWatch(warn=config.stall_warning, limit=config.stall_limit)
        self._last_sent: float | None = None
        # The longest time between two confirmed beats that followed each other, seconds.
        self.longest_gap = 0.0

    # On the event loop.

    def start(self) -> None:
        """Start the thread; the listener hears of the session once it is open."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="leasekeeper-beats", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Beat at once: a claim waits to be covered, or the session may be gone. From any thread."""
        with self._wake:
            self._hurried = True
            self._wake.notify()

    async def close(self, timeout: float) -> None:
        """End the session, giving back what it still holds, and wait for the thread.

        Args:
            timeout: seconds for the last call; if nothing answers, the session ends by its TTL.
        """
        if self._ended is None:
            return
        with self._wake:
            self._closing = True
            self._close_timeout = timeout
            self._wake.notify()
        # The thread may be inside a beat, which has a deadline of its own.
        limit = timeout + beat_timeout(beat_interval(self._config.session_ttl)) + _JOIN_GRACE
        try:
            async with asyncio.timeout(limit):
                await self._ended
        except TimeoutError:
            _log.error("the beat thread did not end within %.1f s; it is left behind", limit)
        else:
            # Telling us was the last thing that it did.
            assert self._thread is not None
            self._thread.join(_JOIN_GRACE)

    # In the thread.

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The loop has ended without closing the session: nobody is there to work.
            self._closing = True

    def _run(self) -> None:
        start = int(self._seams.fraction() * 1024)
        channel = BeatChannel(self._connection, start)
        try:
            while not self._closing:
                self._one_session(channel)
        except Exception as error:  # noqa: BLE001  reported to the worker, which ends by it
            # A fault of ours: without beats nobody may go on believing in the claims.
            _log.exception("the beat thread has failed")
            self._post(self._listener.session_ended, self._book.lose_all())
            self._post(self._listener.session_failed, error)
        finally:
            channel.close()
            self._post(self._finish)

    def _finish(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _one_session(self, channel: BeatChannel) -> None:
        opened, sent = self._open(channel)
        if opened is None:
            return
        generation = self._book.opened(
            sent=sent, safe_duration=opened.safe_duration, revision=opened.revision
        )
        _log.info("session %s is open, ttl %.1f s", opened.session_id, opened.ttl)
        self._post(self._listener.session_opened, generation, opened)
        if self._beat_while_open(channel, opened, generation, sent):
            self._close(channel, opened)
            return
        lost = self._book.lose_all()
        _log.warning("session %s has ended; %d running claims are lost", opened.session_id, len(lost))
        self._post(self._listener.session_ended, lost)

    def _open(self, channel: BeatChannel) -> tuple[OpenedSession | None, float]:
        """Open a session; (None, 0) if the worker closes or no session can be had."""
        request_id = self._seams.identifier()
        # A repeat may find the session that an unanswered try has opened: its time counts from the first try.
        sent = self._seams.now()
        failures = 0
        while not self._closing:
            try:
                opened = channel.open_session(
                    request_id=request_id,
                    identity=self._config.identity or default_identity(),
                    ttl=self._config.session_ttl,
                    sdk=_sdk_name(),
                    labels=self._config.labels,
                    timeout=_OPEN_TIMEOUT,
                )
            except LeasekeeperError as error:
                if not repeatable(error):
                    self._post(self._listener.session_failed, error)
                    self._sleep_until(float("inf"))
                    return None, 0.0
                failures += 1
                if failures in (1, 10) or failures % 100 == 0:
                    _log.warning("no session yet, %d tries: %s", failures, error)
                self._sleep_until(self._seams.now() + self._open_pause(failures, error))
            else:
                return opened, sent
        return None, 0.0

    def _open_pause(self, failures: int, error: LeasekeeperError) -> float:
        retry = self._connection.retry
        pause = retry_delay(retry, failures, self._seams.fraction())
        return max(pause, getattr(error, "retry_after", None) or 0.0)

    def _beat_while_open(
        self, channel: BeatChannel, opened: OpenedSession, generation: int, sent: float
    ) -> bool:
        """Beat until the worker closes (True) or the session has ended (False)."""
        now = self._seams.now
        interval = min(opened.heartbeat_interval or float("inf"), beat_interval(opened.ttl))
        plan = BeatPlan(now=sent + interval, interval=interval, endpoints=channel.endpoint_count)
        number = 0
        self._last_sent = sent
        while not self._closing:
            self._expire()
            self._look_at_loop(channel)
            if self._sleep_until(min(plan.due, self._book.next_deadline(now()))):
                plan.hurry(now())
            if now() < plan.due or self._closing:
                continue
            number += 1
            sent = now()
            listed = self._book.snapshot(self._loop_turns())
            # A beat that hangs must not keep this thread from stopping what is no longer safe.
            timeout = min(beat_timeout(interval), max(0.1, self._book.next_deadline(sent) - sent))
            try:
                answer = channel.beat(
                    session_id=opened.session_id,
                    number=number,
                    sent=sent,
                    claims=[line for _, line in listed],
                    timeout=timeout,
                )
            except SessionNotFound:
                return False
            except LeasekeeperError as error:
                plan.failed(now=now(), fraction=self._seams.fraction())
                self._tell_failure(plan, error)
                continue
            finally:
                self._warn_of_standstill(now() - sent - timeout)
            if not answer.confirmed:
                channel.move_on()
                plan.failed(now=now(), fraction=self._seams.fraction())
                self._tell_failure(plan, None)
                continue
            plan.confirmed(sent=sent)
            self._confirmed(sent)
            effects = self._book.confirm(generation, [claim for claim, _ in listed], answer, sent=sent)
            if effects:
                self._post(self._listener.beat_answered, effects)
            # NONE as well: it takes an earlier QUIET back.
            self._post(self._listener.commanded, answer.command)
        return True

    def _tell_failure(self, plan: BeatPlan, error: LeasekeeperError | None) -> None:
        if plan.failures in (2, 8) or plan.failures % 32 == 0:
            why = error if error is not None else "etcd is out of the coordinator's reach"
            left = self._book.session_deadline - self._seams.now()
            _log.warning("%d beats failed in a row (%s); safe for %.1f s more", plan.failures, why, left)

    def _expire(self) -> None:
        lost = self._book.expire(self._seams.now())
        if lost:
            _log.error("the safe deadline has passed for %d running jobs: they are stopped", len(lost))
            # The flags are set here: the loop may be blocked by the very handler that must hear of it.
            for claim in lost:
                claim.set_lost()
            self._post(self._listener.beat_answered, BeatEffects(lost=lost))

    def _confirmed(self, sent: float) -> None:
        if self._last_sent is not None:
            self.longest_gap = max(self.longest_gap, sent - self._last_sent)
        self._last_sent = sent

    def _look_at_loop(self, channel: BeatChannel) -> None:
        stall = self._stalls.look(self._loop_turns(), self._seams.now())
        if stall is None or self._loop is None:
            return
        if stall.report:
            _log.warning(
                "the event loop has not turned for %.1f s; on it: %s",
                stall.seconds,
                self._book.running(asyncio.current_task(self._loop))[:10],
            )
        if stall.hopeless and self._config.on_stall == "release":
            lost = self._book.lose_on_loop()
            if lost:
                self._release(channel, lost)

    def _release(self, channel: BeatChannel, claims: list[HeldClaim]) -> None:
        """Give back the jobs of a loop that does not turn; beats list them no more, whatever comes of it."""
        _log.error("the event loop does not turn: %d jobs on it are given back", len(claims))
        for claim in claims:
            claim.set_lost()
        self._post(self._listener.beat_answered, BeatEffects(lost=claims))
        try:
            channel.release([claim.job for claim in claims], timeout=_RELEASE_TIMEOUT)
        except LeasekeeperError as error:
            _log.warning("they were not given back at once, but will be after a TTL: %s", error)

    def _warn_of_standstill(self, late: float) -> None:
        """Say that this very thread woke *late* seconds after its time, as it does where nobody could run."""
        if late > self._config.stall_warning:
            _log.warning(
                "this process stood still for %.1f s: it was frozen, or a handler held the GIL; its jobs: %s",
                late,
                self._book.begun()[:10],
            )

    def _sleep_until(self, due: float) -> bool:
        """Sleep until *due*, or until somebody hurries (then True) or the worker closes."""
        with self._wake:
            if not self._hurried and not self._closing:
                left = due - self._seams.now()
                if left > 0:
                    # At most a second at a time: the clock may have counted a sleep of the whole machine.
                    pause, asleep = min(left, 1.0), self._seams.now()
                    self._wake.wait(pause)
                    self._warn_of_standstill(self._seams.now() - asleep - pause)
            hurried, self._hurried = self._hurried, False
            return hurried

    def _close(self, channel: BeatChannel, opened: OpenedSession) -> None:
        request_id = self._seams.identifier()
        deadline = self._seams.now() + self._close_timeout
        while True:
            left = deadline - self._seams.now()
            try:
                released = channel.close_session(
                    session_id=opened.session_id,
                    request_id=request_id,
                    timeout=max(0.05, min(left, 2.0)),
                )
            except SessionNotFound:
                return
            except LeasekeeperError as error:
                if isinstance(error, ClientClosed) or self._seams.now() + 0.1 >= deadline:
                    _log.warning(
                        "session %s ends by its TTL, closing it failed: %s", opened.session_id, error
                    )
                    return
                with self._wake:
                    self._wake.wait(0.05)
            else:
                _log.info("session %s is closed; it gave back %d claims", opened.session_id, released)
                return
