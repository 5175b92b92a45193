"""What the fake holds in place of etcd: records, claims, sessions, revisions, and the time.

It decides nothing. Transitions are the core's (`coordinator.core.machine.decide`), and what else is written
with a record follows from `coordinator.core.effects`, as in the service. Not safe for threads: its owner
holds a lock around every call.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from coordinator.core.commands import ClaimIt, Command, Complete, Submit
from coordinator.core.copying import changed
from coordinator.core.effects import Slot, Where, effects
from coordinator.core.fencing import make_token, split_token
from coordinator.core.job import Claim, Job, JobLock, JobState, Progress
from coordinator.core.job_locks import entry_of
from coordinator.core.lock_order import Line, LockEntry, job_waiter, line_of
from coordinator.core.machine import Decision, Outcome, Refusal, decide
from coordinator.core.rank import Rank
from coordinator.core.rollback import enqueue_rollback

__all__ = ["Bar", "Change", "Checkpoint", "Place", "Record", "Session", "Spec", "Taken", "World"]

_EPOCH: Final = 1

Place = tuple[str, str]
"""Namespace and id of a job or a session."""


class Spec(NamedTuple):
    """What lies beside the record of a job that may still run."""

    payload: bytes
    content_type: str


class Checkpoint(NamedTuple):
    """What an attempt saved last."""

    attempt: int
    sequence: int
    data: bytes
    progress: Progress | None


class Change(NamedTuple):
    """One change of a record; ``job`` None: it was deleted."""

    revision: int
    namespace: str
    job_id: str
    job: Job | None


class Bar(NamedTuple):
    """A lock that a job waits for, who stands there, and whose number of permits is another one."""

    lock: JobLock
    line: Line
    rival: LockEntry | None


class Taken(NamedTuple):
    """The unique key of a job to be stored belongs to another job."""

    owner: str


@dataclass(slots=True)
class Record:
    """One job and what belongs to it. ``sequence`` and the spans are of the beats that list its claim.

    Attributes:
        asked_ms: when a running job was asked to stop, 0 if it was not.
        same_ms, missed_ms: since when beats list it with one sequence, or leave it out; None: they do not.
    """

    job: Job
    revision: int
    spec: Spec | None = None
    claim: Claim | None = None
    result: bytes = b""
    checkpoint: Checkpoint | None = None
    asked_ms: int = 0
    progress: Progress | None = None
    last_beat_ms: int = 0
    sequence: int = -1
    same_ms: int | None = None
    missed_ms: int | None = None
    missed: int = 0


@dataclass(slots=True)
class Session:
    """A worker's presence. ``beat_ms``: when it was last heard of."""

    session_id: str
    ttl_ms: int
    digest: bytes
    beat_ms: int
    claims: dict[str, Claim] = field(default_factory=dict)


class World:
    """Everything that is stored.

    Args:
        now_ms: Unix milliseconds to begin with.
    """

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.revision = 1
        self.records: dict[Place, Record] = {}
        self.sessions: dict[Place, Session] = {}
        self.changes: list[Change] = []
        self._counter = 0
        self._unique: dict[tuple[str, str, str], str] = {}
        self._locks: dict[tuple[str, str], dict[str, LockEntry]] = {}
        self._ready: dict[tuple[str, str, str], set[tuple[Rank, str]]] = {}

    @property
    def token(self) -> int:
        """The present on the scale of fencing tokens."""
        return make_token(_EPOCH, self.revision)

    def owner_of(self, namespace: str, queue: str, unique_key: str) -> str:
        """The job that has this unique key; empty: none."""
        return self._unique.get((namespace, queue, unique_key), "") if unique_key else ""

    def waiting(self, namespace: str, pairs: Iterable[tuple[str, str]]) -> Iterator[Record]:
        """The jobs of these queues and types that may be claimed, in the order in which they are handed out.

        What is claimed meanwhile counts: a job whose lock another has got is left out.
        """
        lines = [self._ready.get((namespace, queue, type_), ()) for queue, type_ in pairs]
        heap = [place for line in lines for place in line]
        heapq.heapify(heap)
        while heap:
            record = self.records[namespace, heapq.heappop(heap)[1]]
            if self.bar(record.job) is None:
                yield record

    def of_namespace(self, namespace: str) -> Iterator[Record]:
        """The jobs of a namespace."""
        return (record for (ns, _), record in self.records.items() if ns == namespace)

    def decide(self, record: Record | None, command: Command) -> Outcome:
        """What the core says now."""
        job, claim = (record.job, record.claim) if record is not None else (None, None)
        return decide(job, claim, command, self.now_ms)

    def next_counter(self) -> int:
        """The place of the next new job among those of its rank."""
        self._counter += 1
        return self._counter

    def next_revision(self) -> int:
        """Begin one more write."""
        self.revision += 1
        return self.revision

    def submit(self, command: Submit, spec: Spec) -> Record | Refusal | Taken:
        """Store a new job; a record that was there already comes back as it is."""
        record = self.records.get((command.namespace, command.job_id))
        outcome = self.decide(record, command)
        if isinstance(outcome, Refusal):
            return outcome
        if record is not None:
            return record
        terms = command.terms
        owner = self.owner_of(command.namespace, terms.queue, terms.unique_key)
        if owner:
            return Taken(owner)
        assert isinstance(outcome, Decision), "a job that is not there can be submitted"
        return self.commit(None, outcome, spec=spec)

    def claim(self, record: Record, claim: Claim, revision: int) -> bool:
        """Give a job to a session, at a revision that the call's claims share; False: it is not to be had."""
        outcome = self.decide(record, ClaimIt(claim=claim))
        if not isinstance(outcome, Decision):
            return False
        self.commit(record, outcome, revision=revision, claim=claim)
        return True

    def act(self, record: Record, command: Command) -> Outcome:
        """Decide on a command, and do it if the core says so."""
        outcome = self.decide(record, command)
        if isinstance(outcome, Decision):
            result = command.result if isinstance(command, Complete) else b""
            self.commit(record, outcome, result=result)
        return outcome

    def commit(
        self,
        before: Record | None,
        decision: Decision,
        *,
        revision: int = 0,
        spec: Spec | None = None,
        claim: Claim | None = None,
        result: bytes = b"",
    ) -> Record:
        """Write what the core decided; answers the record, which is gone if the job was deleted."""
        after = decision.job
        child: Job | None = None
        if before is not None and after is not None:
            enqueued = enqueue_rollback(before.job, after, before.revision)
            if enqueued is not None:
                after, child = enqueued
        job = after if after is not None else before.job if before is not None else None
        assert job is not None, "a transition from nothing to nothing"
        record = before if before is not None else Record(job, 0, spec)
        revision = revision or self.next_revision()
        writes = effects(before.job if before is not None else None, after)
        if claim is not None:
            record.claim = changed(claim, token=make_token(_EPOCH, revision))
        for write in writes:
            self._write(write.where, write.put, record)
        record.job, record.revision = job, revision
        record.result = result or record.result
        if record.job.cancel_requested and not record.asked_ms:
            record.asked_ms = self.now_ms
        self.changes.append(Change(revision, job.namespace, job.job_id, after))
        if child is not None:
            assert after is not None, "only a job that stands has a rollback job"
            wanted = after.terms.rollback
            assert wanted is not None, "a rollback job comes from its parent's terms"
            self.enqueue(child, Spec(wanted.payload, wanted.content_type), revision)
        return record

    def enqueue(self, job: Job, spec: Spec, revision: int) -> None:
        """Store a job that comes with the transition of another, at that one's revision."""
        record = Record(job, revision, spec)
        for write in effects(None, job):
            self._write(write.where, write.put, record)
        self.changes.append(Change(revision, job.namespace, job.job_id, job))

    def _write(self, where: Where, put: bool, record: Record) -> None:
        place = (where.namespace, where.job_id)
        slot = where.slot
        if slot is Slot.STATE:
            if put:
                self.records[place] = record
            else:
                del self.records[place]
        elif slot is Slot.SPEC and not put:
            record.spec = None
        elif slot is Slot.READY:
            line = self._ready.setdefault((where.namespace, where.queue, where.type), set())
            (line.add if put else line.discard)((where.rank, where.job_id))
        elif slot is Slot.UNIQUE:
            key = (where.namespace, where.queue, where.unique_key)
            if put:
                self._unique[key] = where.job_id
            else:
                del self._unique[key]
        elif slot is Slot.LOCK:
            self._lock(where, put, record)
        elif slot is Slot.CHECKPOINT and not put:
            record.checkpoint = None
        elif slot is Slot.CLAIM:
            self._hold(place, record, put)

    def _hold(self, place: Place, record: Record, held: bool) -> None:
        claim = record.claim
        session = self.sessions.get((place[0], claim.session)) if claim is not None else None
        if held:
            assert claim is not None, "a claim key goes with a claim"
            assert session is not None, "only an open session claims"
            session.claims[place[1]] = claim
        else:
            if session is not None:
                session.claims.pop(place[1], None)
            record.claim = None
        record.asked_ms, record.progress, record.last_beat_ms, record.sequence = 0, None, 0, -1
        record.same_ms = record.missed_ms = None
        record.missed = 0

    def _lock(self, where: Where, put: bool, record: Record) -> None:
        entries = self._locks.setdefault((where.namespace, where.lock_name), {})
        if put:
            assert record.claim is not None, "locks come with a claim"
            lock = next(one for one in record.job.terms.locks if one.name == where.lock_name)
            revision = split_token(record.claim.token).revision
            entries[job_waiter(where.job_id)] = entry_of(record.job, lock, record.claim, revision)
        else:
            entries.pop(job_waiter(where.job_id), None)

    def bar(self, job: Job) -> Bar | None:
        """The lock that keeps a job from being claimed."""
        for lock in job.terms.locks:
            line = line_of(list(self._locks.get((job.namespace, lock.name), {}).values()))
            wish = LockEntry(name=lock.name, waiter="", session="", mode=lock.mode, permits=lock.permits)
            rival = line.disagrees(wish)
            if rival is not None or not line.admits(wish):
                return Bar(lock, line, rival)
        return None

    def states(self) -> Mapping[str, JobState]:
        """State of every job by its id, over all namespaces."""
        return {job_id: record.job.state for (_, job_id), record in self.records.items()}
