"""Wait for a job's end, and follow jobs, without polling the store.

While anybody here waits or follows there is one watch for the namespace; a little after the last has gone
it ends. Whoever comes subscribes first and reads then, so no change falls between. A stream that resumes
from a revision has a watch of its own, and there are few of those.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from coordinator.errors import Reason, RequestError, StorageError
from coordinator.ports import Clock, JobStore
from coordinator.services.api import JobFilter, JobView, WatchedJob
from coordinator.services.queries import Queries
from coordinator.services.state_feed import JobWaiter, Reader, StateFeed
from coordinator.services.storage_errors import RETRY_MS, refused
from coordinator.services.waiting import wait_event

__all__ = ["Subscription", "SubscriptionConfig"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionConfig:
    """Bounds. Spans are seconds.

    ``max_wait_s``: longest wait of one call. ``linger_s``: how long an unused watch is kept. ``retry_s``:
    pause before a watch that ended is begun again. ``buffer``: messages kept for a slow reader.
    """

    max_wait_s: float = 30.0
    max_waiters: int = 10_000
    max_streams: int = 1_000
    max_resumed: int = 200
    buffer: int = 10_000
    linger_s: float = 5.0
    retry_s: float = 0.2
    start_s: float = 5.0


class Subscription:
    """WaitJob and WatchJobs.

    ``drain`` ends every wait and stream; ``close`` also ends the watches and awaits them.

    Args:
        store: gives the watches.
        queries: reads jobs.
        clock: bounds of waits.
        config: bounds.
    """

    def __init__(
        self, store: JobStore, queries: Queries, clock: Clock, config: SubscriptionConfig | None = None
    ) -> None:
        self._store = store
        self._queries = queries
        self._clock = clock
        self._config = config or SubscriptionConfig()
        self._feeds: dict[str, StateFeed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: set[JobWaiter] = set()
        self._readers: set[Reader] = set()
        self._resumed = 0
        self._draining = False

    async def wait(
        self, namespace: str, job_id: str, timeout_s: float, deadline: float
    ) -> tuple[JobView, bool]:
        """The job once it is terminal (True), or as it stands when the time is up or this process drains.

        Raises:
            RequestError: JOB_NOT_FOUND (also if it is deleted meanwhile), TOO_MANY_REQUESTS,
                ETCD_UNAVAILABLE, DRAINING.
        """
        self._admit(len(self._waiters) < self._config.max_waiters, "too many calls wait for jobs")
        ends = self._clock.monotonic() + min(timeout_s, self._config.max_wait_s)
        waiter = JobWaiter(job_id)
        async with self._using(namespace) as feed:
            self._waiters.add(waiter)
            feed.add_waiter(waiter)
            try:
                await self._standing(feed, deadline)
                view = await self._queries.get(namespace, job_id, deadline)
                while not view.stored.job.terminal and not self._draining:
                    remaining = ends - self._clock.monotonic()
                    if not await wait_event(self._clock, waiter.woken, remaining):
                        break
                    waiter.woken.clear()
                    waiter.changed = False
                    view = await self._queries.get(namespace, job_id, deadline)
                if waiter.changed and not view.stored.job.terminal:
                    view = await self._queries.get(namespace, job_id, deadline)
                return view, view.stored.job.terminal
            finally:
                feed.remove_waiter(waiter)
                self._waiters.discard(waiter)

    async def watch(
        self, namespace: str, filter: JobFilter, resume_revision: int
    ) -> AsyncIterator[WatchedJob]:
        """Changes of matching jobs, after a first message that tells only the revision they follow.

        Raises:
            RequestError: REVISION_COMPACTED; TOO_MANY_REQUESTS (too many streams, or a reader that is too
                slow, after
                all that was kept for it); ETCD_UNAVAILABLE; DRAINING. In each case resume from the last
                revision.
        """
        self._admit(len(self._readers) < self._config.max_streams, "too many streams follow jobs")
        reader = Reader(filter, self._config.buffer)
        self._readers.add(reader)
        try:
            source = (
                self._resume(namespace, reader, resume_revision)
                if resume_revision
                else self._join(namespace, reader)
            )
            async with source:
                if reader.error is None or reader.buffer:
                    yield WatchedJob(reader.start_revision)
                while True:
                    while reader.buffer:
                        yield reader.buffer.popleft()
                    if reader.error is not None:
                        raise reader.error
                    reader.woken.clear()
                    await reader.woken.wait()
        finally:
            self._readers.discard(reader)

    def drain(self) -> None:
        """Take no more; waits answer what they know, streams end with DRAINING."""
        self._draining = True
        for waiter in self._waiters:
            waiter.woken.set()
        for reader in self._readers:
            reader.end(_draining())

    async def close(self) -> None:
        """Drain, end the watches and await them."""
        self.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit(self, room: bool, message: str) -> None:
        if self._draining:
            raise _draining()
        if not room:
            raise RequestError(Reason.TOO_MANY_REQUESTS, message, retry_after_ms=RETRY_MS)

    @asynccontextmanager
    async def _using(self, namespace: str) -> AsyncIterator[StateFeed]:
        """The namespace's feed, kept alive inside the block."""
        feed = self._feeds.get(namespace)
        if feed is None:
            feed = StateFeed(self._store, namespace, self._clock, self._config.retry_s)
            self._feeds[namespace] = feed
            task = asyncio.create_task(self._keep(feed), name=f"state feed {namespace}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        feed.users += 1
        feed.unused.clear()
        try:
            yield feed
        finally:
            feed.users -= 1
            if not feed.users:
                feed.unused.set()

    async def _keep(self, feed: StateFeed) -> None:
        """Run the feed's watch until it has been unused for a while."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(feed.run())
                while feed.users or not feed.unused.is_set():
                    await feed.unused.wait()
                    await self._clock.sleep(self._config.linger_s)
                self._drop(feed)  # in one step with the check above: who comes from here on starts a new feed
                watching.cancel()
        finally:
            self._drop(feed)

    def _drop(self, feed: StateFeed) -> None:
        if self._feeds.get(feed.namespace) is feed:
            del self._feeds[feed.namespace]

    async def _standing(self, feed: StateFeed, deadline: float) -> None:
        seconds = min(self._config.start_s, deadline - self._clock.monotonic())
        if not await wait_event(self._clock, feed.standing, seconds):
            raise RequestError(
                Reason.ETCD_UNAVAILABLE, "etcd does not give a watch in time", retry_after_ms=RETRY_MS
            )

    @asynccontextmanager
    async def _join(self, namespace: str, reader: Reader) -> AsyncIterator[None]:
        async with self._using(namespace) as feed:
            await self._standing(feed, self._clock.monotonic() + self._config.start_s)
            feed.add_reader(reader)
            try:
                yield
            finally:
                feed.remove_reader(reader)

    @asynccontextmanager
    async def _resume(self, namespace: str, reader: Reader, revision: int) -> AsyncIterator[None]:
        self._admit(self._resumed < self._config.max_resumed, "too many streams resume")
        self._resumed += 1
        task = asyncio.create_task(
            self._follow(namespace, reader, revision), name=f"resumed watch {namespace}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if not await wait_event(self._clock, reader.begun, self._config.start_s):
                raise RequestError(
                    Reason.ETCD_UNAVAILABLE, "etcd does not give a watch in time", retry_after_ms=RETRY_MS
                )
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._resumed -= 1

    async def _follow(self, namespace: str, reader: Reader, revision: int) -> None:
        try:
            await self._store.watch_states(namespace, after_revision=revision, sink=reader)
        except StorageError as error:
            reader.end(refused(error))
        except Exception:
            _logger.exception("a resumed watch of namespace %s failed", namespace)
            reader.end(RequestError(Reason.INTERNAL, "the stream failed; resume from the last revision"))


def _draining() -> RequestError:
    return RequestError(Reason.DRAINING, "this coordinator is shutting down; go to another", retry_after_ms=0)
