"""Where a worker's jobs come from: its stream, or polls where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from worker_sdk._claimer import Claimer, Holder
from worker_sdk._runner import Pool
from worker_sdk._stream_link import StreamLink
from worker_sdk._work import ClaimedJob

__all__ = ["ClaimFeed"]

_SWITCH_SECONDS = 8.0


class ClaimFeed:
    """Polls while they are needed: always without a stream, else while no stream can be had.

    Args:
        make: makes the claim loops, for a holder.
        holder: the worker.
        link: the stream; None: polls alone.
    """

    def __init__(
        self, make: Callable[[Holder], Sequence[Claimer]], holder: Holder, link: StreamLink | None
    ) -> None:
        self._make = make
        self._holder = holder
        self._link = link
        self._pollers: Sequence[Claimer] = ()

    def asking(self) -> Sequence[Claimer | StreamLink]:
        """Whoever asks for jobs now, for health checks."""
        return (*self._pollers, *((self._link,) if self._link is not None else ()))

    async def run(self) -> None:
        """See that jobs are asked for, until the worker stops.

        Raises:
            LeasekeeperError: an error that no repeat can mend, such as missing permission.
        """
        link, stopping = self._link, self._holder.stopping
        if link is None:
            await self._poll(self._holder)
            return
        stopped = asyncio.create_task(stopping.wait())
        try:
            while not stopping.is_set():
                needed = asyncio.create_task(link.needs_polls.wait())
                await asyncio.wait({needed, stopped}, return_when=asyncio.FIRST_COMPLETED)
                needed.cancel()
                if not stopping.is_set():
                    await self._poll_until_streaming(link, stopped)
            await link.quiet.wait()
        finally:
            stopped.cancel()

    async def _poll_until_streaming(self, link: StreamLink, stopped: asyncio.Task[bool]) -> None:
        enough = asyncio.Event()
        polling = asyncio.create_task(
            self._poll(replace(self._holder, stopping=enough, give_back=self._keep))
        )
        streaming = asyncio.create_task(link.joined.wait())
        try:
            await asyncio.wait({polling, streaming, stopped}, return_when=asyncio.FIRST_COMPLETED)
            enough.set()
            await asyncio.wait({polling}, timeout=_SWITCH_SECONDS)
            if polling.done():
                polling.result()
        finally:
            for task in (polling, streaming):
                task.cancel()
            await asyncio.gather(polling, streaming, return_exceptions=True)

    def _keep(self, generation: int, jobs: Sequence[ClaimedJob], pool: Pool) -> None:
        """What a poll brought that was ended for the stream's sake: it has its slots."""
        if self._holder.stopping.is_set():
            self._holder.give_back(generation, jobs, pool)
        else:
            self._holder.admit(generation, jobs, pool)

    async def _poll(self, holder: Holder) -> None:
        pollers = self._pollers = self._make(holder)
        tasks = [asyncio.create_task(poller.run()) for poller in pollers]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            self._pollers = ()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
