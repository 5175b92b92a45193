"""What a call with the token of an ended attempt tells: a run went on after its claim was lost.

The record remembers the last attempts. From them follows which run the token stood for, how it ended, and
for how long newer runs of the job were under way beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.core.job import Attempt, AttemptOutcome, Claim, Job

__all__ = ["LateCall", "late_call"]

_ENDED_BY_WORKER: Final = frozenset(
    {AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED, AttemptOutcome.RELEASED}
)
"""Ends that the worker itself told: a call after one of these is a repeat, and no second run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCall:
    """A run that went on after its claim was lost.

    ``attempt`` is that run. ``newer``: the newest attempt since, None if there is none. ``overlap_ms``: how
    long newer attempts ran until the call, by the wall clocks that wrote the record; 0 if none did.
    """

    attempt: Attempt
    newer: Attempt | None
    overlap_ms: int


def late_call(job: Job, claim: Claim | None, token: int, now_ms: int) -> LateCall | None:
    """Whether ``token`` stands for a run of the job that was taken or lost, and what ran beside it.

    None if it is the holder's, if the worker had ended that attempt itself (a repeat, or a beat that crossed
    its own settlement), and if the record does not tell: an attempt that it has forgotten may have ended
    either way.

    Args:
        job: the record, read after the call.
        claim: the claim as read with it, None if there is none.
        token: what the call presented.
        now_ms: when the call came, Unix milliseconds.
    """
    if token <= 0 or (claim is not None and claim.token <= token):
        return None
    late = job.attempt_with(token) or _unnamed(job, claim, token)
    if late is None or late.outcome in _ENDED_BY_WORKER:
        return None
    newer = [attempt for attempt in job.attempts if attempt.number > late.number]
    overlap = sum(max(0, min(attempt.end_ms or now_ms, now_ms) - attempt.start_ms) for attempt in newer)
    return LateCall(attempt=late, newer=newer[-1] if newer else None, overlap_ms=overlap)


def _unnamed(job: Job, claim: Claim | None, token: int) -> Attempt | None:
    """The attempt that must have had ``token`` though its record does not say so.

    A lost attempt may be recorded without its token, and one that nobody has recovered yet is recorded as
    running. Tokens grow with attempts, so the place between known tokens tells; of several attempts that fit
    it is the newest, whose overlap is the shortest.
    """
    for place in range(len(job.attempts) - 1, -1, -1):
        attempt = job.attempts[place]
        if attempt.outcome is AttemptOutcome.RUNNING and claim is not None:
            continue  # the holder's own
        if attempt.token == token:
            return attempt
        if attempt.token > token:
            continue
        if attempt.token:
            return None
        older = next((one.token for one in reversed(job.attempts[:place]) if one.token), 0)
        remembered = older > 0 or job.attempts[0].number == 1
        return attempt if older < token and remembered else None
    return None
