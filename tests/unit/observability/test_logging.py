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
