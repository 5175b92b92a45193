"""Compact etcd's history: by growth or by time, one winner among all coordinators, never the last half
minute.

The record ``_system/compact`` says where history stood when it was written. The next compaction goes up to
there, so that at least ``keep`` seconds of history remain for watches to resume in, less only when the store
is nearly full. Whoever swaps the record by compare-and-swap compacts (as Kubernetes's apiservers do with
``compact_rev_key``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from coordinator.errors import Compacted, OutcomeUnknown, StorageError, StorageFull
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import FORMAT, decode_record
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.storage_gauge import EtcdStorageGauge
from coordinator.ports import Clock
from leasekeeper.internal.storage.v1.records_pb2 import CompactRecord

__all__ = ["CompactionConfig", "Compactor"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionConfig:
    """Times in seconds, shares of the quota.

    Attributes:
        growth: compact after the data in use grew by this share since the last compaction.
        after: compact after this time anyway.
        urgent: compact as often as ``keep`` allows above this share in use.
        keep: history that stays, at least.
        critical: above this share in use (submissions have stopped) only ``keep_critical`` stays: watches
            that must list again are the smaller evil, for at the quota work under way cannot finish either.
        keep_critical: see ``critical``.
        every: between two looks.
        every_critical: likewise, above ``critical``.
        timeout: deadline of each call.
    """

    growth: float = 0.05
    after: float = 300.0
    urgent: float = 0.60
    keep: float = 30.0
    critical: float = 0.80
    keep_critical: float = 2.0
    every: float = 5.0
    every_critical: float = 1.0
    timeout: float = 10.0


class Compactor:
    """Every coordinator runs one; etcd decides who acts.

    Args:
        client: the etcd client.
        space: the keys.
        gauge: how full etcd is.
        clock: time.
        config: see ``CompactionConfig``.
    """

    def __init__(
        self,
        client: EtcdClient,
        space: KeySpace,
        gauge: EtcdStorageGauge,
        clock: Clock,
        config: CompactionConfig | None = None,
    ) -> None:
        self._client = client
        self._space = space
        self._gauge = gauge
        self._clock = clock
        self._config = config or CompactionConfig()
        # What the record said when we first saw it, and when that was, on our own monotonic clock: the wall
        # clocks of other coordinators are not trusted with the age of history.
        self._known: bytes | None = None
        self._known_at = 0.0
        self._in_use: int | None = None
        self.compactions = 0

    async def run(self) -> None:
        """Look every now and then, until cancelled."""
        while True:
            try:
                await self.compact_once()
            except StorageError as error:
                _log.warning("compaction: %s", error)
            await self._clock.sleep(self._config.every_critical if self._critical() else self._config.every)

    async def compact_once(self, *, force: bool = False) -> int:
        """Compact if it is time and nobody else did; the revision compacted to, or 0.

        Args:
            force: do not wait for growth or time; the kept history stays kept.

        Raises:
            StorageError: etcd could not be asked, or the outcome is unknown, which harms nobody.
        """
        config = self._config
        key = self._space.compact
        reply = await self._client.range(key, timeout=config.timeout)
        kv = reply.kvs[0] if reply.kvs else None
        value = kv.value if kv is not None else b""
        now = self._clock.monotonic()
        if self._known is None or value != self._known:
            self._known, self._known_at = value, now
            self._in_use = None
        if self._in_use is None:
            self._in_use = self._gauge.levels.in_use  # after what the compaction before has freed
        age = now - self._known_at
        if kv is not None and (age < self._keep() or not (force or self._is_time(age))):
            return 0
        record = decode_record(CompactRecord.FromString, value, "compact") if value else None
        target = record.seen if record is not None else 0
        fresh = CompactRecord(
            format=FORMAT, compacted=target, seen=reply.header.revision, at_ms=self._clock.now_ms()
        )
        same = wire.mod_eq(key, kv.mod_revision) if kv is not None else wire.create_eq(key, 0)
        written = fresh.SerializeToString()
        try:
            won = await self._client.txn_bytes(
                wire.txn((same,), (wire.put(key, written),), ()), timeout=config.timeout
            )
        except StorageFull:
            # No record can be written any more, and room is all the more wanted. Two who do this harm nobody.
            self._known_at = now
            return await self._compact(target)
        if not won.succeeded:
            return 0
        self._known, self._known_at, self._in_use = written, now, None
        return await self._compact(target)

    async def _compact(self, target: int) -> int:
        if target <= 0:
            return 0
        try:
            await self._client.compact(target, timeout=self._config.timeout)
        except Compacted:
            return 0  # somebody did it by hand
        except OutcomeUnknown:
            _log.info("whether etcd compacted to revision %d is unknown; the next one will tell", target)
            raise
        self.compactions += 1
        _log.info("compacted etcd's history up to revision %d", target)
        return target

    def _keep(self) -> float:
        config = self._config
        return min(config.keep, config.keep_critical) if self._critical() else config.keep

    def _critical(self) -> bool:
        return self._gauge.levels.in_use_ratio >= self._config.critical

    def _is_time(self, age: float) -> bool:
        levels = self._gauge.levels
        if age >= self._config.after or levels.in_use_ratio >= self._config.urgent:
            return True
        grown = levels.in_use - (self._in_use or 0)
        return bool(levels.quota) and grown >= self._config.growth * levels.quota
