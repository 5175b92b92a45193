"""What a pass of the reconciler did, or in a dry run would do; and what every pass is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Protocol

from coordinator.core.job import JobState

__all__ = ["Action", "Pass", "Report"]

_ACTIONS_KEPT: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One repair. ``kind`` is a short word such as ``recovered`` or ``ready-key-removed``; few and fixed."""

    kind: str
    job_id: str
    reason: str
    state_before: JobState | None = None
    state_after: JobState | None = None


@dataclass(slots=True)
class Report:
    """Counts of one run.

    ``failed``: tried in vain, the next run tries again. ``waiting``: what has to wait, or is left to another
    coordinator. ``more``: the run came to its bound, and there is more to do now.
    """

    name: str
    examined: int = 0
    failed: int = 0
    waiting: int = 0
    more: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    actions: list[Action] = field(default_factory=list)

    def add(self, action: Action) -> None:
        """Count an action; the first thousand are kept whole."""
        self.counts[action.kind] += 1
        if len(self.actions) < _ACTIONS_KEPT:
            self.actions.append(action)

    def include(self, other: Report) -> None:
        """Add what a further run of the same pass did; ``waiting`` and ``more`` are as it found them."""
        self.examined += other.examined
        self.failed += other.failed
        self.waiting, self.more = other.waiting, other.more
        self.counts.update(other.counts)
        self.actions.extend(other.actions[: max(0, _ACTIONS_KEPT - len(self.actions))])

    @property
    def changed(self) -> int:
        """Actions of all kinds."""
        return sum(self.counts.values())


class Pass(Protocol):
    """One pass over one namespace: level-triggered, guarded, repeatable."""

    @property
    def name(self) -> str:
        """As in RunReconcile and in metrics."""

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        """Look, and set right what is not; in a dry run only say what would be done.

        Raises:
            StorageError: the store could not be read to the end; what was done until then stands.
        """
