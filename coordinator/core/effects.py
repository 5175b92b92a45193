"""Every key write that follows from a transition. One pure function; no operation lists its writes by hand.

A key's presence is a function of the record alone (docs/keys.md), so the writes are the difference
between the keys of ``before`` and the keys of ``after``. Keys whose value is a copy of the record are put
again with every change, so that they share its revision.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from coordinator.core.job import RETAINED, TERMINAL, Job, JobState
from coordinator.core.rank import Rank

__all__ = ["Slot", "Usual", "Where", "Write", "effects", "keys_of", "usual"]


class Slot(Enum):
    """The kinds of key that a job has."""

    SPEC = "job"
    STATE = "state"
    READY = "ready"
    DUE = "due"
    CLAIM = "claim"
    CANCEL = "cancel"
    CHECKPOINT = "checkpoint"
    RESULT = "result"
    UNIQUE = "unique"
    LOCK = "lock"

    __hash__ = object.__hash__  # Enum's own is written in Python, and every key of every transition is hashed


# Looked up once: a member of an enum costs thirty times what a global costs.
_SPEC: Final = Slot.SPEC
_STATE: Final = Slot.STATE
_READY: Final = Slot.READY
_DUE: Final = Slot.DUE
_CLAIM: Final = Slot.CLAIM
_CANCEL: Final = Slot.CANCEL
_CHECKPOINT: Final = Slot.CHECKPOINT
_RESULT: Final = Slot.RESULT
_UNIQUE: Final = Slot.UNIQUE
_LOCK: Final = Slot.LOCK
_PENDING: Final = JobState.PENDING
_RUNNING: Final = JobState.RUNNING
_SCHEDULED: Final = JobState.SCHEDULED
_NO_RANK: Final = Rank(0, 0)
_new: Final = tuple.__new__


class Usual(Enum):
    """Transitions that nearly every job makes, and all that each of them writes.

    Not one write more or less, so that whoever carries them out can do without the list (``usual``).
    """

    SUBMISSION = "put state, spec, ready"
    CLAIM = "delete ready; put state, claim"
    END = "delete claim, spec; put state on a retention lease; delete checkpoint"


_SUBMISSION: Final = Usual.SUBMISSION
_CLAIMED: Final = Usual.CLAIM
_ENDED: Final = Usual.END


class Where(NamedTuple):
    """One key: ``job_id`` and whatever else its kind needs; unused parts are empty."""

    slot: Slot
    namespace: str
    job_id: str
    queue: str = ""
    type: str = ""
    rank: Rank = _NO_RANK
    ms: int = 0
    unique_key: str = ""
    lock_name: str = ""


def _at(slot: Slot, namespace: str, job_id: str) -> Where:
    """``Where(slot, namespace, job_id)`` at half its price: ten are made for each job."""
    return _new(Where, (slot, namespace, job_id, "", "", _NO_RANK, 0, "", ""))


class Write(NamedTuple):
    """Put or delete one key. ``retained``: the put goes on a retention lease."""

    where: Where
    put: bool
    retained: bool = False


def _write(where: Where, put: bool, retained: bool = False) -> Write:
    return _new(Write, (where, put, retained))


def ready_key(job: Job) -> Where:
    """The key under which a PENDING job waits."""
    terms = job.terms
    return _new(Where, (_READY, job.namespace, job.job_id, terms.queue, terms.type, job.rank, 0, "", ""))


def keys_of(job: Job) -> dict[Where, bool]:
    """Every key that must exist beside ``job``'s record, and whether its value changes with the record.

    Left out: the checkpoint and the large result, which exist or not without the record saying so.
    """
    ns, job_id, terms = job.namespace, job.job_id, job.terms
    keys = {Where(_STATE, ns, job_id): True}
    if job.state not in RETAINED:
        keys[Where(_SPEC, ns, job_id)] = False
    if job.state is _PENDING:
        keys[ready_key(job)] = True
    if job.state is _RUNNING:
        keys[Where(_CLAIM, ns, job_id)] = False
        keys.update(dict.fromkeys(_lock_keys(job), False))
        if job.cancel_requested:
            keys[Where(_CANCEL, ns, job_id)] = False
    due_ms = job.due_key_ms
    if due_ms:
        keys[Where(_DUE, ns, job_id, ms=due_ms)] = False
    if terms.unique_key and not job.terminal:
        keys[Where(_UNIQUE, ns, job_id, queue=terms.queue, unique_key=terms.unique_key)] = False
    return keys


def effects(before: Job | None, after: Job | None, *, big_result: bool = False) -> tuple[Write, ...]:
    """All writes of the transition from ``before`` to ``after``.

    Args:
        before: the record as read, None if there was none.
        after: the record to be, None if it is deleted.
        big_result: a result too large for the record goes under its own key.
    """
    ns, job_id = _identity(before, after)
    retained = after is not None and after.state in RETAINED
    # By hand what keys_of(after) - keys_of(before) would give, at a third of its price: this runs three times
    # a job. test_effects.py holds it against that difference for every pair of states.
    was = _Kept(before)
    now = _Kept(after)
    writes: list[Write] = []
    if was.ready is not None and was.ready != now.ready:
        writes.append(_write(was.ready, False))
    if was.due and was.due != now.due:
        writes.append(_write(_due_key(ns, job_id, was.due), False))
    if was.claim and not now.claim:
        writes.append(_write(_at(_CLAIM, ns, job_id), False))
        if before is not None and before.terms.locks:
            writes += [_write(where, False) for where in _lock_keys(before)]
    if was.cancel and not now.cancel:
        writes.append(_write(_at(_CANCEL, ns, job_id), False))
    if was.spec and not now.spec:
        writes.append(_write(_at(_SPEC, ns, job_id), False))
    if was.unique and not now.unique:
        writes.append(_write(_unique_key(ns, job_id, before), False))
    writes.append(_write(_at(_STATE, ns, job_id), after is not None, retained))
    if now.spec and not was.spec:
        writes.append(_write(_at(_SPEC, ns, job_id), True, retained))
    if now.ready is not None:
        writes.append(_write(now.ready, True, retained))
    if now.claim and not was.claim:
        writes.append(_write(_at(_CLAIM, ns, job_id), True, retained))
        if after is not None and after.terms.locks:
            writes += [_write(where, True, retained) for where in _lock_keys(after)]
    if now.cancel and not was.cancel:
        writes.append(_write(_at(_CANCEL, ns, job_id), True, retained))
    if now.due and was.due != now.due:
        writes.append(_write(_due_key(ns, job_id, now.due), True, retained))
    if now.unique and not was.unique:
        writes.append(_write(_unique_key(ns, job_id, after), True, retained))
    if after is None or (retained and after.attempt):
        writes.append(_write(_at(_CHECKPOINT, ns, job_id), False))
    if big_result:
        writes.append(_write(_at(_RESULT, ns, job_id), True, retained))
    elif after is None and before is not None and before.result_size > len(before.result):
        writes.append(_write(_at(_RESULT, ns, job_id), False))
    return tuple(writes)


def usual(before: Job | None, after: Job | None, *, big_result: bool = False) -> Usual | None:
    """Which usual transition it is; None if ``effects`` has to tell what it writes.

    The latter whenever in doubt: test_effects.py compares every answer with ``effects``.
    """
    if after is None or after.cancel_requested or after.terms.unique_key or big_result:
        return None
    if after.terms.locks:
        return None
    state = after.state
    if before is None:
        return _SUBMISSION if state is _PENDING and not after.due_key_ms else None
    if before.terms is not after.terms or before.cancel_requested:
        return None
    if before.state is _PENDING and state is _RUNNING:
        return None if before.due_key_ms else _CLAIMED
    if before.state is _RUNNING and state in RETAINED and after.attempt:
        return _ENDED
    return None


class _Kept:
    """Which keys a record wants, as ``keys_of`` says it, without building them."""

    __slots__ = ("cancel", "claim", "due", "ready", "spec", "unique")

    def __init__(self, job: Job | None) -> None:
        self.ready: Where | None = None
        self.due = 0
        self.spec = self.claim = self.cancel = self.unique = False
        if job is None:
            return
        state = job.state
        self.spec = state not in RETAINED
        if state is _RUNNING:
            self.claim = True
            self.cancel = job.cancel_requested
        elif state is _PENDING:
            self.ready = ready_key(job)
            self.due = job.due_key_ms
        elif state is _SCHEDULED:
            self.due = job.due_key_ms
        self.unique = bool(job.terms.unique_key) and state not in TERMINAL


def _due_key(namespace: str, job_id: str, ms: int) -> Where:
    return Where(_DUE, namespace, job_id, ms=ms)


def _lock_keys(job: Job) -> list[Where]:
    return [Where(_LOCK, job.namespace, job.job_id, lock_name=lock.name) for lock in job.terms.locks]


def _unique_key(namespace: str, job_id: str, job: Job | None) -> Where:
    assert job is not None, "only a record has a unique key"
    return Where(_UNIQUE, namespace, job_id, queue=job.terms.queue, unique_key=job.terms.unique_key)


def repair_effects(job: Job) -> tuple[Write, ...]:
    """Every key of ``job`` that can be put again from the record alone (not spec, claim, cancel)."""
    known = (_STATE, _READY, _DUE, _UNIQUE)
    return tuple(Write(where, True, job.state in RETAINED) for where in keys_of(job) if where.slot in known)


def _identity(before: Job | None, after: Job | None) -> tuple[str, str]:
    job = after if after is not None else before
    assert job is not None, "a transition from nothing to nothing"
    return job.namespace, job.job_id
