"""The rules of the transition table: each computes the next record from the present one."""

from __future__ import annotations

from typing import Final

from coordinator.core import commands as c
from coordinator.core.copying import changed
from coordinator.core.job import (
    ATTEMPTS_KEPT,
    INLINE_RESULT_BYTES,
    Attempt,
    AttemptOutcome,
    Job,
    JobState,
    Progress,
    Terms,
)
from coordinator.core.rank import Rank, rank
from coordinator.core.retry import MAX_DELAY_MS, delay_ms

__all__ = ["FREE_RETURNS"]

FREE_RETURNS: Final = 20
"""Free returns of a job; each further one counts as a lease loss, so none circles for ever (design, 5)."""

# Looked up once: a member of an enum costs thirty times what a global costs.
_SCHEDULED: Final = JobState.SCHEDULED
_PENDING: Final = JobState.PENDING
_RUNNING: Final = JobState.RUNNING
_SUCCEEDED: Final = JobState.SUCCEEDED
_WELL: Final = AttemptOutcome.SUCCEEDED


def submit(command: c.Submit, now_ms: int) -> Job:
    """The first record: SCHEDULED if it is to wait, else PENDING."""
    later = command.run_at_ms > now_ms
    ready_ms = command.run_at_ms if later else now_ms
    return Job(
        namespace=command.namespace,
        job_id=command.job_id,
        terms=command.terms,
        state=_SCHEDULED if later else _PENDING,
        ready_ms=ready_ms,
        rank=_rank(command.terms, ready_ms),
    )


def claim(job: Job, command: c.ClaimIt, now_ms: int) -> Job:
    """RUNNING under the next attempt, unless its time in the queue is over."""
    if _expired(job, now_ms):
        return job
    held = command.claim
    started = Attempt(number=job.attempt + 1, session=held.session, start_ms=held.start_ms)
    return changed(
        job,
        state=_RUNNING,
        attempt=started.number,
        attempts=(*job.attempts[-(ATTEMPTS_KEPT - 1) :], started),
        progress=None,
    )


def complete(job: Job, command: c.Complete, now_ms: int) -> Job:
    """SUCCEEDED. A large result is left to a key of its own."""
    result = command.result
    # What _end_attempt does, in one copy of the job: nearly every job ends here.
    ended = changed(
        job.attempts[-1],
        token=command.token,
        end_ms=now_ms,
        outcome=_WELL,
        digest=command.digest,
        failure_type="",
        failure_message="",
        state_after=_SUCCEEDED,
        ready_ms_after=0,
    )
    return changed(
        job,
        state=_SUCCEEDED,
        attempts=(*job.attempts[:-1], ended),
        cancel_requested=False,
        progress=command.progress if command.progress is not None else job.progress,
        result=result if len(result) <= INLINE_RESULT_BYTES else b"",
        result_content_type=command.result_content_type,
        result_size=len(result),
        settle_ms=now_ms,
    )


def fail(job: Job, command: c.Fail, now_ms: int) -> Job:
    """Back off, or DEAD; CANCELLED if it was to stop."""
    failures = job.failures + 1
    policy = job.terms.retry
    if job.cancel_requested:
        after = _cancelled(changed(job, failures=failures), now_ms)
    elif command.no_retry:
        after = _dead(changed(job, failures=failures), now_ms, "told not to retry")
    elif command.failure_type in policy.non_retryable_types:
        after = _dead(
            changed(job, failures=failures), now_ms, f"failure type {command.failure_type} is not retryable"
        )
    elif failures > policy.max_retries:
        after = _dead(changed(job, failures=failures), now_ms, "retries used up")
    else:
        delay = command.retry_delay_ms
        if delay is None:
            delay = delay_ms(policy, failures, command.jitter_number)
        after = _wait(changed(job, failures=failures), now_ms, delay)
    return _end_attempt(
        after,
        now_ms,
        AttemptOutcome.FAILED,
        token=command.token,
        digest=command.digest,
        failure_type=command.failure_type,
        failure_message=command.failure_message,
        progress=command.progress,
    )


def release(job: Job, command: c.Release, now_ms: int) -> Job:
    """Claimable again, uncharged; CANCELLED if it was to stop."""
    after = _returned(job, now_ms, command.delay_ms, hold_ms=0)
    return _end_attempt(
        after,
        now_ms,
        AttemptOutcome.RELEASED,
        token=command.token,
        digest=command.digest,
        failure_message=command.reason,
        progress=command.progress,
    )


def cancel(job: Job, command: c.Cancel, now_ms: int) -> Job:
    """A waiting job is cancelled at once."""
    return _cancelled(changed(job, cancel_reason=command.reason), now_ms)


def request_cancel(job: Job, command: c.Cancel, now_ms: int) -> Job:
    """A running job is asked to stop; asking again changes nothing."""
    if job.cancel_requested:
        return job
    return changed(_held_under(job, command.token), cancel_requested=True, cancel_reason=command.reason)


def lose(job: Job, command: c.Lose, now_ms: int) -> Job:
    """Its holder died: claimable again, or QUARANTINED."""
    losses = job.lease_losses + 1
    if job.cancel_requested:
        after = _cancelled(changed(job, lease_losses=losses), now_ms)
    elif losses > job.terms.retry.max_lease_losses:
        after = _quarantined(changed(job, lease_losses=losses), now_ms)
    else:
        after = _wait(changed(job, lease_losses=losses), now_ms, command.delay_ms)
    known = job.current.token if job.current is not None else 0
    return _end_attempt(after, now_ms, AttemptOutcome.LOST, token=known or command.token)


def take_away(job: Job, command: c.TakeAway, now_ms: int) -> Job:
    """The coordinator ends the claim. The job waits ``hold_ms`` so that its holder hears of it first.

    One that is DEAD or QUARANTINED by it keeps the hold, for a retry by hand.
    Nothing is taken for a cancellation that the record does not ask for: a stray cancel key ends no claim.
    """
    if command.why is c.Taken.CANCELLED and not job.cancel_requested:
        return job
    hold = max(1, command.hold_ms)
    if job.cancel_requested:
        after = _cancelled(job, now_ms)
    elif command.why is c.Taken.TIMED_OUT:
        failures = job.failures + 1
        if failures > job.terms.retry.max_retries:
            ended = changed(job, failures=failures, hold_ms=hold)
            after = _dead(ended, now_ms, command.reason or "timed out")
        else:
            delay = max(hold, delay_ms(job.terms.retry, failures, command.jitter_number))
            after = changed(_wait(changed(job, failures=failures), now_ms, delay), hold_ms=hold)
    else:
        after = _returned(job, now_ms, hold, hold_ms=hold)
    return _end_attempt(
        after,
        now_ms,
        AttemptOutcome(int(command.why)),
        token=command.token,
        failure_message=command.reason,
    )


def fall_due(job: Job, command: c.FallDue, now_ms: int) -> Job:
    """What time alone does to a waiting job."""
    if _expired(job, now_ms):
        total = job.terms.total_timeout_ms and now_ms >= job.total_end_ms
        return _dead(job, now_ms, "total timeout" if total else "queue timeout")
    if job.state is JobState.SCHEDULED and now_ms >= job.ready_ms:
        return changed(job, state=JobState.PENDING, rank=_rank(job.terms, job.ready_ms), hold_ms=0)
    return job


def update(job: Job, command: c.Update, now_ms: int) -> Job:
    """New priority, due time or run_at; the rank follows. A job that was taken away keeps its hold.

    A waiting job that is told to run now keeps its ready time: it neither loses its place nor gains time in
    the queue.
    """
    terms = job.terms
    if command.priority is not None or command.due_ms is not None:
        terms = changed(
            terms,
            priority=terms.priority if command.priority is None else command.priority,
            due_ms=terms.due_ms if command.due_ms is None else command.due_ms,
        )
    ready_ms, state = job.ready_ms, job.state
    if command.run_at_ms is not None:
        waits = job.state is _PENDING and command.run_at_ms <= now_ms
        ready_ms = job.ready_ms if waits else max(command.run_at_ms, job.ready_ms if job.hold_ms else now_ms)
        state = JobState.SCHEDULED if ready_ms > now_ms or job.hold_ms else JobState.PENDING
        if ready_ms != job.ready_ms:
            terms = changed(terms, run_at_ms=command.run_at_ms)
    after = changed(job, terms=terms, ready_ms=ready_ms, state=state, rank=_rank(terms, ready_ms))
    return job if after == job else after


def retry(job: Job, command: c.Retry, now_ms: int) -> Job:
    """Claimable again, with its attempts and their tokens; all that is counted towards an end is 0 again.

    A hold begins anew, for nobody knows how long the job has lain there but by wall clocks.
    """
    if is_repeat(job, command):
        return job  # it died again since
    terms = job.terms
    if command.run_at_ms:
        terms = changed(terms, run_at_ms=command.run_at_ms)
    ready_ms = max(now_ms + job.hold_ms, command.run_at_ms)
    return changed(
        job,
        terms=terms,
        state=_SCHEDULED if ready_ms > now_ms else _PENDING,
        ready_ms=ready_ms,
        rank=_rank(terms, ready_ms),
        failures=0,
        lease_losses=0,
        uncharged=0,
        end_reason="",
        settle_ms=0,
        retry_ms=max(now_ms, job.retry_ms + 1),
        retry_digest=command.digest,
    )


def is_repeat(job: Job, command: c.Retry) -> bool:
    """Whether this request has retried the job already."""
    return bool(command.digest) and command.digest == job.retry_digest


def repair(job: Job, command: c.Repair, now_ms: int) -> Job:
    """The same record as a new object: it is to be written again."""
    return changed(_held_under(job, command.token))


def delete(job: Job, command: c.Delete, now_ms: int) -> None:
    """Nothing is left."""
    return


def _rank(terms: Terms, ready_ms: int) -> Rank:
    return rank(
        ready_ms=ready_ms,
        submit_ms=terms.submit_ms,
        due_ms=terms.due_ms,
        priority=terms.priority,
        counter=terms.counter,
        target_wait_ms=terms.target_wait_ms,
    )


def _expired(job: Job, now_ms: int) -> bool:
    terms = job.terms
    if terms.total_timeout_ms and now_ms >= job.total_end_ms:
        return True
    return bool(
        job.state is _PENDING and terms.queue_timeout_ms and now_ms >= job.ready_ms + terms.queue_timeout_ms
    )


def _held_under(job: Job, token: int) -> Job:
    """``job`` with the token of its claim, which its revision tells only until it is written again."""
    current = job.current
    if current is None or current.token or not token:
        return job
    return changed(job, attempts=(*job.attempts[:-1], changed(current, token=token)))


def _wait(job: Job, now_ms: int, delay: int) -> Job:
    delay = max(0, min(delay, MAX_DELAY_MS))
    ready_ms = now_ms + delay
    return changed(
        job,
        state=JobState.SCHEDULED if delay > 0 else JobState.PENDING,
        ready_ms=ready_ms,
        rank=_rank(job.terms, ready_ms),
    )


def _returned(job: Job, now_ms: int, delay: int, *, hold_ms: int) -> Job:
    """An uncharged return; too many of them count as lease losses."""
    uncharged = job.uncharged + 1
    losses = job.lease_losses + (1 if uncharged > FREE_RETURNS else 0)
    job = changed(job, uncharged=uncharged, lease_losses=losses)
    if job.cancel_requested:
        return _cancelled(job, now_ms)
    if losses > job.terms.retry.max_lease_losses and uncharged > FREE_RETURNS:
        return changed(
            _quarantined(job, now_ms),
            end_reason=f"returned {uncharged} times without a settlement",
            hold_ms=hold_ms,
        )
    return changed(_wait(job, now_ms, delay), hold_ms=hold_ms)


def _dead(job: Job, now_ms: int, why: str) -> Job:
    return changed(job, state=JobState.DEAD, end_reason=why, settle_ms=now_ms)


def _cancelled(job: Job, now_ms: int) -> Job:
    why = job.cancel_reason or "cancelled"
    return changed(job, state=JobState.CANCELLED, end_reason=why, settle_ms=now_ms, hold_ms=0)


def _quarantined(job: Job, now_ms: int) -> Job:
    why = f"its holders died {job.lease_losses} times"
    return changed(job, state=JobState.QUARANTINED, end_reason=why, settle_ms=now_ms)


def _end_attempt(
    job: Job,
    now_ms: int,
    outcome: AttemptOutcome,
    *,
    token: int,
    digest: bytes = b"",
    failure_type: str = "",
    failure_message: str = "",
    progress: Progress | None = None,
) -> Job:
    """Close the attempt under way in ``job``, whose other fields are already those of the next record."""
    ended = changed(
        job.attempts[-1],
        token=token,
        end_ms=now_ms,
        outcome=outcome,
        digest=digest,
        failure_type=failure_type,
        failure_message=failure_message,
        state_after=job.state,
        ready_ms_after=job.ready_ms if not job.terminal else 0,
    )
    return changed(
        job,
        attempts=(*job.attempts[:-1], ended),
        cancel_requested=False,
        progress=progress if progress is not None else job.progress,
    )
