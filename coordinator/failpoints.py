"""Named places at which a test can hold, delay or end a coordinator; inert unless a test armed them.

``leasekeeper serve`` and ``reconciler`` arm them from the variable LEASEKEEPER_FAILPOINTS, and only with
``--allow-failpoints``: without the flag a set variable is refused at start. Nothing else arms them, so that
elsewhere a point costs one look into an empty table.

The text is a list of ``point=action``, separated by semicolons:

* ``pause:FILE``: touch ``FILE.reached``, then wait until FILE exists;
* ``exit``: end the process at once, as SIGKILL would (nothing is flushed, nothing is closed);
* ``delay:SECONDS``: wait so long.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.errors import ConfigError

__all__ = ["EXIT_CODE", "POINTS", "VARIABLE", "arm", "disarm", "reached"]

VARIABLE: Final = "LEASEKEEPER_FAILPOINTS"
EXIT_CODE: Final = 86
"""What a process ends with that was told to ``exit``: tells it from every other end."""

POINTS: Final = frozenset(
    {
        "submit.before-commit",
        "submit.after-commit",
        "claim.before-commit",
        "claim.after-commit",
        "settle.before-commit",
        "settle.after-commit",
        "change.before-commit",
        "change.after-commit",
        "retry.before-commit",
        "retry.after-commit",
        "lost.before-commit",
        "lost.after-commit",
        "due.before-commit",
        "due.after-commit",
        "take-away.before-commit",
        "take-away.after-commit",
        "overdue.before-commit",
        "overdue.after-commit",
        "repair.before-commit",
        "lock.before-commit",
        "lock.after-commit",
        "lock.in-line",
        "unlock.before-commit",
        "unlock.after-commit",
    }
)
"""``change`` is CancelJob, UpdateJob and DeleteJob, ``settle`` CompleteJob, FailJob and ReleaseJob,
``lock`` AcquireLock, ``unlock`` ReleaseLock. Before: what was read and decided is not sent yet. After: etcd
has it, and nobody has been told. In line: the entry stands, and its call is about to wait."""

_POLL_S: Final = 0.01
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Action:
    """What happens at a point: end the process, or wait for ``file`` or ``seconds``."""

    ends: bool = False
    file: Path | None = None
    seconds: float = 0.0


_armed: dict[str, _Action] = {}


def arm(text: str) -> None:
    """Arm the points that *text* names, in place of those armed before, and say so in the log.

    Raises:
        ConfigError: there is no such point, or the action cannot be read; nothing is armed then.
    """
    wanted: dict[str, _Action] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        point, equals, action = part.partition("=")
        if not equals or point not in POINTS:
            raise ConfigError(f"{VARIABLE}: {part!r} names no point; points are {sorted(POINTS)}")
        wanted[point] = _action(part, action)
    disarm()
    _armed.update(wanted)
    for point, what in wanted.items():
        _LOG.critical(
            "FAILPOINT ARMED, this process will hurt itself", extra={"point": point, "does": str(what)}
        )


def disarm() -> None:
    """Make every point inert."""
    _armed.clear()


async def reached(point: str) -> None:
    """Do what a test wants done at *point*; returns at once if that is nothing."""
    if _armed:
        action = _armed.get(point)
        if action is not None:
            await _act(point, action)


def _action(part: str, text: str) -> _Action:
    kind, _, value = text.partition(":")
    if text == "exit":
        return _Action(ends=True)
    if kind == "pause" and value:
        return _Action(file=Path(value))
    if kind == "delay":
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if 0 < seconds < 3600:
            return _Action(seconds=seconds)
    raise ConfigError(f"{VARIABLE}: the action of {part!r} must be pause:FILE, exit or delay:SECONDS")


async def _act(point: str, action: _Action) -> None:
    if action.ends:
        os._exit(EXIT_CODE)
    _LOG.warning("failpoint reached", extra={"point": point})
    if action.file is None:
        await asyncio.sleep(action.seconds)
        return
    await asyncio.to_thread(action.file.with_name(f"{action.file.name}.reached").touch)
    while not await asyncio.to_thread(action.file.exists):  # noqa: ASYNC110 - another process makes the file
        await asyncio.sleep(_POLL_S)
