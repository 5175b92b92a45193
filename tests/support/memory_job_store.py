"""``ports.JobStore`` and ``ports.SessionStore`` over ``MemoryEtcd``, for tests that need no etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

from coordinator.core.effects import Slot, Where
from coordinator.core.job import Claim, Job, JobState
from coordinator.core.rank import Rank
from coordinator.errors import CodecError, Compacted, Reason, RequestError
from coordinator.ports import (
    Checkpoint,
    Confirmation,
    Due,
    JobPage,
    KeptAlive,
    Operation,
    PendingCommit,
    ReadyPage,
    Session,
    Snapshot,
    StateSink,
    Stored,
)
from tests.support.memory_etcd import Lease, MemoryEtcd, session_where

__all__ = ["MemoryJobStore", "MemorySessionStore"]


class MemoryJobStore:
    """Jobs in memory; see ``ports.JobStore``."""

    def __init__(self, etcd: MemoryEtcd) -> None:
        self.etcd = etcd
        self.types = etcd.types
        self.watching = 0
        self.garbled: set[str] = set()
        """Jobs whose record cannot be decoded: a single read says so, others leave it out."""

    def commit(self, operation: Operation) -> PendingCommit:
        """Queue one operation."""
        return self.etcd.enqueue(operation)

    async def read(
        self,
        namespace: str,
        job_id: str,
        *,
        deadline: float,
        spec: bool = False,
        checkpoint: bool = False,
        result: bool = False,
    ) -> Snapshot:
        """State, claim, and what else is asked for."""
        self.etcd.reading()
        if job_id in self.garbled:
            raise CodecError("planned by the test")
        snapshot = self._snapshot(namespace, job_id)
        if spec:
            snapshot = replace(snapshot, spec=self._value(Slot.SPEC, namespace, job_id))
        if checkpoint:
            snapshot = replace(snapshot, checkpoint=self._checkpoint(namespace, job_id))
        if result:
            snapshot = replace(snapshot, result=self._value(Slot.RESULT, namespace, job_id))
        return snapshot

    async def read_many(self, namespace: str, job_ids: Sequence[str], *, deadline: float) -> list[Snapshot]:
        """State and claim of several jobs."""
        self.etcd.reading()
        return [self._decoded(namespace, job_id) for job_id in job_ids]

    async def list_jobs(
        self,
        namespace: str,
        *,
        cursor: str,
        limit: int,
        deadline: float,
        states: frozenset[JobState] | None = None,
    ) -> JobPage:
        """By id; the cursor is the last id examined."""
        self.etcd.reading()
        ids = sorted(w.job_id for w, _ in self.etcd.of_slot(Slot.STATE, namespace) if w.job_id > cursor)
        page = [self._decoded(namespace, job_id).stored for job_id in ids[:limit]]
        jobs = tuple(s for s in page if s is not None and (states is None or s.job.state in states))
        return JobPage(jobs, ids[limit - 1] if len(ids) > limit else "", min(limit, len(ids)))

    async def save_checkpoint(
        self, namespace: str, job_id: str, token: int, checkpoint: Checkpoint, *, deadline: float
    ) -> bool:
        """Put it under the claim's guard."""
        self.etcd.reading()
        held = self.etcd.claim(namespace, job_id)
        if self.etcd.stored(namespace, job_id) is None:
            raise RequestError(Reason.JOB_NOT_FOUND, "there is no such job", metadata={"job_id": job_id})
        if held is None or held.token != token:
            current = held.token if held is not None else 0
            raise RequestError(
                Reason.CLAIM_LOST,
                "the claim that this token stood for has ended",
                metadata={"job_id": job_id, "held": str(token), "current": str(current)},
            )
        before = self._checkpoint(namespace, job_id)
        if before is not None and (before.attempt, before.sequence) > (
            checkpoint.attempt,
            checkpoint.sequence,
        ):
            return False
        self.etcd.write([(Where(Slot.CHECKPOINT, namespace, job_id), checkpoint, None)])
        return True

    async def list_due(self, namespace: str, *, until_ms: int, limit: int, deadline: float) -> list[Due]:
        """Due keys, earliest first."""
        self.etcd.reading()
        due = [
            Due(where.job_id, where.ms, entry.value, entry.mod)
            for where, entry in self.etcd.of_slot(Slot.DUE, namespace)
            if where.ms <= until_ms
        ]
        return sorted(due, key=lambda one: (one.ms, one.job_id))[:limit]

    async def delete_stray(self, namespace: str, due: Due, *, deadline: float) -> bool:
        """Delete it if it is unchanged."""
        self.etcd.reading()
        where = Where(Slot.DUE, namespace, due.job_id, ms=due.ms)
        entry = self.etcd.keys.get(where)
        if entry is None or entry.mod != due.revision:
            return False
        self.etcd.write((), [where])
        return True

    async def list_ready(
        self,
        namespace: str,
        queue: str,
        type_: str,
        *,
        after: Rank | None,
        until: Rank,
        limit: int,
        deadline: float,
    ) -> ReadyPage:
        """Waiting jobs by rank."""
        self.etcd.reading()
        found = sorted(
            (where.rank, where.job_id, entry)
            for where, entry in self.etcd.of_slot(Slot.READY, namespace)
            if (where.queue, where.type) == (queue, type_)
            and where.rank <= until
            and (after is None or where.rank > after)
        )
        jobs = tuple(Stored(entry.value, entry.mod) for _, _, entry in found[:limit])
        complete = len(found) <= limit
        return ReadyPage(jobs, complete, None if complete else found[limit - 1][0])

    async def count_ready(
        self, namespace: str, queue: str, type_: str, *, deadline: float
    ) -> tuple[int, int]:
        """How many wait, as of now."""
        self.etcd.reading()
        ready = self.etcd.of_slot(Slot.READY, namespace)
        number = sum((where.queue, where.type) == (queue, type_) for where, _ in ready)
        return number, self.etcd.revision

    async def list_types(self, namespace: str, *, deadline: float) -> list[tuple[str, str]]:
        """Registered pairs."""
        self.etcd.reading()
        return sorted((queue, type_) for ns, queue, type_ in self.types if ns == namespace)

    async def register_type(self, namespace: str, queue: str, type_: str, *, deadline: float) -> None:
        """Make sure that the pair is listed."""
        if (namespace, queue, type_) not in self.types:
            self.etcd.reading()
            self.types[namespace, queue, type_] = None

    async def list_claims(self, namespace: str, *, deadline: float) -> list[tuple[str, Claim]]:
        """Every claim."""
        self.etcd.reading()
        found = [where.job_id for where, _ in self.etcd.of_slot(Slot.CLAIM, namespace)]
        claims = [(job_id, self.etcd.claim(namespace, job_id)) for job_id in sorted(found)]
        return [(job_id, claim) for job_id, claim in claims if claim is not None]

    async def watch_states(
        self, namespace: str, *, after_revision: int, sink: StateSink, stop: Awaitable[None] | None = None
    ) -> None:
        """Deliver history after ``after_revision``, then every change as it is committed."""
        self.etcd.reading()
        if after_revision and after_revision < self.etcd.compacted:
            raise Compacted("that revision is gone", self.etcd.compacted)
        sink.started(after_revision or self.etcd.revision)
        if after_revision:
            for revision, where, value in self.etcd.history:
                if revision > after_revision:
                    self._deliver(namespace, sink, revision, where, value)

        def watcher(revision: int, changes: list[tuple[Where, Any]]) -> None:
            for where, value in changes:
                self._deliver(namespace, sink, revision, where, value)

        self.etcd.watchers.append(watcher)
        self.watching += 1
        try:
            await (stop if stop is not None else asyncio.get_running_loop().create_future())
        finally:
            self.watching -= 1
            self.etcd.watchers.remove(watcher)

    @staticmethod
    def _deliver(namespace: str, sink: StateSink, revision: int, where: Where, value: Job | None) -> None:
        if where.slot is Slot.STATE and where.namespace == namespace:
            sink.changed(revision, where.job_id, Stored(value, revision) if value is not None else None)

    def _decoded(self, namespace: str, job_id: str) -> Snapshot:
        return Snapshot(stored=None) if job_id in self.garbled else self._snapshot(namespace, job_id)

    def _snapshot(self, namespace: str, job_id: str) -> Snapshot:
        return Snapshot(
            stored=self.etcd.stored(namespace, job_id),
            claim=self.etcd.claim(namespace, job_id),
            revision=self.etcd.revision,
        )

    def _value(self, slot: Slot, namespace: str, job_id: str) -> Any:
        entry = self.etcd.keys.get(Where(slot, namespace, job_id))
        return entry.value if entry is not None else None

    def _checkpoint(self, namespace: str, job_id: str) -> Checkpoint | None:
        entry = self.etcd.keys.get(Where(Slot.CHECKPOINT, namespace, job_id))
        return replace(entry.value, revision=entry.mod) if entry is not None else None


class MemorySessionStore:
    """Sessions in memory; see ``ports.SessionStore``. A lease ends once the clock was stepped past it."""

    def __init__(self, etcd: MemoryEtcd, *, raft_term: int = 2) -> None:
        self.etcd = etcd
        self.raft_term = raft_term
        self.kept_alive = 0
        self.lock_tokens: dict[tuple[str, str], int] = {}

    async def open(self, session: Session, *, deadline: float) -> Session:
        """Grant and put the witness."""
        self.etcd.reading()
        where = session_where(session.namespace, session.session_id)
        entry = self.etcd.keys.get(where)
        if entry is not None:
            if entry.value.request_digest != session.request_digest:
                raise RequestError(Reason.REQUEST_ID_REUSED, "this request_id came with other content before")
            found: Session = replace(entry.value, revision=entry.create)
            return found
        ttl_s = session.ttl_ms / 1000
        lease = Lease(ttl_s, self.etcd.clock.monotonic() + ttl_s)
        self.etcd.sessions[session.namespace, session.session_id] = lease
        opened = replace(session, epoch=self.etcd.epoch, revision=self.etcd.revision + 1)
        self.etcd.write([(where, opened, lease)])
        return opened

    async def read(self, namespace: str, session_id: str, *, deadline: float) -> Session | None:
        """The session, if it is open."""
        self.etcd.reading()
        return self._session(namespace, session_id)

    async def keep_alive(self, session_id: str, *, deadline: float) -> KeptAlive:
        """Renew once."""
        self.etcd.reading()
        self.kept_alive += 1
        for (_, own_id), lease in self.etcd.sessions.items():
            if own_id == session_id:
                lease.expires = self.etcd.clock.monotonic() + lease.ttl_s
                return KeptAlive(round(lease.ttl_s * 1000), self.raft_term)
        return KeptAlive(0, self.raft_term)

    async def confirm(
        self,
        namespace: str,
        session_id: str,
        job_ids: Sequence[str],
        *,
        locks: Sequence[tuple[str, str]] = (),
        deadline: float,
    ) -> Confirmation:
        """Session, claims and cancel keys at one revision."""
        self.etcd.reading()
        claims = {job_id: self.etcd.claim(namespace, job_id) for job_id in job_ids}
        return Confirmation(
            session=self._session(namespace, session_id),
            claims={job_id: claim for job_id, claim in claims.items() if claim is not None},
            cancelled=frozenset(j for j in job_ids if Where(Slot.CANCEL, namespace, j) in self.etcd.keys),
            position=self.etcd.position(),
            raft_term=self.raft_term,
            locks={one: token for one in locks if (token := self.lock_tokens.get(one)) is not None},
        )

    async def claims_of(self, namespace: str, session_id: str, *, deadline: float) -> list[tuple[str, Claim]]:
        """Claims on the session's lease."""
        self.etcd.reading()
        lease = self.etcd.sessions.get((namespace, session_id))
        ids = sorted(w.job_id for w in lease.keys if w.job_id) if lease is not None else []
        claims = [(job_id, self.etcd.claim(namespace, job_id)) for job_id in ids]
        return [(job_id, claim) for job_id, claim in claims if claim is not None]

    async def shut(self, namespace: str, session_id: str, *, deadline: float) -> None:
        """Delete the witness."""
        self.etcd.reading()
        self.etcd.write([], [session_where(namespace, session_id)])

    async def close(self, namespace: str, session_id: str, *, deadline: float) -> None:
        """Revoke."""
        self.etcd.reading()
        lease = self.etcd.sessions.pop((namespace, session_id), None)
        if lease is not None:
            self.etcd.end(lease)

    async def list_sessions(self, namespace: str, *, deadline: float) -> list[Session]:
        """Every open session."""
        self.etcd.reading()
        ids = sorted(own_id for ns, own_id in self.etcd.sessions if ns == namespace)
        found = [self._session(namespace, session_id) for session_id in ids]
        return [session for session in found if session is not None]

    def _session(self, namespace: str, session_id: str) -> Session | None:
        entry = self.etcd.keys.get(session_where(namespace, session_id))
        return replace(entry.value, revision=entry.create) if entry is not None else None
