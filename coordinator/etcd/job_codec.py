"""The record of a job, its value and back. Hot: it copies encoded terms and writes usual fields by hand."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from coordinator.core.job import RETAINED, Attempt, AttemptOutcome, Job, JobState
from coordinator.core.rank import Rank
from coordinator.errors import CodecError
from coordinator.etcd.record_codec import FORMAT, decode_record, progress_of
from coordinator.etcd.terms_codec import TermsCodec, terms_from_record
from coordinator.etcd.wire import moment, varint
from leasekeeper.internal.storage.v1.records_pb2 import AttemptRecord, ProgressRecord, StateRecord

__all__ = ["JobCodec"]

_TERMS_TAG: Final = b"\x1a"  # StateRecord.terms: field 3, length-delimited

_RUNNING: Final = AttemptOutcome.RUNNING  # a member of an enum costs thirty times what a global costs
_STATES: Final = {state: bytes((0x08, FORMAT, 0x10, state, 0x20)) for state in JobState}
"""Format, state, and the tag of ready_ms, which every record has."""

_OUTCOMES: Final = {outcome: varint(outcome) for outcome in AttemptOutcome}


class JobCodec:
    """``StateRecord``s; keeps encoded terms between transitions."""

    __slots__ = ("_terms",)

    def __init__(self, terms: TermsCodec | None = None) -> None:
        self._terms = terms or TermsCodec()

    def encode(self, job: Job) -> bytes:
        """The value of ``job``'s ``state`` and ``ready`` keys."""
        encode = self._terms.encode_last if job.state in RETAINED else self._terms.encode
        terms = encode(job.terms)
        # Fields may come in any order, so the terms are spliced in behind.
        unusual = (
            job.failures
            or job.lease_losses
            or job.uncharged
            or job.hold_ms
            or job.cancel_requested
            or job.cancel_reason
            or job.end_reason
            or job.retry_ms
            or job.retry_digest
            or job.rollback_job
            or job.progress is not None
        )
        head = _by_protobuf(job) if unusual else _by_hand(job)
        return b"".join((head, _TERMS_TAG, varint(len(terms)), terms))

    def decode(self, namespace: str, job_id: str, value: bytes) -> Job:
        """The job whose ``state`` or ``ready`` key held ``value``.

        Raises:
            CodecError: the value is unreadable or lacks what every record has.
        """
        record = decode_record(StateRecord.FromString, value, "state")
        if not record.HasField("terms") or not record.terms.queue or not record.terms.type:
            raise CodecError("state: without terms")
        try:
            return Job(
                namespace=namespace,
                job_id=job_id,
                terms=terms_from_record(record.terms),
                state=JobState(record.state),
                ready_ms=record.ready_ms,
                rank=Rank(record.rank_ms, record.rank_counter),
                attempt=record.attempt,
                failures=record.failures,
                lease_losses=record.lease_losses,
                uncharged=record.uncharged,
                hold_ms=record.hold_ms,
                cancel_requested=record.cancel_requested,
                cancel_reason=record.cancel_reason,
                attempts=tuple([_attempt(attempt) for attempt in record.attempts]),
                progress=progress_of(record),
                result=record.result,
                result_content_type=record.result_content_type,
                result_size=record.result_size,
                end_reason=record.end_reason,
                settle_ms=record.settle_ms,
                retry_ms=record.retry_ms,
                retry_digest=record.retry_digest,
                rollback_job=record.rollback_job,
            )
        except ValueError as error:
            raise CodecError(f"state: {error}") from error


def _by_hand(job: Job) -> bytes:
    """All but the terms of a job that never failed, was never lost, is not to stop and has no progress.

    Most transitions are of such jobs, and this takes a third of the time that the message object takes.
    """
    rank = job.rank
    parts = [
        _STATES[job.state],
        moment(job.ready_ms),
        b"\x28",
        moment(rank.ms),
        b"\x30",
        varint(rank.counter),
    ]
    if job.attempt:
        parts += (b"\x38", varint(job.attempt))
    for attempt in job.attempts:
        encoded = _attempt_by_hand(attempt)
        parts += (b"\x72", varint(len(encoded)), encoded)
    if job.result:
        parts += (b"\x82\x01", varint(len(job.result)), job.result)
    if job.result_content_type:
        kind = job.result_content_type.encode()
        parts += (b"\x8a\x01", varint(len(kind)), kind)
    if job.result_size:
        parts += (b"\x90\x01", varint(job.result_size))
    if job.settle_ms:
        parts += (b"\xa0\x01", varint(job.settle_ms))
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _begun(number: int, session: str, start_ms: int) -> bytes:
    """What is known of an attempt as it begins, and the tag of its outcome; claims of one call share it."""
    record = AttemptRecord(number=number, session=session, start_ms=start_ms)
    return record.SerializeToString() + b"\x30"


def _attempt_by_hand(attempt: Attempt) -> bytes:
    outcome = attempt.outcome
    if outcome is _RUNNING:
        begun = _begun(attempt.number, attempt.session, attempt.start_ms) + _OUTCOMES[outcome]
        return b"%b\x10%b" % (begun, varint(attempt.token)) if attempt.token else begun
    if attempt.failure_type or attempt.failure_message:
        return _attempt_record(attempt).SerializeToString()
    digest = attempt.digest
    return b"%b%b\x10%b\x28%b\x3a%b%b\x50%b\x58%b" % (
        _begun(attempt.number, attempt.session, attempt.start_ms),
        _OUTCOMES[outcome],
        moment(attempt.token),
        moment(attempt.end_ms),
        varint(len(digest)),
        digest,
        varint(attempt.state_after or 0),
        varint(attempt.ready_ms_after),
    )


def _by_protobuf(job: Job) -> bytes:
    """All but the terms of any job."""
    head = StateRecord(
        format=FORMAT,
        state=job.state,
        ready_ms=job.ready_ms,
        rank_ms=job.rank.ms,
        rank_counter=job.rank.counter,
        attempt=job.attempt,
        attempts=[_attempt_record(attempt) for attempt in job.attempts],
    )
    # Setting an empty field costs as much as setting another one, and most of these are empty.
    if job.failures:
        head.failures = job.failures
    if job.lease_losses:
        head.lease_losses = job.lease_losses
    if job.uncharged:
        head.uncharged = job.uncharged
    if job.hold_ms:
        head.hold_ms = job.hold_ms
    if job.cancel_requested:
        head.cancel_requested = True
    if job.cancel_reason:
        head.cancel_reason = job.cancel_reason
    if job.progress is not None:
        head.progress.CopyFrom(ProgressRecord(ratio=job.progress.ratio, note=job.progress.note))
    if job.result:
        head.result = job.result
    if job.result_content_type:
        head.result_content_type = job.result_content_type
    if job.result_size:
        head.result_size = job.result_size
    if job.end_reason:
        head.end_reason = job.end_reason
    if job.settle_ms:
        head.settle_ms = job.settle_ms
    if job.retry_ms:
        head.retry_ms = job.retry_ms
    if job.retry_digest:
        head.retry_digest = job.retry_digest
    if job.rollback_job:
        head.rollback_job = job.rollback_job
    return head.SerializeToString()


def _attempt_record(attempt: Attempt) -> AttemptRecord:
    if attempt.outcome is _RUNNING:
        return AttemptRecord(
            number=attempt.number,
            token=attempt.token,
            session=attempt.session,
            start_ms=attempt.start_ms,
            outcome=attempt.outcome,
        )
    record = AttemptRecord(
        number=attempt.number,
        token=attempt.token,
        session=attempt.session,
        start_ms=attempt.start_ms,
        end_ms=attempt.end_ms,
        outcome=attempt.outcome,
        digest=attempt.digest,
        state_after=attempt.state_after or 0,
    )
    if attempt.failure_type:
        record.failure_type = attempt.failure_type
    if attempt.failure_message:
        record.failure_message = attempt.failure_message
    if attempt.ready_ms_after:
        record.ready_ms_after = attempt.ready_ms_after
    return record


def _attempt(record: AttemptRecord) -> Attempt:
    return Attempt(
        number=record.number,
        session=record.session,
        start_ms=record.start_ms,
        token=record.token,
        end_ms=record.end_ms,
        outcome=AttemptOutcome(record.outcome),
        digest=record.digest,
        failure_type=record.failure_type,
        failure_message=record.failure_message,
        state_after=JobState(record.state_after) if record.state_after else None,
        ready_ms_after=record.ready_ms_after,
    )
