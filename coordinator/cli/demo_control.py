"""How the demo's driver and its workers meet at one exact point: a claim is held, its write not yet made.

Everything is a file that appears by renaming, so either side may die at any moment. The driver lays out one
ticket for each thing that it wants to do to a worker. The first worker that reaches the point with a job of
the second half takes a ticket, says so, and waits there until it is killed, or is told to go on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["FREEZE", "KILL", "Control", "Held"]

KILL, FREEZE = "kill", "freeze"
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A worker that waits before its write."""

    worker: str
    pid: int
    job_id: str
    token: int


class Control:
    """The folder of tickets; one object for each process.

    Args:
        folder: where the files lie; must exist.
        pause: sleeps for some seconds.
    """

    def __init__(self, folder: Path, pause: Callable[[float], None] = time.sleep) -> None:
        self._folder = folder
        self._pause = pause
        self._has_ticket = False

    # --- the driver's side ----------------------------------------------------------------------------------

    def lay_ticket(self, ticket: str, first_number: int) -> None:
        """Offer a ticket to jobs whose number is ``first_number`` or above."""
        self._put(f"ticket-{ticket}", str(first_number))

    def held(self, ticket: str) -> Held | None:
        """Who took the ticket and waits; None as long as nobody does."""
        try:
            return Held(**json.loads((self._folder / f"held-{ticket}").read_text()))
        except FileNotFoundError:
            return None

    def let_go(self, ticket: str) -> None:
        """Let the worker that waits go on."""
        self._put(f"go-{ticket}", "")

    def finished(self, ticket: str) -> bool:
        """Whether the worker has done what it does after the wait."""
        return (self._folder / f"finished-{ticket}").exists()

    # --- the worker's side ----------------------------------------------------------------------------------

    def take_ticket(self, number: int) -> str | None:
        """Take a ticket for the job with this number, at most one in the life of a process."""
        if self._has_ticket:
            return None
        for ticket in (KILL, FREEZE):
            offered = self._folder / f"ticket-{ticket}"
            try:
                if number < int(offered.read_text()):
                    continue
                # Renaming succeeds for one taker alone.
                offered.rename(self._folder / f"taken-{ticket}")
            except FileNotFoundError:
                continue
            self._has_ticket = True
            return ticket
        return None

    def wait_here(self, ticket: str, held: Held) -> None:
        """Say who waits, and wait until told to go on."""
        self._put(f"held-{ticket}", json.dumps(asdict(held)))
        told = self._folder / f"go-{ticket}"
        while not told.exists():
            self._pause(_POLL_SECONDS)

    def finish(self, ticket: str) -> None:
        """Say that everything after the wait is done."""
        self._put(f"finished-{ticket}", "")

    def _put(self, name: str, content: str) -> None:
        draft = self._folder / f".{name}.{os.getpid()}"
        draft.write_text(content)
        draft.rename(self._folder / name)
