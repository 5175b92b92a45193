"""Where time, randomness and ids come from; tests put others in their place."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

__all__ = ["Seams", "boottime", "default_identity"]


def boottime() -> float:
    """Return seconds on a clock that never falls and, where the system has one, also counts while it sleeps.

    CLOCK_BOOTTIME, because a machine that slept through its TTL must not believe in its claims on waking.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def _identifier() -> str:
    return uuid.uuid4().hex


def default_identity() -> str:
    """Return host and pid of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """Clock (seconds, see `boottime`), sleep of the event loop, a fraction in 0-1, and a new unique id."""

    now: Callable[[], float] = boottime
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    fraction: Callable[[], float] = random.random
    identifier: Callable[[], str] = _identifier
