"""The folder of a development server: who uses it now, and where everything lies in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

__all__ = ["DevFolder", "FolderBusy", "FolderUnusable"]


class FolderBusy(RuntimeError):
    """Another process uses the folder."""


class FolderUnusable(RuntimeError):
    """The folder cannot be made or written."""


class DevFolder:
    """Paths below one folder.

    Args:
        root: the folder; made when it is locked.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.etcd = self.root / "etcd"
        self.valkey = self.root / "valkey"
        self.state = self.root / "coordinator"
        self.endpoints = self.root / "endpoints.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. The kernel lets go of the lock whenever the process ends, however it ends.

        A folder that is made here hides itself from git, as it may well lie in somebody's work tree.

        Raises:
            FolderBusy: another process holds it; the message names its pid.
            FolderUnusable: it is no folder, or cannot be made or written.
        """
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                raise FolderBusy(f"{self.root} is in use by process {owner}") from error
            lock.seek(0)
            lock.truncate()
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    def _lock_file(self) -> TextIO:
        try:
            if not self.root.exists():
                self.root.mkdir(parents=True)
                (self.root / ".gitignore").write_text("*\n")
            return open(self.root / "lock", "a+", encoding="ascii")
        except OSError as error:
            raise FolderUnusable(f"{self.root} cannot be used: {error.strerror or error}") from error

    @contextlib.contextmanager
    def announced(self, endpoints: Mapping[str, str]) -> Iterator[None]:
        """Keep ``endpoints.json`` in the folder, for scripts."""
        draft = self.endpoints.with_suffix(".draft")
        draft.write_text(json.dumps(dict(endpoints), indent=2) + "\n")
        draft.rename(self.endpoints)
        try:
            yield
        finally:
            self.endpoints.unlink(missing_ok=True)
