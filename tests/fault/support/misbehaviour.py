"""How the handlers of `worker_program` misbehave where a job's payload tells them to."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

__all__ = ["misbehave", "swallow_cancels"]

_POLL = 0.01


class TwoArguments(Exception):
    """What pickle cannot bring back: it needs two arguments and keeps one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}{second}")


def misbehave(told: dict[str, Any], attempt: int) -> None:
    """Do what ``wrong`` says, in the first ``attempts`` attempts (default: in each).

    ``die``: SIGKILL to the own process; ``block``: sleep ``span`` seconds on whatever thread this is;
    ``hold-gil``: the same without letting any other thread run Python; any other: raise the exception of that
    name.
    """
    wrong = told.get("wrong", "")
    if not wrong or wrong == "swallow" or attempt > told.get("attempts", attempt):
        return
    if wrong == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong == "block":
        time.sleep(told["span"])
    elif wrong == "hold-gil":
        # PyDLL, unlike CDLL, keeps the GIL during the call, as a long match of a regular expression does.
        ctypes.PyDLL(None).usleep(int(told["span"] * 1e6))
    elif wrong == "TwoArguments":
        raise TwoArguments("one", "two")
    elif wrong == "CancelledError":
        raise asyncio.CancelledError("of the handler's own making")
    else:
        raise getattr(builtins, wrong)("told to raise")


async def swallow_cancels(told: dict[str, Any], gates: Path) -> None:
    """With ``wrong``: ``swallow``, wait for the file ``let-go`` in *gates*, whoever cancels this."""
    while told.get("wrong") == "swallow" and not (gates / "let-go").exists():
        try:
            await asyncio.sleep(_POLL)
        except BaseException:  # noqa: BLE001 - the very mistake that is tested
            continue
