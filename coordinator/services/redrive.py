"""Retry many dead jobs by hand: a page of records at a time, and no faster than asked.

A call examines a bounded number of records, retries at most so many jobs, and ends before its deadline with a
token for the next call. It is no snapshot. A repeat of a call does nothing twice: what was retried is no
longer dead, or carries the digest of the request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from coordinator.core.job import FAILED, Job
from coordinator.core.machine import Decision, decide
from coordinator.errors import Reason, RequestError, StorageError
from coordinator.ports import Clock, JobStore, StorageGauge, Stored
from coordinator.services.api import Redriven, RedriveQuery
from coordinator.services.page_cursor import page_cursor, position_in
from coordinator.services.retrying import RetryCase, Retrying, command_of, storage_full
from coordinator.services.storage_errors import refused

__all__ = ["Redrive", "RedriveConfig"]

logger = logging.getLogger(__name__)

_QUERY_BYTES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveConfig:
    """Bounds of one RedriveJobs.

    ``page``: records read at once. ``max_examined``: records of a call. ``batch``: most jobs committed
    together. ``batches_per_second``: a second's worth is cut into so many. ``share``: of the time that a call
    has; the rest is left for the last batch and for the answer. ``full_retry_ms``: told while it is full.
    """

    page: int = 200
    max_examined: int = 20_000
    batch: int = 50
    batches_per_second: int = 10
    share: float = 0.8
    full_retry_ms: int = 5_000


@dataclass(slots=True)
class _Run:
    """One call under way. Times are of the monotonic clock."""

    query: RedriveQuery
    next_at: float
    until: float
    deadline: float
    position: str
    finished: bool = False
    taken: int = 0
    examined: int = 0
    job_ids: list[str] = field(default_factory=list)
    failures: list[tuple[str, RequestError]] = field(default_factory=list)


class Redrive:
    """RedriveJobs.

    Args:
        store: where jobs are.
        retrying: retries them.
        gauge: whether there is room.
        clock: deadlines and pace.
        config: bounds.
    """

    def __init__(
        self,
        store: JobStore,
        retrying: Retrying,
        gauge: StorageGauge,
        clock: Clock,
        config: RedriveConfig | None = None,
    ) -> None:
        self._store = store
        self._retrying = retrying
        self._gauge = gauge
        self._clock = clock
        self._config = config or RedriveConfig()

    async def redrive(self, namespace: str, query: RedriveQuery, deadline: float) -> Redriven:
        """Retry what matches, from where ``query.cursor`` says; an empty cursor in the answer ends it.

        Raises:
            RequestError: VALIDATION_FAILED (a cursor of another query), STORAGE_FULL, ETCD_UNAVAILABLE; each
                only if nothing was done.
        """
        mark = _mark(namespace, query)
        began = self._clock.monotonic()
        run = _Run(
            query=query,
            next_at=began,
            until=began + max(0.0, deadline - began) * self._config.share,
            deadline=deadline,
            position=position_in(query.cursor, mark, from_start=True),
        )
        if not query.validate_only and not self._gauge.accepts_submissions:
            raise storage_full(self._config.full_retry_ms)
        while self._goes_on(run):
            try:
                if not await self._page(namespace, run):
                    break
            except StorageError as error:
                if not run.taken:
                    raise refused(error) from error
                break  # what was done is told; the next call meets the error
        if run.job_ids and not query.validate_only:
            logger.info("jobs retried by hand: %d", len(run.job_ids))
        return Redriven(
            job_ids=tuple(run.job_ids),
            failures=tuple(run.failures),
            examined=run.examined,
            cursor="" if run.finished else page_cursor(mark, run.position),
        )

    def _goes_on(self, run: _Run) -> bool:
        if run.taken >= run.query.max_jobs or run.examined >= self._config.max_examined:
            return False
        return self._clock.monotonic() < run.until and (
            run.query.validate_only or self._gauge.accepts_submissions
        )

    async def _page(self, namespace: str, run: _Run) -> bool:
        """Work off one page; says whether to go on.

        One that is cut short is read again by the next call, which finds what was retried no longer dead.
        """
        query = run.query
        room = query.max_jobs - run.taken
        if not query.validate_only:
            # Not more than time is left for, so that pages are seldom cut short.
            left = run.until - self._clock.monotonic()
            room = min(room, max(1, int(left * query.jobs_per_second)))
        limit = self._config.page
        while True:
            page = await self._store.list_jobs(
                namespace,
                cursor=run.position,
                limit=limit,
                deadline=run.deadline,
                states=query.states or FAILED,
            )
            matching = [stored for stored in page.jobs if self._matches(query, stored.job)]
            if len(matching) <= room:
                break
            limit = max(1, limit // 2)  # the store's own cursor says where the next page begins
        if not await self._retry(matching, run):
            return False
        run.examined += page.examined
        run.position = page.cursor
        run.finished = not page.cursor
        return not run.finished

    async def _retry(self, matching: Sequence[Stored], run: _Run) -> bool:
        """Retry them at the pace that is asked for; whether there was time for all of them."""
        query, config = run.query, self._config
        if query.validate_only:
            run.taken += len(matching)
            run.job_ids += [stored.job.job_id for stored in matching]
            return True
        command = command_of(query.request_id)
        size = max(1, min(config.batch, query.jobs_per_second // config.batches_per_second))
        for start in range(0, len(matching), size):
            if run.next_at >= run.until:
                return False
            pause = run.next_at - self._clock.monotonic()
            if pause > 0:
                await self._clock.sleep(pause)
            if not self._goes_on(run):
                return False
            cases = [RetryCase(stored.job.job_id, stored) for stored in matching[start : start + size]]
            run.next_at = max(run.next_at, self._clock.monotonic()) + len(cases) / query.jobs_per_second
            await self._retrying.retry_each(cases, command, run.deadline)
            run.taken += len(cases)
            for case in cases:
                if case.revived:
                    run.job_ids.append(case.job_id)
                elif case.error is not None and case.error.reason is not Reason.JOB_NOT_FOUND:
                    run.failures.append((case.job_id, case.error))
        return True

    def _matches(self, query: RedriveQuery, job: Job) -> bool:
        if not query.matches(job):
            return False
        return isinstance(decide(job, None, command_of(query.request_id), self._clock.now_ms()), Decision)


def _mark(namespace: str, query: RedriveQuery) -> str:
    """What tells the tokens of one query from those of another: all that says which jobs it is about."""
    said = (
        namespace,
        sorted(query.states),
        query.queue,
        query.type,
        sorted(query.labels.items()),
        query.failure_type,
        query.settled_before_ms,
    )
    return sha256(repr(said).encode()).hexdigest()[: 2 * _QUERY_BYTES]
