"""Every record but that of a job: core values to protobuf and back, each with a format version.

Decoding raises ``CodecError`` for whatever this version cannot read; callers set such a record aside, count
it and go on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from coordinator.core.job import Claim, Job, Progress
from coordinator.errors import CodecError
from coordinator.etcd.wire import varint
from coordinator.ports import Checkpoint, Session, Spec
from leasekeeper.internal.storage.v1.records_pb2 import (
    CancelRecord,
    CheckpointRecord,
    ClaimRecord,
    DueRecord,
    EpochRecord,
    ResultRecord,
    SessionRecord,
    SpecRecord,
    StateRecord,
    UniqueRecord,
)

__all__ = [
    "FORMAT",
    "decode_checkpoint",
    "decode_claim",
    "decode_due",
    "decode_epoch",
    "decode_record",
    "decode_result",
    "decode_session",
    "decode_spec",
    "decode_unique",
    "encode_cancel",
    "encode_checkpoint",
    "encode_claim",
    "encode_due",
    "encode_epoch",
    "encode_result",
    "encode_session",
    "encode_spec",
    "encode_unique",
    "progress_of",
]

FORMAT: Final = 1
"""Version of every record that this code writes, and the only one that it reads."""

_SPEC_HEAD: Final = bytes((0x08, FORMAT, 0x12))
"""The format of a SpecRecord, and the tag of its payload."""

R = TypeVar("R")


def decode_record(parse: Callable[[bytes], R], value: bytes, what: str) -> R:
    """Parse a record and check its format version.

    Args:
        parse: ``FromString`` of a record with a ``format`` field.
        value: as stored.
        what: names the record in the error.

    Raises:
        CodecError: it is no such record, or of a format that we do not know.
    """
    try:
        record: Any = parse(value)
    except DecodeError as error:
        raise CodecError(f"{what}: {error}") from error
    if record.format != FORMAT:
        raise CodecError(f"{what}: format {record.format}, this version reads {FORMAT}")
    parsed: R = record
    return parsed


def progress_of(record: StateRecord | CheckpointRecord) -> Progress | None:
    """The progress of a record that may have one."""
    if not record.HasField("progress"):
        return None
    return Progress(ratio=record.progress.ratio, note=record.progress.note)


def encode_spec(spec: Spec) -> bytes:
    """Value of ``job/<hh>/<job>``. By hand, as every job has one."""
    payload = spec.payload
    if spec.content_type:
        return SpecRecord(format=FORMAT, payload=payload, content_type=spec.content_type).SerializeToString()
    return b"%b%b%b" % (_SPEC_HEAD, varint(len(payload)), payload)


def decode_spec(value: bytes) -> Spec:
    """Undo ``encode_spec``."""
    record = decode_record(SpecRecord.FromString, value, "job")
    return Spec(payload=record.payload, content_type=record.content_type)


def encode_claim(claim: Claim) -> bytes:
    """Value of ``claim/<job>``. The token is not in it: it is the revision that creates the key."""
    return _claim_value(
        claim.session,
        claim.queue,
        claim.type,
        claim.attempt,
        claim.nonce,
        claim.run_timeout_ms,
        claim.start_ms,
        claim.heartbeat_timeout_ms,
    )


@lru_cache(maxsize=256)
def _claim_value(
    session: str,
    queue: str,
    type_: str,
    attempt: int,
    nonce: bytes,
    run_timeout_ms: int,
    start_ms: int,
    heartbeat_timeout_ms: int,
) -> bytes:
    """It does not name its job, so the claims of one call share it."""
    return ClaimRecord(
        format=FORMAT,
        session=session,
        queue=queue,
        type=type_,
        attempt=attempt,
        nonce=nonce,
        run_timeout_ms=run_timeout_ms,
        start_ms=start_ms,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    ).SerializeToString()


def decode_claim(value: bytes, token: int) -> Claim:
    """Undo ``encode_claim``; ``token`` comes from the key's create revision."""
    record = decode_record(ClaimRecord.FromString, value, "claim")
    return Claim(
        session=record.session,
        attempt=record.attempt,
        nonce=record.nonce,
        start_ms=record.start_ms,
        token=token,
        queue=record.queue,
        type=record.type,
        run_timeout_ms=record.run_timeout_ms,
        heartbeat_timeout_ms=record.heartbeat_timeout_ms,
    )


def encode_due(job: Job) -> bytes:
    """Value of ``due/<ms>/<job>``."""
    return DueRecord(format=FORMAT, queue=job.terms.queue, hold_ms=job.hold_ms).SerializeToString()


def decode_due(value: bytes) -> int:
    """``hold_ms`` of a due key."""
    return decode_record(DueRecord.FromString, value, "due").hold_ms


def encode_cancel(who: str, at_ms: int) -> bytes:
    """Value of ``cancel/<job>``."""
    return CancelRecord(format=FORMAT, who=who, at_ms=at_ms).SerializeToString()


def encode_unique(job_id: str) -> bytes:
    """Value of ``unique/<queue>/<key>``."""
    return UniqueRecord(format=FORMAT, job=job_id).SerializeToString()


def decode_unique(value: bytes) -> str:
    """The job that owns a unique key."""
    return decode_record(UniqueRecord.FromString, value, "unique").job


def encode_result(result: bytes, content_type: str) -> bytes:
    """Value of ``result/<job>``."""
    return ResultRecord(format=FORMAT, result=result, content_type=content_type).SerializeToString()


def decode_result(value: bytes) -> bytes:
    """A result that was too large for its record."""
    return decode_record(ResultRecord.FromString, value, "result").result


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Value of ``checkpoint/<job>``."""
    record = CheckpointRecord(
        format=FORMAT,
        attempt=checkpoint.attempt,
        sequence=checkpoint.sequence,
        checkpoint=checkpoint.data,
        saved_ms=checkpoint.saved_ms,
    )
    if checkpoint.progress is not None:
        record.progress.ratio = checkpoint.progress.ratio
        record.progress.note = checkpoint.progress.note
        record.progress.SetInParent()
    return record.SerializeToString()


def decode_checkpoint(value: bytes, revision: int) -> Checkpoint:
    """Undo ``encode_checkpoint``; ``revision`` is the key's mod revision."""
    record = decode_record(CheckpointRecord.FromString, value, "checkpoint")
    return Checkpoint(
        attempt=record.attempt,
        sequence=record.sequence,
        data=record.checkpoint,
        progress=progress_of(record),
        saved_ms=record.saved_ms,
        revision=revision,
    )


def encode_session(session: Session) -> bytes:
    """Value of ``session/<session>``."""
    return SessionRecord(
        format=FORMAT,
        identity=session.identity,
        sdk=session.sdk,
        labels=session.labels,
        epoch=session.epoch,
        opened_ms=session.opened_ms,
        ttl_ms=session.ttl_ms,
        command=session.command,
        request_digest=session.request_digest,
        terminate_ms=session.terminate_ms,
    ).SerializeToString()


def decode_session(namespace: str, session_id: str, value: bytes, revision: int) -> Session:
    """Undo ``encode_session``; ``revision`` is the witness's create revision."""
    record = decode_record(SessionRecord.FromString, value, "session")
    return Session(
        namespace=namespace,
        session_id=session_id,
        identity=record.identity,
        sdk=record.sdk,
        labels=MappingProxyType(dict(record.labels)),
        opened_ms=record.opened_ms,
        ttl_ms=record.ttl_ms,
        epoch=record.epoch,
        command=record.command,
        request_digest=record.request_digest,
        revision=revision,
        terminate_ms=record.terminate_ms,
    )


def encode_epoch(epoch: int) -> bytes:
    """Value of ``_system/epoch``."""
    return EpochRecord(format=FORMAT, epoch=epoch).SerializeToString()


def decode_epoch(value: bytes) -> int:
    """The epoch, at least 1.

    Raises:
        CodecError: unreadable, or no epoch.
    """
    epoch = decode_record(EpochRecord.FromString, value, "epoch").epoch
    if epoch < 1:
        raise CodecError(f"epoch: {epoch}")
    return epoch
