"""The lock entries that the claim of a job takes: made with the claim, gone with it.

They have the claim's create revision, since one Txn makes them all; so their fencing token is the claim's.
"""

from __future__ import annotations

from typing import Final

from coordinator.core.job import Claim, Job, JobLock
from coordinator.core.lock_order import LockEntry, job_waiter

__all__ = ["MAX_LOCKS", "entries_of", "entry_of"]

MAX_LOCKS: Final = 8
"""Locks that one job may name."""


def entry_of(job: Job, lock: JobLock, claim: Claim, revision: int = 0) -> LockEntry:
    """The entry of one of the job's locks under ``claim``. ``revision`` 0: before it is there."""
    return LockEntry(
        name=lock.name,
        waiter=job_waiter(job.job_id),
        session=claim.session,
        mode=lock.mode,
        permits=lock.permits,
        job_id=job.job_id,
        nonce=claim.nonce,
        since_ms=claim.start_ms,
        revision=revision,
        version=revision,
    )


def entries_of(job: Job, claim: Claim, revision: int = 0) -> tuple[LockEntry, ...]:
    """The entries of all its locks, in the order in which it names them."""
    return tuple(entry_of(job, lock, claim, revision) for lock in job.terms.locks)
