"""The part of etcd that the ports promise, in memory: revisions, leases, guards and history.

Written from the ports' text, not from the adapter, so that the conformance suite compares two readings.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from coordinator.core.effects import Slot, Where
from coordinator.core.fencing import make_token
from coordinator.core.follow_ups import Standing
from coordinator.core.job import Claim, Job
from coordinator.core.machine import Guard
from coordinator.errors import DeadlinePassed, NotApplied, OutcomeUnknown, TooManyRequests
from coordinator.ports import (
    Changes,
    Checkpoint,
    Clock,
    Commit,
    CommitObserver,
    Operation,
    Session,
    Spec,
    Stored,
)

__all__ = ["Entry", "Fault", "Lease", "MemoryEtcd", "session_where"]

RETENTION_S = 3_600.0


class Fault(Enum):
    """What befalls the next commit."""

    REFUSED = "nothing is written, and the caller hears so"
    LOST_REQUEST = "nothing is written, and the caller cannot know"
    LOST_REPLY = "it is written, and the caller cannot know"
    RESENT = "it is written, the reply is lost, and the same operation is sent again"


@dataclass(slots=True)
class Lease:
    """A lease: it ends at ``expires`` on the clock, and its keys with it, in one revision."""

    ttl_s: float
    expires: float
    keys: set[Where] = field(default_factory=set)


@dataclass(slots=True)
class Entry:
    """A key's value and revisions."""

    value: Any
    create: int
    mod: int
    lease: Lease | None = None


@dataclass(slots=True)
class _Queued:
    operation: Operation
    future: asyncio.Future[Commit]


def session_where(namespace: str, session_id: str) -> Where:
    """The witness key of a session; it borrows the shape of the jobs' keys."""
    return Where(Slot.CLAIM, namespace, "", unique_key=f"session/{session_id}")


def _key(where: Where) -> Where:
    if where.slot is Slot.UNIQUE:
        return Where(Slot.UNIQUE, where.namespace, "", queue=where.queue, unique_key=where.unique_key)
    return where


class MemoryEtcd:
    """One store that several fake ports share.

    Args:
        clock: leases end by its monotonic time; tests step it.

    ``faults`` befall the next operations, one each. ``interfere`` is called with each operation right before
    its group is judged, so that a test can change what the decision was based on. ``hold()`` keeps commits
    waiting until ``go()``.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.epoch = 1
        self.revision = 1
        self.keys: dict[Where, Entry] = {}
        self.sessions: dict[tuple[str, str], Lease] = {}
        self.history: list[tuple[int, Where, Any]] = []
        self.compacted = 0
        self.types: dict[tuple[str, str, str], None] = {}
        self.faults: deque[Fault | None] = deque()
        self.interfere: list[Callable[[Operation], None]] = []
        self.observers: list[CommitObserver] = []
        self.listeners: list[Changes] = []
        self.watchers: list[Callable[[int, list[tuple[Where, Any]]], None]] = []
        self.read_error: Exception | None = None
        self.leads = True
        """Whether the process under test leads the sweeps."""
        self.commits = 0
        self.groups = 0
        self.reads = 0
        self._queue: list[_Queued] = []
        self._scheduled = False
        self._held = False

    # -- reading

    def reading(self) -> None:
        """Every read passes here: it counts, fails if told to, and sees no lease that has ended."""
        self.reads += 1
        if self.read_error is not None:
            raise self.read_error
        self.expire()

    def stored(self, namespace: str, job_id: str) -> Stored | None:
        """The record, if there is one."""
        entry = self.keys.get(Where(Slot.STATE, namespace, job_id))
        return None if entry is None else Stored(entry.value, entry.mod)

    def claim(self, namespace: str, job_id: str) -> Claim | None:
        """The claim with its token, if there is one."""
        entry = self.keys.get(Where(Slot.CLAIM, namespace, job_id))
        return None if entry is None else replace(entry.value, token=make_token(self.epoch, entry.create))

    def keys_of(self, namespace: str, job_id: str) -> list[Where]:
        """Every key that exists for a job, as ``core.invariants`` wants them."""
        found = []
        for where, entry in self.keys.items():
            if where.namespace != namespace:
                continue
            if where.slot is Slot.UNIQUE and entry.value == job_id:
                found.append(where._replace(job_id=job_id))
            elif where.job_id == job_id:
                found.append(where)
        return found

    def of_slot(self, slot: Slot, namespace: str) -> Iterator[tuple[Where, Entry]]:
        """Keys of one kind, unordered."""
        return (
            (where, entry)
            for where, entry in self.keys.items()
            if where.slot is slot and where.namespace == namespace and (where.job_id or slot is Slot.UNIQUE)
        )

    async def listen(self, listener: Changes, namespace: str) -> None:
        """Have ``listener`` list now and hear of every change from then on."""
        await listener.relist(namespace, self.revision)
        self.listeners.append(listener)
        listener.freshness(namespace, True)

    def position(self) -> int:
        """The present on the token scale."""
        return make_token(self.epoch, self.revision)

    def _open(self, namespace: str, session_id: str) -> bool:
        return session_where(namespace, session_id) in self.keys

    # -- writing

    def write(self, puts: Iterable[tuple[Where, Any, Lease | None]], deletes: Iterable[Where] = ()) -> int:
        """One revision of puts and deletes, unguarded; also for edits by hand. Answers the revision."""
        self.revision += 1
        changes: list[tuple[Where, Any]] = []
        for where in deletes:
            entry = self.keys.pop(_key(where), None)
            if entry is not None:
                if entry.lease is not None:
                    entry.lease.keys.discard(_key(where))
                changes.append((_key(where), (None, entry.value)))
        for where, value, lease in puts:
            key = _key(where)
            old = self.keys.get(key)
            if old is not None and old.lease is not None:
                old.lease.keys.discard(key)
            created = old.create if old is not None else self.revision
            self.keys[key] = Entry(value, created, self.revision, lease)
            if lease is not None:
                lease.keys.add(key)
            changes.append((key, (value, old.value if old is not None else None)))
        self._tell(changes)
        return self.revision

    def expire(self) -> None:
        """End the leases whose time is up, each in a revision of its own."""
        now = self.clock.monotonic()
        ended = {
            id(e.lease): e.lease for e in self.keys.values() if e.lease is not None and e.lease.expires <= now
        }
        for lease in ended.values():
            self.end(lease)
        for session, lease in list(self.sessions.items()):
            if lease.expires <= now:
                del self.sessions[session]

    def end(self, lease: Lease) -> None:
        """Revoke ``lease``: all its keys go in one revision."""
        lease.expires = 0.0
        if lease.keys:
            self.write((), sorted(lease.keys))

    def hold(self) -> None:
        """Keep commits waiting."""
        self._held = True

    def go(self) -> None:
        """Let the waiting commits happen."""
        self._held = False
        self._schedule()

    def enqueue(self, operation: Operation) -> asyncio.Future[Commit]:
        """Queue one operation for the next group."""
        future: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        self._queue.append(_Queued(operation, future))
        self._schedule()
        return future

    def _schedule(self) -> None:
        if self._queue and not self._scheduled and not self._held:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._held:
            return
        queued, self._queue = self._queue, []
        lanes: set[object] = set()
        group = []
        for one in queued:
            own = set(_lanes(one.operation))
            if own & lanes:
                self._queue.append(one)
            else:
                lanes |= own
                group.append(one)
        for hook in self.interfere:
            for one in group:
                hook(one.operation)
        self.expire()
        self._commit_group([one for one in group if not one.future.done()])
        self._schedule()

    def _commit_group(self, group: list[_Queued]) -> None:
        self.groups += 1
        faults = {id(one): self.faults.popleft() if self.faults else None for one in group}
        winners = []
        for one in group:
            fault = faults[id(one)]
            if one.operation.deadline <= self.clock.monotonic():
                one.future.set_exception(DeadlinePassed("the deadline passed before the first try was sent"))
            elif one.operation.as_leader and not self.leads:
                one.future.set_exception(NotApplied("another process leads the sweeps"))
            elif fault is Fault.REFUSED:
                one.future.set_exception(TooManyRequests("planned by the test"))
            elif fault is Fault.LOST_REQUEST:
                one.future.set_exception(OutcomeUnknown("planned by the test"))
            elif self._holds(one.operation):
                winners.append(one)
            else:
                one.future.set_result(self._lost(one.operation))
        if not winners:
            return
        puts: list[tuple[Where, Any, Lease | None]] = []
        deletes: list[Where] = []
        found = {id(one): self._wanted(one.operation) for one in winners}
        for one in winners:
            for operation in (one.operation, *one.operation.also):
                self._collect(operation, puts, deletes)
        self.commits += len(winners)
        told: list[tuple[Operation, Commit]] = []
        self._muted = True
        revision = self.write(puts, deletes)
        for one in winners:
            commit = self._won(one.operation, revision, *found[id(one)])
            fault = faults[id(one)]
            if fault is Fault.LOST_REPLY:
                one.future.set_exception(OutcomeUnknown("planned by the test"))
            elif fault is Fault.RESENT:
                one.future.set_result(replace(self._lost(one.operation), resent=True))
            else:
                told.append((one.operation, commit))
                told += [(also, self._won(also, revision, None, None)) for also in one.operation.also]
                one.future.set_result(commit)
        for operation, commit in told:
            for observer in self.observers:
                observer.applied(operation, commit)
        self._muted = False
        self._tell(self._unheard)

    # -- judging one operation

    def _holds(self, op: Operation) -> bool:
        namespace, job_id = _identity(op)
        stored, claim = self.stored(namespace, job_id), self.claim(namespace, job_id)
        if op.guard is Guard.ABSENT:
            return stored is None and not self._unique_owner(op)
        if op.guard is Guard.REVIVE and self._unique_owner(op):
            return False
        assert op.before is not None, "every guard but ABSENT compares what was read"
        same = stored is not None and stored.revision == op.before.revision
        if op.guard is Guard.HELD:
            held = same and claim is not None and claim.token == op.token
            return held and (not op.guards_also or all(self._may_follow(op, also) for also in op.also))
        if op.guard is Guard.UNHELD:
            return same and claim is None
        if op.guard is Guard.SEEN:
            seen = (claim.token if claim is not None else 0) == op.token
            return same and seen and not self._unique_owner(op)
        if op.guard is Guard.READY:
            assert op.claim is not None, "a claim puts its claim"
            ready = [e for w, e in self.of_slot(Slot.READY, namespace) if w.job_id == job_id]
            indexed = len(ready) == 1 and ready[0].mod == op.before.revision
            return same and indexed and claim is None and self._open(namespace, op.claim.session)
        return same

    def _unique_owner(self, op: Operation) -> str:
        for write in op.writes:
            if write.where.slot is Slot.UNIQUE and write.put:
                entry = self.keys.get(_key(write.where))
                if entry is not None:
                    return str(entry.value)
        return ""

    def _may_follow(self, op: Operation, also: Operation) -> bool:
        given_up = {_key(w.where) for w in op.writes if w.where.slot is Slot.UNIQUE and not w.put}
        wants = {_key(w.where) for w in also.writes if w.where.slot is Slot.UNIQUE}
        return self.stored(*_identity(also)) is None and not any(key in self.keys for key in wants - given_up)

    def _standing(self, op: Operation) -> tuple[Standing, ...]:
        if not op.guards_also:
            return ()
        found = []
        for also in op.also:
            stored = self.stored(*_identity(also))
            job = stored.job if stored is not None else None
            found.append(Standing(job=job, unique_owner=self._unique_owner(also)))
        return tuple(found)

    def _lost(self, op: Operation) -> Commit:
        namespace, job_id = _identity(op)
        return Commit(
            won=False,
            revision=self.revision,
            stored=self.stored(namespace, job_id),
            claim=self.claim(namespace, job_id),
            unique_owner=self._unique_owner(op) if op.guard in (Guard.ABSENT, Guard.REVIVE) else "",
            session_gone=op.claim is not None and not self._open(namespace, op.claim.session),
            also=self._standing(op),
        )

    def _wanted(self, op: Operation) -> tuple[Spec | None, Checkpoint | None]:
        namespace, job_id = _identity(op)
        spec = self.keys.get(Where(Slot.SPEC, namespace, job_id)) if op.want_spec else None
        saved = self.keys.get(Where(Slot.CHECKPOINT, namespace, job_id)) if op.want_checkpoint else None
        return (
            spec.value if spec is not None else None,
            replace(saved.value, revision=saved.mod) if saved is not None else None,
        )

    def _won(self, op: Operation, revision: int, spec: Spec | None, checkpoint: Checkpoint | None) -> Commit:
        token = make_token(self.epoch, revision) if op.claim is not None else 0
        return Commit(
            won=True,
            revision=revision,
            stored=Stored(op.after, revision) if op.after is not None else None,
            claim=replace(op.claim, token=token) if op.claim is not None else None,
            token=token,
            spec=spec,
            checkpoint=checkpoint,
        )

    def _collect(
        self, op: Operation, puts: list[tuple[Where, Any, Lease | None]], deletes: list[Where]
    ) -> None:
        namespace, job_id = _identity(op)
        bucket = Lease(RETENTION_S, self.clock.monotonic() + RETENTION_S)
        values: dict[Slot, Any] = {
            Slot.STATE: op.after,
            Slot.READY: op.after,
            Slot.DUE: op.after.hold_ms if op.after is not None else 0,
            Slot.CLAIM: op.claim,
            Slot.SPEC: op.spec,
            Slot.RESULT: op.big_result,
            Slot.UNIQUE: job_id,
            Slot.CANCEL: op.cancelled_by,
        }
        for write in op.writes:
            if not write.put:
                deletes.append(write.where)
                continue
            lease = bucket if write.retained else None
            if write.where.slot is Slot.CLAIM:
                assert op.claim is not None, "a claim is put by an operation that carries it"
                lease = self.sessions[namespace, op.claim.session]
            value = values[write.where.slot]
            assert value is not None, f"nothing to put under {write.where.slot}"
            puts.append((write.where, value, lease))

    # -- telling

    _muted = False
    _unheard: list[tuple[Where, Any]] = []  # noqa: RUF012 - replaced, never appended to

    def _tell(self, changes: list[tuple[Where, Any]]) -> None:
        if self._muted:
            self._unheard = changes
            return
        revision = self.revision
        self.history += [(revision, where, new) for where, (new, _) in changes]
        for watcher in list(self.watchers):
            watcher(revision, [(where, new) for where, (new, _) in changes])
        for listener in self.listeners:
            _report(listener, revision, self.epoch, changes)


def _report(listener: Changes, revision: int, epoch: int, changes: list[tuple[Where, Any]]) -> None:
    kinds = set()
    for where, (new, old) in changes:
        ns, job_id = where.namespace, where.job_id
        kinds.add(ns)
        if where.slot is Slot.READY and new is not None:
            listener.ready_put(ns, Stored(new, revision), created=old is None)
        elif where.slot is Slot.READY:
            listener.ready_deleted(ns, where.queue, where.type, where.rank, job_id, revision)
        elif where.slot is Slot.CANCEL and new is not None:
            listener.cancel_put(ns, job_id, revision)
        elif where.slot is Slot.CLAIM and isinstance(new, Session):
            listener.session_put(new, revision)
        elif where.slot is Slot.CLAIM and isinstance(old, Session):
            listener.session_deleted(ns, old.session_id, revision)
        elif where.slot is Slot.CLAIM and new is not None:
            listener.claim_put(ns, job_id, replace(new, token=make_token(epoch, revision)), revision)
        elif where.slot is Slot.CLAIM:
            listener.claim_deleted(ns, job_id, revision)
    for ns in kinds:
        for kind in ("ready", "claim", "session", "cancel"):
            listener.passed(ns, kind, revision)


def _identity(op: Operation) -> tuple[str, str]:
    job: Job | None = op.after if op.after is not None else op.before.job if op.before is not None else None
    assert job is not None, "an operation on nothing"
    return job.namespace, job.job_id


def _lanes(op: Operation) -> Iterator[object]:
    for also in op.also:
        yield from _lanes(also)
    yield _identity(op)
    for write in op.writes:
        if write.where.slot is Slot.UNIQUE:
            yield _key(write.where)
