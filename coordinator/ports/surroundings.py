"""Time, randomness, other coordinators, how full the store is, and where notices go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from coordinator.core.notice import Notice

__all__ = [
    "Clock",
    "Entropy",
    "Membership",
    "Meters",
    "Notices",
    "StorageGauge",
]


class Clock(Protocol):
    """Time. Wall time is for records and for people; deadlines and spans use the monotonic clock."""

    def now_ms(self) -> int:
        """Unix milliseconds."""

    def monotonic(self) -> float:
        """Seconds from any origin, never going back."""

    async def sleep(self, seconds: float) -> None:
        """Sleep; a stepping clock wakes its sleepers when it is stepped."""


class Entropy(Protocol):
    """Randomness and order of arrival."""

    def fraction(self) -> float:
        """Uniform in [0, 1)."""

    def identifier(self) -> str:
        """A fresh id of 32 hex digits."""

    def counter(self) -> int:
        """A number that grows with each call within this process; ties between coordinators do not matter."""


class Membership(Protocol):
    """The coordinators that are alive."""

    @property
    def own_id(self) -> str:
        """This coordinator."""

    def members(self) -> Sequence[str]:
        """Ids, sorted, this one included."""


class StorageGauge(Protocol):
    """How full the store is, as of the last poll."""

    @property
    def accepts_submissions(self) -> bool:
        """False from 80 % of the quota in use or 95 % allocated."""


class Notices(Protocol):
    """Where notices go: log, metrics, streams, webhooks. Synchronous, never blocks, never raises."""

    def publish(self, notice: Notice) -> None:
        """Tell whoever listens."""


class Meters(Protocol):
    """Counts that no notice tells. Synchronous, never blocks, never raises."""

    def late_call(self, call: str) -> None:
        """A call came with the token of an ended attempt: settlement, checkpoint or heartbeat."""

    def pass_done(self, name: str, seconds: float, counts: Mapping[str, int], failed: int) -> None:
        """A pass of the reconciler has run: how long, what it did by kind, and what it tried in vain."""

    def pass_failed(self, name: str) -> None:
        """A pass of the reconciler could not finish."""
