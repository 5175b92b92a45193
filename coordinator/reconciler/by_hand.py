"""Runs passes when somebody asks for it, and tells what each did: the use case behind RunReconcile.

It may run beside the reconcilers of all coordinators, because every write of a pass compares what it read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.errors import FieldViolation, LeasekeeperError, Reason, RequestError
from coordinator.ports import Clock
from coordinator.reconciler.report import Pass, Report

__all__ = ["ByHand", "PassRun"]

_LOG = logging.getLogger(__name__)

_ANSWER_SHARE: Final = 0.05
_LARGEST_ANSWER_S: Final = 0.25
"""What is kept of the caller's time for the end of a pass that is cut off, and for the answer."""

_NOT_BEGUN: Final = "not begun: the call's time was over"
_STANDS: Final = "what the run under way did stands, and is not counted here"
_CUT_OFF: Final = f"cut off by the end of the call's time; {_STANDS}"
_MORE: Final = "it came to the bound of one run, and there is more: run it again"
_FAULT: Final = f"a fault of the coordinator, see its log; {_STANDS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRun:
    """One pass of a run. ``error``: why it could not finish, empty if it did."""

    report: Report
    duration_ms: int = 0
    error: str = ""


@dataclass(slots=True)
class _Run:
    """What all passes of a run share. ``ends_at``: monotonic seconds."""

    namespace: str
    dry_run: bool
    ends_at: float
    done: list[PassRun] = field(default_factory=list)


async def _all_of(one: Pass, run: _Run, report: Report) -> bool:
    """Run a pass until it comes to no bound of its own, and add everything to ``report``.

    Returns whether there is more to do all the same: a dry run changes nothing, so it would find the same
    again; and a run that changed nothing has done what it can.
    """
    while True:  # each round changes something; the caller's time is its cap
        part = await one.run_once(run.namespace, dry_run=run.dry_run)
        report.include(part)
        if not part.more:
            return False
        if run.dry_run or not part.changed:
            return True


class ByHand:
    """One run at a time.

    Args:
        passes: by name, in the order in which they run.
        clock: deadlines and durations.
    """

    def __init__(self, passes: Mapping[str, Pass], clock: Clock) -> None:
        self._passes = dict(passes)
        self._clock = clock
        self._busy = False

    @property
    def names(self) -> Sequence[str]:
        """The passes that can be named."""
        return tuple(self._passes)

    async def run(
        self, namespace: str, names: Sequence[str], *, dry_run: bool, deadline: float
    ) -> Sequence[PassRun]:
        """Run passes one after the other; none hinders the next.

        It ends before ``deadline``: a pass that is under way then is cut off, and those behind it say that
        they have not begun.

        Args:
            namespace: what they look at.
            names: which passes, each once and in their own order; empty: all.
            dry_run: only tell what would be done.
            deadline: absolute, in seconds of the monotonic clock.

        Returns:
            One for each pass that was asked for.

        Raises:
            RequestError: VALIDATION_FAILED (there is no such pass), TOO_MANY_REQUESTS (a run is under way).
        """
        self._check(names)
        if self._busy:
            raise RequestError(
                Reason.TOO_MANY_REQUESTS,
                "another run is under way on this coordinator",
                retry_after_ms=1_000,
            )
        self._busy = True
        left = max(0.0, deadline - self._clock.monotonic())
        run = _Run(namespace, dry_run, deadline - min(_LARGEST_ANSWER_S, left * _ANSWER_SHARE))
        try:
            for name, one in self._passes.items():
                if not names or name in names:
                    run.done.append(await self._one(one, run))
        finally:
            self._busy = False
            self._tell(run)
        return tuple(run.done)

    def _check(self, names: Sequence[str]) -> None:
        known = ", ".join(self._passes)
        unknown = [
            FieldViolation(f"passes[{place}]", f"there is no pass {name!r}; there are {known}")
            for place, name in enumerate(names)
            if name not in self._passes
        ]
        if unknown:
            text = f"{unknown[0].field}: {unknown[0].description}"
            raise RequestError(Reason.VALIDATION_FAILED, text, fields=unknown)

    async def _one(self, one: Pass, run: _Run) -> PassRun:
        began = self._clock.monotonic()
        report, error = Report(one.name), ""
        if began >= run.ends_at:
            return PassRun(report=report, error=_NOT_BEGUN)
        working = asyncio.ensure_future(_all_of(one, run, report))
        timer = asyncio.ensure_future(self._clock.sleep(run.ends_at - began))
        try:
            await asyncio.wait((working, timer), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                error = _CUT_OFF
            elif working.result():
                error = _MORE
        except LeasekeeperError as failure:
            error = f"{failure}; {_STANDS}"
        except Exception:  # noqa: BLE001 - a fault of ours must not keep the other passes from their work
            _LOG.exception("pass %s failed, asked for by hand", one.name)
            error = _FAULT
        finally:
            for task in (working, timer):
                task.cancel()
            await asyncio.gather(working, timer, return_exceptions=True)
        duration = round((self._clock.monotonic() - began) * 1000)
        return PassRun(report=report, duration_ms=duration, error=error)

    @staticmethod
    def _tell(run: _Run) -> None:
        counts = {one.report.name: dict(one.report.counts) for one in run.done if one.report.counts}
        errors = {one.report.name: one.error for one in run.done if one.error}
        _LOG.info(
            "reconciled by hand%s",
            ", dry run" if run.dry_run else "",
            extra={"namespace": run.namespace, "done": counts, "errors": errors},
        )
