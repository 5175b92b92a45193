"""Spans that are a part of the fault: an outage that lasts, a TTL that must pass without anything happening.

What can be waited for is waited for with ``eventually``; this is for what must *not* happen meanwhile.
"""

from __future__ import annotations

import asyncio

__all__ = ["lapse"]


async def lapse(seconds: float) -> None:
    """Let so much time pass."""
    await asyncio.sleep(seconds)
