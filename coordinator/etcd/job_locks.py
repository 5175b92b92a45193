"""What a claim compares, puts and reads of the locks that its job names.

The rule of ``lock_store`` holds here too: whoever is to own compares that nothing was added to the lock since
it was read, and one operation in flight adds to a lock's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from coordinator.core.effects import Where
from coordinator.core.job import Claim, Job
from coordinator.core.job_locks import entry_of as job_entry
from coordinator.core.lock_order import LockEntry, job_waiter
from coordinator.errors import KeyFormatError
from coordinator.etcd import wire
from coordinator.etcd.lock_codec import encode_lock, entry_of
from coordinator.etcd.namespace_keys import NamespaceKeys
from coordinator.etcd.set_aside import SetAside

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import ResponseOp

__all__ = ["LINE_GUESS", "LocksGuard", "found_lines", "locks_guard", "put_entry"]

LINE_GUESS = 2048
"""Expected bytes of one lock's entries: a few with small values."""


class LocksGuard(NamedTuple):
    """Pieces of a guarded operation; ``elses`` read the lines, in the order in which the job names them."""

    compares: list[bytes]
    elses: list[bytes]
    adds: tuple[bytes, ...]


def locks_guard(keys: NamespaceKeys, job: Job, revisions: Sequence[int]) -> LocksGuard:
    """That each lock is as it was known, and has no entry of this job.

    Args:
        keys: of the namespace.
        job: as it is to be.
        revisions: of each lock, up to where every entry is known.

    Raises:
        ValueError: there is not one revision for each lock.
    """
    compares: list[bytes] = []
    elses: list[bytes] = []
    adds: list[bytes] = []
    waiter = job_waiter(job.job_id)
    for lock, known in zip(job.terms.locks, revisions, strict=True):
        span = keys.lock_entries(lock.name)
        compares.append(wire.create_eq(keys.lock(lock.name, waiter), 0))
        compares.append(wire.range_mod_less(span.start, span.end, known + 1))
        elses.append(wire.get(span.start, span.end))
        adds.append(span.start)
    return LocksGuard(compares, elses, tuple(adds))


def put_entry(key: bytes, where: Where, job: Job, claim: Claim) -> bytes:
    """Put the entry of the lock that ``where`` names, on the lease of the claim's session."""
    [lock] = [lock for lock in job.terms.locks if lock.name == where.lock_name]
    return wire.put(key, encode_lock(job_entry(job, lock, claim)), int(claim.session, 16))


def found_lines(
    keys: NamespaceKeys, job: Job, responses: Sequence[ResponseOp], set_aside: SetAside
) -> Mapping[str, tuple[LockEntry, ...]]:
    """What the reads of ``locks_guard`` found, by lock."""
    lines: dict[str, tuple[LockEntry, ...]] = {}
    for lock, response in zip(job.terms.locks, responses, strict=True):
        entries: list[LockEntry] = []
        for kv in response.response_range.kvs:
            try:
                entries.append(entry_of(keys, kv, set_aside))
            except KeyFormatError as error:
                set_aside.add("lock", kv.key, error)
        lines[lock.name] = tuple(entries)
    return lines
