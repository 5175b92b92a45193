"""Tells the meters what each run of a pass took and did, whoever runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from coordinator.ports import Clock, Meters, NamespaceFeeds
from coordinator.reconciler.report import Pass, Report

__all__ = ["Measured", "over_namespaces"]


class Measured:
    """Implements ``report.Pass`` around another one. Dry runs are not counted.

    Args:
        one: the pass.
        meters: told.
        clock: durations.
    """

    def __init__(self, one: Pass, meters: Meters, clock: Clock) -> None:
        self._one = one
        self._meters = meters
        self._clock = clock

    @property
    def name(self) -> str:
        """The pass's."""
        return self._one.name

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        """See ``report.Pass``."""
        if dry_run:
            return await self._one.run_once(namespace, dry_run=True)
        began = self._clock.monotonic()
        try:
            report = await self._one.run_once(namespace)
        except Exception:
            self._meters.pass_failed(self._one.name)
            raise
        seconds = self._clock.monotonic() - began
        self._meters.pass_done(self._one.name, seconds, report.counts, report.failed)
        return report


def over_namespaces(one: Pass, feeds: NamespaceFeeds) -> Callable[[], Awaitable[bool]]:
    """One run of a pass over every namespace, as the step of a ``PassLoop``."""

    async def step() -> bool:
        more = False
        for namespace in feeds.namespaces():
            more |= (await one.run_once(namespace)).more
        return more

    return step
