"""What an operator may want to know: plain values that services and passes hand to ``ports.Notices``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from coordinator.core.job import JobState

__all__ = ["Notice", "NoticeKind", "PublishedNotice"]

_NO_FACTS: Final[Mapping[str, str]] = MappingProxyType({})


class NoticeKind(IntEnum):
    """What a notice is about; the numbers are those of ``leasekeeper.v1.NoticeKind``."""

    STUCK = 1
    HUNG = 2
    DUPLICATE_RUN = 3
    LOST = 4
    TAKEN_AWAY = 5
    DEAD = 6
    QUARANTINED = 7
    CIRCUIT = 8
    PAST_DUE = 9
    STORAGE = 10
    EPOCH = 11
    REPAIRED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One notice. Whoever raises it fills in what it knows; the hub adds id, time and coordinator.

    ``overlap_ms``: of DUPLICATE_RUN, how long two runs lasted side by side, as far as the coordinator can
    tell. ``facts``: few, short, and never labels of a metric.
    """

    kind: NoticeKind
    reason: str
    namespace: str = ""
    queue: str = ""
    type: str = ""
    job_id: str = ""
    session_id: str = ""
    attempt: int = 0
    token: int = 0
    state_before: JobState | None = None
    state_after: JobState | None = None
    overlap_ms: int = 0
    facts: Mapping[str, str] = field(default_factory=lambda: _NO_FACTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedNotice:
    """A notice as it goes out. ``order`` grows with each notice of a coordinator's life."""

    notice_id: str
    order: int
    time_ms: int
    coordinator_id: str
    notice: Notice
