"""One stream both ways: written by one task, read by another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import grpc.aio
from google.protobuf.message import Message

from worker_sdk.errors import LeasekeeperError, OutcomeUnknown

__all__ = ["Duplex"]

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class Duplex(Generic[Q, A]):
    """A stream to one coordinator. It has no deadline: its owner watches it, and cancels it.

    Args:
        call: the stream of grpc.aio.
        failure: makes the SDK's error of gRPC's.
        address: of the coordinator.
    """

    def __init__(
        self, call: Any, failure: Callable[[grpc.aio.AioRpcError], LeasekeeperError], address: str
    ) -> None:
        self._call = call
        self._failure = failure
        self.address = address

    async def write(self, message: Q) -> None:
        """Send one message; returns once gRPC has taken it.

        Raises:
            LeasekeeperError: it has ended.
        """
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            # Why, its reader is told.
            raise OutcomeUnknown("the stream has ended", reason="OUTCOME_UNKNOWN") from None

    async def done_writing(self) -> None:
        """Say that nothing more is sent. No error if the stream has ended."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return

    async def read(self) -> A | None:
        """Return the next message, None at an end in order.

        Raises:
            RequestError: what the coordinator ended the stream with, or that it is gone.
        """
        try:
            message: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        return None if message is grpc.aio.EOF else cast(A, message)

    def cancel(self) -> None:
        """End it now."""
        self._call.cancel()
