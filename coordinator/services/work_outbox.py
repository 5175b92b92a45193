"""What is to be written to one worker's stream: many producers, one writer.

Bounded by what fills it, not by a number of its own: claims by the worker's credits, requests to stop by its
claims, answers by the calls that it may have under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from coordinator.services.api import ClaimedJob

__all__ = ["Answer", "Outbox", "Outgoing", "StopAsked", "claimed_bytes"]

_CLAIMS_A_MESSAGE: Final = 100
_BYTES_A_MESSAGE: Final = 3 << 20


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody asks the holder of this claim to stop."""

    job_id: str
    token: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A message of the caller's own making, sent as it is."""

    message: object


Outgoing = list[ClaimedJob] | list[StopAsked] | Answer
"""What becomes one message."""


class Outbox:
    """The buffer of one stream.

    What was taken has been handed to the transport, and may have reached the worker; what was not, cannot.
    """

    def __init__(self) -> None:
        self._claims: deque[ClaimedJob] = deque()
        self._stops: deque[StopAsked] = deque()
        self._answers: deque[Answer] = deque()
        self._woken = asyncio.Event()
        self._ended = False
        self._delivers = True
        self._error: Exception | None = None
        self.drained = asyncio.Event()
        self.drained.set()

    @property
    def waiting_claims(self) -> int:
        """Claims that the writer has not taken yet."""
        return len(self._claims)

    def put_claims(self, claims: list[ClaimedJob]) -> bool:
        """Send claims; False: too late, nothing was taken in."""
        if self._ended:
            return False
        self._claims.extend(claims)
        self.drained.clear()
        self._woken.set()
        return True

    def put_stop(self, stop: StopAsked) -> None:
        """Send a request to stop; the same one twice is sent once, as long as it waits."""
        if not self._ended and stop not in self._stops:
            self._stops.append(stop)
            self._woken.set()

    def put_answer(self, message: object) -> None:
        """Send a message."""
        if not self._ended:
            self._answers.append(Answer(message))
            self._woken.set()

    def end(self, error: Exception | None = None, *, deliver: bool = False) -> None:
        """Nothing more comes. Answers that wait are still written, then ``take`` raises ``error``.

        Claims that wait are written with ``deliver`` alone: see ``withdraw``.
        """
        if not self._ended:
            self._ended, self._error = True, error
        self._delivers = self._delivers and deliver
        self._woken.set()

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._ended

    async def take(self) -> Outgoing | None:
        """What becomes the next message; None at the end.

        Raises:
            Exception: what the stream ended with.
        """
        while True:
            # Claims before requests to stop, so that nobody is told to stop what it has not heard of.
            if self._claims and (self._delivers or not self._ended):
                return self._some_claims()
            if self._answers:
                return self._answers.popleft()
            if self._stops:
                stops = list(self._stops)
                self._stops.clear()
                return stops
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._woken.clear()
            await self._woken.wait()

    def withdraw(self) -> list[ClaimedJob]:
        """The claims that no writer has taken; they are sent no more."""
        left = list(self._claims)
        self._claims.clear()
        self.drained.set()
        return left

    def _some_claims(self) -> list[ClaimedJob]:
        claims: list[ClaimedJob] = []
        size = 0
        while self._claims and len(claims) < _CLAIMS_A_MESSAGE:
            one = claimed_bytes(self._claims[0])
            if claims and size + one > _BYTES_A_MESSAGE:
                break
            size += one
            claims.append(self._claims.popleft())
        if not self._claims:
            self.drained.set()
        return claims


def claimed_bytes(claimed: ClaimedJob) -> int:
    """What a claimed job counts against credits: its payload and its checkpoint."""
    checkpoint = claimed.checkpoint
    return len(claimed.spec.payload) + (len(checkpoint.data) if checkpoint is not None else 0)
