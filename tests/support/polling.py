"""Wait for a condition with a deadline, in place of long sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["eventually"]

T = TypeVar("T")


async def eventually(
    probe: Callable[[], T | Awaitable[T]], *, timeout: float = 5.0, interval: float = 0.01, what: str = ""
) -> T:
    """Return the first truthy result of *probe*, asked every *interval* seconds.

    Raises:
        AssertionError: none came within *timeout* seconds; it names *what* and the last result.
    """
    deadline = time.monotonic() + timeout
    while True:
        result = probe()
        if isinstance(result, Awaitable):
            result = await result
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{what or probe} not within {timeout} s; last: {result!r}")
        await asyncio.sleep(interval)
