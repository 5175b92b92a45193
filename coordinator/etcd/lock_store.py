"""Named locks in etcd: entries on session leases, through the group committer.

One operation in flight adds to a lock's name (``GuardedOp.adds``): compares see the store before the whole
Txn, so two entries of one Txn would not see each other. Whoever is to own at once compares that nothing was
added to the lock since it was read: every key in its range has a mod revision below R+1. Deletions pass,
which only makes room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from coordinator.core.lock_order import LockEntry
from coordinator.errors import KeyFormatError, LeasekeeperError, StorageError
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.committer import Committer
from coordinator.etcd.group_read import GroupReader
from coordinator.etcd.guarded_op import GuardedOp, OpResult
from coordinator.etcd.keys import KeySpace, NamespaceKeys
from coordinator.etcd.lock_codec import encode_lock, entry_of
from coordinator.etcd.paging import pages
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.time_left import read_timeout
from coordinator.etcd.txn import one
from coordinator.ports import Clock, LockCommit, LockDeletion, LocksRead
from leasekeeper.internal.etcd.v1.kv_pb2 import TxnRequest

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue, ResponseOp

__all__ = ["EtcdLockStore"]

_NAMES_PER_READ: Final = 64
_KEYS_PER_READ: Final = 128


class EtcdLockStore:
    """Implements ``ports.LockStore``.

    Args:
        client: for ranges.
        committer: for every write.
        reader: for point reads.
        space: the keys.
        set_aside: told of undecodable records.
        clock: the time that deadlines are measured in.
    """

    def __init__(
        self,
        client: EtcdClient,
        committer: Committer,
        reader: GroupReader,
        space: KeySpace,
        set_aside: SetAside,
        clock: Clock,
    ) -> None:
        self._client = client
        self._committer = committer
        self._reader = reader
        self._space = space
        self._set_aside = set_aside
        self._clock = clock

    # --- write ------------------------------------------------------------------------------------

    async def acquire(
        self,
        namespace: str,
        asked: Sequence[LockEntry],
        *,
        after: int | None,
        deadline: float,
        orphaned: Callable[[Awaitable[LockCommit]], None] = lambda pending: None,
    ) -> LockCommit:
        """See ``ports.LockStore``."""
        keys = self._space.namespace(namespace)
        witness, lease = _witness(keys, asked)
        own = [keys.lock(entry.name, entry.waiter) for entry in asked]
        spans = [keys.lock_entries(entry.name) for entry in asked]
        compares = [wire.lease_eq(witness, lease)]
        if after is None:
            compares += [wire.create_eq(key, 0) for key in own]
        else:
            # That nothing was added says that the own keys are absent, too.
            compares += [wire.range_mod_less(span.start, span.end, after + 1) for span in spans]
        # A future and no task: every call goes this way.
        future = self._committer.enqueue(
            GuardedOp(
                lanes=tuple(own),
                adds=tuple([span.start for span in spans]),
                compares=tuple(compares),
                thens=tuple(
                    [wire.put(key, encode_lock(entry), lease) for key, entry in zip(own, asked, strict=True)]
                ),
                # Not the lines: every winner would pay for what few losers need, who read them.
                elses=(wire.get(witness),),
                deadline=deadline,
            )
        )
        try:
            return _commit_of(await asyncio.shield(future), lease)
        except asyncio.CancelledError:
            orphaned(_commit_to_come(future, lease))
            raise

    async def adopt(self, namespace: str, found: Sequence[LockEntry], *, deadline: float) -> int:
        """See ``ports.LockStore``. The lease stays the session's: its id is in the record's key."""
        keys = self._space.namespace(namespace)
        witness, lease = _witness(keys, found)
        own = [keys.lock(entry.name, entry.waiter) for entry in found]
        result = await self._committer.commit(
            GuardedOp(
                lanes=tuple(own),
                # It changes mod revisions, which others compare: it counts as an addition.
                adds=tuple(keys.lock_entries(entry.name).start for entry in found),
                compares=(
                    wire.lease_eq(witness, lease),
                    *(wire.mod_eq(key, entry.version) for key, entry in zip(own, found, strict=True)),
                ),
                thens=tuple(
                    wire.put(key, encode_lock(entry), lease) for key, entry in zip(own, found, strict=True)
                ),
                elses=tuple(wire.get(key) for key in own),
                deadline=deadline,
                reply_bytes=256 * len(own),
            )
        )
        # After a send whose outcome is unknown a loss says nothing: the caller looks again, and adopts again.
        return result.revision if result.won else 0

    async def delete(
        self, namespace: str, entries: Sequence[LockEntry], *, untouched: bool = False, deadline: float
    ) -> list[LockDeletion | LeasekeeperError]:
        """See ``ports.LockStore``."""
        keys = self._space.namespace(namespace)
        results = await self._committer.commit_all(
            [self._deletion(keys, entry, untouched, deadline) for entry in entries]
        )
        return [
            result
            if isinstance(result, StorageError)
            else LockDeletion(
                deleted=result.won,
                revision=result.revision,
                session_open=result.won or not result.responses or one(result.responses[0]) is not None,
                resent=result.resent,
            )
            for result in results
        ]

    @staticmethod
    def _deletion(keys: NamespaceKeys, entry: LockEntry, untouched: bool, deadline: float) -> GuardedOp:
        key = keys.lock(entry.name, entry.waiter)
        guard = wire.mod_eq(key, entry.version) if untouched else wire.create_eq(key, entry.revision)
        elses = (wire.get(keys.session(entry.session)),) if entry.session else ()
        return GuardedOp(
            lanes=(key,), compares=(guard,), thens=(wire.delete(key),), elses=elses, deadline=deadline
        )

    # --- read -------------------------------------------------------------------------------------

    async def read(self, namespace: str, names: Sequence[str], *, deadline: float) -> LocksRead:
        """See ``ports.LockStore``."""
        keys = self._space.namespace(namespace)
        revision, entries = 0, dict[str, tuple[LockEntry, ...]]()
        for at in range(0, len(names), _NAMES_PER_READ):
            chunk = names[at : at + _NAMES_PER_READ]
            spans = [keys.lock_entries(name) for name in chunk]
            request = TxnRequest.FromString(
                wire.txn((), [wire.get(span.start, span.end) for span in spans], ())
            )
            reply = await self._client.read_txn(request, timeout=read_timeout(self._clock, deadline))
            revision = revision or reply.header.revision
            for name, response in zip(chunk, reply.responses, strict=True):
                entries[name] = self._entries(keys, response)
        return LocksRead(revision, entries)

    async def of_session(self, namespace: str, session_id: str, *, deadline: float) -> list[LockEntry]:
        """See ``ports.LockStore``."""
        keys = self._space.namespace(namespace)
        lease = int(session_id, 16)
        span = keys.all_locks()
        answer = await self._client.lease_time_to_live(
            lease, keys=True, timeout=read_timeout(self._clock, deadline)
        )
        held = [key for key in answer.keys if span.start <= key < span.end]
        found: list[LockEntry] = []
        for at in range(0, len(held), _KEYS_PER_READ):
            chunk = held[at : at + _KEYS_PER_READ]
            kvs = (await self._reader.get(chunk, deadline=deadline, reply_bytes=256 * len(chunk))).kvs
            found += self._decoded(keys, [kv for kv in kvs if kv is not None and kv.lease == lease])
        return found

    async def list_entries(self, namespace: str, *, deadline: float) -> tuple[int, list[LockEntry]]:
        """See ``ports.LockStore``. In pages, all of the first one's revision."""
        keys = self._space.namespace(namespace)
        head = await self._client.range(
            self._space.epoch, count_only=True, timeout=read_timeout(self._clock, deadline)
        )
        kvs = [kv async for kv in pages(self._client, keys.all_locks(), clock=self._clock, deadline=deadline)]
        # The pages are of this revision or a later one; saying the earlier one only means more waiting.
        return head.header.revision, self._decoded(keys, kvs)

    def _entries(self, keys: NamespaceKeys, response: ResponseOp) -> tuple[LockEntry, ...]:
        return tuple(self._decoded(keys, response.response_range.kvs))

    def _decoded(self, keys: NamespaceKeys, kvs: Sequence[KeyValue]) -> list[LockEntry]:
        entries: list[LockEntry] = []
        for kv in kvs:
            try:
                entries.append(entry_of(keys, kv, self._set_aside))
            except KeyFormatError as error:
                self._set_aside.add("lock", kv.key, error)
        return entries


def _commit_of(result: OpResult, lease: int) -> LockCommit:
    if result.won:
        return LockCommit(won=True, revision=result.revision)
    held = one(result.responses[0])
    return LockCommit(won=False, revision=result.revision, session_gone=held is None or held.lease != lease)


async def _commit_to_come(future: asyncio.Future[OpResult], lease: int) -> LockCommit:
    return _commit_of(await future, lease)


def _witness(keys: NamespaceKeys, entries: Sequence[LockEntry]) -> tuple[bytes, int]:
    session = entries[0].session
    return keys.session(session), int(session, 16)
