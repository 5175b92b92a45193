"""How a lock is shared, which locks and jobs that name them both say."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["LockMode"]


class LockMode(IntEnum):
    """How a lock is shared; numbers as on the wire."""

    EXCLUSIVE = 1
    SHARED = 2
    SEMAPHORE = 3
