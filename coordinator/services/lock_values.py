"""What the lock services take and give: plain values between the RPC layer and the use cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.core.lock_order import Line, LockEntry, LockMode

__all__ = ["LOCK", "HeldName", "LockListing", "LockView", "LockWish"]

LOCK: Final = "lock"
"""The kind of these resources in ``services.contention``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockWish:
    """Locks that a session wants, all or none. ``wait_ms`` 0: answer at once; ``names`` differ.

    ``repeats``: how often the request was sent before.
    """

    session_id: str
    request_id: str
    names: tuple[str, ...]
    mode: LockMode = LockMode.EXCLUSIVE
    permits: int = 1
    value: bytes = b""
    wait_ms: int = 0
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class HeldName:
    """A lock that its owner names, by its token."""

    name: str
    token: int


@dataclass(frozen=True, slots=True)
class LockView:
    """A lock as it stands at ``revision``, etcd's own."""

    name: str
    line: Line
    revision: int

    @property
    def owners(self) -> tuple[LockEntry, ...]:
        """Those who own it, in order."""
        return self.line.owners


@dataclass(frozen=True, slots=True)
class LockListing:
    """A page; ``cursor`` empty at the end."""

    locks: tuple[LockView, ...]
    cursor: str
