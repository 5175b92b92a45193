"""The rollback job: what a job that has failed for good has run in its place. Pure.

It is enqueued by whichever transition makes its parent DEAD or QUARANTINED, in the same Txn and under the
parent's guard alone: that a retried Txn enqueues it once follows from its id, a hash of the parent and of the
revision at which the parent was read.
"""

from __future__ import annotations

import base64
import struct
from hashlib import sha256
from typing import Final

from coordinator.core.copying import changed
from coordinator.core.job import FAILED, Job, JobState, Rollback, Terms
from coordinator.core.rank import rank

__all__ = ["REASON_LABEL", "ROLLBACK_OF_LABEL", "enqueue_rollback", "rollback_job_id"]

ROLLBACK_OF_LABEL: Final = "leasekeeper.rollback-of"
"""Label of a rollback job: its parent's id."""

REASON_LABEL: Final = "leasekeeper.rollback-reason"
"""Label of a rollback job: the state that its parent ended in."""

_DIGEST_BYTES: Final = 16


def rollback_job_id(job: Job, revision: int) -> str:
    """The id of the rollback job of ``job``, whose record was read at mod revision ``revision``.

    26 characters of base 32 over 128 bits of SHA-256: no two of 2^64 such ids are the same by chance.
    """
    parts = (job.namespace.encode(), job.job_id.encode(), struct.pack(">q", revision))
    digest = _fold(b"lk-rollback-id-1", *parts)
    return base64.b32encode(digest[:_DIGEST_BYTES]).decode()[:26].lower()


def enqueue_rollback(before: Job, after: Job, revision: int) -> tuple[Job, Job] | None:
    """``after`` with its rollback job named, and the rollback job's first record; None if there is none.

    Args:
        before: the parent's record as read.
        after: the parent's record to be.
        revision: mod revision of ``before``.
    """
    wanted = after.terms.rollback
    if wanted is None or after.state not in FAILED or before.state in FAILED:
        return None
    job_id = rollback_job_id(before, revision)
    now_ms = after.settle_ms
    terms = _terms(after, wanted, job_id)
    child = Job(
        namespace=after.namespace,
        job_id=job_id,
        terms=terms,
        state=JobState.PENDING,
        ready_ms=now_ms,
        rank=rank(
            ready_ms=now_ms, submit_ms=now_ms, due_ms=0, priority=terms.priority, counter=terms.counter
        ),
    )
    return changed(after, rollback_job=job_id), child


def _terms(parent: Job, wanted: Rollback, job_id: str) -> Terms:
    labels = {ROLLBACK_OF_LABEL: parent.job_id, REASON_LABEL: parent.state.name}
    texts = (wanted.queue, wanted.type, wanted.content_type, parent.job_id, parent.state.name)
    return Terms(
        queue=wanted.queue,
        type=wanted.type,
        priority=wanted.priority or parent.terms.priority,
        labels=labels,
        submit_ms=parent.settle_ms,
        counter=parent.terms.counter,
        payload_size=len(wanted.payload),
        digest=_fold(b"lk-rollback-1", job_id.encode(), wanted.payload, *map(str.encode, texts))[
            :_DIGEST_BYTES
        ],
    )


def _fold(tag: bytes, *parts: bytes) -> bytes:
    """SHA-256 over length-prefixed parts, so that no two lists of parts share bytes."""
    lengths = struct.pack(f">{len(parts)}I", *map(len, parts))
    return sha256(tag + lengths + b"".join(parts)).digest()
