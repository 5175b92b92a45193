"""Structured logs: one event a line, whatever the input; JSON for machines, coloured text on a terminal.

Modules log through the standard library's loggers by name; this is the one place that decides how it looks.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Final, TextIO

import structlog
from structlog.typing import EventDict, Processor

__all__ = ["configure_logging"]

_NOISY: Final = ("grpc", "asyncio")
_CONTROL: Final = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff]")
_TRACEBACK_MARGIN: Final = "    | "


def _escaped(text: str) -> str:
    """``text`` without anything that ends a line or speaks to a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def _escape(_: object, __: str, event: EventDict) -> EventDict:
    """For the console: what callers and exceptions say forges no line. JSON escapes by itself."""
    for name, value in event.items():
        if not isinstance(value, str):
            continue
        if name == "exception":
            lines = (_TRACEBACK_MARGIN + _escaped(line) for line in value.split("\n"))
            event[name] = "\n".join(lines)
        else:
            event[name] = _escaped(value)
    return event


def _processors() -> list[Processor]:
    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
    ]


def configure_logging(level: str = "info", style: str = "auto", stream: TextIO | None = None) -> None:
    """Send all logs of the process to one stream.

    Args:
        level: debug, info, warning or error.
        style: "json", "console", or "auto": console on a terminal, JSON elsewhere.
        stream: standard error by default; standard output belongs to what a command prints.
    """
    out = stream if stream is not None else sys.stderr
    console = style == "console" or (style == "auto" and out.isatty())
    renderer: list[Processor]
    if console:
        # Tracebacks keep their lines, each behind a margin: nothing in them looks like an event.
        renderer = [
            structlog.processors.format_exc_info,
            _escape,
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    else:
        # The traceback becomes a field, and JSON escapes every line break: one event stays one line.
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_processors(),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[*_processors(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
