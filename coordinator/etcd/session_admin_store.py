"""Sessions in etcd as operators see them: the witness, and all keys on its lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from coordinator.core.fencing import make_token
from coordinator.core.job import Claim
from coordinator.core.lock_order import LockEntry
from coordinator.errors import (
    CodecError,
    KeyFormatError,
    LeaseNotFound,
)
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_session, encode_session
from coordinator.etcd.group_read import GroupReader
from coordinator.etcd.keys import KeyRange, KeySpace
from coordinator.etcd.lock_codec import entry_of
from coordinator.etcd.namespace_keys import NamespaceKeys
from coordinator.etcd.present import EtcdPresent
from coordinator.etcd.record_swap import swap_record
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.time_left import read_timeout
from coordinator.etcd.txn import TxnCodec
from coordinator.ports import Clock, HeldBySession, Session, StoredSession

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["EtcdSessionAdminStore"]

_KEYS_PER_READ: Final = 128


class EtcdSessionAdminStore:
    """Implements ``ports.SessionAdminStore``.

    Args:
        client: the etcd client.
        reader: for reads.
        space: the keys.
        codec: decodes claims.
        present: the epoch that every Txn compares.
        set_aside: told of undecodable records.
        clock: deadlines.
    """

    def __init__(
        self,
        client: EtcdClient,
        reader: GroupReader,
        space: KeySpace,
        codec: TxnCodec,
        present: EtcdPresent,
        set_aside: SetAside,
        clock: Clock,
    ) -> None:
        self._client = client
        self._reader = reader
        self._space = space
        self._codec = codec
        self._present = present
        self._set_aside = set_aside
        self._clock = clock

    async def read(self, namespace: str, session_id: str, *, deadline: float) -> StoredSession | None:
        """See ``ports.SessionAdminStore``."""
        key = self._space.namespace(namespace).session(session_id)
        found = await self._reader.get((key,), deadline=deadline)
        return _stored(namespace, session_id, found.kvs[0])

    async def held(self, namespace: str, session_id: str, *, deadline: float) -> HeldBySession:
        """See ``ports.SessionAdminStore``. One lease carries at most some 500 keys."""
        keys = self._space.namespace(namespace)
        lease = int(session_id, 16)
        answer = await self._client.lease_time_to_live(
            lease, keys=True, timeout=read_timeout(self._clock, deadline)
        )
        claim_keys = await self._on_lease(keys.all_claims(), answer.keys, lease, deadline)
        lock_keys = await self._on_lease(keys.all_locks(), answer.keys, lease, deadline)
        claims = [claim for kv in claim_keys if (claim := self._claim(keys, kv)) is not None]
        locks = [found for kv in lock_keys if (found := self._lock(keys, kv)) is not None]
        return HeldBySession(claims, locks)

    async def _on_lease(
        self, span: KeyRange, attached: Sequence[bytes], lease: int, deadline: float
    ) -> list[KeyValue]:
        """The keys of ``span`` among those ``attached`` to the lease, as they stand now."""
        wanted = sorted(key for key in attached if span.start <= key < span.end)
        found: list[KeyValue] = []
        for at in range(0, len(wanted), _KEYS_PER_READ):
            chunk = wanted[at : at + _KEYS_PER_READ]
            read = await self._reader.get(chunk, deadline=deadline, reply_bytes=512 * len(chunk))
            found += [kv for kv in read.kvs if kv is not None and kv.lease == lease]
        return found

    def _claim(self, keys: NamespaceKeys, kv: KeyValue) -> tuple[str, Claim] | None:
        try:
            claim = self._codec.claim_of(kv)
            return (keys.parse_claim(kv.key), claim) if claim is not None else None
        except (CodecError, KeyFormatError) as error:
            self._set_aside.add("claim", kv.key, error)
            return None

    def _lock(self, keys: NamespaceKeys, kv: KeyValue) -> tuple[LockEntry, int] | None:
        try:
            entry = entry_of(keys, kv, self._set_aside)
            return entry, make_token(self._present.epoch, entry.revision)
        except KeyFormatError as error:
            self._set_aside.add("lock", kv.key, error)
            return None

    async def swap(
        self, before: StoredSession, after: Session, *, deadline: float
    ) -> tuple[bool, StoredSession | None]:
        """See ``ports.SessionAdminStore``."""
        namespace, session_id = after.namespace, after.session_id
        key, lease = self._space.namespace(namespace).session(session_id), int(session_id, 16)
        try:
            reply = await swap_record(
                self._client,
                self._present,
                self._clock,
                key,
                wire.put(key, encode_session(after), lease),
                version=before.version,
                deadline=deadline,
                # On a dead or another lease nothing may be put.
                also=(wire.lease_eq(key, lease),),
            )
        except LeaseNotFound:
            return False, None
        if reply.won:
            return True, StoredSession(after, reply.revision)
        stands = _stored(namespace, session_id, reply.stands)
        # Whoever wrote the very same wanted the very same.
        same = stands is not None and stands.session == replace(after, revision=stands.session.revision)
        return reply.doubtful and same, stands


def _stored(namespace: str, session_id: str, kv: KeyValue | None) -> StoredSession | None:
    if kv is None:
        return None
    session = decode_session(namespace, session_id, kv.value, kv.create_revision)
    return StoredSession(session, kv.mod_revision)
