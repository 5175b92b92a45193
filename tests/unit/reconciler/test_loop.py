"""The loop of a pass: woken, by timer, never dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.errors import EtcdUnavailable
from coordinator.reconciler.loop import LoopConfig, PassLoop
from tests.support.clock import SteppingClock
from tests.support.fake_ports import SteadyEntropy


class Step:
    """A pass that counts, and does next what the test says."""

    def __init__(self) -> None:
        self.runs = 0
        self.error: Exception | None = None
        self.more = 0

    async def __call__(self) -> bool:
        self.runs += 1
        if self.error is not None:
            raise self.error
        self.more -= 1
        return self.more >= 0


@asynccontextmanager
async def running(loop: PassLoop) -> AsyncIterator[None]:
    task = asyncio.create_task(loop.run())
    try:
        await asyncio.sleep(0)
        yield
        assert not task.done(), "a loop never dies"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def a_loop(step: Step, clock: SteppingClock, **more: object) -> PassLoop:
    return PassLoop("test", step, clock, SteadyEntropy(), LoopConfig(interval_s=1.0), **more)  # type: ignore[arg-type]


async def test_it_runs_at_once_and_then_by_its_timer() -> None:
    step, clock = Step(), SteppingClock()
    async with running(a_loop(step, clock)):
        await clock.advance(0.5)
        assert step.runs == 1
        await clock.advance(1)
        assert step.runs == 2


async def test_it_runs_when_woken() -> None:
    step, clock = Step(), SteppingClock()
    loop = a_loop(step, clock)
    async with running(loop):
        await clock.advance(0.1)
        loop.wake()
        await clock.advance(0.1)
        assert step.runs == 2


async def test_it_goes_on_while_there_is_more() -> None:
    step, clock = Step(), SteppingClock()
    step.more = 5
    async with running(a_loop(step, clock)):
        await clock.advance(0.1)
        assert step.runs == 6


async def test_an_outage_is_logged_once_and_tried_less_and_less(caplog: pytest.LogCaptureFixture) -> None:
    step, clock = Step(), SteppingClock()
    step.error = EtcdUnavailable("planned")
    loop = a_loop(step, clock)
    with caplog.at_level(logging.INFO):
        async with running(loop):
            await clock.advance(20)
            tried = step.runs
            assert 3 <= tried <= 7
            step.error = None
            await clock.advance(6)
            assert step.runs > tried
            assert loop.failures == 0
    assert sum("is tried again" in record.message for record in caplog.records) == 1
    assert sum("works again" in record.message for record in caplog.records) == 1


async def test_a_fault_of_our_own_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    step, clock = Step(), SteppingClock()
    step.error = ZeroDivisionError("planned")
    async with running(a_loop(step, clock)):
        await clock.advance(3)
        step.error = None
        await clock.advance(6)
        assert step.runs >= 3
    assert "ZeroDivisionError" in caplog.text


async def test_it_rests_while_it_is_not_its_turn() -> None:
    step, clock = Step(), SteppingClock()
    turn = False
    async with running(a_loop(step, clock, active=lambda: turn)):
        await clock.advance(3)
        assert step.runs == 0
        turn = True
        await clock.advance(1.5)
        assert step.runs >= 1


async def test_failures_in_a_row_are_trouble_until_a_run_succeeds() -> None:
    step, clock = Step(), SteppingClock()
    step.error = EtcdUnavailable("no member answers")
    loop = a_loop(step, clock)
    async with running(loop):
        await clock.advance(1)
        assert (1, "") == (step.runs, loop.trouble)
        await clock.advance(10)
        assert "pass test failed" in loop.trouble
        assert "no member answers" in loop.trouble
        step.error = None
        await clock.advance(6)
        assert loop.trouble == ""


async def test_the_text_of_a_fault_of_our_own_is_not_told() -> None:
    step, clock = Step(), SteppingClock()
    step.error = ZeroDivisionError("planned")
    loop = a_loop(step, clock)
    async with running(loop):
        await clock.advance(30)
        assert loop.trouble.endswith("ZeroDivisionError")


async def test_a_run_that_does_not_end_is_trouble() -> None:
    clock = SteppingClock()

    async def for_ever() -> bool:
        await asyncio.Event().wait()
        return False

    loop = PassLoop("test", for_ever, clock, SteadyEntropy(), LoopConfig(interval_s=1.0, alarm_s=60.0))
    async with running(loop):
        await clock.advance(60)
        assert loop.trouble == ""
        await clock.advance(1)
        assert "has not ended a run for 61 s" in loop.trouble


async def test_a_long_interval_is_no_trouble() -> None:
    clock = SteppingClock()
    config = LoopConfig(interval_s=100.0, jitter=0.0, alarm_s=60.0)
    loop = PassLoop("test", Step(), clock, SteadyEntropy(), config)
    async with running(loop):
        await clock.advance(95)
        assert loop.trouble == ""


async def test_whoever_need_not_act_is_in_no_trouble() -> None:
    step, clock = Step(), SteppingClock()
    turn = True
    step.error = EtcdUnavailable("planned")
    loop = a_loop(step, clock, active=lambda: turn)
    async with running(loop):
        await clock.advance(30)
        assert loop.trouble
        turn = False
        await clock.advance(6)
        assert loop.trouble == ""
        await clock.advance(1_000)
        assert loop.trouble == ""
