"""One event a line, whatever the input."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from coordinator.observability.logging import configure_logging


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    "text", ["plain", "a\nb", "a\r\n{}", '"quoted"', "\x00\x1b[31m", "\u2028", "\udc80", "x" * 10_000]
)
def test_one_event_is_one_line_of_json(text: str) -> None:
    out = io.StringIO()
    configure_logging("info", "auto", out)

    logging.getLogger("t").warning("seen %s", text, extra={"job_id": text})

    [line] = out.getvalue().splitlines()
    event = json.loads(line)
    assert (f"seen {text}", text) == (event["event"], event["job_id"])
    assert ("warning", "t") == (event["level"], event["logger"])


def test_a_traceback_stays_in_its_line() -> None:
    out = io.StringIO()
    configure_logging("info", "json", out)
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("t").exception("failed")

    [line] = out.getvalue().splitlines()
    assert "ValueError: a\nb" in json.loads(line)["exception"]


def test_what_lies_below_the_level_is_left_out() -> None:
    out = io.StringIO()
    configure_logging("warning", "json", out)

    logging.getLogger("t").info("quiet")

    assert "" == out.getvalue()


@pytest.mark.parametrize(
    "text", ["a\nb", "a\r\n2026-01-01 CRITICAL forged", "\x00\x1b[2J\x85\u2028", "\udc80"]
)
def test_on_the_console_too_one_event_is_one_line(text: str) -> None:
    """Fault case 158."""
    out = io.StringIO()
    configure_logging("info", "console", out)

    logging.getLogger("t").warning("seen %s", text, extra={"job_id": text, "facts": {text: text}})

    assert len(out.getvalue().splitlines()) == 1
    assert not set("\x1b\x00\x85\u2028\r") & set(out.getvalue())


def test_on_the_console_nothing_in_a_traceback_looks_like_an_event() -> None:
    out = io.StringIO()
    configure_logging("info", "console", out)
    try:
        raise ValueError("a\n2026-01-01 CRITICAL forged\x1b[2J")
    except ValueError:
        logging.getLogger("t").exception("failed")

    event, *traceback = out.getvalue().splitlines()
    assert "failed" in event
    assert all(line.startswith("    | ") or not line for line in traceback)
    assert any("forged" in line for line in traceback)
    assert "\x1b" not in out.getvalue()
