"""Wait for an event with a bound in the time of ``ports.Clock``."""

from __future__ import annotations

import asyncio

from coordinator.ports import Clock

__all__ = ["wait_event"]


async def wait_event(clock: Clock, event: asyncio.Event, seconds: float) -> bool:
    """Wait until ``event`` is set, at most ``seconds``; answers whether it is."""
    if event.is_set() or seconds <= 0:
        return event.is_set()
    sleeping = asyncio.ensure_future(clock.sleep(seconds))
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((sleeping, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleeping.cancel()
        waiting.cancel()
        await asyncio.gather(sleeping, waiting, return_exceptions=True)
    return event.is_set()
