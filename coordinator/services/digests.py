"""Every digest that the services compute, and the ids that follow from a request.

SHA-256 over length-prefixed fields behind a tag with a version, so that no two field lists share bytes.
Digests are stored and compared across restarts and releases: a changed encoding needs a new tag, and
repeats across that change would be refused as other content.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Final

from coordinator.core.commands import Complete, Fail, Settlement
from coordinator.core.job import JobLock, Rollback
from coordinator.core.retry import RetryPolicy
from coordinator.services.api import NewJob
from coordinator.services.lock_values import LockWish

__all__ = [
    "claim_nonce",
    "job_digest",
    "lock_nonce",
    "made_job_id",
    "made_session_id",
    "request_digest",
    "session_digest",
    "settlement_digest",
]

_DIGEST_BYTES: Final = 16
"""128 bits: 2^64 records before two of them collide by chance."""

_NUMBERS: Final = struct.Struct(">8q")
_POLICY: Final = struct.Struct(">qqdqdq")
_FAILURE: Final = struct.Struct(">?q?")
_MAX_SESSION: Final = 2**63 - 1


def _fold(tag: bytes, *parts: bytes) -> bytes:
    lengths = struct.pack(f">{len(parts)}I", *map(len, parts))
    return sha256(tag + lengths + b"".join(parts)).digest()


@lru_cache(maxsize=1024)
def _policy_bytes(policy: RetryPolicy) -> bytes:
    numbers = _POLICY.pack(
        policy.max_retries,
        policy.initial_ms,
        policy.multiplier,
        policy.cap_ms,
        policy.jitter,
        policy.max_lease_losses,
    )
    return numbers + _text_list(policy.non_retryable_types)


def _text_list(texts: tuple[str, ...]) -> bytes:
    encoded = [text.encode() for text in texts]
    return struct.pack(f">{len(encoded) + 1}I", len(encoded), *map(len, encoded)) + b"".join(encoded)


def _label_bytes(labels: Mapping[str, str]) -> bytes:
    return _text_list(tuple(text for pair in sorted(labels.items()) for text in pair)) if labels else b""


def job_digest(job: NewJob) -> bytes:
    """16 bytes over all that the submitter said of the job, save its id, under which the digest is kept.

    A job without a rollback job, and one without locks, has the digest that it had before there were any.
    """
    numbers = _NUMBERS.pack(
        job.priority,
        job.due_ms,
        job.run_at_ms,
        job.queue_timeout_ms,
        job.run_timeout_ms,
        job.total_timeout_ms,
        job.heartbeat_timeout_ms,
        0,
    )
    rollback = job.rollback
    kind = b"lk-job-1" if rollback is None else b"lk-job-2"
    return _fold(
        kind if not job.locks else kind + b"-locks",
        numbers,
        _policy_bytes(job.retry),
        job.queue.encode(),
        job.type.encode(),
        job.content_type.encode(),
        job.unique_key.encode(),
        _label_bytes(job.labels),
        job.payload,
        *(_rollback_parts(rollback) if rollback is not None else ()),
        *(_lock_part(lock) for lock in job.locks),
    )[:_DIGEST_BYTES]


def _lock_part(lock: JobLock) -> bytes:
    return struct.pack(">bq", lock.mode, lock.permits) + lock.name.encode()


def _rollback_parts(rollback: Rollback) -> tuple[bytes, ...]:
    texts = (rollback.queue, rollback.type, rollback.content_type)
    return (rollback.payload, struct.pack(">q", rollback.priority), *map(str.encode, texts))


def settlement_digest(command: Settlement, follow_ups: Sequence[NewJob] = ()) -> bytes:
    """16 bytes over what a worker said of an attempt's end, its follow-up jobs among it.

    Token and progress are no part of it: a repeat may know more of the progress. A completion without
    follow-ups has the digest that it had before there were any.
    """
    if isinstance(command, Complete):
        parts = (command.result, command.result_content_type.encode())
        if follow_ups:
            said = (part for job in follow_ups for part in (job.job_id.encode(), job_digest(job)))
            return _fold(b"lk-complete-2", *parts, *said)[:_DIGEST_BYTES]
        return _fold(b"lk-complete-1", *parts)[:_DIGEST_BYTES]
    if isinstance(command, Fail):
        delay = command.retry_delay_ms
        flags = _FAILURE.pack(delay is not None, delay or 0, command.no_retry)
        texts = (command.failure_type.encode(), command.failure_message.encode())
        return _fold(b"lk-fail-1", flags, *texts)[:_DIGEST_BYTES]
    delay_bytes = struct.pack(">q", command.delay_ms)
    return _fold(b"lk-release-1", delay_bytes, command.reason.encode())[:_DIGEST_BYTES]


def request_digest(request_id: str) -> bytes:
    """16 bytes for a request id, empty for none."""
    return _fold(b"lk-request-1", request_id.encode())[:_DIGEST_BYTES] if request_id else b""


def made_job_id(namespace: str, request_id: str, item: int) -> str:
    """The id of a job whose submitter named none: 26 characters, the same for every repeat of the request."""
    digest = _fold(b"lk-job-id-1", namespace.encode(), request_id.encode(), struct.pack(">I", item))
    return base64.b32encode(digest[:16]).decode()[:26].lower()


def made_session_id(namespace: str, request_id: str) -> str:
    """The id of a session: 16 hex digits of a positive int64, which also names its lease."""
    digest = _fold(b"lk-session-1", namespace.encode(), request_id.encode())
    return f"{int.from_bytes(digest[:8], 'big') % _MAX_SESSION + 1:016x}"


def session_digest(*, identity: str, sdk: str, labels: Mapping[str, str], ttl_ms: int) -> bytes:
    """16 bytes over what a worker said when it opened a session."""
    parts = (identity.encode(), sdk.encode(), _label_bytes(labels), struct.pack(">q", ttl_ms))
    return _fold(b"lk-session-open-1", *parts)[:_DIGEST_BYTES]


def claim_nonce(session_id: str, request_id: str) -> bytes:
    """16 bytes that all claims of one call carry, so that its repeat finds them."""
    return _fold(b"lk-claim-1", session_id.encode(), request_id.encode())[:_DIGEST_BYTES]


def lock_nonce(wish: LockWish) -> bytes:
    """16 bytes over all that a call asks of locks, so that its repeat knows its own entries."""
    numbers = struct.pack(">2q", wish.mode, wish.permits)
    texts = (wish.session_id.encode(), wish.request_id.encode(), _text_list(wish.names))
    return _fold(b"lk-lock-1", numbers, wish.value, *texts)[:_DIGEST_BYTES]
