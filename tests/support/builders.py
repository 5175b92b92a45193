"""Ready-made values for tests; each takes the few fields that a test is about."""

from __future__ import annotations

from typing import Any

from coordinator.core.commands import ClaimIt, Submit
from coordinator.core.effects import effects
from coordinator.core.job import Claim, Job, Terms
from coordinator.core.machine import Decision, decide
from coordinator.core.retry import RetryPolicy
from coordinator.ports import Commit, JobStore, Operation, Session, SessionStore, Spec, Stored
from coordinator.services.api import NewJob

__all__ = [
    "FAR",
    "NOW_MS",
    "a_claim",
    "a_job",
    "a_new_job",
    "a_session",
    "claim_job",
    "claim_operation",
    "open_session",
    "store_job",
    "terms",
]

NOW_MS = 1_700_000_000_000
FAR = 1e9
"""A deadline that no test reaches."""


def a_new_job(job_id: str = "j1", **fields: Any) -> NewJob:
    """A job as submitted."""
    values: dict[str, Any] = {
        "queue": "q",
        "type": "t",
        "payload": b"{}",
        "content_type": "application/json",
        "labels": {},
        "priority": 3,
        "due_ms": 0,
        "run_at_ms": 0,
        "queue_timeout_ms": 0,
        "run_timeout_ms": 0,
        "total_timeout_ms": 0,
        "heartbeat_timeout_ms": 0,
        "retry": RetryPolicy(),
        "unique_key": "",
    }
    return NewJob(job_id=job_id, **{**values, **fields})


def terms(**fields: Any) -> Terms:
    """Terms of a job submitted at ``NOW_MS``."""
    values: dict[str, Any] = {"queue": "q", "type": "t", "submit_ms": NOW_MS}
    return Terms(**{**values, **fields})


def a_job(job_id: str = "j1", *, namespace: str = "default", run_at_ms: int = 0, **fields: Any) -> Job:
    """The first record of a job with these terms."""
    command = Submit(namespace=namespace, job_id=job_id, terms=terms(**fields), run_at_ms=run_at_ms)
    outcome = decide(None, None, command, NOW_MS)
    assert isinstance(outcome, Decision)
    assert outcome.job is not None
    return outcome.job


def a_session(
    session_id: str = "00000000000000a1", *, ttl_ms: int = 10_000, namespace: str = "default"
) -> Session:
    """A session to open."""
    return Session(
        namespace=namespace,
        session_id=session_id,
        identity="worker-1",
        sdk="test",
        labels={},
        opened_ms=NOW_MS,
        ttl_ms=ttl_ms,
        request_digest=b"open",
    )


def a_claim(
    job: Job, session_id: str = "00000000000000a1", *, nonce: bytes = b"nonce", start_ms: int = NOW_MS
) -> Claim:
    """The claim of the next attempt of ``job``."""
    return Claim(
        session=session_id,
        attempt=job.attempt + 1,
        nonce=nonce,
        start_ms=start_ms,
        queue=job.terms.queue,
        type=job.terms.type,
        run_timeout_ms=job.terms.run_timeout_ms,
        heartbeat_timeout_ms=job.terms.heartbeat_timeout_ms,
    )


async def store_job(store: JobStore, job: Job, *, payload: bytes = b"{}") -> Stored:
    """Put a first record into the store the way that a submission does."""
    submit = Submit(namespace=job.namespace, job_id=job.job_id, terms=job.terms)
    outcome = decide(None, None, submit, job.terms.submit_ms)
    assert isinstance(outcome, Decision)
    commit = await store.commit(
        Operation(
            guard=outcome.guard,
            before=None,
            after=job,
            writes=effects(None, job),
            deadline=FAR,
            spec=Spec(payload=payload),
        )
    )
    assert commit.won, commit
    assert commit.stored is not None
    return commit.stored


async def claim_job(
    store: JobStore, stored: Stored, session: str | Session = "00000000000000a1", *, now_ms: int = NOW_MS
) -> Commit:
    """Claim a waiting job for an open session; the commit must win."""
    commit = await store.commit(claim_operation(stored, session, now_ms=now_ms))
    assert commit.won, commit
    return commit


def claim_operation(
    stored: Stored,
    session: str | Session = "00000000000000a1",
    *,
    now_ms: int = NOW_MS,
    lock_revisions: tuple[int, ...] | None = None,
) -> Operation:
    """The operation that claims a waiting job for a session; its locks are taken to have no entry."""
    if lock_revisions is None:
        lock_revisions = (0,) * len(stored.job.terms.locks)
    session_id = session if isinstance(session, str) else session.session_id
    claim = a_claim(stored.job, session_id, start_ms=now_ms)
    outcome = decide(stored.job, None, ClaimIt(claim=claim), claim.start_ms)
    assert isinstance(outcome, Decision), outcome
    return Operation(
        guard=outcome.guard,
        before=stored,
        after=outcome.job,
        writes=effects(stored.job, outcome.job),
        deadline=FAR,
        claim=claim,
        want_spec=True,
        want_checkpoint=True,
        lock_revisions=lock_revisions,
    )


async def open_session(sessions: SessionStore, session: Session | None = None) -> Session:
    """Open a session."""
    return await sessions.open(session if session is not None else a_session(), deadline=FAR)
