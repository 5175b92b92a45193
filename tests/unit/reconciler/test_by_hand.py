"""A run by hand: one at a time, no pass hinders the next, and it ends in time with what was done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.reconciler.by_hand import ByHand, PassRun
from coordinator.reconciler.report import Action, Report
from tests.support.clock import SteppingClock


class Scripted:
    """A pass that notes how it was called, and does what the test says."""

    def __init__(self, name: str, act: Callable[[], Awaitable[None]] | None = None) -> None:
        self.name = name
        self.calls: list[tuple[str, bool]] = []
        self.act = act
        self.more = 0
        self.kind = "mended"
        self.cancelled = False

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        self.calls.append((namespace, dry_run))
        report = Report(self.name, examined=3)
        try:
            if self.act is not None:
                await self.act()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        self.more -= 1
        report.more = self.more >= 0
        report.waiting = len(self.calls)
        if self.kind:
            report.add(Action(kind=self.kind, job_id="j1", reason="it was broken"))
        return report


async def fail() -> None:
    raise EtcdUnavailable("no member answers")


async def err() -> None:
    raise ZeroDivisionError


async def for_ever() -> None:
    await asyncio.Event().wait()


class Bench:
    """Three passes under one roof."""

    def __init__(self) -> None:
        self.clock = SteppingClock()
        self.passes = {name: Scripted(name) for name in ("lost", "due", "repair")}
        self.by_hand = ByHand(self.passes, self.clock)

    async def run(self, *names: str, dry_run: bool = False, seconds: float = 10.0) -> list[PassRun]:
        deadline = self.clock.monotonic() + seconds
        return list(await self.by_hand.run("mail", names, dry_run=dry_run, deadline=deadline))

    def called(self) -> list[str]:
        return [name for name, one in self.passes.items() if one.calls]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("dry_run", [False, True])
async def test_without_names_every_pass_runs_in_its_order(bench: Bench, dry_run: bool) -> None:
    runs = await bench.run(dry_run=dry_run)

    assert ["lost", "due", "repair"] == [one.report.name for one in runs]
    assert [[("mail", dry_run)]] * 3 == [one.calls for one in bench.passes.values()]
    assert [(3, {"mended": 1}, "")] * 3 == [
        (one.report.examined, dict(one.report.counts), one.error) for one in runs
    ]


async def test_named_passes_run_once_each_and_no_other(bench: Bench) -> None:
    runs = await bench.run("repair", "lost", "repair")

    assert ["lost", "repair"] == [one.report.name for one in runs]
    assert ["lost", "repair"] == bench.called()
    assert len(bench.passes["repair"].calls) == 1


async def test_an_unknown_name_is_refused_by_its_place_and_nothing_runs(bench: Bench) -> None:
    with pytest.raises(RequestError) as caught:
        await bench.run("lost", "lots")

    assert caught.value.reason is Reason.VALIDATION_FAILED
    assert ["passes[1]"] == [violation.field for violation in caught.value.fields]
    assert "lost, due, repair" in str(caught.value)
    assert [] == bench.called()


async def test_a_second_run_is_refused_while_one_is_under_way_and_taken_afterwards(bench: Bench) -> None:
    go_on = asyncio.Event()

    async def wait() -> None:
        await go_on.wait()

    bench.passes["due"].act = wait
    first = asyncio.create_task(bench.run())
    await bench.clock.wait_for_sleepers()
    with pytest.raises(RequestError) as caught:
        await bench.run("repair")
    go_on.set()

    assert caught.value.reason is Reason.TOO_MANY_REQUESTS
    assert 3 == len(await first)
    assert 1 == len(await bench.run("repair"))


async def test_a_caller_that_goes_away_ends_its_run_and_leaves_room_for_the_next(bench: Bench) -> None:
    bench.passes["lost"].act = for_ever
    first = asyncio.create_task(bench.run())
    await bench.clock.wait_for_sleepers()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    assert first.cancelled()
    assert bench.passes["lost"].cancelled
    assert 0 == bench.clock.sleepers
    assert 1 == len(await bench.run("due"))


async def test_a_pass_that_the_store_fails_says_so_and_the_others_go_on(bench: Bench) -> None:
    bench.passes["lost"].act = fail

    lost, due, repair = await bench.run()

    assert lost.error.startswith("no member answers")
    assert "stands" in lost.error
    assert ("", "") == (due.error, repair.error)
    assert (1, 1) == (due.report.changed, repair.report.changed)


async def test_a_fault_of_our_own_is_logged_once_and_not_told_to_the_caller(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.passes["due"].act = err
    with caplog.at_level(logging.ERROR):
        lost, due, repair = await bench.run()

    assert "fault of the coordinator" in due.error
    assert "ZeroDivision" not in due.error
    assert ("", "") == (lost.error, repair.error)
    assert 1 == len(caplog.records)


async def test_a_run_ends_before_its_deadline_with_what_was_done(bench: Bench) -> None:
    bench.passes["due"].act = for_ever
    running = asyncio.create_task(bench.run(seconds=10.0))
    await bench.clock.wait_for_sleepers()
    await bench.clock.advance(9.7)
    assert not running.done()
    await bench.clock.advance(0.1)
    assert running.done(), "a quarter of a second before the deadline it answers"
    lost, due, repair = running.result()

    assert ("", 1) == (lost.error, lost.report.changed)
    assert due.error.startswith("cut off")
    assert bench.passes["due"].cancelled
    assert 9_750 == due.duration_ms
    assert repair.error.startswith("not begun")
    assert ["lost", "due"] == bench.called()


async def test_a_run_whose_time_is_over_begins_nothing(bench: Bench) -> None:
    runs = await bench.run(seconds=-1.0)

    assert ["not begun"] * 3 == [one.error.partition(":")[0] for one in runs]
    assert [] == bench.called()


async def test_a_pass_runs_again_while_it_comes_to_its_bound_and_counts_are_of_all_runs(bench: Bench) -> None:
    bench.passes["due"].more = 2

    [run] = await bench.run("due")

    assert 3 == len(bench.passes["due"].calls)
    assert (9, {"mended": 3}, "") == (run.report.examined, dict(run.report.counts), run.error)
    assert 3 == len(run.report.actions)
    assert 3 == run.report.waiting, "as the last run found it"


@pytest.mark.parametrize(("dry_run", "kind"), [(True, "mended"), (False, "")])
async def test_a_pass_that_would_find_the_same_again_says_that_there_is_more(
    bench: Bench, dry_run: bool, kind: str
) -> None:
    bench.passes["due"].more = 1_000
    bench.passes["due"].kind = kind

    [run] = await bench.run("due", dry_run=dry_run)

    assert 1 == len(bench.passes["due"].calls)
    assert "run it again" in run.error


async def test_what_earlier_runs_of_a_pass_did_is_counted_when_a_later_one_fails(bench: Bench) -> None:
    due = bench.passes["due"]
    due.more = 1

    async def fail_later() -> None:
        if len(due.calls) > 1:
            raise EtcdUnavailable("no member answers")

    due.act = fail_later

    [run] = await bench.run("due")

    assert {"mended": 1} == dict(run.report.counts)
    assert run.error.startswith("no member answers")


async def test_each_run_is_logged_with_what_it_did(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.passes["lost"].act = fail
    with caplog.at_level(logging.INFO):
        await bench.run("lost", "due", dry_run=True)

    [record] = caplog.records
    assert "reconciled by hand, dry run" == record.getMessage()
    assert ("mail", {"due": {"mended": 1}}) == (record.namespace, record.done)  # type: ignore[attr-defined]
    assert ["lost"] == list(record.errors)  # type: ignore[attr-defined]
