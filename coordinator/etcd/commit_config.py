"""Settings, seams and counts of the committer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from coordinator.errors import ConfigError
from coordinator.etcd.guarded_op import GroupLimits

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import TxnResponse

__all__ = [
    "CommitHooks",
    "CommitterConfig",
    "CommitterStats",
    "EpochFence",
    "MonotonicClock",
    "SystemClock",
    "TxnClient",
]


class TxnClient(Protocol):
    """What the committer needs of the etcd client: sends one Txn, once.

    Raises as ``coordinator.etcd.outcome`` maps: ``NotApplied`` or ``EtcdUnavailable`` when this try wrote
    nothing, ``OutcomeUnknown`` when nobody knows.
    """

    async def txn_bytes(self, request: bytes, *, timeout: float) -> TxnResponse: ...


class MonotonicClock(Protocol):
    """Monotonic seconds and sleeping by them: what is needed here of ``coordinator.ports.Clock``."""

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds since some start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFence:
    """The epoch that every Txn is built under.

    Attributes:
        guard: gives the top-level compare, encoded; asked for each Txn.
        refresh: reads the epoch again after the compare failed, under a deadline of its own; may raise
            ``StorageError``.
    """

    guard: Callable[[], bytes]
    refresh: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHooks:
    """Whom the committer tells.

    Attributes:
        own_revision: told each revision that this committer is certain to have written, before any ``on_won``
            of that Txn; so that the index can skip the watch's echo. Never told of unknown outcomes.
        group_done: told size and seconds of each Txn that etcd answered; for metrics.
    """

    own_revision: Callable[[int], None] | None = None
    group_done: Callable[[int, float], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitterConfig:
    """How the committer behaves. Times in seconds.

    Attributes:
        limits: how much travels in one Txn.
        max_in_flight: Txns under way at once; the second and further ones only while a full group waits.
        max_queued: operations taken and not yet finished; one more is refused.
        txn_timeout: longest wait for one Txn; less if all its operations' deadlines are nearer.
        backoff_first, backoff_max: pause before a group is sent again; doubles, with jitter of +-50 %.
        deadline_tick: how often deadlines are looked at; an answer comes two ticks after its deadline at
            most.
        drain_timeout: after ``close``, how long operations already taken may still go on.
        jitter: returns a number in [0, 1).
    """

    limits: GroupLimits = field(default_factory=GroupLimits)
    max_in_flight: int = 4
    max_queued: int = 20_000
    txn_timeout: float = 5.0
    backoff_first: float = 0.01
    backoff_max: float = 0.5
    deadline_tick: float = 0.02
    drain_timeout: float = 5.0
    jitter: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if self.max_in_flight < 1 or self.max_queued < 1:
            raise ConfigError(
                f"max_in_flight {self.max_in_flight} and max_queued {self.max_queued} need to be 1 or more"
            )
        if min(self.txn_timeout, self.backoff_first, self.deadline_tick, self.drain_timeout) <= 0:
            raise ConfigError("txn_timeout, backoff_first, deadline_tick, drain_timeout need to be positive")
        if self.backoff_max < self.backoff_first:
            raise ConfigError(f"backoff_max {self.backoff_max} is below backoff_first {self.backoff_first}")


@dataclass(slots=True)
class CommitterStats:
    """Counts since the start; read them freely, only the committer writes.

    Attributes:
        group_sizes: ``group_sizes[n]`` counts the Txns of n operations, of all tries.
        txns: Txns sent, of all tries.
        ops: operations that etcd answered, won or lost.
        conflicts: of these, lost.
        refused: Txns that certainly wrote nothing.
        unknown: Txns whose outcome stayed unknown.
        resent_ops: operations of those, sent again.
        expired: operations answered because their deadline passed.
        epoch_mismatches: Txns refused by the epoch compare.
        rebuilt: operations built again for another retention lease.
    """

    group_sizes: list[int]
    txns: int = 0
    ops: int = 0
    conflicts: int = 0
    refused: int = 0
    unknown: int = 0
    resent_ops: int = 0
    expired: int = 0
    epoch_mismatches: int = 0
    rebuilt: int = 0
