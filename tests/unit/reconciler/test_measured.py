"""What meters hear of passes."""

from __future__ import annotations

import pytest

from coordinator.errors import EtcdUnavailable
from coordinator.reconciler.measured import Measured, over_namespaces
from coordinator.reconciler.report import Action, Report
from tests.support.clock import SteppingClock
from tests.support.fake_ports import RecordedMeters, StillFeeds


class APass:
    """Takes two seconds, recovers one job, tries one in vain; or fails."""

    name = "lost"

    def __init__(self, clock: SteppingClock, error: Exception | None = None) -> None:
        self._clock = clock
        self._error = error
        self.ran: list[tuple[str, bool]] = []
        self.more = False

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        self.ran.append((namespace, dry_run))
        await self._clock.advance(2)
        if self._error is not None:
            raise self._error
        report = Report(self.name, failed=1, more=self.more)
        report.add(Action(kind="recovered", job_id="j", reason="r"))
        return report


async def test_a_run_is_measured_with_what_it_did() -> None:
    clock, meters = SteppingClock(), RecordedMeters()

    report = await Measured(APass(clock), meters, clock).run_once("default")

    assert report.changed == 1
    assert meters.passes == [("lost", 2.0, {"recovered": 1}, 1)]


async def test_a_dry_run_is_not_counted() -> None:
    clock, meters = SteppingClock(), RecordedMeters()
    one = APass(clock)

    await Measured(one, meters, clock).run_once("default", dry_run=True)

    assert one.ran == [("default", True)]
    assert meters.passes == []


async def test_a_run_that_fails_is_counted_and_fails() -> None:
    clock, meters = SteppingClock(), RecordedMeters()

    with pytest.raises(EtcdUnavailable):
        await Measured(APass(clock, EtcdUnavailable("down")), meters, clock).run_once("default")

    assert meters.failed_passes == {"lost": 1}
    assert meters.passes == []


@pytest.mark.parametrize("more", [False, True])
async def test_a_step_runs_over_every_namespace_and_says_whether_there_is_more(more: bool) -> None:
    one = APass(SteppingClock())
    one.more = more

    assert await over_namespaces(one, StillFeeds("a", "b"))() is more
    assert one.ran == [("a", False), ("b", False)]
