"""How full etcd is, asked every second: when to stop taking jobs, and when to compact."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from coordinator.core.notice import Notice, NoticeKind
from coordinator.errors import StorageError
from coordinator.etcd.client import EtcdClient
from coordinator.ports import Clock, Notices
from leasekeeper.internal.etcd.v1.maintenance_pb2 import AlarmType

__all__ = ["EtcdStorageGauge", "GaugeConfig", "StorageLevels"]

_log = logging.getLogger(__name__)

_LARGE_NO_MORE = 0.9
"""Share of ``allocated_notice`` below which the next crossing is told again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeConfig:
    """Ratios are of the quota, times in seconds.

    Attributes:
        quota: bytes, for etcds older than 3.6, which do not tell theirs.
        every: between two polls.
        timeout: deadline of a poll.
        in_use_stop, in_use_go: submissions stop at the first and go on below the second.
        allocated_stop, allocated_go: likewise, of what the file occupies.
        allocated_notice: from it on an operator should defragment; told once, until it has fallen by a tenth.
        stale_after: a level older than this says nothing; submissions go on, etcd itself refuses.
    """

    quota: int = 8 * 1024**3
    every: float = 1.0
    timeout: float = 1.0
    in_use_stop: float = 0.80
    in_use_go: float = 0.75
    allocated_stop: float = 0.95
    allocated_go: float = 0.93
    allocated_notice: float = 0.90
    stale_after: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLevels:
    """As of the last poll, of the fullest member; bytes. ``at`` is monotonic seconds, 0 before the first."""

    in_use: int = 0
    allocated: int = 0
    quota: int = 0
    nospace: bool = False
    corrupt: bool = False
    revision: int = 0
    at: float = 0.0

    @property
    def in_use_ratio(self) -> float:
        """Share of the quota in use."""
        return self.in_use / self.quota if self.quota else 0.0

    @property
    def allocated_ratio(self) -> float:
        """Share of the quota that the file occupies."""
        return self.allocated / self.quota if self.quota else 0.0


class EtcdStorageGauge:
    """Implements ``ports.StorageGauge``.

    Args:
        client: the etcd client.
        config: see ``GaugeConfig``.
        clock: time.
        notices: told when submissions stop or go on, when the file is nearly as large as it may become, and
            when an alarm comes or goes.
    """

    def __init__(
        self, client: EtcdClient, config: GaugeConfig, clock: Clock, notices: Notices | None = None
    ) -> None:
        self._client = client
        self._config = config
        self._clock = clock
        self._notices = notices
        self._accepts = True
        self._large = False
        self.levels = StorageLevels()

    @property
    def accepts_submissions(self) -> bool:
        """False from 80 % of the quota in use or 95 % allocated, or while etcd has an alarm."""
        if self._clock.monotonic() - self.levels.at > self._config.stale_after:
            return True
        return self._accepts

    @property
    def should_defragment(self) -> bool:
        """Whether the file is nearly as large as it may become."""
        return self.levels.allocated_ratio > self._config.allocated_notice

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                await self.poll_once()
            except StorageError as error:
                _log.debug("etcd's storage could not be asked: %s", error)
            await self._clock.sleep(self._config.every)

    async def poll_once(self) -> StorageLevels:
        """Ask every member, and the alarms; judge.

        Raises:
            EtcdUnavailable: no member answered.
        """
        timeout = self._config.timeout
        endpoints = [member.endpoint for member in self._client.ring.members]
        answers = await asyncio.gather(
            *(self._client.status(endpoint, timeout=timeout) for endpoint in endpoints),
            return_exceptions=True,
        )
        levels = StorageLevels(at=self._clock.monotonic())
        failure: BaseException | None = None
        answered = False
        for answer in answers:
            if isinstance(answer, BaseException):
                failure = failure or answer
                continue
            answered = True
            levels = replace(
                levels,
                in_use=max(levels.in_use, answer.db_size_in_use),
                allocated=max(levels.allocated, answer.db_size),
                quota=answer.db_size_quota or levels.quota or self._config.quota,
                revision=max(levels.revision, answer.header.revision),
            )
        if not answered and failure is not None:
            raise failure
        alarms = await self._client.alarms(timeout=timeout)
        raised = {alarm.alarm for alarm in alarms.alarms}
        before = self.levels
        self.levels = replace(
            levels, nospace=AlarmType.NOSPACE in raised, corrupt=AlarmType.CORRUPT in raised
        )
        self._judge()
        self._tell_alarms(before)
        return self.levels

    def _judge(self) -> None:
        config, levels = self._config, self.levels
        stop = levels.in_use_ratio >= config.in_use_stop or levels.allocated_ratio >= config.allocated_stop
        go = levels.in_use_ratio < config.in_use_go and levels.allocated_ratio < config.allocated_go
        alarmed = levels.nospace or levels.corrupt
        accepts = not alarmed and (go or (self._accepts and not stop))
        if accepts is not self._accepts:
            _log.warning(
                "submissions %s: etcd has %.0f %% of its quota in use, %.0f %% allocated%s",
                "go on" if accepts else "stop",
                100 * levels.in_use_ratio,
                100 * levels.allocated_ratio,
                ", and an alarm" if alarmed else "",
            )
            self._accepts = accepts
            self._tell("submissions go on" if accepts else "submissions stop")
        if levels.allocated_ratio >= config.allocated_notice and not self._large:
            self._large = True
            self._tell("the file is nearly as large as the quota allows: defragment etcd")
        elif levels.allocated_ratio < config.allocated_notice * _LARGE_NO_MORE:
            self._large = False

    def _tell_alarms(self, before: StorageLevels) -> None:
        now = self.levels
        for name, was, is_ in (
            ("NOSPACE", before.nospace, now.nospace),
            ("CORRUPT", before.corrupt, now.corrupt),
        ):
            if was is not is_:
                self._tell(f"etcd has the alarm {name}" if is_ else f"etcd's alarm {name} is gone")

    def _tell(self, reason: str) -> None:
        if self._notices is None:
            return
        levels = self.levels
        facts = {
            "in_use_bytes": str(levels.in_use),
            "allocated_bytes": str(levels.allocated),
            "quota_bytes": str(levels.quota),
        }
        self._notices.publish(Notice(kind=NoticeKind.STORAGE, reason=reason, facts=facts))
