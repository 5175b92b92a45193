"""A producer and a worker in one: acts on the ports alone, so that it fits every implementation."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from coordinator.core import commands as c
from coordinator.core.job import Claim, Job, Terms
from coordinator.core.machine import Decision, decide
from coordinator.ports import Clock, Commit, JobStore, Operation, Session, SessionStore, Spec, Stored
from coordinator.services.commits import operation_of

__all__ = ["Actor"]


@dataclass
class Actor:
    """Decides by the core and commits what it decided."""

    jobs: JobStore
    sessions: SessionStore
    clock: Clock
    namespace: str
    session: Session | None = None

    def deadline(self, seconds: float = 5.0) -> float:
        return self.clock.monotonic() + seconds

    def terms(self, **changes: Any) -> Terms:
        values: dict[str, Any] = {
            "queue": "q",
            "type": "t",
            "submit_ms": self.clock.now_ms(),
            "digest": b"d" * 32,
            "counter": 1,
            **changes,
        }
        return Terms(**values)

    def operation(
        self,
        before: Stored | None,
        command: c.Command,
        *,
        claim: Claim | None = None,
        token: int = 0,
        spec: Spec | None = None,
        seconds: float = 5.0,
        held: Claim | None = None,
        **more: bool,
    ) -> Operation:
        """The operation that the core decides on."""
        decision = decide(before.job if before else None, held, command, self.clock.now_ms())
        assert isinstance(decision, Decision), decision
        return operation_of(
            before,
            decision,
            self.deadline(seconds),
            token=token,
            claim=claim,
            spec=spec,
            cancelled_by="test",
            **more,
        )

    def submit(self, job_id: str, payload: bytes = b"payload", **terms: Any) -> Awaitable[Commit]:
        command = c.Submit(
            namespace=self.namespace, job_id=job_id, terms=self.terms(payload_size=len(payload), **terms)
        )
        return self.jobs.commit(self.operation(None, command, spec=Spec(payload=payload)))

    def submit_later(self, job_id: str, run_at_ms: int, *, seconds: float = 5.0) -> Awaitable[Commit]:
        command = c.Submit(namespace=self.namespace, job_id=job_id, terms=self.terms(), run_at_ms=run_at_ms)
        return self.jobs.commit(self.operation(None, command, spec=Spec(payload=b""), seconds=seconds))

    async def submitted(self, job_id: str, **terms: Any) -> Stored:
        commit = await self.submit(job_id, **terms)
        assert commit.won
        assert commit.stored is not None
        return commit.stored

    async def open_session(self, *, ttl_ms: int = 5_000, digest: bytes = b"s") -> Session:
        self.session = await self.sessions.open(self.new_session(ttl_ms, digest), deadline=self.deadline())
        return self.session

    def new_session(self, ttl_ms: int = 5_000, digest: bytes = b"s", session_id: str = "") -> Session:
        return Session(
            namespace=self.namespace,
            session_id=session_id or f"{uuid.uuid4().int >> 65:016x}",
            identity="worker",
            sdk="test",
            labels={"a": "b"},
            opened_ms=self.clock.now_ms(),
            ttl_ms=ttl_ms,
            request_digest=digest,
        )

    def claim_for(self, job: Job, *, nonce: bytes = b"n" * 16, session_id: str = "") -> Claim:
        if not session_id:
            assert self.session is not None
            session_id = self.session.session_id
        return Claim(
            session=session_id,
            attempt=job.attempt + 1,
            nonce=nonce,
            start_ms=self.clock.now_ms(),
            queue=job.terms.queue,
            type=job.terms.type,
        )

    def claim(self, stored: Stored, *, nonce: bytes = b"n" * 16, session_id: str = "") -> Awaitable[Commit]:
        claim = self.claim_for(stored.job, nonce=nonce, session_id=session_id)
        operation = self.operation(
            stored, c.ClaimIt(claim=claim), claim=claim, want_spec=True, want_checkpoint=True
        )
        return self.jobs.commit(operation)

    async def claimed(self, job_id: str, **terms: Any) -> tuple[Stored, int]:
        stored = await self.submitted(job_id, **terms)
        if self.session is None:
            await self.open_session()
        commit = await self.claim(stored)
        assert commit.won, commit
        assert commit.stored is not None
        return commit.stored, commit.token

    def complete(
        self, stored: Stored, token: int, *, result: bytes = b"", seconds: float = 5.0
    ) -> Awaitable[Commit]:
        """Settle as the holder of ``token``, whatever the store says of it."""
        held = Claim(session="0" * 16, attempt=stored.job.attempt, nonce=b"", start_ms=0, token=token)
        command = c.Complete(token=token, digest=b"c", result=result)
        return self.jobs.commit(self.operation(stored, command, held=held, token=token, seconds=seconds))
