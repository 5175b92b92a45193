"""What repairs, put together once for coordinators and for ``leasekeeper reconciler``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.app.foundation import Foundation
from coordinator.reconciler.due import DuePass
from coordinator.reconciler.loop import LoopConfig, PassLoop
from coordinator.reconciler.lost import LostPass
from coordinator.reconciler.measured import Measured, over_namespaces
from coordinator.reconciler.overdue import OverdueConfig, OverduePass
from coordinator.reconciler.passes import passes_by_name
from coordinator.reconciler.repair import RepairConfig, RepairPass
from coordinator.reconciler.report import Pass
from coordinator.reconciler.retention import RetentionPass
from coordinator.reconciler.state_walk import StateWalk
from coordinator.reconciler.sweep import Sweep, SweptPasses
from coordinator.services.holders import Holders

__all__ = ["Recovery", "compose_recovery"]

_DUE_EVERY_S: Final = 0.25
_OVERDUE_EVERY_S: Final = 0.5
"""How late a run timeout and the grace of a cancellation may be noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The passes, what they know of holders, and what runs them.

    ``background``: what acts on changes, and the sweeps where they are enabled. ``loops``: those of it that
    can say what is wrong with them. ``passes``: those that can be asked for by name.
    """

    holders: Holders
    due: DuePass
    due_loop: PassLoop
    loops: tuple[PassLoop, ...]
    background: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]
    passes: Mapping[str, Pass] = field(default_factory=dict)

    def trouble(self) -> str:
        """Why a pass does not do its work, empty if all do."""
        return "; ".join(filter(None, (loop.trouble for loop in self.loops)))


def compose_recovery(base: Foundation, *, sweeps: bool) -> Recovery:
    """Make it.

    Args:
        base: store, clock and notices.
        sweeps: this process sweeps; without, it acts on what it hears of, and others sweep.
    """
    store, clock, entropy, settings = base.store, base.clock, base.entropy, base.settings.reconciler
    hung_after_s = base.settings.notices.hung_after_s
    leader, walk = store.sweeps, StateWalk(store.jobs, clock)
    lost = LostPass(store.jobs, walk, store.present, store.membership, clock, entropy, notices=base.notices)
    holders = Holders(
        lost.suspect,
        notices=base.notices,
        hung_after_ms=round(hung_after_s * 1000) if hung_after_s is not None else None,
        ended=base.circuits.outcomes.claim_ended,
    )
    overdue = OverduePass(
        store.jobs,
        store.sessions,
        store.upkeep,
        holders,
        clock,
        entropy,
        notices=base.notices,
        meters=base.metrics,
        leads=lambda: leader.is_leader,
        config=OverdueConfig(cancel_grace_s=settings.cancel_grace_s, stuck_after_s=settings.stuck_after_s),
    )
    repair = RepairPass(
        store.jobs,
        store.upkeep,
        walk,
        clock,
        notices=base.notices,
        suspect=lost.suspect,
        config=RepairConfig(orphan_after_s=settings.orphan_after_s),
    )
    retention = RetentionPass(store.jobs, walk, clock, keep_ms=round(settings.keep_dead_s * 1000))
    due = DuePass(store.jobs, store.membership, clock, notices=base.notices)
    sweep = Sweep(
        SweptPasses(lost=lost, repair=repair, retention=retention),
        walk,
        store.namespaces,
        leads=lambda: leader.is_leader,
        meters=base.metrics,
        clock=clock,
    )
    measured_due = Measured(due, base.metrics, clock)
    due_loop = PassLoop(
        "due",
        over_namespaces(measured_due, store.namespaces),
        clock,
        entropy,
        LoopConfig(interval_s=_DUE_EVERY_S),
    )
    overdue_loop = PassLoop("overdue", overdue.step, clock, entropy, LoopConfig(interval_s=_OVERDUE_EVERY_S))
    sweep_loop = PassLoop("sweep", sweep.step, clock, entropy, LoopConfig(interval_s=settings.sweep_every_s))
    leader.won = sweep_loop.wake
    background = {"lost": lost.run, "due": due_loop.run}
    loops: tuple[PassLoop, ...] = (due_loop,)
    if sweeps:
        background |= {"sweep leadership": leader.run, "sweep": sweep_loop.run, "overdue": overdue_loop.run}
        loops = (due_loop, overdue_loop, sweep_loop)
    by_hand = [Measured(one, base.metrics, clock) for one in (lost, overdue, repair, retention)]
    return Recovery(
        holders=holders,
        due=due,
        due_loop=due_loop,
        loops=loops,
        background=background,
        passes=passes_by_name((*by_hand, measured_due)),
    )
