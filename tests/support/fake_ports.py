"""The small ports in memory: feeds, gauge, present, membership, entropy. Tests set their fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from coordinator.core.notice import Notice, NoticeKind
from tests.support.memory_etcd import MemoryEtcd

__all__ = [
    "FixedMembers",
    "FixedPresent",
    "OpenGauge",
    "RecordedMeters",
    "RecordedNotices",
    "SteadyEntropy",
    "StillFeeds",
]


class StillFeeds:
    """``ports.NamespaceFeeds``: a namespace is known once somebody asked for it."""

    def __init__(self, *namespaces: str) -> None:
        self._names = list(namespaces)

    async def ensure(self, namespace: str, *, deadline: float) -> None:
        """Remember it."""
        if namespace not in self._names:
            self._names.append(namespace)

    def namespaces(self) -> Sequence[str]:
        """Those asked for."""
        return tuple(self._names)


class OpenGauge:
    """``ports.StorageGauge``, full when told so."""

    def __init__(self) -> None:
        self.accepts_submissions = True


class FixedPresent:
    """``ports.Present`` that follows a ``MemoryEtcd``; ``lag`` revisions behind until refreshed."""

    def __init__(self, etcd: MemoryEtcd) -> None:
        self._etcd = etcd
        self.regressed = False
        self.lag = 0
        self.refreshed = 0

    @property
    def epoch(self) -> int:
        """The store's epoch."""
        return self._etcd.epoch

    def token(self) -> int:
        """The store's position, as far as it is known."""
        return self._etcd.position() - self.lag

    async def refresh(self, *, deadline: float) -> int:
        """Catch up."""
        self.refreshed += 1
        self.lag = 0
        return self.token()


class FixedMembers:
    """``ports.Membership``: whoever is named."""

    def __init__(self, own_id: str = "c1", *others: str) -> None:
        self.own_id = own_id
        self._members = sorted((own_id, *others))

    def members(self) -> Sequence[str]:
        """All of them, sorted."""
        return self._members


class RecordedMeters:
    """``ports.Meters`` that adds up."""

    def __init__(self) -> None:
        self.late_calls: Counter[str] = Counter()
        self.passes: list[tuple[str, float, dict[str, int], int]] = []
        self.failed_passes: Counter[str] = Counter()

    def late_call(self, call: str) -> None:
        """Count it."""
        self.late_calls[call] += 1

    def pass_done(self, name: str, seconds: float, counts: Mapping[str, int], failed: int) -> None:
        """Keep it."""
        self.passes.append((name, seconds, dict(counts), failed))

    def pass_failed(self, name: str) -> None:
        """Count it."""
        self.failed_passes[name] += 1


class RecordedNotices:
    """``ports.Notices`` that keeps all of them, in their order."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []

    def publish(self, notice: Notice) -> None:
        """Keep it."""
        self.notices.append(notice)

    def of(self, kind: NoticeKind) -> list[Notice]:
        """Those of one kind."""
        return [notice for notice in self.notices if notice.kind is kind]


class SteadyEntropy:
    """``ports.Entropy`` without chance."""

    def __init__(self, fraction: float = 0.5) -> None:
        self._fraction = fraction
        self._count = 0

    def fraction(self) -> float:
        """Always the same."""
        return self._fraction

    def identifier(self) -> str:
        """Counted up."""
        self._count += 1
        return f"{self._count:032x}"

    def counter(self) -> int:
        """Counted up."""
        self._count += 1
        return self._count
