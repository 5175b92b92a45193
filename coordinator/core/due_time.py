"""Whether a job misses its due time: the time by which its first attempt should have begun. Pure."""

from __future__ import annotations

from coordinator.core.job import Job, JobState

__all__ = ["is_past_due"]


def is_past_due(job: Job, now_ms: int) -> bool:
    """Whether it has missed its due time, or will miss it as things are.

    Judged by the beginning of its first attempt that the record remembers. A job that has none is late from
    its due time on, or at once if it is not claimable before.
    """
    due_ms = job.terms.due_ms
    if not due_ms:
        return False
    if job.attempts:
        return job.attempts[0].start_ms > due_ms
    if job.terminal:
        return job.settle_ms > due_ms
    begins_ms = max(now_ms, job.ready_ms) if job.state is JobState.SCHEDULED else now_ms
    return begins_ms > due_ms
