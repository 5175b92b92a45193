"""What a worker has done so far, for logs and health checks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WorkerHealth", "WorkerStats"]


@dataclass(slots=True)
class WorkerStats:
    """Counts since the worker was made; read them on its event loop.

    Attributes:
        claimed: claims received.
        completed, failed, released: how handlers ended, as reported.
        lost: claims lost while their handler ran or waited.
        refused: settlements that came too late: somebody else had the job.
        abandoned: handlers that did not end when they were cancelled, and were left behind at shutdown.
        sessions: sessions opened.
        cut_short: a second signal, or `Worker.stop` with now, ended the drain before its time.
        longest_stall: the longest time in which the event loop did not turn, seconds.
        longest_beat_gap: the longest time between two confirmed beats of one session, seconds.
    """

    claimed: int = 0
    completed: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0
    refused: int = 0
    abandoned: int = 0
    sessions: int = 0
    cut_short: bool = False
    longest_stall: float = 0.0
    longest_beat_gap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """How a worker does now; times in seconds.

    A worker that beats but does not claim looks alive and is not: judge by `not_live` and `not_ready`.

    Attributes:
        session_safe_for: how long the session is certainly alive; 0: there is none, or it is in doubt.
        oldest_poll: how long the oldest unanswered claim call has waited, its repeats included; None: all
            slots are taken, or the worker is stopping.
        running: handlers that run.
        loop_silent_for: since the event loop turned last.
        oldest_try: since the oldest claim loop that waits for an answer last sent anything; None as above.
        stopping: the worker claims no more.
        not_live: why the process should be started again; empty: it should not. A coordinator that is away is
            no reason.
        not_ready: why the worker does no work now; empty: it does.
    """

    session_safe_for: float = 0.0
    oldest_poll: float | None = None
    running: int = 0
    loop_silent_for: float = 0.0
    oldest_try: float | None = None
    stopping: bool = False
    not_live: tuple[str, ...] = ()
    not_ready: tuple[str, ...] = ()
