"""One notice is one line with all that is known; a flood is a few lines and a number."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from coordinator.core.job import JobState
from coordinator.core.notice import Notice, NoticeKind, PublishedNotice
from coordinator.observability.logging import configure_logging
from coordinator.observability.notice_log import NoticeLog, NoticeLogConfig
from tests.support.clock import SteppingClock

FORGED = "x\r\n2026-01-01 CRITICAL forged \x1b[2J\x00\x85\u2028"


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def published(kind: NoticeKind = NoticeKind.LOST, **fields: object) -> PublishedNotice:
    notice = Notice(kind=kind, reason="its lease ended", **fields)  # type: ignore[arg-type]
    return PublishedNotice(notice_id="n1", order=1, time_ms=1, coordinator_id="c1", notice=notice)


def a_log(clock: SteppingClock, **config: float) -> tuple[NoticeLog, io.StringIO]:
    out = io.StringIO()
    configure_logging("info", "json", out)
    return NoticeLog(clock.monotonic, clock.sleep, NoticeLogConfig(**config)), out  # type: ignore[arg-type]


def events(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_notice_is_one_line_with_all_that_is_known_and_nothing_else() -> None:
    log, out = a_log(SteppingClock())

    log.noticed(
        published(
            namespace="default",
            job_id="j1",
            session_id="s1",
            attempt=2,
            token=77,
            state_before=JobState.RUNNING,
            state_after=JobState.PENDING,
        )
    )

    [event] = events(out)
    del event["timestamp"]
    assert event == {
        "event": "notice: LOST",
        "kind": "LOST",
        "reason": "its lease ended",
        "namespace": "default",
        "job": "j1",
        "session": "s1",
        "attempt": 2,
        "token": 77,
        "state_before": "RUNNING",
        "state_after": "PENDING",
        "notice_id": "n1",
        "level": "warning",
        "logger": "leasekeeper.notices",
    }


@pytest.mark.parametrize("style", ["json", "console"])
def test_no_text_of_a_caller_makes_a_second_line(style: str) -> None:
    """Fault case 158."""
    clock, out = SteppingClock(), io.StringIO()
    configure_logging("info", style, out)
    log = NoticeLog(clock.monotonic, clock.sleep)

    for name in ("namespace", "queue", "type", "job_id", "session_id"):
        log.noticed(published(**{name: FORGED}))
    log.noticed(published(facts={FORGED: FORGED}))

    lines = out.getvalue().splitlines()
    assert len(lines) == 6
    assert not any(line.startswith("2026-01-01 CRITICAL") for line in lines)
    assert not set("\x1b\x00\x85\u2028\r") & set(out.getvalue())


async def test_five_thousand_at_once_are_a_few_lines_and_one_with_their_number() -> None:
    clock = SteppingClock()
    log, out = a_log(clock, lines=20, window_s=10.0)
    running = asyncio.ensure_future(log.run())
    try:
        for number in range(5_000):
            log.noticed(published(job_id=f"j{number}"))
        log.noticed(published(NoticeKind.EPOCH))
        assert len(events(out)) == 21
        await clock.advance(15)
    finally:
        running.cancel()

    *_, summary = events(out)
    assert len(events(out)) == 22
    assert (summary["event"], summary["folded"]) == ("notices: 4980 more of LOST", 4_980)


async def test_what_was_folded_is_told_when_it_stops() -> None:
    clock = SteppingClock()
    log, out = a_log(clock, lines=1, window_s=10.0)
    running = asyncio.ensure_future(log.run())
    await clock.wait_for_sleepers()
    for _ in range(3):
        log.noticed(published())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert [event.get("folded") for event in events(out)] == [None, 2]


async def test_after_its_window_a_kind_has_its_lines_again() -> None:
    clock = SteppingClock()
    log, out = a_log(clock, lines=1, window_s=10.0)

    log.noticed(published())
    log.noticed(published())
    await clock.advance(11)
    log.noticed(published())

    assert [event["event"] for event in events(out)] == [
        "notice: LOST",
        "notices: 1 more of LOST",
        "notice: LOST",
    ]
