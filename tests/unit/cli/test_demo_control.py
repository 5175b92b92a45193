"""The meeting point of the demo's driver and its workers."""

from __future__ import annotations

from pathlib import Path

from coordinator.cli.demo_control import FREEZE, KILL, Control, Held

HELD = Held(worker="w1", pid=7, job_id="a", token=9)


def test_only_jobs_of_the_second_half_take_a_ticket(tmp_path: Path) -> None:
    Control(tmp_path).lay_ticket(KILL, 5)

    assert Control(tmp_path).take_ticket(4) is None
    assert Control(tmp_path).take_ticket(5) == KILL


def test_a_ticket_has_one_taker_and_a_process_takes_one(tmp_path: Path) -> None:
    driver = Control(tmp_path)
    driver.lay_ticket(KILL, 0)
    driver.lay_ticket(FREEZE, 0)
    first, second, third = Control(tmp_path), Control(tmp_path), Control(tmp_path)

    assert first.take_ticket(1) == KILL
    assert first.take_ticket(2) is None
    assert second.take_ticket(3) == FREEZE
    assert third.take_ticket(4) is None


def test_a_worker_says_that_it_waits_and_goes_on_when_told(tmp_path: Path) -> None:
    driver = Control(tmp_path)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        assert driver.held(FREEZE) == HELD
        pauses.append(seconds)
        if len(pauses) == 2:
            driver.let_go(FREEZE)

    assert driver.held(FREEZE) is None
    worker = Control(tmp_path, pause)
    worker.wait_here(FREEZE, HELD)
    assert len(pauses) == 2
    assert not driver.finished(FREEZE)
    worker.finish(FREEZE)
    assert driver.finished(FREEZE)
