"""What the gauge tells operators: each crossing once, and alarms as they come and go."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from coordinator.core.notice import NoticeKind
from coordinator.etcd.storage_gauge import EtcdStorageGauge, GaugeConfig
from leasekeeper.internal.etcd.v1.maintenance_pb2 import AlarmType
from tests.support.clock import SteppingClock
from tests.support.fake_ports import RecordedNotices


@dataclass
class Client:
    """One member of the size that a test sets."""

    in_use: int = 0
    allocated: int = 0
    raised: list[int] = field(default_factory=list)
    ring: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(members=[SimpleNamespace(endpoint="e")])
    )

    async def status(self, endpoint: str, *, timeout: float) -> SimpleNamespace:
        header = SimpleNamespace(revision=1)
        return SimpleNamespace(
            db_size_in_use=self.in_use, db_size=self.allocated, db_size_quota=1_000, header=header
        )

    async def alarms(self, *, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(alarms=[SimpleNamespace(alarm=alarm) for alarm in self.raised])


class Gauge:
    """A gauge over such a client, and what it has told."""

    def __init__(self) -> None:
        self.client, self.notices = Client(), RecordedNotices()
        self.gauge = EtcdStorageGauge(
            self.client,  # type: ignore[arg-type]
            GaugeConfig(),
            SteppingClock(),
            self.notices,
        )

    async def told(self, in_use: int, allocated: int, *raised: int) -> list[str]:
        """The reasons that a poll at these sizes tells."""
        self.client.in_use, self.client.allocated, self.client.raised = in_use, allocated, list(raised)
        before = len(self.notices.notices)
        await self.gauge.poll_once()
        return [notice.reason for notice in self.notices.notices[before:]]


async def test_submissions_that_stop_and_go_on_are_told_once_each() -> None:
    gauge = Gauge()

    assert await gauge.told(500, 500) == []
    assert await gauge.told(800, 800) == ["submissions stop"]
    assert await gauge.told(790, 800) == []
    assert await gauge.told(740, 800) == ["submissions go on"]
    [stop, _] = gauge.notices.of(NoticeKind.STORAGE)
    assert stop.facts == {"in_use_bytes": "800", "allocated_bytes": "800", "quota_bytes": "1000"}
    assert (stop.namespace, stop.job_id) == ("", "")


async def test_a_file_nearly_as_large_as_it_may_become_is_told_once_until_it_shrinks() -> None:
    gauge = Gauge()
    large = "the file is nearly as large as the quota allows: defragment etcd"

    assert await gauge.told(100, 900) == [large]
    assert await gauge.told(100, 899) == []
    assert await gauge.told(100, 920) == []
    assert await gauge.told(100, 500) == []
    assert await gauge.told(100, 910) == [large]


async def test_alarms_are_told_as_they_come_and_go() -> None:
    gauge = Gauge()

    assert await gauge.told(1, 1, AlarmType.NOSPACE) == ["submissions stop", "etcd has the alarm NOSPACE"]
    assert await gauge.told(1, 1, AlarmType.NOSPACE) == []
    assert await gauge.told(1, 1, AlarmType.CORRUPT) == [
        "etcd's alarm NOSPACE is gone",
        "etcd has the alarm CORRUPT",
    ]
    assert await gauge.told(1, 1) == ["submissions go on", "etcd's alarm CORRUPT is gone"]
