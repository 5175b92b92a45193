"""Walks all records of a namespace, paced, and shows each page to the passes that look at records.

A page is read once, however many passes look at it. The store is left alone for a multiple of the time that
a page took, so that a sweep of a million records takes long and hurts nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from coordinator.core.job import JobState
from coordinator.ports import Clock, JobStore, Stored
from coordinator.reconciler.report import Report

__all__ = ["Pace", "PaceConfig", "Run", "StateWalk", "Visitor"]

_ALL: Final = frozenset(JobState)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceConfig:
    """``page``: records read at once. ``share``: of the time that a sweep may be busy. ``first_share``: the
    same for the first sweep of a namespace by this process and for runs by hand, which somebody waits for.
    ``rest_s``: the shortest rest after a page. ``timeout_s``: for one page.
    """

    page: int = 200
    share: float = 0.05
    first_share: float = 0.5
    rest_s: float = 0.02
    timeout_s: float = 5.0


class Pace:
    """Rests after each piece of work, so that no more than a share of the time is work."""

    def __init__(self, clock: Clock, config: PaceConfig, *, hurry: bool) -> None:
        self._clock = clock
        self._rest_s = config.rest_s
        self._share = config.first_share if hurry else config.share
        self._began = clock.monotonic()

    def begin(self) -> float:
        """A piece of work begins; the monotonic time."""
        self._began = self._clock.monotonic()
        return self._began

    async def rest(self) -> None:
        """It has ended."""
        busy = self._clock.monotonic() - self._began
        await self._clock.sleep(max(self._rest_s, busy * (1 / self._share - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a pass over one namespace.

    ``as_leader``: it is a sweep's, so its Txns compare that this process still leads. ``hurry``: somebody
    waits for it. ``go_on``: False ends it early.
    """

    namespace: str
    report: Report
    dry_run: bool = False
    as_leader: bool = False
    hurry: bool = True
    go_on: Callable[[], bool] = lambda: True


class Visitor(Protocol):
    """A pass that looks at records."""

    @property
    def states(self) -> frozenset[JobState]:
        """The states that it looks at."""

    async def visit(self, found: Sequence[Stored], run: Run) -> None:
        """Look at some records of its states, and set right what is not."""


class StateWalk:
    """Reads records and shows them.

    Args:
        store: where records are.
        clock: deadlines and rests.
        config: pace.
    """

    def __init__(self, store: JobStore, clock: Clock, config: PaceConfig | None = None) -> None:
        self._store = store
        self._clock = clock
        self.config = config or PaceConfig()

    async def walk(self, visits: Sequence[tuple[Visitor, Run]]) -> None:
        """Show every record of the namespace that the runs have in common to all visitors.

        Raises:
            StorageError: a page could not be read; what was done until then stands.
        """
        first = visits[0][1]
        states = frozenset[JobState]().union(*(visitor.states for visitor, _ in visits))
        pace = Pace(self._clock, self.config, hurry=first.hurry)
        cursor = ""
        while first.go_on():
            deadline = pace.begin() + self.config.timeout_s
            page = await self._store.list_jobs(
                first.namespace,
                cursor=cursor,
                limit=self.config.page,
                deadline=deadline,
                states=None if states == _ALL else states,
            )
            for visitor, run in visits:
                found = [stored for stored in page.jobs if stored.job.state in visitor.states]
                if found:
                    await visitor.visit(found, run)
            cursor = page.cursor
            if not cursor:
                return
            await pace.rest()
