"""What must always hold, as functions that answer with sentences about what does not.

Shared by the property tests, the fault suite and, in development, the reconciler. They look at what is
stored, never at our own counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from coordinator.core.effects import Slot, Where, keys_of
from coordinator.core.job import ATTEMPTS_KEPT, FAILED, TERMINAL, AttemptOutcome, Claim, Job, JobState

__all__ = ["check_history", "check_job", "check_keys"]


def check_job(job: Job, claim: Claim | None) -> list[str]:
    """Violations of a job beside its claim, read at one revision (docs/guarantees.md, P1)."""
    bad: list[str] = []
    name = f"{job.namespace}/{job.job_id}"
    running = [attempt for attempt in job.attempts if attempt.outcome is AttemptOutcome.RUNNING]
    if job.state is JobState.RUNNING:
        if claim is not None and job.current is not None:
            if claim.session != job.current.session:
                bad.append(f"{name}: RUNNING for session {job.current.session}, held by {claim.session}")
            if claim.attempt != job.attempt:
                bad.append(f"{name}: RUNNING attempt {job.attempt}, claim is for attempt {claim.attempt}")
            past = max((attempt.token for attempt in job.attempts[:-1]), default=0)
            if claim.token and claim.token <= past:
                bad.append(f"{name}: held under token {claim.token}, after one of {past}")
            if job.current.token not in (0, claim.token):
                bad.append(f"{name}: held under token {claim.token}, the record says {job.current.token}")
        if len(running) != 1 or job.attempts[-1] is not running[0]:
            bad.append(f"{name}: RUNNING with {len(running)} attempts under way")
    else:
        if claim is not None:
            bad.append(f"{name}: {job.state.name} beside a claim of session {claim.session}")
        if running:
            bad.append(f"{name}: {job.state.name} with an attempt under way")
    if len(job.attempts) > ATTEMPTS_KEPT or len(job.attempts) > job.attempt:
        bad.append(f"{name}: remembers {len(job.attempts)} of {job.attempt} attempts")
    tokens = [attempt.token for attempt in job.attempts if attempt.token]
    if any(later <= earlier for earlier, later in pairwise(tokens)):
        bad.append(f"{name}: tokens do not grow: {tokens}")
    if job.state in TERMINAL and not job.settle_ms:
        bad.append(f"{name}: {job.state.name} without a time of its end")
    if job.state not in TERMINAL and (job.settle_ms or job.end_reason):
        bad.append(f"{name}: {job.state.name} with an end: {job.end_reason!r} at {job.settle_ms}")
    if job.terms.rollback is not None and job.state in FAILED and not job.rollback_job:
        bad.append(f"{name}: {job.state.name} without its rollback job")
    if job.cancel_requested and job.state is not JobState.RUNNING:
        bad.append(f"{name}: {job.state.name} and still asked to stop")
    return bad


def check_keys(job: Job, present: Sequence[Where]) -> list[str]:
    """Violations between a job and the keys that exist for it at the same revision.

    The claim of a RUNNING job may be gone, and the entries of its locks with it (its lease has ended and
    recovery is under way); nothing else may.
    """
    wanted = keys_of(job)
    free = {Slot.CHECKPOINT, Slot.RESULT}
    name = f"{job.namespace}/{job.job_id}"
    gone = [w for w in wanted if w not in present]
    ended = {Slot.CLAIM, Slot.LOCK} if any(w.slot is Slot.CLAIM for w in gone) else set()
    bad = [f"{name}: {job.state.name} without its {w.slot.value} key" for w in gone if w.slot not in ended]
    bad += [
        f"{name}: {job.state.name} with a {where.slot.value} key"
        for where in present
        if where not in wanted and where.slot not in free
    ]
    return bad


def check_history(versions: Sequence[Job]) -> list[str]:
    """Violations over the successive records of one incarnation of a job: no way back, nothing shrinks.

    An incarnation ends with deletion. Only a retry by hand leads on from DEAD and QUARANTINED, and starts all
    counters but that of attempts again.
    """
    bad: list[str] = []
    for earlier, later in pairwise(versions):
        name = f"{later.namespace}/{later.job_id}"
        if earlier.state in (JobState.SUCCEEDED, JobState.CANCELLED):
            bad.append(f"{name}: {earlier.state.name} was followed by {later.state.name}")
        retried = later.retry_ms > earlier.retry_ms
        if earlier.state in FAILED and later.state is not earlier.state and not retried:
            bad.append(f"{name}: {earlier.state.name} was followed by {later.state.name} without a retry")
        counters: dict[str, tuple[int, int]] = {
            "attempt": (earlier.attempt, later.attempt),
            "retry_ms": (earlier.retry_ms, later.retry_ms),
        }
        if not retried:
            counters |= {
                "failures": (earlier.failures, later.failures),
                "lease_losses": (earlier.lease_losses, later.lease_losses),
                "uncharged": (earlier.uncharged, later.uncharged),
            }
        bad += [f"{name}: {what} fell from {a} to {b}" for what, (a, b) in counters.items() if b < a]
        if (
            earlier.state is JobState.RUNNING
            and later.state is JobState.RUNNING
            and later.attempt != earlier.attempt
        ):
            bad.append(f"{name}: attempt {later.attempt} began before attempt {earlier.attempt} had ended")
    return bad
