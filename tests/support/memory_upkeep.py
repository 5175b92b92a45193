"""``ports.upkeep.Upkeep`` over ``MemoryEtcd``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.core.effects import Slot, Where
from coordinator.core.upkeep import KeySeen, wanted, why_stray
from coordinator.errors import NotApplied
from coordinator.ports import Stored
from coordinator.ports.upkeep import Beside, LockSeen, Sight
from tests.support.memory_etcd import Entry, MemoryEtcd, session_where
from tests.support.memory_job_store import MemoryJobStore

__all__ = ["MemoryUpkeep"]


@dataclass
class _Pages:
    """What stood there when the walk began."""

    left: list[KeySeen]
    size: int
    etcd: MemoryEtcd

    async def page(self, *, deadline: float) -> Sequence[KeySeen] | None:
        """The next few."""
        self.etcd.reading()
        if not self.left:
            return None
        page, self.left = self.left[: self.size], self.left[self.size :]
        return page


@dataclass
class _LockPage:
    left: list[LockSeen] | None

    async def page(self, *, deadline: float) -> Sequence[LockSeen] | None:
        """All at once."""
        page, self.left = self.left, None
        return page


@dataclass
class MemoryUpkeep:
    """Keys one by one. ``locks`` are set by the test; ``removed_locks`` is what was deleted."""

    store: MemoryJobStore
    page: int = 7
    locks: list[LockSeen] = field(default_factory=list)
    removed: list[Where] = field(default_factory=list)

    @property
    def etcd(self) -> MemoryEtcd:
        return self.store.etcd

    def walk(self, namespace: str, slot: Slot) -> _Pages:
        """A walk over what is there now."""
        found = sorted(self.etcd.of_slot(slot, namespace), key=lambda pair: repr(pair[0]))
        return _Pages([self._seen(where, entry) for where, entry in found], self.page, self.etcd)

    def walk_locks(self, namespace: str) -> _LockPage:
        """All of them."""
        return _LockPage(list(self.locks))

    async def suspects(self, namespace: str, keys: Sequence[KeySeen], *, deadline: float) -> list[KeySeen]:
        """Those that a record does not want as it is now."""
        self.etcd.reading()
        return [key for key in keys if self._suspect(namespace, key)]

    def _suspect(self, namespace: str, key: KeySeen) -> bool:
        if key.where.job_id in self.store.garbled:
            return False
        if key.claim is not None and key.lease != int(key.claim.session, 16):
            return True
        if key.claim is not None and session_where(namespace, key.claim.session) not in self.etcd.keys:
            return True
        stored = self.etcd.stored(namespace, key.where.job_id)
        return bool(why_stray(key, stored.job if stored is not None else None))

    async def sight(self, namespace: str, where: Where, *, deadline: float) -> Sight:
        """The key and its record."""
        self.etcd.reading()
        entry = self.etcd.keys.get(_plain(where))
        seen = self._seen(_plain(where), entry) if entry is not None else None
        stored = self.etcd.stored(namespace, where.job_id)
        readable = where.job_id not in self.store.garbled
        claim = seen.claim if seen is not None else None
        return Sight(
            key=seen,
            stored=stored if readable else None,
            revision=stored.revision if stored is not None else 0,
            readable=readable,
            session_open=claim is not None and session_where(namespace, claim.session) in self.etcd.keys,
        )

    async def remove(self, namespace: str, sight: Sight, *, as_leader: bool, deadline: float) -> bool:
        """Delete it if all is as seen."""
        self._lead(as_leader)
        now = await self.sight(namespace, sight.key.where, deadline=deadline)  # type: ignore[union-attr]
        if now.key != sight.key or now.revision != sight.revision:
            return False
        if now.session_open and not sight.session_open:
            return False
        assert sight.key is not None
        self.etcd.write((), [_plain(sight.key.where)])
        self.removed.append(sight.key.where)
        return True

    async def remove_lock(self, namespace: str, lock: LockSeen, *, as_leader: bool, deadline: float) -> bool:
        """Delete it if it is as seen."""
        self._lead(as_leader)
        if lock not in self.locks:
            return False
        self.locks.remove(lock)
        return True

    async def look(self, namespace: str, stored: Sequence[Stored], *, deadline: float) -> list[Beside | None]:
        """What lies beside each."""
        self.etcd.reading()
        return [self._beside(namespace, record) for record in stored]

    def _beside(self, namespace: str, record: Stored) -> Beside | None:
        job_id = record.job.job_id
        now = self.etcd.stored(namespace, job_id)
        if now is None or now.revision != record.revision:
            return None
        entries = ((where, self.etcd.keys.get(_plain(where))) for where in wanted(record.job))
        keys = {where: self._seen(_plain(where), entry) for where, entry in entries if entry is not None}
        return Beside(stored=record, claim=self.etcd.claim(namespace, job_id), keys=keys)

    def _seen(self, where: Where, entry: Entry) -> KeySeen:
        seen = KeySeen(where=where, modified=entry.mod, created=entry.create)
        if where.slot is Slot.UNIQUE:
            return replace(seen, where=where._replace(job_id=str(entry.value)))
        if where.slot is Slot.DUE:
            return replace(seen, hold_ms=int(entry.value))
        if where.slot is Slot.CLAIM:
            claim = self.etcd.claim(where.namespace, where.job_id)
            assert claim is not None
            own = self.etcd.sessions.get((where.namespace, claim.session))
            on_own = entry.lease is not None and entry.lease is own
            return replace(seen, claim=claim, lease=int(claim.session, 16) if on_own else id(entry.lease))
        return seen

    def _lead(self, as_leader: bool) -> None:
        if as_leader and not self.etcd.leads:
            raise NotApplied("another process leads the sweeps")


def _plain(where: Where) -> Where:
    """The key itself, whosever it is."""
    return where._replace(job_id="") if where.slot is Slot.UNIQUE else where
