"""One coordinator per role, elected by whose key stands; the key lies on the membership lease.

Being leader is a hint that saves double work. Writes that only a leader may make compare ``guard()``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.errors import LeaseNotFound, StorageError
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import FORMAT
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.membership import EtcdMembership
from coordinator.etcd.present import EtcdPresent
from coordinator.etcd.txn import one
from coordinator.ports import Clock
from leasekeeper.internal.storage.v1.records_pb2 import LeaderRecord

__all__ = ["EtcdLeadership", "LeadershipConfig"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadershipConfig:
    """Times in seconds.

    Attributes:
        every: between two looks at the key.
        timeout: deadline of each.
        fresh_for: how long a look counts; a leader that cannot reach etcd stops acting after it.
    """

    every: float = 1.0
    timeout: float = 2.0
    fresh_for: float = 5.0


class EtcdLeadership:
    """A standing candidacy for one role.

    Args:
        client: the etcd client.
        space: the keys.
        membership: whose lease the key lies on.
        present: the epoch.
        role: the name of the role.
        clock: time.
        config: see ``LeadershipConfig``.

    ``won`` is called each time that the role was taken; whoever sweeps need not wait for its timer then.
    """

    def __init__(
        self,
        client: EtcdClient,
        space: KeySpace,
        membership: EtcdMembership,
        present: EtcdPresent,
        role: str,
        clock: Clock,
        config: LeadershipConfig | None = None,
    ) -> None:
        self._client = client
        self._key = space.leader(role)
        self._membership = membership
        self._present = present
        self.role = role
        self._clock = clock
        self._config = config or LeadershipConfig()
        self._created = 0
        self._seen_at = -float("inf")
        self._told = False
        self.won: Callable[[], None] = lambda: None

    @property
    def is_leader(self) -> bool:
        """Whether our key stood when we last looked, and that was not long ago."""
        fresh = self._clock.monotonic() - self._seen_at <= self._config.fresh_for
        return self._created > 0 and fresh

    def guard(self) -> bytes | None:
        """The compare that our candidacy still stands; None if we do not lead."""
        return wire.create_eq(self._key, self._created) if self.is_leader else None

    async def run(self) -> None:
        """Stand for election until cancelled."""
        while True:  # each round sleeps
            try:
                await self.stand_once()
            except StorageError as error:
                _log.debug("leadership of %s: %s", self.role, error)
            await self._clock.sleep(self._config.every)

    async def stand_once(self) -> bool:
        """Create the key if nobody has it, and look whose it is.

        An unknown outcome is settled by the next look: the key says whose it is.

        Raises:
            StorageError: etcd could not be asked; what was known stands until it is stale.
        """
        try:
            await self._look()
        finally:
            self._tell()
        return self.is_leader

    def _tell(self) -> None:
        """Say when the role has changed hands, however that was noticed."""
        if self.is_leader is not self._told:
            self._told = self.is_leader
            _log.info("%s the role %s", "took" if self._told else "lost", self.role)
            if self._told:
                self.won()

    async def _look(self) -> None:
        lease = self._membership.lease
        if not lease:
            self._created = 0
            return
        asked_at = self._clock.monotonic()
        record = LeaderRecord(
            format=FORMAT, coordinator=self._membership.own_id, since_ms=self._clock.now_ms()
        )
        try:
            reply = await self._client.txn_bytes(
                wire.txn(
                    (self._present.guard(), wire.create_eq(self._key, 0)),
                    (wire.put(self._key, record.SerializeToString(), lease),),
                    (wire.get(self._key),),
                ),
                timeout=self._config.timeout,
            )
        except LeaseNotFound:
            self._created = 0
            return
        if reply.succeeded:
            self._created = reply.header.revision
        else:
            kv = one(reply.responses[0])
            # The lease is ours alone, so the key on it is ours.
            self._created = kv.create_revision if kv is not None and kv.lease == lease else 0
        self._seen_at = asked_at

    async def resign(self) -> None:
        """Give the role up, if it is ours, so that another can take it at once.

        Raises:
            StorageError: it ends with the membership lease.
        """
        created, self._created = self._created, 0
        if created:
            await self._client.txn_bytes(
                wire.txn((wire.create_eq(self._key, created),), (wire.delete(self._key),), ()),
                timeout=self._config.timeout,
            )
