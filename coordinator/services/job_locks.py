"""What is known of the locks that jobs name: whether a claim could take them now, and how far that is known.

It only proposes, as the index does; the Txn of the claim compares. Claims on their way count as owners, so
that of the jobs that name one lock no more are proposed than it admits.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from coordinator.core.fencing import split_token
from coordinator.core.job import Job, JobLock, JobState
from coordinator.core.job_locks import entries_of
from coordinator.core.lock_order import LockEntry, job_waiter
from coordinator.errors import RequestError
from coordinator.ports import Commit, LockStore, Operation
from coordinator.services.lock_lines import LockLines
from coordinator.services.lock_refusals import lock_held, permits_mismatch

__all__ = ["Bar", "JobLocks"]

_log = logging.getLogger(__name__)

_RUNNING: Final = JobState.RUNNING
_TOLD: Final = 1_000
"""Contradictions that were logged and are remembered."""


class Bar(NamedTuple):
    """The first lock that keeps a job from being claimed, and the entry whose permits it contradicts."""

    lock: JobLock
    rival: LockEntry | None = None


class JobLocks:
    """Implements ``ports.CommitObserver``.

    Args:
        lines: what is known of locks.
        store: for a look at a line.
        token: the fencing token of an entry.
        changed: called with (namespace, name) when a lock may admit somebody; it must not block.
    """

    def __init__(
        self,
        lines: LockLines,
        store: LockStore,
        *,
        token: Callable[[LockEntry], int],
        changed: Callable[[str, str], None],
    ) -> None:
        self._lines = lines
        self._store = store
        self._token = token
        self._changed = changed
        self._flying: dict[tuple[str, str], dict[str, JobLock]] = {}
        self._told: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def bar(self, job: Job) -> Bar | None:
        """What keeps the job from being claimed now, as far as is known."""
        for lock in job.terms.locks:
            bar = self.bar_of(job, lock)
            if bar is not None:
                return bar
        return None

    def bar_of(self, job: Job, lock: JobLock, more: int = 0) -> Bar | None:
        """Whether this lock keeps the job from being claimed. ``more``: so many like it are about to own."""
        line = self._lines.line(job.namespace, lock.name)
        flying = self._flying.get((job.namespace, lock.name))
        if not line.owners and not flying and not more:
            return None  # without owners nobody waits
        wish = LockEntry(
            name=lock.name, waiter=job_waiter(job.job_id), session="", mode=lock.mode, permits=lock.permits
        )
        rival = line.disagrees(wish)
        if rival is not None:
            self._tell(job, lock, rival)
            return Bar(lock, rival)
        if not line.admits(wish) or any(owner.waiter == wish.waiter for owner in line.owners):
            return Bar(lock)  # an entry of its own that an end has left behind is for the reconciler
        others = [other for job_id, other in (flying or {}).items() if job_id != job.job_id]
        if any((other.mode, other.permits) != (lock.mode, lock.permits) for other in others):
            return Bar(lock)
        places = wish.places
        if places is not None and len(line.owners) + len(others) + more >= places:
            return Bar(lock)
        return None

    def revisions(self, job: Job) -> tuple[int, ...]:
        """Of each of its locks, up to where every entry that stands is known."""
        return tuple([self._lines.compared_to(job.namespace, lock.name) for lock in job.terms.locks])

    def begin(self, job: Job) -> None:
        """A claim is proposed; whoever says so says ``landed`` too."""
        for lock in job.terms.locks:
            self._flying.setdefault((job.namespace, lock.name), {})[job.job_id] = lock

    def landed(self, jobs: Iterable[Job]) -> None:
        """These claims are under way no more, whatever became of them."""
        for job in jobs:
            for lock in job.terms.locks:
                place = (job.namespace, lock.name)
                flying = self._flying.get(place)
                if flying is None or flying.pop(job.job_id, None) is None:
                    continue
                if not flying:
                    del self._flying[place]
                self._changed(*place)

    def met(self, namespace: str, commit: Commit) -> None:
        """A claim lost, and read the lines of its locks."""
        for name, entries in (commit.lines or {}).items():
            self._lines.looked(namespace, name, entries, commit.revision)

    async def look(self, job: Job, deadline: float) -> None:
        """Ask the store how the lines of its locks stand.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """
        names = [lock.name for lock in job.terms.locks]
        read = await self._store.read(job.namespace, names, deadline=deadline)
        for name, entries in read.entries.items():
            self._lines.looked(job.namespace, name, entries, read.revision)

    def refusal(self, job: Job) -> RequestError | None:
        """What a caller who wants this very job is told of its locks."""
        bar = self.bar(job)
        if bar is None:
            return None
        lock = bar.lock
        if bar.rival is not None:
            wish = LockEntry(name=lock.name, waiter="", session="", mode=lock.mode, permits=lock.permits)
            return permits_mismatch(wish, bar.rival)
        return lock_held(lock.name, self._lines.line(job.namespace, lock.name), self._token)

    # -- ports.CommitObserver

    def applied(self, operation: Operation, commit: Commit) -> None:
        """An own claim has taken its locks, or the end of one has given them back."""
        job = operation.after
        if operation.claim is not None and job is not None:
            if job.terms.locks:
                entries = entries_of(job, operation.claim, commit.revision)
                self._lines.put(job.namespace, entries, complete=True)
            return
        before = operation.before
        if before is None or before.job.state is not _RUNNING or not before.job.terms.locks:
            return
        if job is not None and job.state is _RUNNING:
            return
        self._given_back(before.job, operation.token)

    def _given_back(self, job: Job, token: int) -> None:
        current = job.current
        if current is None or not token:
            return  # lost with its session: the watch tells
        revision = split_token(token).revision
        for lock in job.terms.locks:
            entry = self._lines.entry(job.namespace, lock.name, session=current.session, revision=revision)
            if entry is not None:
                self._lines.deleted(job.namespace, entry)
                self._changed(job.namespace, lock.name)

    def _tell(self, job: Job, lock: JobLock, rival: LockEntry) -> None:
        """Once for each job and lock: only a change of the one or the other can help."""
        told = (job.namespace, job.job_id, lock.name)
        if told in self._told:
            return
        self._told[told] = None
        if len(self._told) > _TOLD:
            self._told.popitem(last=False)
        _log.warning(
            "a job waits for a semaphore that is used with another number of permits",
            extra={
                "namespace": job.namespace,
                "job": job.job_id,
                "lock": lock.name,
                "asked": lock.permits,
                "current": rival.permits,
            },
        )
