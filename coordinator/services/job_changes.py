"""Cancel, update and delete a job by hand: each repeatable, each guarded by what it was decided on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator import failpoints
from coordinator.core.commands import Cancel, Command, Delete, Update
from coordinator.core.job import Claim
from coordinator.core.machine import Decision, Refusal, Unchanged, decide
from coordinator.errors import CodecError, Reason, RequestError, StorageError
from coordinator.ports import Clock, Commit, JobStore, Operation, Stored
from coordinator.services.api import JobView
from coordinator.services.commits import operation_of
from coordinator.services.queries import Beats, not_found, view_of
from coordinator.services.storage_errors import RETRY_MS, refused

__all__ = ["JobChanges", "JobChangesConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChangesConfig:
    """``max_rounds``: how often a lost commit is decided again."""

    max_rounds: int = 5


@dataclass(frozen=True, slots=True)
class _Change:
    """What is asked of which job. ``etag`` empty: whatever the job is now."""

    namespace: str
    job_id: str
    command: Command
    etag: str = ""
    who: str = ""


class JobChanges:
    """CancelJob, UpdateJob, DeleteJob.

    Args:
        store: where jobs are.
        beats: what beats told, for the answer.
        clock: times in records.
        config: bounds.
    """

    def __init__(
        self, store: JobStore, beats: Beats, clock: Clock, config: JobChangesConfig | None = None
    ) -> None:
        self._store = store
        self._beats = beats
        self._clock = clock
        self._config = config or JobChangesConfig()

    async def cancel(self, namespace: str, job_id: str, reason: str, who: str, deadline: float) -> JobView:
        """Cancel a waiting job, or ask a running one to stop; asking again changes nothing.

        Raises:
            RequestError: JOB_NOT_FOUND, JOB_TERMINAL (it ended otherwise), OUTCOME_UNKNOWN, ETCD_UNAVAILABLE.
        """
        return await self._apply(
            _Change(namespace, job_id, Cancel(reason=reason), who=who or "unknown"), deadline
        )

    async def update(
        self,
        namespace: str,
        job_id: str,
        etag: str,
        priority: int | None,
        due_ms: int | None,
        run_at_ms: int | None,
        deadline: float,
    ) -> JobView:
        """Change what may change while a job waits. Where it already is as asked, nothing is written.

        Raises:
            RequestError: JOB_NOT_FOUND, JOB_TERMINAL, NOT_CLAIMABLE (it runs), ETAG_MISMATCH,
                OUTCOME_UNKNOWN,
                ETCD_UNAVAILABLE.
        """
        command = Update(priority=priority, due_ms=due_ms, run_at_ms=run_at_ms)
        return await self._apply(_Change(namespace, job_id, command, etag=etag), deadline)

    async def delete(self, namespace: str, job_id: str, etag: str, deadline: float) -> None:
        """Forget a terminal job.

        Raises:
            RequestError: JOB_NOT_FOUND, NOT_CLAIMABLE (it is not terminal), ETAG_MISMATCH, OUTCOME_UNKNOWN,
                ETCD_UNAVAILABLE.
        """
        change = _Change(namespace, job_id, Delete(), etag=etag)
        stored, claim = await self._read(change, deadline)
        for _ in range(self._config.max_rounds):
            operation = self._decide(change, stored, claim, deadline)
            if not isinstance(operation, Operation):
                raise _too_fast(change)  # Delete has no Unchanged; a record that refuses it has raised
            commit = await self._commit(change, operation)
            if commit.won or (commit.resent and _other_job(operation, commit.stored)):
                return
            stored, claim = commit.stored, commit.claim
        raise _too_fast(change)

    async def _apply(self, change: _Change, deadline: float) -> JobView:
        stored, claim = await self._read(change, deadline)
        for _ in range(self._config.max_rounds):
            operation = self._decide(change, stored, claim, deadline)
            if not isinstance(operation, Operation):
                return view_of(operation, claim, self._beats)
            commit = await self._commit(change, operation)
            if commit.won:
                assert commit.stored is not None, "only a deletion leaves no record"
                return view_of(commit.stored, claim, self._beats)
            stored, claim = commit.stored, commit.claim
        raise _too_fast(change)

    def _decide(
        self, change: _Change, stored: Stored | None, claim: Claim | None, deadline: float
    ) -> Operation | Stored:
        """The operation that makes the change, or the record that needs none.

        An etag that does not fit is no conflict where the job already is as asked: that is how a caller
        finds its own change after an unknown outcome.
        """
        if stored is None:
            raise not_found(change.job_id)
        command = change.command
        if isinstance(command, Cancel) and claim is not None:
            command = replace(command, token=claim.token)
        outcome = decide(stored.job, claim, command, self._clock.now_ms())
        if isinstance(outcome, Unchanged):
            return stored
        if change.etag and change.etag != str(stored.revision):
            raise RequestError(
                Reason.ETAG_MISMATCH,
                "the job has changed since; read it again",
                metadata={"job_id": change.job_id, "etag": str(stored.revision)},
                retry_after_ms=0,
            )
        if isinstance(outcome, Refusal):
            raise RequestError(outcome.reason, outcome.message, metadata=outcome.metadata)
        assert isinstance(outcome, Decision), "these commands settle nothing, so nothing is replayed"
        return operation_of(stored, outcome, deadline, cancelled_by=change.who)

    async def _read(self, change: _Change, deadline: float) -> tuple[Stored | None, Claim | None]:
        try:
            snapshot = await self._store.read(change.namespace, change.job_id, deadline=deadline)
        except (StorageError, CodecError) as error:
            raise refused(error, {"job_id": change.job_id}) from error
        return snapshot.stored, snapshot.claim

    async def _commit(self, change: _Change, operation: Operation) -> Commit:
        try:
            await failpoints.reached("change.before-commit")
            commit = await self._store.commit(operation)
        except (StorageError, CodecError) as error:
            raise refused(error, {"job_id": change.job_id}) from error
        await failpoints.reached("change.after-commit")
        return commit


def _other_job(operation: Operation, stored: Stored | None) -> bool:
    """Whether the job of ``operation`` is gone; another of its id, not asked about, may stand there."""
    assert operation.before is not None, "a deletion was decided on a record"
    before = operation.before.job.terms
    if stored is None:
        return True
    after = stored.job.terms
    return (before.submit_ms, before.counter, before.digest) != (after.submit_ms, after.counter, after.digest)


def _too_fast(change: _Change) -> RequestError:
    return RequestError(
        Reason.TOO_MANY_REQUESTS,
        "others change this job too fast; nothing was changed",
        metadata={"job_id": change.job_id},
        retry_after_ms=RETRY_MS,
    )
