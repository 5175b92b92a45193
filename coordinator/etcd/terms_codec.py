"""Encode the terms of a job once per job, not once per transition."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import Final

from coordinator.core.job import JobLock, Rollback, Terms
from coordinator.core.lock_order import LockMode
from coordinator.core.retry import RetryPolicy
from coordinator.etcd.wire import moment, varint
from leasekeeper.internal.storage.v1.records_pb2 import (
    JobLockRecord,
    RetryRecord,
    RollbackRecord,
    TermsRecord,
)

__all__ = ["TermsCodec", "policy_from_record", "retry_record", "terms_from_record"]

_RETRY_TAG: Final = b"\x42"  # TermsRecord.retry: field 8, length-delimited

_DEFAULT_GENERATION: Final = 16_384
"""Encoded terms that each of two generations keeps; about 300 bytes each."""


def retry_record(policy: RetryPolicy) -> RetryRecord:
    """A policy as a record."""
    return RetryRecord(
        max_retries=policy.max_retries,
        initial_ms=policy.initial_ms,
        multiplier=policy.multiplier,
        cap_ms=policy.cap_ms,
        jitter=policy.jitter,
        non_retryable_types=policy.non_retryable_types,
        max_lease_losses=policy.max_lease_losses,
    )


def policy_from_record(record: RetryRecord) -> RetryPolicy:
    """Undo ``retry_record``."""
    return RetryPolicy(
        max_retries=record.max_retries,
        initial_ms=record.initial_ms,
        multiplier=record.multiplier,
        cap_ms=record.cap_ms,
        jitter=record.jitter,
        non_retryable_types=tuple(record.non_retryable_types),
        max_lease_losses=record.max_lease_losses,
    )


@lru_cache(maxsize=1024)
def _retry(policy: RetryPolicy) -> bytes:
    """The ``retry`` field with its tag: most jobs of a type share one policy."""
    encoded = retry_record(policy).SerializeToString()
    return b"".join((_RETRY_TAG, varint(len(encoded)), encoded))


_RETRIES: Final[dict[int, tuple[RetryPolicy, bytes]]] = {}
"""``_retry`` by identity: hashing a policy costs more than all else of a submission's terms. An entry holds
its policy, so an identity cannot be taken over by another object."""

_RETRIES_KEPT: Final = 1_024


def _retry_of(policy: RetryPolicy) -> bytes:
    entry = _RETRIES.get(id(policy))
    if entry is None:
        if len(_RETRIES) >= _RETRIES_KEPT:
            _RETRIES.clear()
        entry = _RETRIES[id(policy)] = (policy, _retry(policy))
    return entry[1]


def _encode(terms: Terms) -> bytes:
    unusual = (
        terms.labels
        or terms.due_ms
        or terms.run_at_ms
        or terms.queue_timeout_ms
        or terms.run_timeout_ms
        or terms.total_timeout_ms
        or terms.heartbeat_timeout_ms
        or terms.unique_key
        or terms.rollback is not None
        or terms.target_wait_ms
        or terms.locks
    )
    return _by_protobuf(terms) if unusual else _by_hand(terms)


@lru_cache(maxsize=1024)
def _line(queue: str, type_: str, priority: int) -> bytes:
    """The fields that jobs of one line share, and the tag of what follows."""
    return TermsRecord(queue=queue, type=type_, priority=priority).SerializeToString() + b"\x28"


def _by_hand(terms: Terms) -> bytes:
    """Terms of a job that has nothing but a place to go, which most have."""
    digest, request = terms.digest, terms.request_digest
    return b"%b%b\x38%b%b\x70%b\x7a%b%b\x82\x01%b%b" % (
        _line(terms.queue, terms.type, terms.priority),
        moment(terms.submit_ms),
        varint(terms.counter),
        _retry_of(terms.retry),
        varint(terms.payload_size),
        varint(len(digest)),
        digest,
        varint(len(request)),
        request,
    )


def _by_protobuf(terms: Terms) -> bytes:
    record = TermsRecord(
        queue=terms.queue,
        type=terms.type,
        priority=terms.priority,
        submit_ms=terms.submit_ms,
        counter=terms.counter,
        payload_size=terms.payload_size,
        digest=terms.digest,
        request_digest=terms.request_digest,
    )
    # Setting an empty field costs as much as setting another one, and most of these are empty.
    if terms.labels:
        record.labels.update(terms.labels)
    if terms.due_ms:
        record.due_ms = terms.due_ms
    if terms.run_at_ms:
        record.run_at_ms = terms.run_at_ms
    if terms.queue_timeout_ms:
        record.queue_timeout_ms = terms.queue_timeout_ms
    if terms.run_timeout_ms:
        record.run_timeout_ms = terms.run_timeout_ms
    if terms.total_timeout_ms:
        record.total_timeout_ms = terms.total_timeout_ms
    if terms.heartbeat_timeout_ms:
        record.heartbeat_timeout_ms = terms.heartbeat_timeout_ms
    if terms.unique_key:
        record.unique_key = terms.unique_key
    if terms.target_wait_ms:
        record.target_wait_ms.extend(terms.target_wait_ms)
    if terms.locks:
        record.locks.extend(
            [JobLockRecord(name=lock.name, mode=lock.mode, permits=lock.permits) for lock in terms.locks]
        )
    rollback = terms.rollback
    if rollback is not None:
        record.rollback.queue = rollback.queue
        record.rollback.type = rollback.type
        record.rollback.payload = rollback.payload
        record.rollback.content_type = rollback.content_type
        record.rollback.priority = rollback.priority
    return record.SerializeToString() + _retry_of(terms.retry)


def terms_from_record(record: TermsRecord) -> Terms:
    """The terms of a decoded record.

    Raises:
        ValueError: a lock has a mode that there is not.
    """
    return Terms(
        queue=record.queue,
        type=record.type,
        priority=record.priority,
        labels=MappingProxyType(dict(record.labels)),
        submit_ms=record.submit_ms,
        due_ms=record.due_ms,
        run_at_ms=record.run_at_ms,
        counter=record.counter,
        retry=policy_from_record(record.retry),
        queue_timeout_ms=record.queue_timeout_ms,
        run_timeout_ms=record.run_timeout_ms,
        total_timeout_ms=record.total_timeout_ms,
        heartbeat_timeout_ms=record.heartbeat_timeout_ms,
        unique_key=record.unique_key,
        payload_size=record.payload_size,
        digest=record.digest,
        request_digest=record.request_digest,
        rollback=_rollback_from(record.rollback) if record.HasField("rollback") else None,
        target_wait_ms=tuple(record.target_wait_ms),
        locks=tuple(
            [JobLock(name=lock.name, mode=LockMode(lock.mode), permits=lock.permits) for lock in record.locks]
        )
        if record.locks
        else (),
    )


def _rollback_from(record: RollbackRecord) -> Rollback:
    return Rollback(
        queue=record.queue,
        type=record.type,
        payload=record.payload,
        content_type=record.content_type,
        priority=record.priority,
    )


class TermsCodec:
    """Encoded terms by the identity of the terms object, which a transition hands on unchanged.

    Two generations instead of a use order: a lookup is one dict access, and the older half goes when the
    younger is full. An entry holds its terms, so an identity cannot be taken over by another object.
    """

    __slots__ = ("_limit", "_old", "_young")

    def __init__(self, generation: int = _DEFAULT_GENERATION) -> None:
        self._limit = generation
        self._young: dict[int, tuple[Terms, bytes]] = {}
        self._old: dict[int, tuple[Terms, bytes]] = {}

    def encode(self, terms: Terms) -> bytes:
        """The bytes of a ``TermsRecord``."""
        identity = id(terms)
        entry = self._young.get(identity)
        if entry is not None:
            return entry[1]
        entry = self._old.get(identity)
        encoded = entry[1] if entry is not None else _encode(terms)
        self._remember(terms, encoded)
        return encoded

    def encode_last(self, terms: Terms) -> bytes:
        """As ``encode``, of terms that will hardly be asked for again: they are not kept any longer."""
        identity = id(terms)
        entry = self._young.pop(identity, None)
        before = self._old.pop(identity, None)
        entry = entry or before
        return entry[1] if entry is not None else _encode(terms)

    def _remember(self, terms: Terms, encoded: bytes) -> None:
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}
        self._young[id(terms)] = (terms, encoded)
