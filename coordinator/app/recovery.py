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
from coordinator.reconciler.passes import passes_by_name
from coordinator.reconciler.report import Pass
from coordinator.services.holders import Holders

__all__ = ["Recovery", "compose_recovery"]

_DUE_EVERY_S: Final = 0.25
_SWEEP_ROLE: Final = "sweep"
"""One process sweeps for all."""


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
    store, clock, entropy = base.store, base.clock, base.entropy
    hung_after_s = base.settings.notices.hung_after_s
    leader = store.leadership(_SWEEP_ROLE)
    lost = LostPass(
        store.jobs,
        store.namespaces,
        store.present,
        store.membership,
        clock,
        notices=base.notices,
        leads=lambda: leader.is_leader,
    )
    due = DuePass(store.jobs, store.namespaces, store.membership, clock, notices=base.notices)
    measured_due = Measured(due, base.metrics, clock)
    due_loop = PassLoop(
        "due",
        over_namespaces(measured_due, store.namespaces),
        clock,
        entropy,
        LoopConfig(interval_s=_DUE_EVERY_S),
    )
    sweep_loop = PassLoop(
        "lost sweep",
        lost.sweep,
        clock,
        entropy,
        LoopConfig(interval_s=base.settings.reconciler.sweep_every_s),
    )
    leader.won = sweep_loop.wake
    background = {"lost": lost.run, "due": due_loop.run}
    if sweeps:
        background |= {"sweep leadership": leader.run, "lost sweep": sweep_loop.run}
    return Recovery(
        holders=Holders(
            lost.suspect,
            notices=base.notices,
            hung_after_ms=round(hung_after_s * 1000) if hung_after_s is not None else None,
            ended=base.circuits.outcomes.claim_ended,
        ),
        due=due,
        due_loop=due_loop,
        loops=(due_loop, sweep_loop) if sweeps else (due_loop,),
        background=background,
        passes=passes_by_name((Measured(lost, base.metrics, clock), measured_due)),
    )
