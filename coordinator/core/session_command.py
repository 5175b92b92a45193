"""What an operator asks of a worker, and when. Pure."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["SessionCommand", "command_at"]


class SessionCommand(IntEnum):
    """What a worker is asked; the numbers are those of ``leasekeeper.v1.WorkerCommand``."""

    NONE = 0
    QUIET = 1
    TERMINATE = 2


def command_at(command: int, terminate_ms: int, now_ms: int) -> int:
    """What a beat is told at ``now_ms``: QUIET becomes TERMINATE at ``terminate_ms``, if that is not 0."""
    if command == SessionCommand.QUIET and 0 < terminate_ms <= now_ms:
        return SessionCommand.TERMINATE
    return command
