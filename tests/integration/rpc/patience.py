"""What is answered from memory is refused while a coordinator lists, also for a moment under load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from tests.unit.rpc.fakes import told

__all__ = ["when_ready"]

_TRIES = 500


async def when_ready(call: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of a call, made again while it is refused with NOT_READY; after 500 tries the refusal."""
    for left in range(_TRIES, 0, -1):
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if told(error).reason != "NOT_READY" or left == 1:
                raise
        await asyncio.sleep(0.01)
    raise AssertionError("unreachable")
