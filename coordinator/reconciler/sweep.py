"""The round of the leader of the sweeps: every namespace, each record read once and shown to all passes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.errors import StorageError
from coordinator.ports import Clock, Meters, NamespaceFeeds
from coordinator.reconciler.lost import LostPass
from coordinator.reconciler.repair import FIRST, LATER, RepairPass
from coordinator.reconciler.report import Report
from coordinator.reconciler.retention import RetentionPass
from coordinator.reconciler.state_walk import Run, StateWalk

__all__ = ["Sweep", "SweptPasses"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptPasses:
    """The passes that look at every record."""

    lost: LostPass
    repair: RepairPass
    retention: RetentionPass


class Sweep:
    """The leader's round. Its Txns compare that it still leads.

    Args:
        passes: what is done.
        walk: reads the records, once for all passes.
        feeds: the namespaces.
        leads: whether this process leads.
        meters: told what each pass did.
        clock: durations.
    """

    def __init__(
        self,
        passes: SweptPasses,
        walk: StateWalk,
        feeds: NamespaceFeeds,
        *,
        leads: Callable[[], bool],
        meters: Meters,
        clock: Clock,
    ) -> None:
        self._passes = passes
        self._walk = walk
        self._feeds = feeds
        self._leads = leads
        self._meters = meters
        self._clock = clock
        self._swept: set[str] = set()

    async def step(self) -> bool:
        """Sweep every namespace while this process leads; for a ``PassLoop``.

        Returns:
            False: the next sweep may wait for the timer.

        Raises:
            StorageError: one could not be swept to its end; the others have had their turn.
        """
        failure: StorageError | None = None
        for namespace in self._feeds.namespaces():
            if not self._leads():
                break
            try:
                await self.sweep(namespace)
            except StorageError as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    async def sweep(self, namespace: str) -> list[Report]:
        """Sweep one namespace.

        Raises:
            StorageError: it could not be read to the end; what was done until then stands.
        """
        lost, repair, retention = self._passes.lost, self._passes.repair, self._passes.retention
        runs = [
            Run(
                namespace=namespace,
                report=Report(one.name),
                as_leader=True,
                hurry=namespace not in self._swept,
                go_on=self._leads,
            )
            for one in (lost, repair, retention)
        ]
        of_lost, of_repair, of_retention = runs
        began = self._clock.monotonic()
        try:
            await repair.remove_strays(FIRST, of_repair)
            await self._walk.walk([(lost, of_lost), (repair, of_repair), (retention, of_retention)])
            await repair.remove_strays(LATER, of_repair)
            await repair.remove_locks(of_repair)
        except StorageError:
            self._meters.pass_failed("sweep")
            raise
        finally:
            seconds = self._clock.monotonic() - began
            for run in runs:
                report = run.report
                self._meters.pass_done(report.name, seconds, report.counts, report.failed)
                if report.changed:
                    _log.info(
                        "pass %s changed what it found",
                        report.name,
                        extra={"namespace": namespace, "done": dict(report.counts)},
                    )
        self._swept.add(namespace)
        return [run.report for run in runs]
