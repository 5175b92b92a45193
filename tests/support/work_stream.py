"""A worker's stream as a test drives it: messages up, and what came down, sorted."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Self

import grpc.aio

from leasekeeper.v1 import worker_service_pb2 as w

__all__ = ["Stream", "lane"]


def lane(*, jobs: int = 10, size: int = 0, queue: str = "mail", types: tuple[str, ...] = ("send",)) -> Any:
    """A lane of one queue."""
    return w.WorkLane(
        queues=[w.QueueTypes(queue=queue, types=types)], credit=w.WorkCredit(jobs=jobs, bytes=size)
    )


class Stream:
    """An open stream; use it as a context. Each kind of message down has a queue of its own."""

    def __init__(self, stub: Any, session_id: str, *lanes: Any, namespace: str = "") -> None:
        self._stub = stub
        self._open = w.WorkOpen(
            namespace=namespace, session_id=session_id, lanes=lanes, request_id=uuid.uuid4().hex
        )
        self.claims: asyncio.Queue[Any] = asyncio.Queue()
        self.settled: asyncio.Queue[Any] = asyncio.Queue()
        self.beats: asyncio.Queue[Any] = asyncio.Queue()
        self.stops: asyncio.Queue[Any] = asyncio.Queue()
        self.commands: asyncio.Queue[int] = asyncio.Queue()
        self.opened = asyncio.Event()
        self.coordinator_id = ""
        self.messages: list[str] = []
        self.error: grpc.aio.AioRpcError | None = None
        self._numbers = 0

    async def __aenter__(self) -> Self:
        self.call = self._stub.Work()
        await self.call.write(w.WorkRequest(open=self._open))
        self._reading = asyncio.create_task(self._read())
        opened = asyncio.create_task(self.opened.wait())
        await asyncio.wait((opened, self._reading), timeout=10, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.call.cancel()
        await asyncio.wait((self._reading,), timeout=5)

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self._sort(message)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass

    def _sort(self, message: Any) -> None:
        what = message.WhichOneof("what")
        self.messages.append(what)
        if what == "opened":
            self.coordinator_id = message.opened.coordinator_id
            self.opened.set()
        elif what == "claims":
            for claim in message.claims.claims:
                self.claims.put_nowait(claim)
        elif what == "stop":
            for stop in message.stop.stops:
                self.stops.put_nowait((stop.job_id, stop.fencing_token))
        elif what == "command":
            self.commands.put_nowait(message.command)
        else:
            (self.settled if what == "settled" else self.beats).put_nowait(getattr(message, what))

    async def claim(self, timeout: float = 5) -> Any:
        """The next claim."""
        async with asyncio.timeout(timeout):
            return await self.claims.get()

    async def credit(self, jobs: int, size: int = 0, lane: int = 0) -> None:
        """Leave for more."""
        await self.call.write(w.WorkRequest(credit=w.WorkCredit(jobs=jobs, bytes=size, lane=lane)))

    async def settle(self, *settlements: Any, timeout: float = 5) -> Any:
        """Settle, and the answer."""
        self._numbers += 1
        number = self._numbers
        await self.call.write(w.WorkRequest(settle=w.WorkSettle(number=number, settlements=settlements)))
        async with asyncio.timeout(timeout):
            answer = await self.settled.get()
        assert number == answer.number
        return answer

    async def complete(self, *claims: Any) -> list[Any]:
        """Complete, and the results."""
        done = [
            w.Settlement(job_id=c.job_id, fencing_token=c.fencing_token, complete=w.Completion())
            for c in claims
        ]
        return list((await self.settle(*done)).results)

    async def beat(self, number: int, *claims: Any, timeout: float = 5) -> Any:
        """Beat, and the answer."""
        beat = w.HeartbeatRequest(number=number)
        beat.sent_at.FromSeconds(number)
        for claim in claims:
            beat.claims.add(job_id=claim.job_id, fencing_token=claim.fencing_token, sequence=number)
        await self.call.write(w.WorkRequest(beat=beat))
        async with asyncio.timeout(timeout):
            return await self.beats.get()

    async def end(self, timeout: float = 10) -> grpc.aio.AioRpcError | None:
        """Wait until it has ended; why, None if in order."""
        await asyncio.wait((self._reading,), timeout=timeout)
        assert self._reading.done(), "the stream goes on"
        return self.error
