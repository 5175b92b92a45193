"""Read jobs: one with all that is known of it, or pages of many.

A listing examines a bounded number of records a call and may answer a short page, also an empty one, with a
cursor. It is no snapshot: a job that changes meanwhile is seen before or after its change, and each job
that stays is seen once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from coordinator.core.job import Claim, JobState, Progress
from coordinator.errors import CodecError, FieldViolation, Reason, RequestError, StorageError
from coordinator.ports import JobPage, JobStore, Snapshot, Stored
from coordinator.services.api import JobFilter, JobListing, JobView
from coordinator.services.page_cursor import page_cursor, position_in
from coordinator.services.storage_errors import refused

__all__ = ["Beats", "Queries", "QueriesConfig", "not_found", "view_of"]

_FILTER_BYTES = 6


class Beats(Protocol):
    """What beats told of running jobs; ``services.holders.Holders`` is one."""

    def progress(self, namespace: str, job_id: str) -> Progress | None:
        """The progress told last."""

    def last_beat_ms(self, namespace: str, job_id: str) -> int:
        """Unix milliseconds of the last beat, 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueriesConfig:
    """Bounds of one ListJobs: records examined, records asked for at once, ids named in the filter."""

    max_examined: int = 2_000
    max_read: int = 500
    max_named: int = 1_000


def not_found(job_id: str) -> RequestError:
    """JOB_NOT_FOUND for ``job_id``."""
    return RequestError(Reason.JOB_NOT_FOUND, "there is no such job", metadata={"job_id": job_id})


def view_of(stored: Stored, claim: Claim | None, beats: Beats, snapshot: Snapshot | None = None) -> JobView:
    """Put together what is known of a job.

    Args:
        stored: its record.
        claim: its claim.
        beats: asked about a running job only.
        snapshot: where spec, checkpoint and a large result come from, if they were read.
    """
    job = stored.job
    progress, last_beat_ms = job.progress, 0
    if snapshot is not None and snapshot.checkpoint is not None:
        progress = progress or snapshot.checkpoint.progress
    if job.state is JobState.RUNNING:
        progress = beats.progress(job.namespace, job.job_id) or progress
        last_beat_ms = beats.last_beat_ms(job.namespace, job.job_id)
    token = claim.token if claim is not None else 0
    if not token:
        token = next((attempt.token for attempt in reversed(job.attempts) if attempt.token), 0)
    result = snapshot.result if snapshot is not None and snapshot.result is not None else job.result
    return JobView(
        stored=stored,
        claim=claim,
        spec=snapshot.spec if snapshot is not None else None,
        result=result,
        progress=progress,
        last_beat_ms=last_beat_ms,
        token=token,
    )


class Queries:
    """GetJob, ListAttempts and ListJobs.

    Args:
        store: where jobs are.
        beats: what beats told.
        config: bounds.
    """

    def __init__(self, store: JobStore, beats: Beats, config: QueriesConfig | None = None) -> None:
        self._store = store
        self._beats = beats
        self._config = config or QueriesConfig()

    async def get(self, namespace: str, job_id: str, deadline: float) -> JobView:
        """The job with spec, result, claim and progress, all of one revision save what beats told.

        Raises:
            RequestError: JOB_NOT_FOUND, ETCD_UNAVAILABLE.
        """
        try:
            snapshot = await self._store.read(
                namespace, job_id, deadline=deadline, spec=True, checkpoint=True, result=True
            )
        except (StorageError, CodecError) as error:
            raise refused(error, {"job_id": job_id}) from error
        if snapshot.stored is None:
            raise not_found(job_id)
        return view_of(snapshot.stored, snapshot.claim, self._beats, snapshot)

    async def attempts(self, namespace: str, job_id: str, deadline: float) -> JobView:
        """The job with the attempts that its record remembers, and its claim.

        Raises:
            RequestError: JOB_NOT_FOUND, ETCD_UNAVAILABLE.
        """
        try:
            snapshot = await self._store.read(namespace, job_id, deadline=deadline)
        except (StorageError, CodecError) as error:
            raise refused(error, {"job_id": job_id}) from error
        if snapshot.stored is None:
            raise not_found(job_id)
        return view_of(snapshot.stored, snapshot.claim, self._beats)

    async def list(
        self, namespace: str, filter: JobFilter, page_size: int, cursor: str, deadline: float
    ) -> JobListing:
        """The next page of jobs that match, at most ``page_size``; an empty cursor ends the listing.

        Raises:
            RequestError: VALIDATION_FAILED (a cursor of another query, too many ids), ETCD_UNAVAILABLE.
        """
        try:
            if filter.job_ids:
                return await self._named(namespace, filter, cursor, deadline)
            return await self._scan(namespace, filter, page_size, cursor, deadline)
        except (StorageError, CodecError) as error:
            raise refused(error) from error

    async def _scan(
        self, namespace: str, filter: JobFilter, page_size: int, cursor: str, deadline: float
    ) -> JobListing:
        query = _fingerprint(namespace, filter)
        position = position_in(cursor, query)
        found: list[Stored] = []
        budget = self._config.max_examined
        while budget > 0 and len(found) < page_size:
            limit = min(self._config.max_read, budget, max(page_size - len(found), 50))
            page = await self._store.list_jobs(namespace, cursor=position, limit=limit, deadline=deadline)
            matches = self._matches(page, filter)
            room = page_size - len(found)
            while len(matches) > room:
                # Read again what fits, so that the store's own cursor says where the next page goes on. Each
                # round asks for fewer records, whatever has changed there meanwhile.
                limit = matches[room - 1] + 1
                page = await self._store.list_jobs(namespace, cursor=position, limit=limit, deadline=deadline)
                matches = self._matches(page, filter)
            found += [page.jobs[n] for n in matches]
            position = page.cursor
            budget -= limit
            if not position:
                return JobListing(tuple(found), "")
        return JobListing(tuple(found), page_cursor(query, position))

    @staticmethod
    def _matches(page: JobPage, filter: JobFilter) -> Sequence[int]:
        return [n for n, stored in enumerate(page.jobs) if filter.matches(stored.job)]

    async def _named(self, namespace: str, filter: JobFilter, cursor: str, deadline: float) -> JobListing:
        """Jobs named in the filter are read, not searched for; they are one page."""
        position_in(cursor, _fingerprint(namespace, filter))
        if len(filter.job_ids) > self._config.max_named:
            raise _invalid("job_ids", f"{len(filter.job_ids)} ids, at most {self._config.max_named}")
        found = await self._store.read_many(namespace, sorted(filter.job_ids), deadline=deadline)
        jobs = [snapshot.stored for snapshot in found if snapshot.stored is not None]
        return JobListing(tuple(stored for stored in jobs if filter.matches(stored.job)), "")


def _fingerprint(namespace: str, filter: JobFilter) -> str:
    said = (
        namespace,
        sorted(filter.states),
        filter.queue,
        filter.type,
        sorted(filter.labels.items()),
        sorted(filter.job_ids),
        *(("past due",) if filter.past_due_at_ms else ()),  # cursors of before stay good
    )
    return sha256(repr(said).encode()).hexdigest()[: 2 * _FILTER_BYTES]


def _invalid(field: str, description: str) -> RequestError:
    violation = FieldViolation(field, description)
    return RequestError(Reason.VALIDATION_FAILED, f"{field}: {description}", fields=[violation])
