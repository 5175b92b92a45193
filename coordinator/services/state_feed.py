"""One watch of a namespace's records, shared by everybody here who waits for a job or follows jobs."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

from coordinator.errors import (
    ClusterChanged,
    Compacted,
    FutureRevision,
    Reason,
    RequestError,
    StorageError,
)
from coordinator.ports import Clock, JobStore, Stored
from coordinator.services.api import JobFilter, WatchedJob
from coordinator.services.storage_errors import refused

__all__ = ["JobWaiter", "Reader", "StateFeed"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class JobWaiter:
    """Somebody who waits for the end of one job. ``woken`` is set when there is reason to read it again."""

    job_id: str
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    changed: bool = False


class Reader:
    """A follower's buffer: a ``StateSink`` that keeps what its filter lets through, up to a bound.

    A deleted job is known by its id alone, so only the filter's ids are asked about it. A job that changes
    so that it no longer matches is not reported.

    Args:
        filter: which jobs.
        limit: messages kept; one more ends the stream with TOO_MANY_REQUESTS after those that are kept.
    """

    def __init__(self, filter: JobFilter, limit: int) -> None:
        self._filter = filter
        self._limit = limit
        self.begun = asyncio.Event()
        self.woken = asyncio.Event()
        self.start_revision = 0
        self.buffer: deque[WatchedJob] = deque()
        self.error: RequestError | None = None

    def started(self, revision: int) -> None:
        """The stream stands after ``revision``."""
        if not self.begun.is_set():
            self.start_revision = revision
            self.begun.set()

    def changed(self, revision: int, job_id: str, stored: Stored | None) -> None:
        """Keep the change if it is asked for."""
        if self.error is not None:
            return
        ids = self._filter.job_ids
        wanted = self._filter.matches(stored.job) if stored is not None else not ids or job_id in ids
        if not wanted:
            return
        if len(self.buffer) >= self._limit:
            self.end(
                RequestError(
                    Reason.TOO_MANY_REQUESTS,
                    "the reader is too slow; resume from the last revision",
                    metadata={"resume_revision": str(self.buffer[-1].revision)},
                    retry_after_ms=0,
                )
            )
            return
        self.buffer.append(WatchedJob(revision, job_id, stored))
        self.woken.set()

    def end(self, error: RequestError) -> None:
        """No more changes follow; what is kept is still delivered."""
        if self.error is None:
            self.error = error
        self.begun.set()
        self.woken.set()


class StateFeed:
    """The shared watch of one namespace, and who listens to it.

    It goes on after every outage from the revision that it has seen. Where that is gone (compacted, another
    history) waiters read again and readers end, for they have missed changes.

    Args:
        store: gives the watch.
        namespace: whose records.
        clock: for pauses between tries.
        retry_s: that pause.
    """

    def __init__(self, store: JobStore, namespace: str, clock: Clock, retry_s: float) -> None:
        self._store = store
        self._clock = clock
        self._retry_s = retry_s
        self._waiters: dict[str, set[JobWaiter]] = {}
        self._readers: set[Reader] = set()
        self.namespace = namespace
        self.revision = 0
        self.standing = asyncio.Event()
        self.users = 0
        self.unused = asyncio.Event()

    def add_waiter(self, waiter: JobWaiter) -> None:
        """Wake it when its job ends, is deleted, or may have done so unseen."""
        self._waiters.setdefault(waiter.job_id, set()).add(waiter)

    def remove_waiter(self, waiter: JobWaiter) -> None:
        """It waits no more."""
        waiting = self._waiters.get(waiter.job_id, set())
        waiting.discard(waiter)
        if not waiting:
            self._waiters.pop(waiter.job_id, None)

    def add_reader(self, reader: Reader) -> None:
        """Deliver to it all that comes after the present revision; the feed must be standing."""
        self._readers.add(reader)
        reader.started(self.revision)

    def remove_reader(self, reader: Reader) -> None:
        """It reads no more."""
        self._readers.discard(reader)

    def started(self, revision: int) -> None:
        """The watch stands."""
        self.revision = max(self.revision, revision)
        self.standing.set()

    def changed(self, revision: int, job_id: str, stored: Stored | None) -> None:
        """Tell who listens."""
        self.revision = max(self.revision, revision)
        for waiter in self._waiters.get(job_id, ()):
            waiter.changed = True
            if stored is None or stored.job.terminal:
                waiter.woken.set()
        for reader in self._readers:
            reader.changed(revision, job_id, stored)

    async def run(self) -> None:
        """Watch until cancelled."""
        failing = False
        while True:
            try:
                await self._store.watch_states(self.namespace, after_revision=self.revision, sink=self)
                failing = False
            except (Compacted, FutureRevision, ClusterChanged) as error:
                self._missed(error)
            except StorageError as error:
                if not failing:
                    _logger.warning(
                        "the watch of namespace %s ended: %s; trying again", self.namespace, error
                    )
                failing = True
            except Exception:
                _logger.exception("the watch of namespace %s failed; trying again", self.namespace)
            await self._clock.sleep(self._retry_s)

    def _missed(self, error: StorageError) -> None:
        _logger.warning("namespace %s: changes were missed: %s", self.namespace, error)
        self.standing.clear()
        self.revision = 0
        for reader in self._readers:
            reader.end(refused(error))
        for waiting in self._waiters.values():
            for waiter in waiting:
                waiter.changed = True
                waiter.woken.set()
