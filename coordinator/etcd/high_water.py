"""Remember, over restarts, how far the store's history had come: one small file in the state directory."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from coordinator.core.fencing import Position

__all__ = ["HighWaterFile"]

_log = logging.getLogger(__name__)


class HighWaterFile:
    """Blocking file access; call ``write`` in a thread.

    The file says what had been seen when it was written, up to a second before a crash. What was seen after
    that is not remembered: a restore to within that second goes unnoticed by this file.

    Args:
        folder: made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "high-water"

    def read(self) -> Position | None:
        """What was written last; None if there is nothing, or nothing readable."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        try:
            record = json.loads(text)
            return Position(int(record["epoch"]), int(record["revision"]))
        except (ValueError, KeyError, TypeError):
            _log.error("%s is unreadable: a fall of history before this start goes unseen", self._path)
            return None

    def write(self, position: Position) -> None:
        """Replace the file, durably.

        Raises:
            OSError: the disk says no.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with fresh.open("w") as file:
            json.dump({"format": 1, "epoch": position.epoch, "revision": position.revision}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
