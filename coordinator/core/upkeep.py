"""Whether the keys beside a job's record are the ones that follow from it: what is too many, what is missing.

``effects`` keeps keys and record together in every transition. Edits by hand, a restore of some keys alone or
a fault of ours can part them; these functions say how, and ``reconciler.repair`` sets it right. They look at
one key, or one record, as read at one revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coordinator.core.effects import Slot, Where, Write, keys_of
from coordinator.core.job import RETAINED, Claim, Job, JobState

_LEFT_OUT: Final = (Slot.STATE, Slot.CLAIM)

LOST_FOR_GOOD: Final = frozenset({Slot.SPEC, Slot.LOCK})
"""What no repair can put again."""

__all__ = ["LOST_FOR_GOOD", "KeySeen", "Lack", "lacks", "repair_writes", "wanted", "why_stray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySeen:
    """A key as it was found. ``modified`` and ``created`` are revisions of the store.

    ``where.job_id`` of a unique key is the job that its value names. ``readable``: the value could be
    decoded, or was not looked at. ``hold_ms`` is a due key's, ``claim`` a claim key's.
    """

    where: Where
    modified: int
    created: int = 0
    lease: int = 0
    readable: bool = True
    hold_ms: int = 0
    claim: Claim | None = None


def why_stray(seen: KeySeen, job: Job | None) -> str:
    """Why the record, None if there is none, does not want the key; empty if it does.

    A ready key at the right place that is older or younger than its record is no stray: the record is put
    again (``lacks``).
    """
    where = seen.where
    if job is None:
        return "there is no such job"
    slot = where.slot
    if slot is Slot.CLAIM:
        return _why_orphan(seen.claim, job)
    if slot is Slot.CHECKPOINT:
        if job.state in RETAINED:
            return f"its job is {job.state.name}"
        return "" if job.attempt else "its job never ran"
    if slot is Slot.RESULT:
        return "" if job.result_size > len(job.result) else "its job has no such result"
    if slot is Slot.UNIQUE:
        owned = any(_same_key(where, key) for key in keys_of(job))
        return "" if owned else f"its job, {job.state.name}, does not own it"
    if where in keys_of(job):
        return ""
    if slot is Slot.READY and job.state is JobState.PENDING:
        return "its job waits in another place"
    if slot is Slot.DUE and job.due_key_ms:
        return "its job falls due at another time"
    if slot is Slot.CANCEL and job.state is JobState.RUNNING:
        return "its job is not asked to stop"
    return f"its job is {job.state.name}"


def _why_orphan(claim: Claim | None, job: Job) -> str:
    """Why the record does not run under the claim."""
    current = job.current
    if current is None:
        return f"its job is {job.state.name}"
    if claim is None:
        return ""  # it cannot be decoded, so nobody can say that it is another's
    if claim.session != current.session or claim.attempt != current.number:
        return f"its job runs as attempt {current.number} of session {current.session}"
    if current.token not in (0, claim.token):
        return f"its job runs under token {current.token}"
    return ""


@dataclass(frozen=True, slots=True)
class Lack:
    """A key that a record wants and that is not as it should be.

    ``rival`` is the job that another's unique key names, empty for every other lack.
    """

    where: Where
    reason: str
    rival: str = ""


def wanted(job: Job) -> tuple[Where, ...]:
    """The keys to look at beside the record. Its claim is not among them: that is the lost pass's."""
    return tuple(where for where in keys_of(job) if where.slot not in _LEFT_OUT)


def lacks(job: Job, revision: int, seen: Mapping[Where, KeySeen]) -> tuple[Lack, ...]:
    """What a record misses.

    Args:
        job: the record.
        revision: its mod revision.
        seen: those of ``wanted(job)`` that exist, read at the revision at which the record was.
    """
    found: list[Lack] = []
    for where in wanted(job):
        key = seen.get(where)
        name = where.slot.value
        if key is None and where.slot is Slot.LOCK:
            found.append(Lack(where, f"{job.state.name} without its entry of lock {where.lock_name}"))
        elif key is None:
            found.append(Lack(where, f"{job.state.name} without its {name} key"))
        elif where.slot is Slot.READY and key.modified != revision:
            found.append(Lack(where, "its ready key is of another revision"))
        elif where.slot is Slot.UNIQUE and not key.readable:
            found.append(Lack(where, "its unique key cannot be decoded", rival="?"))
        elif where.slot is Slot.UNIQUE and key.where.job_id != job.job_id:
            found.append(Lack(where, "its unique key names another job", rival=key.where.job_id))
        elif where.slot is Slot.DUE and (not key.readable or key.hold_ms != job.hold_ms):
            found.append(Lack(where, "its due key says something else"))
    return tuple(found)


def repair_writes(job: Job, missing: tuple[Lack, ...]) -> tuple[Write, ...]:
    """What sets it right: the record again, its ready key with it, and of the others those that lack.

    Left out: the spec, which nothing can bring back, an entry of a lock, which would not own it any more, and
    a unique key that another job has.
    """
    again = {Slot.STATE, Slot.READY}
    lacking = {lack.where for lack in missing if lack.where.slot not in LOST_FOR_GOOD and not lack.rival}
    return tuple(
        Write(where, True, job.state in RETAINED)
        for where in keys_of(job)
        if where.slot in again or where in lacking
    )


def _same_key(one: Where, other: Where) -> bool:
    return other.slot is Slot.UNIQUE and (one.queue, one.unique_key) == (other.queue, other.unique_key)
