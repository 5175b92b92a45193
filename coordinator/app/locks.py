"""The parts of a coordinator that named locks need."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.app.foundation import Foundation
from coordinator.app.readings import lock_readings
from coordinator.rpc.limits import CallLimits
from coordinator.rpc.lock_servicer import LockServicer, LockUseCases
from coordinator.services.claim_revocation import ClaimRevocation
from coordinator.services.contention import Contention, ContentionConfig
from coordinator.services.fencing import FutureTokens
from coordinator.services.holders import Holders
from coordinator.services.index import Index
from coordinator.services.lock_acquisition import LockAcquisition
from coordinator.services.lock_cleanup import LockCleanup
from coordinator.services.lock_delivery import LockDelivery
from coordinator.services.lock_lines import LockLines
from coordinator.services.locks import Locks
from coordinator.services.parking import Parking
from coordinator.services.waiters import Pair

__all__ = ["LockParts", "compose_locks", "compose_parking"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockParts:
    """What came of it; ``background`` and ``drains`` as of ``Parts``."""

    servicer: LockServicer
    lines: LockLines
    locks: Locks
    delivery: LockDelivery
    background: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]
    drains: tuple[Callable[[], None], ...]


def compose_locks(base: Foundation, holders: Holders, limits: CallLimits) -> LockParts:
    """Make them, and let the store tell them."""
    store, clock = base.store, base.clock
    lines = LockLines(store.locks, clock)
    base.locks.bind(lines)
    holders.locks_held_by = lines.held_by
    # Those who wait for a lock stand in its line in the store: none of its tries is kept for them.
    contention = Contention(clock, ContentionConfig(), has_line=lambda one: False)
    cleanup = LockCleanup(store.locks, lines, clock)
    base.metrics.expose(lock_readings(lines, cleanup, contention))
    acquisition = LockAcquisition(
        store.locks,
        store.sessions,
        store.namespaces,
        store.present,
        lines,
        holders,
        contention,
        cleanup,
        clock,
    )
    locks = Locks(
        store.locks,
        store.sessions,
        store.namespaces,
        store.present,
        lines,
        contention,
        FutureTokens(base.notices, clock),
        clock,
        claims=ClaimRevocation(store.jobs, store.sessions, clock),
    )
    return LockParts(
        servicer=LockServicer(LockUseCases(acquisition=acquisition, locks=locks), clock, limits),
        lines=lines,
        locks=locks,
        delivery=LockDelivery(lines, cleanup.later),
        background={"lines of locks": lines.run, "locks left behind": cleanup.run},
        drains=(acquisition.drain, locks.drain),
    )


def compose_parking(
    base: Foundation,
    parts: LockParts,
    index: Index,
    *,
    arrived: Callable[[Pair, str], None],
    of_one: Callable[[str, str], None],
) -> Parking:
    """Make what parks jobs whose locks are held, and let the lines of locks tell it."""
    store, lines = base.store, parts.lines
    parking = Parking(
        lines,
        store.locks,
        store.jobs,
        index,
        base.clock,
        token=parts.locks.token_of,
        arrived=arrived,
        of_one=of_one,
    )
    lines.moved, lines.watched = parking.changed, parking.names
    return parking
