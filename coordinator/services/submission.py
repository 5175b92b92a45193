"""Store new jobs: each is created once, whatever is repeated, or refused with the reason.

A repeat is recognised by the job's id, which for a job without one is made from the request id, and by the
digest of its content. After an unknown outcome the store sends the same operation again; the loser finds
its own first try and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator import failpoints
from coordinator.core.commands import Submit
from coordinator.core.machine import Decision, Refusal, decide
from coordinator.core.queue_settings import QueueSettings
from coordinator.errors import FieldViolation, Reason, RequestError, StorageError
from coordinator.ports import (
    Clock,
    Commit,
    Entropy,
    JobStore,
    NamespaceFeeds,
    Operation,
    Spec,
    StorageGauge,
    Stored,
)
from coordinator.services.api import NewJob, SubmitOutcome
from coordinator.services.commits import commit_each, operation_of
from coordinator.services.digests import job_digest, made_job_id, request_digest
from coordinator.services.storage_errors import refused

__all__ = ["Submission", "SubmissionConfig", "pairs_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionConfig:
    """``max_rounds``: how often a lost commit is decided again. ``full_retry_ms``: told while it is full."""

    max_rounds: int = 5
    full_retry_ms: int = 5_000


@dataclass(slots=True)
class _Item:
    """One job on its way: ``index`` in the answers, ``place`` in the call."""

    index: int
    place: int
    command: Submit
    spec: Spec


_Result = SubmitOutcome | RequestError


class Submission:
    """SubmitJob and SubmitJobs.

    Args:
        store: where jobs go.
        feeds: a namespace is registered and watched before its first job is stored.
        gauge: whether there is room.
        clock: submit times.
        entropy: order of submission; ids of jobs that come without id and request id.
        config: bounds.
        settings: (namespace, queue) → what its jobs take where they leave it out, None for nothing.
    """

    def __init__(
        self,
        store: JobStore,
        feeds: NamespaceFeeds,
        gauge: StorageGauge,
        clock: Clock,
        entropy: Entropy,
        config: SubmissionConfig | None = None,
        *,
        settings: Callable[[str, str], QueueSettings | None] = lambda namespace, queue: None,
    ) -> None:
        self._store = store
        self._feeds = feeds
        self._gauge = gauge
        self._clock = clock
        self._entropy = entropy
        self._config = config or SubmissionConfig()
        self._settings = settings

    async def submit(
        self, namespace: str, request_id: str, jobs: Sequence[NewJob], deadline: float
    ) -> list[SubmitOutcome | RequestError]:
        """Store ``jobs``, each alone; the answers are in their order.

        Raises:
            RequestError: for the call as a whole: VALIDATION_FAILED (two jobs with one id), NOT_READY,
                RATE_LIMITED,
                and what the store says before anything was stored.
        """
        results: list[_Result | None] = [None] * len(jobs)
        try:
            await self._feeds.ensure(namespace, deadline=deadline)
            items = self._items(namespace, request_id, jobs)  # not before the settings of queues are known
            if not self._gauge.accepts_submissions:
                await self._answer_repeats(namespace, items, results, deadline)
                return [result for result in results if result is not None]
            for queue, type_ in pairs_of(jobs):
                await self._store.register_type(namespace, queue, type_, deadline=deadline)
        except StorageError as error:
            raise refused(error) from error
        duplicates = await self._store_items(items, results, deadline)
        if duplicates:
            await self._describe_owners(namespace, duplicates, results, deadline)
        return [result for result in results if result is not None]

    def _items(self, namespace: str, request_id: str, jobs: Sequence[NewJob]) -> list[_Item]:
        now_ms = self._clock.now_ms()
        asked_by = request_digest(request_id)
        counter = self._entropy.counter
        items = []
        for index, job in enumerate(jobs):
            job_id = job.job_id
            if not job_id:
                source = request_id or self._entropy.identifier()
                job_id = made_job_id(namespace, source, job.item)
            terms = job.terms(
                submit_ms=now_ms,
                counter=counter(),
                digest=job_digest(job),
                request_digest=asked_by,
                settings=self._settings(namespace, job.queue),
            )
            command = Submit(namespace=namespace, job_id=job_id, terms=terms, run_at_ms=job.run_at_ms)
            items.append(
                _Item(index, job.item, command, Spec(payload=job.payload, content_type=job.content_type))
            )
        if len({item.command.job_id for item in items}) != len(items):
            raise _two_with_one_id(items)
        return items

    async def _store_items(
        self, items: list[_Item], results: list[_Result | None], deadline: float
    ) -> dict[int, tuple[_Item, str]]:
        """Commit until each has an answer; what it leaves out are those whose unique key has an owner."""
        duplicates: dict[int, tuple[_Item, str]] = {}
        for _ in range(self._config.max_rounds):
            operations = [self._operation(item, deadline) for item in items]
            await failpoints.reached("submit.before-commit")
            commits = await commit_each(self._store, operations)
            await failpoints.reached("submit.after-commit")
            again = []
            for item, commit in zip(items, commits, strict=True):
                if isinstance(commit, Commit) and commit.won and commit.stored is not None:
                    results[item.index] = SubmitOutcome(commit.stored, True)
                elif not isinstance(commit, Commit):
                    results[item.index] = refused(commit, {"job_id": item.command.job_id})
                elif commit.stored is not None:
                    results[item.index] = self._stands(item, commit.stored, resent=commit.resent)
                elif commit.unique_owner:
                    duplicates[item.index] = (item, commit.unique_owner)
                else:
                    again.append(item)  # what stood in the way has gone meanwhile
            items = again
            if not items:
                break
        for item in items:
            results[item.index] = RequestError(
                Reason.TOO_MANY_REQUESTS,
                "others create and delete this job too fast; nothing was changed",
                metadata={"job_id": item.command.job_id},
                retry_after_ms=self._config.full_retry_ms,
            )
        return duplicates

    def _operation(self, item: _Item, deadline: float) -> Operation:
        outcome = decide(None, None, item.command, self._clock.now_ms())
        assert isinstance(outcome, Decision), "a job that is not there can be submitted"
        return operation_of(None, outcome, deadline, spec=item.spec)

    def _stands(self, item: _Item, stored: Stored, *, resent: bool) -> _Result:
        """The answer where a job of this id stands. ``resent``: our own first try may have stored it."""
        outcome = decide(stored.job, None, item.command, self._clock.now_ms())
        if isinstance(outcome, Refusal):
            return RequestError(outcome.reason, outcome.message, metadata=outcome.metadata)
        ours, theirs = item.command.terms, stored.job.terms
        own = (ours.request_digest, ours.submit_ms, ours.counter) == (
            theirs.request_digest,
            theirs.submit_ms,
            theirs.counter,
        )
        return SubmitOutcome(stored, resent and own)

    async def _answer_repeats(
        self, namespace: str, items: list[_Item], results: list[_Result | None], deadline: float
    ) -> None:
        """The store is full: a repeat of what is stored is answered as ever, the rest is refused."""
        found = await self._store.read_many(namespace, [i.command.job_id for i in items], deadline=deadline)
        for item, snapshot in zip(items, found, strict=True):
            if snapshot.stored is not None:
                results[item.index] = self._stands(item, snapshot.stored, resent=False)
                continue
            results[item.index] = RequestError(
                Reason.STORAGE_FULL,
                "the store is nearly full; work under way goes on, new jobs have to wait",
                metadata={"job_id": item.command.job_id},
                retry_after_ms=self._config.full_retry_ms,
            )

    async def _describe_owners(
        self,
        namespace: str,
        duplicates: dict[int, tuple[_Item, str]],
        results: list[_Result | None],
        deadline: float,
    ) -> None:
        """Name each unique key's owner, and say if it has the same content, as far as that can be read."""
        owners = sorted({owner for _, owner in duplicates.values()})
        try:
            found = await self._store.read_many(namespace, owners, deadline=deadline)
            by_id = dict(zip(owners, (snapshot.stored for snapshot in found), strict=True))
        except StorageError:
            by_id = {}  # the refusal stands without this; who wants to know reads the owner
        for index, (item, owner) in duplicates.items():
            facts = {"job_id": owner, "unique_key": item.command.terms.unique_key}
            stored = by_id.get(owner)
            if stored is not None:
                facts["state"] = stored.job.state.name
                facts["same_content"] = str(stored.job.terms.digest == item.command.terms.digest).lower()
            results[index] = RequestError(
                Reason.DUPLICATE_JOB, f"its unique key belongs to job {owner}", metadata=facts
            )


def pairs_of(jobs: Sequence[NewJob]) -> dict[tuple[str, str], None]:
    """(queue, type) of the jobs and of their rollback jobs, which nobody submits."""
    pairs: dict[tuple[str, str], None] = {}
    for job in jobs:
        pairs[job.queue, job.type] = None
        if job.rollback is not None:
            pairs[job.rollback.queue, job.rollback.type] = None
    return pairs


def _two_with_one_id(items: Sequence[_Item]) -> RequestError:
    count = Counter(item.command.job_id for item in items)
    fields = [
        FieldViolation(
            f"jobs[{item.place}].job_id", f"{item.command.job_id!r} stands in this call more than once"
        )
        for item in items
        if count[item.command.job_id] > 1
    ]
    return RequestError(Reason.VALIDATION_FAILED, "two jobs of one call have the same id", fields=fields)
