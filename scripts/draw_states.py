#!/usr/bin/env python3
"""Draw docs/states.md from the transition table and from what ``decide`` really answers.

scripts/draw_states.py            # write docs/states.md
scripts/draw_states.py --check    # exit 1 if the file differs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from coordinator.core import commands as c  # noqa: E402 - the repository is not always installed
from coordinator.core.job import Claim, Job, JobState, Terms  # noqa: E402
from coordinator.core.machine import TRANSITIONS, Decision, Guard, decide  # noqa: E402
from coordinator.core.retry import RetryPolicy  # noqa: E402
from coordinator.core.rules import FREE_RETURNS  # noqa: E402

OUTPUT = ROOT / "docs" / "states.md"
NOW = 1_000_000
TOKEN = 7
HOLD = 10_000
POLICY = RetryPolicy(jitter=0.0)

HEAD = """\
# States of a job

<!-- Drawn by scripts/draw_states.py from coordinator/core/machine.py; `make check` compares. Do not edit. -->

A job is always in exactly one of seven states. What moves it is a *command*; what it becomes is decided by
one pure function, and committed in one etcd transaction under the *guard* of the row. A pair of state and
command without a row changes nothing.

"""

BETWEEN = """
`Repair` writes the record again as it is and is left out of the picture; `Submit` is the only way in from
nothing. SUCCEEDED and CANCELLED records end with their retention; DEAD and QUARANTINED ones keep payload
and checkpoint.

## Every transition

| from | command | to | the transaction compares |
| --- | --- | --- | --- |
"""

ENDS = """
## How an attempt ends, and what that costs

Each row is computed by running the rule, with the default policy ({retries} retries, {losses} lease losses,
no jitter) and a session TTL of 10 s.

| what happens | attempt ends as | charged to | delay before it can run again | state |
| --- | --- | --- | --- | --- |
"""

TAIL = """
"Drain" is a worker that gives back what it holds before it stops. A job that the coordinator takes from a
session that may be alive waits one TTL of that session, so that its holder hears of it first; a job whose
lease has ended waits for nothing, unless many are lost together or it was lost before. Failures and lease
losses are counted apart: a crash burns no retry. All counters, also that of the {free} free returns, begin
again with a retry by hand. [Retries](retries.md) names the test of each row.
"""


def drawing() -> str:
    """The whole document."""
    ends = ENDS.format(retries=POLICY.max_retries, losses=POLICY.max_lease_losses)
    tail = TAIL.format(free=FREE_RETURNS)
    return HEAD + "".join(_diagram()) + BETWEEN + "".join(_transitions()) + ends + "".join(_ends()) + tail


def _targets(targets: frozenset[JobState | None]) -> list[JobState | None]:
    return sorted(targets, key=lambda state: (state is None, state or 0))


def _rows() -> list[tuple[JobState, type, frozenset[JobState | None], Guard]]:
    order = {command: number for number, command in enumerate(get_args(c.Command))}
    rows = [(state, command, row.targets, row.guard) for (state, command), row in TRANSITIONS.items()]
    return sorted(rows, key=lambda row: (row[0], order[row[1]]))


def _diagram() -> Iterator[str]:
    yield "```mermaid\nstateDiagram-v2\n"
    yield "    [*] --> PENDING: Submit\n    [*] --> SCHEDULED: Submit, to run later\n"
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, command, targets, _ in _rows():
        if command is c.Repair:
            continue
        for target in _targets(targets):
            if target is not state:
                end = "[*]" if target is None else target.name
                arrows.setdefault((state.name, end), []).append(command.__name__)
    for (start, end), names in arrows.items():
        yield f"    {start} --> {end}: {', '.join(names)}\n"
    yield "```\n"


def _transitions() -> Iterator[str]:
    yield f"| – | Submit | SCHEDULED, PENDING | {Guard.ABSENT.value} |\n"
    for state, command, targets, guard in _rows():
        to = ", ".join("deleted" if target is None else target.name for target in _targets(targets))
        yield f"| {state.name} | {command.__name__} | {to} | {guard.value} |\n"


def _job(*, failures: int = 0, losses: int = 0, uncharged: int = 0, stop: bool = False) -> tuple[Job, Claim]:
    """A RUNNING job and its claim."""
    terms = Terms(queue="q", type="t", submit_ms=NOW, retry=POLICY)
    submitted = decide(None, None, c.Submit(namespace="default", job_id="j", terms=terms), NOW)
    assert isinstance(submitted, Decision)
    claim = Claim(session="s", attempt=1, nonce=b"n", start_ms=NOW)
    claimed = decide(submitted.job, None, c.ClaimIt(claim=claim), NOW)
    assert isinstance(claimed, Decision)
    assert claimed.job is not None
    job = replace(
        claimed.job, failures=failures, lease_losses=losses, uncharged=uncharged, cancel_requested=stop
    )
    return job, replace(claim, token=TOKEN)


def _scenarios() -> Iterator[tuple[str, tuple[Job, Claim | None], c.Command]]:
    retries, losses = POLICY.max_retries, POLICY.max_lease_losses
    fail = c.Fail(token=TOKEN, digest=b"d")
    drain = c.Release(token=TOKEN, digest=b"d")
    timeout = c.TakeAway(token=TOKEN, why=c.Taken.TIMED_OUT, hold_ms=HOLD)
    missing = c.TakeAway(token=TOKEN, why=c.Taken.UNDELIVERED, hold_ms=HOLD)
    forced = c.TakeAway(token=TOKEN, why=c.Taken.CANCELLED, hold_ms=HOLD)
    lost = c.Lose(token=TOKEN)

    def gone(held: tuple[Job, Claim]) -> tuple[Job, None]:
        return held[0], None

    yield "success", _job(), c.Complete(token=TOKEN, digest=b"d")
    yield "success after a request to stop", _job(stop=True), c.Complete(token=TOKEN, digest=b"d")
    yield "failure, the first", _job(), fail
    yield "failure, the third", _job(failures=2), fail
    yield f"failure number {retries + 1}", _job(failures=retries), fail
    yield "failure that is not to be retried", _job(), replace(fail, no_retry=True)
    yield "failure after a request to stop", _job(stop=True), fail
    yield "drain: the worker gives it back", _job(), drain
    yield "released after a request to stop", _job(stop=True), drain
    yield "crash, lost lease: the first", gone(_job()), lost
    yield f"poison: lost lease number {losses + 1}", gone(_job(losses=losses)), lost
    yield "lost lease after a request to stop", gone(_job(stop=True)), lost
    yield "run or heartbeat timeout, the first", _job(), timeout
    yield f"timeout as failure number {retries + 1}", _job(failures=retries), timeout
    yield "timeout after a request to stop", _job(stop=True), timeout
    yield "claimed, but its session never says so", _job(), missing
    yield f"return number {FREE_RETURNS + 1} without charge", _job(uncharged=FREE_RETURNS), missing
    spent = _job(uncharged=FREE_RETURNS, losses=losses)
    yield f"the same, with {losses} lease losses behind it", spent, missing
    yield "forced cancel: the handler did not stop in its grace", _job(stop=True), forced


def _ends() -> Iterator[str]:
    for what, (job, claim), command in _scenarios():
        outcome = decide(job, claim, command, NOW)
        assert isinstance(outcome, Decision), what
        after = outcome.job
        assert after is not None
        counted = [
            name
            for name, grew in (
                ("failures", after.failures - job.failures),
                ("lease losses", after.lease_losses - job.lease_losses),
                ("uncharged returns", after.uncharged - job.uncharged),
            )
            if grew
        ]
        delay = "" if after.terminal else f"{(after.ready_ms - NOW) / 1000:g} s"
        ended = after.attempts[-1].outcome.name
        charged = ", ".join(counted) or "nothing"
        yield f"| {what} | {ended} | {charged} | {delay or '–'} | {after.state.name} |\n"


def main() -> int:
    """Write the document, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    text = drawing()
    if parser.parse_args().check:
        if OUTPUT.is_file() and OUTPUT.read_text() == text:
            return 0
        sys.stderr.write(
            f"{OUTPUT.relative_to(ROOT)} is not what the table says: run scripts/draw_states.py\n"
        )
        return 1
    OUTPUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
