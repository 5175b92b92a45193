"""A waiting job as a window knows it."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.ports import Spec, Stored

__all__ = ["Entry", "Key"]

Key = tuple[int, int, str]
"""Rank and job id: where it stands in its line."""


@dataclass(slots=True)
class Entry:
    """A waiting job as the window knows it. ``spec`` is kept if this process stored the job; ``seen`` is
    monotonic seconds."""

    stored: Stored
    spec: Spec | None
    seen: float

    @property
    def key(self) -> Key:
        job = self.stored.job
        return (job.rank.ms, job.rank.counter, job.job_id)
