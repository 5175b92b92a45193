"""Entries of named locks to records and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.core.lock_order import LockEntry, LockMode
from coordinator.errors import CodecError
from coordinator.etcd.namespace_keys import NamespaceKeys
from coordinator.etcd.record_codec import FORMAT, decode_record
from coordinator.etcd.set_aside import SetAside
from leasekeeper.internal.storage.v1.records_pb2 import LockRecord

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["decode_lock", "encode_lock", "entry_of"]


def encode_lock(entry: LockEntry) -> bytes:
    """Value of ``lock/<name>/<waiter>``."""
    return LockRecord(
        format=FORMAT,
        session=entry.session,
        mode=entry.mode.value,
        permits=entry.permits,
        job=entry.job_id,
        nonce=entry.nonce,
        value=entry.value,
        since_ms=entry.since_ms,
        repeats=entry.repeats,
    ).SerializeToString()


def decode_lock(name: str, waiter: str, kv: KeyValue) -> LockEntry:
    """Undo ``encode_lock``.

    Raises:
        CodecError: it is no such record.
    """
    record = decode_record(LockRecord.FromString, kv.value, "lock")
    try:
        mode = LockMode(record.mode)
    except ValueError as error:
        raise CodecError(f"lock: there is no mode {record.mode}") from error
    if mode is LockMode.SEMAPHORE and record.permits < 1:
        raise CodecError(f"lock: a semaphore of {record.permits} permits")
    return LockEntry(
        name=name,
        waiter=waiter,
        session=record.session,
        mode=mode,
        permits=record.permits,
        job_id=record.job,
        nonce=record.nonce,
        value=record.value,
        since_ms=record.since_ms,
        repeats=record.repeats,
        revision=kv.create_revision,
        version=kv.mod_revision,
    )


def entry_of(keys: NamespaceKeys, kv: KeyValue, set_aside: SetAside) -> LockEntry:
    """The entry that a key stands for.

    One whose value cannot be decoded is set aside, and stands as an exclusive one: were it left out, a second
    owner could come in beside it. It goes with its session, or is revoked by its token.

    Raises:
        KeyFormatError: the key is no lock's.
    """
    name, waiter = keys.parse_lock(kv.key)
    try:
        return decode_lock(name, waiter, kv)
    except CodecError as error:
        set_aside.add("lock", kv.key, error)
    return LockEntry(
        name=name,
        waiter=waiter,
        session="",
        mode=LockMode.EXCLUSIVE,
        revision=kv.create_revision,
        version=kv.mod_revision,
    )
