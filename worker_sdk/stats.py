"""What a worker has done so far, for logs and health checks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WorkerStats"]


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
