"""Retry by hand: a DEAD or QUARANTINED job is claimable again, each guarded by what it was decided on.

A repeat changes nothing: it finds the job waiting or running, or, if it has died again since, the request's
digest in its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator import failpoints
from coordinator.core.commands import Retry
from coordinator.core.job import Claim
from coordinator.core.machine import Decision, Refusal, Unchanged, decide
from coordinator.errors import CodecError, Reason, RequestError, StorageError
from coordinator.ports import Clock, Commit, JobStore, Operation, StorageGauge, Stored
from coordinator.services.api import JobView
from coordinator.services.commits import commit_each, operation_of
from coordinator.services.digests import request_digest
from coordinator.services.queries import Beats, not_found, view_of
from coordinator.services.storage_errors import RETRY_MS, refused

__all__ = ["RetryCase", "Retrying", "RetryingConfig", "storage_full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryingConfig:
    """``max_rounds``: how often a lost commit is decided again. ``full_retry_ms``: told while it is full."""

    max_rounds: int = 5
    full_retry_ms: int = 5_000


@dataclass(slots=True)
class RetryCase:
    """A job to be retried, and what became of it.

    ``stored`` and ``claim`` are as read or as they are now; ``etag`` empty: whatever the job is. In the end
    ``revived`` (this request did it), or ``error``, or neither: it waits or runs already.
    """

    job_id: str
    stored: Stored | None
    claim: Claim | None = None
    etag: str = ""
    revived: bool = False
    error: RequestError | None = None
    owner: str = ""

    def take(self, commit: Commit) -> None:
        """What stands there now."""
        self.stored, self.claim, self.owner = commit.stored, commit.claim, commit.unique_owner


class Retrying:
    """RetryJob, and the way in which every job is retried.

    Args:
        store: where jobs are.
        beats: what beats told, for the answer.
        gauge: whether there is room: a retried job takes some, as a new one does.
        clock: times in records.
        config: bounds.
    """

    def __init__(
        self,
        store: JobStore,
        beats: Beats,
        gauge: StorageGauge,
        clock: Clock,
        config: RetryingConfig | None = None,
    ) -> None:
        self._store = store
        self._beats = beats
        self._gauge = gauge
        self._clock = clock
        self._config = config or RetryingConfig()

    async def retry(
        self, namespace: str, job_id: str, *, etag: str, run_at_ms: int, request_id: str, deadline: float
    ) -> JobView:
        """Make the job claimable again, not before ``run_at_ms`` (0: now).

        Raises:
            RequestError: JOB_NOT_FOUND, JOB_TERMINAL (SUCCEEDED or CANCELLED), DUPLICATE_JOB (its unique key
                is taken), ETAG_MISMATCH, STORAGE_FULL, OUTCOME_UNKNOWN, ETCD_UNAVAILABLE.
        """
        try:
            found = await self._store.read(namespace, job_id, deadline=deadline)
        except (StorageError, CodecError) as error:
            raise refused(error, {"job_id": job_id}) from error
        case = RetryCase(job_id, found.stored, found.claim, etag=etag)
        await self.retry_each([case], command_of(request_id, run_at_ms), deadline)
        if case.error is not None:
            raise case.error
        assert case.stored is not None, "a job that is not there is refused"
        return view_of(case.stored, case.claim, self._beats)

    async def retry_each(self, cases: Sequence[RetryCase], command: Retry, deadline: float) -> None:
        """Retry every case, each alone; what became of it stands in it."""
        for _ in range(self._config.max_rounds):
            pending: list[tuple[RetryCase, Operation]] = []
            for case in cases:
                operation = self._decide(case, command, deadline)
                if operation is not None:
                    pending.append((case, operation))
            if not pending:
                return
            await failpoints.reached("retry.before-commit")
            commits = await commit_each(self._store, [operation for _, operation in pending])
            await failpoints.reached("retry.after-commit")
            cases = []
            for (case, operation), commit in zip(pending, commits, strict=True):
                if not isinstance(commit, Commit):
                    case.error = refused(commit, {"job_id": case.job_id})
                    continue
                case.take(commit)
                case.revived = commit.won or (commit.resent and _is_own(operation, commit.stored))
                if not case.revived:
                    cases.append(case)
        for case in cases:
            case.error = RequestError(
                Reason.TOO_MANY_REQUESTS,
                "others change this job too fast; nothing was changed",
                metadata={"job_id": case.job_id},
                retry_after_ms=RETRY_MS,
            )

    def _decide(self, case: RetryCase, command: Retry, deadline: float) -> Operation | None:
        """The operation that retries the job; None if there is nothing to do, or ``error`` says why not."""
        stored = case.stored
        if stored is None:
            case.error = not_found(case.job_id)
            return None
        outcome = decide(stored.job, case.claim, command, self._clock.now_ms())
        if isinstance(outcome, Unchanged):
            return None
        if case.etag and case.etag != str(stored.revision):
            case.error = RequestError(
                Reason.ETAG_MISMATCH,
                "the job has changed since; read it again",
                metadata={"job_id": case.job_id, "etag": str(stored.revision)},
                retry_after_ms=0,
            )
        elif isinstance(outcome, Refusal):
            case.error = RequestError(outcome.reason, outcome.message, metadata=outcome.metadata)
        elif case.owner and case.owner != case.job_id:
            case.error = RequestError(
                Reason.DUPLICATE_JOB,
                f"its unique key belongs to job {case.owner} by now",
                metadata={"job_id": case.owner, "unique_key": stored.job.terms.unique_key},
            )
        elif not self._gauge.accepts_submissions:
            case.error = storage_full(self._config.full_retry_ms, case.job_id)
        else:
            assert isinstance(outcome, Decision), "a retry settles nothing, so nothing is replayed"
            return operation_of(stored, outcome, deadline)
        return None


def command_of(request_id: str, run_at_ms: int = 0) -> Retry:
    """The command of a request."""
    return Retry(run_at_ms=run_at_ms, digest=request_digest(request_id))


def storage_full(retry_ms: int, job_id: str = "") -> RequestError:
    """STORAGE_FULL: retries have to wait."""
    return RequestError(
        Reason.STORAGE_FULL,
        "the store is nearly full; work under way goes on, retries by hand have to wait",
        metadata={"job_id": job_id} if job_id else {},
        retry_after_ms=retry_ms,
    )


def _is_own(operation: Operation, stored: Stored | None) -> bool:
    """Whether a first try of ``operation``, whose answer was lost, has made what stands there."""
    after = operation.after
    assert after is not None, "a retry deletes nothing"
    if stored is None:
        return False
    now = stored.job
    return (now.retry_ms, now.retry_digest) == (after.retry_ms, after.retry_digest)
