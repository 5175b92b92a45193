"""Single keys beside the jobs' records, for repair: walks, sights and guarded deletions.

Deletions do not go through the committer: what it commits counts as known here, and the watch of this
process has to tell index and holders that the key is gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from coordinator.core.effects import Slot, Where
from coordinator.core.job import Claim
from coordinator.core.upkeep import KeySeen, wanted, why_stray
from coordinator.errors import CodecError, KeyFormatError, NotApplied
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_due, decode_unique
from coordinator.etcd.key_walk import TightWalk, WalkHint
from coordinator.etcd.keys import KeySpace, NamespaceKeys
from coordinator.etcd.lock_codec import entry_of
from coordinator.etcd.present import EtcdPresent
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.time_left import read_timeout
from coordinator.etcd.txn import TxnCodec, one
from coordinator.ports import Clock, Stored
from coordinator.ports.upkeep import Beside, LockSeen, Sight
from leasekeeper.internal.etcd.v1.kv_pb2 import TxnRequest

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["EtcdUpkeep"]

_WITH_VALUE: Final = frozenset({Slot.CLAIM, Slot.UNIQUE, Slot.DUE})
_HINTS: Final = 2_000
"""Spans whose last walk is remembered."""

_GETS: Final = 120
"""Keys of one read, below etcd's ``--max-txn-ops``."""

_WIDEST_JOB: Final = 16
"""Keys that one record wants, its own and its claim's among them."""


class EtcdUpkeep:
    """Implements ``ports.upkeep.Upkeep``.

    Args:
        client: the etcd client.
        space: the keys.
        codec: decodes records and claims.
        present: the epoch, which every Txn compares.
        leads: the compare that this process leads the sweeps, None if it does not.
        set_aside: told of what cannot be decoded.
        clock: the time that deadlines are measured in.
    """

    def __init__(
        self,
        client: EtcdClient,
        space: KeySpace,
        codec: TxnCodec,
        present: EtcdPresent,
        set_aside: SetAside,
        clock: Clock,
        *,
        leads: Callable[[], bytes | None],
    ) -> None:
        self._client = client
        self._space = space
        self._codec = codec
        self._present = present
        self._set_aside = set_aside
        self._clock = clock
        self._leads = leads
        self._hints: dict[tuple[str, str], WalkHint] = {}

    def _hint(self, namespace: str, kind: str) -> WalkHint:
        if len(self._hints) > _HINTS:
            self._hints.clear()
        return self._hints.setdefault((namespace, kind), WalkHint())

    # --- walks --------------------------------------------------------------------------------------

    def walk(self, namespace: str, slot: Slot) -> _KeyWalk:
        """See ``ports.upkeep.Upkeep``."""
        keys = self._space.namespace(namespace)
        walk = TightWalk(
            self._client,
            keys.all_of(slot),
            clock=self._clock,
            keys_only=slot not in _WITH_VALUE,
            hint=self._hint(namespace, slot.value),
        )

        def seen(kv: KeyValue) -> KeySeen | None:
            try:
                return self._seen(keys, slot, kv)
            except KeyFormatError as error:
                self._set_aside.add(slot.value, kv.key, error)
                return None

        return _KeyWalk(walk, seen)

    def walk_locks(self, namespace: str) -> _LockWalk:
        """See ``ports.upkeep.Upkeep``."""
        keys = self._space.namespace(namespace)
        walk = TightWalk(
            self._client,
            keys.all_locks(),
            clock=self._clock,
            keys_only=True,
            hint=self._hint(namespace, "lock"),
        )

        async def seen(kvs: Sequence[KeyValue], deadline: float) -> list[LockSeen]:
            return await self._locks(keys, kvs, deadline)

        return _LockWalk(walk, seen)

    # --- reads --------------------------------------------------------------------------------------

    async def suspects(self, namespace: str, keys: Sequence[KeySeen], *, deadline: float) -> list[KeySeen]:
        """See ``ports.upkeep.Upkeep``. Ready keys are compared by revision: their records stay undecoded."""
        spaces = self._space.namespace(namespace)
        found: list[KeySeen] = []
        told = [key for key in keys if key.where.job_id]  # a unique key may not say whose it is
        for start in range(0, len(told), _GETS):
            some = told[start : start + _GETS]
            ready = all(key.where.slot is Slot.READY for key in some)
            gets = [wire.get(spaces.state(key.where.job_id), keys_only=ready) for key in some]
            for key, kv in zip(some, await self._read(gets, deadline), strict=True):
                if ready:
                    sound = kv is not None and kv.mod_revision == key.modified
                else:
                    sound = self._sound(namespace, key, kv)
                if not sound:
                    found.append(key)
        return found + await self._sessionless(namespace, [key for key in keys if key not in found], deadline)

    async def _sessionless(self, namespace: str, keys: Sequence[KeySeen], deadline: float) -> list[KeySeen]:
        """Claims whose session has no witness."""
        spaces = self._space.namespace(namespace)
        sessions = sorted({key.claim.session for key in keys if key.claim is not None})
        closed: set[str] = set()
        for start in range(0, len(sessions), _GETS):
            some = sessions[start : start + _GETS]
            gets = [wire.get(spaces.session(session), keys_only=True) for session in some]
            kvs = await self._read(gets, deadline)
            closed |= {session for session, kv in zip(some, kvs, strict=True) if kv is None}
        return [key for key in keys if key.claim is not None and key.claim.session in closed]

    def _sound(self, namespace: str, key: KeySeen, kv: KeyValue | None) -> bool:
        """Whether the record wants the key, or cannot be decoded. A claim on another lease is looked at."""
        if key.claim is not None and key.lease != int(key.claim.session, 16):
            return False
        try:
            stored = self._codec.stored_of(namespace, key.where.job_id, kv)
        except CodecError as error:
            self._set_aside.add("state", key.where.job_id.encode(), error)
            return True
        return not why_stray(key, stored.job if stored is not None else None)

    async def sight(self, namespace: str, where: Where, *, deadline: float) -> Sight:
        """See ``ports.upkeep.Upkeep``."""
        keys = self._space.namespace(namespace)
        key = keys.where(where)
        gets = [wire.get(key), wire.get(keys.state(where.job_id))]
        session = ""
        if where.slot is Slot.CLAIM:
            # Whose it is stands in its value; the witness has to be read at the same revision.
            [first] = await self._read([wire.get(key)], deadline)
            claim = self._seen(keys, where.slot, first).claim if first is not None else None
            if claim is not None:
                session = claim.session
                gets.append(wire.get(keys.session(session)))
        kvs = await self._read(gets, deadline)
        seen = self._seen(keys, where.slot, kvs[0]) if kvs[0] is not None else None
        stored, readable = self._stored(namespace, where.job_id, kvs[1])
        witness = kvs[2] if session else None
        return Sight(
            key=seen,
            stored=stored,
            revision=kvs[1].mod_revision if kvs[1] is not None else 0,
            readable=readable,
            session_open=witness is not None,
        )

    async def look(self, namespace: str, stored: Sequence[Stored], *, deadline: float) -> list[Beside | None]:
        """See ``ports.upkeep.Upkeep``."""
        found: list[Beside | None] = []
        at_once = _GETS // _WIDEST_JOB
        for start in range(0, len(stored), at_once):
            found += await self._look(namespace, stored[start : start + at_once], deadline)
        return found

    async def _look(self, namespace: str, stored: Sequence[Stored], deadline: float) -> list[Beside | None]:
        keys = self._space.namespace(namespace)
        places = [wanted(record.job) for record in stored]
        gets: list[bytes] = []
        for record, wheres in zip(stored, places, strict=True):
            job_id = record.job.job_id
            gets += (wire.get(keys.state(job_id), keys_only=True), wire.get(keys.claim(job_id)))
            gets += [wire.get(keys.where(where), keys_only=where.slot not in _WITH_VALUE) for where in wheres]
        kvs = iter(await self._read(gets, deadline))
        found: list[Beside | None] = []
        for record, wheres in zip(stored, places, strict=True):
            state, held = next(kvs), next(kvs)
            beside = [(where, next(kvs)) for where in wheres]
            if state is None or state.mod_revision != record.revision:
                found.append(None)
                continue
            claim, readable = self._claim(record.job.job_id, held)
            if not readable:
                found.append(None)
                continue
            there = {where: self._seen_at(keys, where, kv) for where, kv in beside if kv is not None}
            found.append(Beside(stored=record, claim=claim, keys=there))
        return found

    async def _locks(self, keys: NamespaceKeys, kvs: Sequence[KeyValue], deadline: float) -> list[LockSeen]:
        entries: list[LockSeen] = []
        leases = sorted({kv.lease for kv in kvs if kv.lease})
        there: set[int] = set()
        for start in range(0, len(leases), _GETS):
            some = leases[start : start + _GETS]
            gets = [wire.get(keys.session(f"{lease:016x}"), keys_only=True) for lease in some]
            found = await self._read(gets, deadline)
            there |= {lease for lease, kv in zip(some, found, strict=True) if kv is not None}
        owners = await self._jobs_of(keys, kvs, deadline)
        for kv in kvs:
            try:
                name, waiter = keys.parse_lock(kv.key)
            except KeyFormatError as error:
                self._set_aside.add("lock", kv.key, error)
                continue
            job_id, claim = owners.get(kv.key, ("", None))
            entries.append(
                LockSeen(
                    name=name,
                    waiter=waiter,
                    modified=kv.mod_revision,
                    lease=kv.lease,
                    session_open=kv.lease in there,
                    created=kv.create_revision,
                    job_id=job_id,
                    claim=claim,
                )
            )
        return entries

    async def _jobs_of(
        self, keys: NamespaceKeys, kvs: Sequence[KeyValue], deadline: float
    ) -> dict[bytes, tuple[str, int | None]]:
        """Job and create revision of its claim, 0 for none, of the entries that claims have put."""
        put = [kv.key for kv in kvs if keys.is_of_a_job(kv.key)]
        jobs: dict[bytes, str] = {}
        for start in range(0, len(put), _GETS):
            entries = await self._read([wire.get(key) for key in put[start : start + _GETS]], deadline)
            for kv in entries:
                if kv is not None:
                    try:
                        jobs[kv.key] = entry_of(keys, kv, self._set_aside).job_id
                    except KeyFormatError as error:
                        self._set_aside.add("lock", kv.key, error)
        told = [(key, job_id) for key, job_id in jobs.items() if job_id]
        found: dict[bytes, tuple[str, int | None]] = {}
        for start in range(0, len(told), _GETS):
            some = told[start : start + _GETS]
            gets = [wire.get(keys.claim(job_id), keys_only=True) for _, job_id in some]
            for (key, job_id), claim in zip(some, await self._read(gets, deadline), strict=True):
                found[key] = (job_id, claim.create_revision if claim is not None else 0)
        return found

    # --- deletions ----------------------------------------------------------------------------------

    async def remove(self, namespace: str, sight: Sight, *, as_leader: bool, deadline: float) -> bool:
        """See ``ports.upkeep.Upkeep``."""
        assert sight.key is not None, "only a key that is there is removed"
        keys = self._space.namespace(namespace)
        where, claim = sight.key.where, sight.key.claim
        key, state = keys.where(where), keys.state(where.job_id)
        compares = [wire.mod_eq(key, sight.key.modified), wire.mod_eq(state, sight.revision)]
        if claim is not None and not sight.session_open:
            compares.append(wire.create_eq(keys.session(claim.session), 0))
        return await self._delete(key, compares, as_leader, deadline)

    async def remove_lock(self, namespace: str, lock: LockSeen, *, as_leader: bool, deadline: float) -> bool:
        """See ``ports.upkeep.Upkeep``."""
        keys = self._space.namespace(namespace)
        key = keys.lock(lock.name, lock.waiter)
        compares = [wire.mod_eq(key, lock.modified)]
        if lock.claim is not None and lock.claim != lock.created:
            compares.append(wire.create_eq(keys.claim(lock.job_id), lock.claim))
        elif lock.lease:
            compares.append(wire.create_eq(keys.session(f"{lock.lease:016x}"), 0))
        return await self._delete(key, compares, as_leader, deadline)

    async def _delete(self, key: bytes, compares: list[bytes], as_leader: bool, deadline: float) -> bool:
        if as_leader:
            leads = self._leads()
            if leads is None:
                raise NotApplied("another process leads the sweeps")
            compares.append(leads)
        request = wire.txn((self._present.guard(), *compares), (wire.delete(key),), ())
        reply = await self._client.txn_bytes(request, timeout=read_timeout(self._clock, deadline))
        return reply.succeeded

    # --- decoding -----------------------------------------------------------------------------------

    async def _read(self, gets: Sequence[bytes], deadline: float) -> list[KeyValue | None]:
        """Gets of single keys, at one revision."""
        reply = await self._client.read_txn(
            TxnRequest.FromString(wire.txn((), gets, ())), timeout=read_timeout(self._clock, deadline)
        )
        return [one(response) for response in reply.responses]

    def _seen_at(self, keys: NamespaceKeys, where: Where, kv: KeyValue) -> KeySeen:
        if where.slot is Slot.LOCK:  # its key does not say whose it is
            return KeySeen(where=where, modified=kv.mod_revision, created=kv.create_revision, lease=kv.lease)
        return self._seen(keys, where.slot, kv)

    def _seen(self, keys: NamespaceKeys, slot: Slot, kv: KeyValue) -> KeySeen:
        """The key as found.

        Raises:
            KeyFormatError: it is none of ours.
        """
        where = keys.parse(slot, kv.key)
        seen = KeySeen(where=where, modified=kv.mod_revision, created=kv.create_revision, lease=kv.lease)
        try:
            if slot is Slot.UNIQUE and kv.value:
                return replace(seen, where=where._replace(job_id=decode_unique(kv.value)))
            if slot is Slot.DUE and kv.value:
                return replace(seen, hold_ms=decode_due(kv.value))
            if slot is Slot.CLAIM:
                claim = self._codec.claim_of(kv)
                assert claim is not None, "there is a key"
                keys.session(claim.session)  # refuses what is no session's name
                return replace(seen, claim=claim)
        except (CodecError, KeyFormatError) as error:
            self._set_aside.add(slot.value, kv.key, CodecError(str(error)))
            return replace(seen, readable=False)
        return seen

    def _stored(self, namespace: str, job_id: str, kv: KeyValue | None) -> tuple[Stored | None, bool]:
        try:
            return self._codec.stored_of(namespace, job_id, kv), True
        except CodecError as error:
            self._set_aside.add("state", job_id.encode(), error)
            return None, False

    def _claim(self, job_id: str, kv: KeyValue | None) -> tuple[Claim | None, bool]:
        try:
            return self._codec.claim_of(kv), True
        except CodecError as error:
            self._set_aside.add("claim", job_id.encode(), error)
            return None, False


class _KeyWalk:
    """Implements ``ports.upkeep.KeyWalk``."""

    def __init__(self, walk: TightWalk, seen: Callable[[KeyValue], KeySeen | None]) -> None:
        self._walk = walk
        self._seen = seen

    async def page(self, *, deadline: float) -> Sequence[KeySeen] | None:
        """See ``ports.upkeep.KeyWalk``."""
        kvs = await self._walk.page(deadline=deadline)
        if kvs is None:
            return None
        return [seen for seen in map(self._seen, kvs) if seen is not None]


class _LockWalk:
    """Implements ``ports.upkeep.LockWalk``."""

    def __init__(
        self, walk: TightWalk, seen: Callable[[Sequence[KeyValue], float], Awaitable[list[LockSeen]]]
    ) -> None:
        self._walk = walk
        self._seen = seen

    async def page(self, *, deadline: float) -> Sequence[LockSeen] | None:
        """See ``ports.upkeep.LockWalk``."""
        kvs = await self._walk.page(deadline=deadline)
        return None if kvs is None else await self._seen(kvs, deadline)
