"""A coordinator with a planted bug, a clock of its own or shorter loops. Run like ``python -m coordinator``.

The variable FAULT_PLAN tells what, as JSON: ``bug``, a name of `process_bugs.BUGS`; ``clock``, a file that
holds the milliseconds by which its wall clock is off; ``every_s``, the most seconds between two runs of a
pass; ``member_ttl_s``, how long it is remembered, and leads, after its death.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fault.support.process_bugs import BUGS

PLAN_VARIABLE = "FAULT_PLAN"


def apply(plan: dict[str, Any]) -> None:
    """Change this process as *plan* says."""
    if plan.get("every_s"):
        _hurry_the_passes(plan["every_s"])
    if plan.get("member_ttl_s"):
        _be_remembered(plan["member_ttl_s"])
    if plan.get("clock"):
        _bend_the_clock(Path(plan["clock"]))
    if plan.get("bug"):
        BUGS[plan["bug"]].plant()


def _hurry_the_passes(every_s: float) -> None:
    from coordinator.reconciler.loop import PassLoop

    make = PassLoop.__init__

    def hurried(
        self: PassLoop, name: str, step: Any, clock: Any, entropy: Any, config: Any, **more: Any
    ) -> None:
        config = replace(config, interval_s=min(config.interval_s, every_s))
        make(self, name, step, clock, entropy, config, **more)

    PassLoop.__init__ = hurried  # type: ignore[method-assign]


def _be_remembered(ttl_s: int) -> None:
    from coordinator.etcd import store

    make: Any = store.MembershipConfig
    changed: Any = store
    changed.MembershipConfig = lambda **given: make(**{**given, "ttl": ttl_s})


def _bend_the_clock(file: Path) -> None:
    """The wall clock alone; monotonic time stays true, as it does where somebody sets the time of a host."""
    from coordinator.app.machine import SystemClock

    def now_ms(self: SystemClock) -> int:
        return time.time_ns() // 1_000_000 + int(file.read_text() or "0")

    SystemClock.now_ms = now_ms  # type: ignore[method-assign]


def main() -> None:
    """Change the process, then be a coordinator."""
    apply(json.loads(os.environ[PLAN_VARIABLE]))
    from coordinator.cli.commands import commands_entry

    commands_entry(prog_name="leasekeeper")


if __name__ == "__main__":
    main()
