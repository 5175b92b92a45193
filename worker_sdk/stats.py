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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """How a worker does now; times in seconds.

    A worker that beats but does not claim looks alive and is not: judge by `oldest_poll` too.

    Attributes:
        session_safe_for: how long the session is certainly alive; 0: there is none, or it is in doubt.
        oldest_poll: how long the oldest unanswered claim call has waited; None: all slots are taken, or the
            worker is stopping. More than ``WorkerConfig.poll_wait`` and some seconds means that no
            coordinator answers.
        running: handlers that run.
    """

    session_safe_for: float
    oldest_poll: float | None
    running: int
