"""What a run of the tests left out, and the switch that forbids leaving anything out.

A test whose tool is missing skips with a reason. On a laptop that is fine, as long as it is said: the summary
lists every reason once, with the number of tests behind it. With ``LEASEKEEPER_REQUIRE=all`` (CI) a skip is a
failure, so that a missing tool cannot turn a red suite green.

``tests/conftest.py`` imports the hooks by name; they have no effect elsewhere.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

REQUIRE_VARIABLE = "LEASEKEEPER_REQUIRE"


def everything_required() -> bool:
    """Return whether a left-out test counts as a failure in this run."""
    return os.environ.get(REQUIRE_VARIABLE, "") == "all"


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason given for a skip, without pytest's prefix and the place it was raised."""
    longrepr = report.longrepr
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ").strip()


def lines(reasons: Counter[str]) -> list[str]:
    """Return one plain line per reason, the most frequent first."""
    return [
        f"left out: {count} test{'s' if count != 1 else ''}: {reason}"
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    ]


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure that says which rule it broke."""
    if report.skipped and not hasattr(report, "wasxfail") and everything_required():
        reason = reason_of(report)
        report.outcome = "failed"
        report.longrepr = f"left out although {REQUIRE_VARIABLE}=all: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped test when everything is required."""
    report = yield
    _forbid(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that skips itself while it is collected, when everything is required."""
    report = yield
    _forbid(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was left out, before pytest's closing line."""
    reasons = Counter(reason_of(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("left out")
    for line in lines(reasons) or ["left out: no test for want of a tool"]:
        terminalreporter.write_line(line)
    if "not slow" in terminalreporter.config.getoption("markexpr", ""):
        terminalreporter.write_line("left out: the cases marked slow; `make test-fault` runs them")
