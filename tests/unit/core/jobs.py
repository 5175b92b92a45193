"""Jobs in any state, made by the core's own commands so that no record is one that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coordinator.core import commands as c
from coordinator.core.job import Claim, Job, JobState, Terms
from coordinator.core.machine import Decision, Outcome, Refusal, decide
from coordinator.core.retry import RetryPolicy

NOW = 1_700_000_000_000
TOKEN = 500
SESSION = "session-a"
PLAIN = RetryPolicy(jitter=0.0)


def terms(**fields: Any) -> Terms:
    """Terms of a plain job, submitted now."""
    return Terms(
        **{"queue": "q", "type": "t", "submit_ms": NOW, "retry": PLAIN, "digest": b"content", **fields}
    )


def after(outcome: Outcome) -> Job:
    """The record that a decision would commit."""
    assert isinstance(outcome, Decision), outcome
    assert outcome.job is not None
    return outcome.job


def reason(outcome: Outcome) -> str:
    """Why a command was refused."""
    assert isinstance(outcome, Refusal), outcome
    return str(outcome.reason)


def facts(outcome: Outcome) -> Mapping[str, str]:
    """What a refusal tells machines."""
    assert isinstance(outcome, Refusal), outcome
    return outcome.metadata


def pending(**fields: Any) -> Job:
    """A job that waits for a worker."""
    return after(decide(None, None, c.Submit(namespace="default", job_id="j", terms=terms(**fields)), NOW))


def scheduled(run_in: int = 5_000, **fields: Any) -> Job:
    """A job that is not due yet."""
    command = c.Submit(namespace="default", job_id="j", terms=terms(**fields), run_at_ms=NOW + run_in)
    return after(decide(None, None, command, NOW))


def claimed(job: Job, token: int = TOKEN, *, now: int = NOW) -> tuple[Job, Claim]:
    """``job`` in the hands of the session, and its claim as it would be read."""
    claim = Claim(session=SESSION, attempt=job.attempt + 1, nonce=b"n", start_ms=now)
    return after(decide(job, None, c.ClaimIt(claim=claim), now)), replace(claim, token=token)


def running(*, stop: bool = False, **fields: Any) -> tuple[Job, Claim]:
    """A held job; ``stop``: it has been asked to stop."""
    job, claim = claimed(pending(**fields))
    return (after(decide(job, claim, c.Cancel(reason="enough"), NOW)) if stop else job), claim


def succeeded() -> Job:
    """A job that ended well, with a checkpoint-less attempt behind it."""
    job, claim = running()
    return after(decide(job, claim, c.Complete(token=TOKEN, digest=b"d", result=b"ok"), NOW))


def dead() -> Job:
    """A job whose failure was not to be retried."""
    job, claim = running()
    return after(decide(job, claim, c.Fail(token=TOKEN, digest=b"d", no_retry=True), NOW))


def cancelled() -> Job:
    """A job that was cancelled before anybody claimed it."""
    return after(decide(pending(), None, c.Cancel(), NOW))


def quarantined() -> Job:
    """A job whose only holder died, under a policy that allows for none."""
    job, _ = running(retry=replace(PLAIN, max_lease_losses=0))
    return after(decide(job, None, c.Lose(token=TOKEN), NOW))


def in_state(state: JobState) -> tuple[Job, Claim | None]:
    """A job in ``state`` and its claim."""
    if state is JobState.RUNNING:
        return running()
    makers = {
        JobState.SCHEDULED: scheduled,
        JobState.PENDING: pending,
        JobState.SUCCEEDED: succeeded,
        JobState.DEAD: dead,
        JobState.CANCELLED: cancelled,
        JobState.QUARANTINED: quarantined,
    }
    return makers[state](), None
