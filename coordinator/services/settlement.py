"""Complete, fail, release and checkpoint: what a worker says about its attempt, fenced by its token.

A settlement of a job that this coordinator claimed needs no read: the record and claim are remembered, and
the Txn compares them. Where the memory is wrong the Txn loses, tells what stands, and the core decides
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator import failpoints
from coordinator.core.commands import Fail, Settlement
from coordinator.core.copying import changed
from coordinator.core.job import Claim, Job, JobState, Progress
from coordinator.core.machine import Decision, Refusal, Replay, Unchanged, decide
from coordinator.core.notice import Notice, NoticeKind
from coordinator.core.queue_settings import QueueSettings
from coordinator.errors import CodecError, Reason, RequestError, StorageError
from coordinator.ports import (
    Checkpoint,
    Clock,
    Commit,
    Entropy,
    JobStore,
    NamespaceFeeds,
    Notices,
    Operation,
    Present,
    Stored,
)
from coordinator.services.api import Settle, Settled
from coordinator.services.commits import commit_each, operation_of
from coordinator.services.digests import settlement_digest
from coordinator.services.fencing import FutureTokens, check_present, check_token, is_foreign
from coordinator.services.follow_ups import FollowUps
from coordinator.services.late_calls import CHECKPOINT, SETTLEMENT
from coordinator.services.storage_errors import RETRY_MS, refused
from coordinator.services.submission import pairs_of

__all__ = ["HeldJobs", "SettlementConfig", "SettlementService"]


class HeldJobs(Protocol):
    """What is remembered of running jobs; ``services.holders.Holders`` is one."""

    def running(self, namespace: str, job_id: str) -> tuple[Stored, Claim] | None:
        """Record and claim as this coordinator last saw them."""

    def forget(self, namespace: str, job_id: str) -> None:
        """What is remembered of its record is outdated."""

    def progress(self, namespace: str, job_id: str) -> Progress | None:
        """The progress that beats told last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettlementConfig:
    """``max_rounds``: how often a lost commit is decided again."""

    max_rounds: int = 5


@dataclass(slots=True)
class _Case:
    """One settlement on its way. ``known``: record and claim are as read, not as remembered."""

    index: int
    job_id: str
    command: Settlement
    foreign: bool
    stored: Stored | None = None
    claim: Claim | None = None
    known: bool = False
    follow_ups: FollowUps | None = None


_Result = Settled | RequestError
_WAITING = (JobState.SCHEDULED, JobState.PENDING)
_NOTABLE = {JobState.DEAD: NoticeKind.DEAD, JobState.QUARANTINED: NoticeKind.QUARANTINED}


class SettlementService:
    """CompleteJob, FailJob, ReleaseJob, SettleJobs, SaveCheckpoint.

    Args:
        store: where jobs are.
        holders: what is remembered of running jobs.
        present: the store's epoch and position.
        clock: times in records.
        entropy: jitter of backoff.
        config: bounds.
        notices: told of jobs that end DEAD or QUARANTINED.
        late: takes in namespace, job id, token and kind of a call that was refused as CLAIM_LOST.
        feeds: a namespace's settings are known once it is watched; None: they are known.
        settings: (namespace, queue) → what follow-up jobs take where they leave it out, None for nothing.
    """

    def __init__(
        self,
        store: JobStore,
        holders: HeldJobs,
        present: Present,
        clock: Clock,
        entropy: Entropy,
        config: SettlementConfig | None = None,
        *,
        notices: Notices,
        late: Callable[[str, str, int, str], None],
        feeds: NamespaceFeeds | None = None,
        settings: Callable[[str, str], QueueSettings | None] = lambda namespace, queue: None,
    ) -> None:
        self._store = store
        self._holders = holders
        self._present = present
        self._clock = clock
        self._entropy = entropy
        self._config = config or SettlementConfig()
        self._notices = notices
        self._late = late
        self._feeds = feeds
        self._settings = settings
        self._future = FutureTokens(notices, clock)

    async def settle(
        self, namespace: str, items: Sequence[Settle], deadline: float
    ) -> list[Settled | RequestError]:
        """Settle each item alone; the answers are in their order.

        Items of one job go one after the other: the store may take two operations in either order.

        Raises:
            RequestError: EPOCH_REGRESSED, for all of them.
        """
        check_present(self._present)
        results: list[_Result | None] = [None] * len(items)
        waves: list[list[_Case]] = []
        seen: dict[str, int] = {}
        present = self._present.token()
        unready = await self._unready(namespace, deadline) if any(item.follow_ups for item in items) else None
        for index, item in enumerate(items):
            token = item.command.token
            error = None
            if unready is not None and item.follow_ups:
                results[index] = unready
                continue
            if token > present:
                error = await check_token(self._present, token, item.job_id, deadline=deadline)
            if error is not None:
                results[index] = error
                self._future.refused(namespace, item.job_id, token, error)
                continue
            wave = seen.get(item.job_id, 0)
            seen[item.job_id] = wave + 1
            if wave == len(waves):
                waves.append([])
            try:
                waves[wave].append(self._case(namespace, index, item))
            except RequestError as refusal:
                results[index] = refusal
        for cases in waves:
            await self._settle_cases(namespace, cases, results, deadline)
        return [result for result in results if result is not None]

    async def _unready(self, namespace: str, deadline: float) -> RequestError | None:
        """Why what follow-ups take from their queues cannot be known yet; None: it is known."""
        if self._feeds is None:
            return None
        try:
            await self._feeds.ensure(namespace, deadline=deadline)
        except StorageError as error:
            return refused(error)
        except RequestError as error:
            return error
        return None

    async def checkpoint(
        self,
        namespace: str,
        job_id: str,
        token: int,
        sequence: int,
        data: bytes,
        progress: Progress | None,
        deadline: float,
    ) -> bool:
        """Save what the next attempt shall go on from. False: a later one of this attempt is stored already.

        Raises:
            RequestError: CLAIM_LOST, JOB_NOT_FOUND, EPOCH_REGRESSED, OUTCOME_UNKNOWN (repeat it),
                ETCD_UNAVAILABLE.
        """
        check_present(self._present)
        error = await check_token(self._present, token, job_id, deadline=deadline)
        if error is not None:
            self._future.refused(namespace, job_id, token, error)
            raise error
        try:
            claim = await self._claim_of(namespace, job_id, token, deadline)
            saved = Checkpoint(
                attempt=claim.attempt,
                sequence=sequence,
                data=data,
                progress=progress,
                saved_ms=self._clock.now_ms(),
            )
            return await self._store.save_checkpoint(namespace, job_id, token, saved, deadline=deadline)
        except (StorageError, CodecError) as storage_error:
            raise refused(storage_error, {"job_id": job_id}) from storage_error
        except RequestError as refusal:
            if refusal.reason is Reason.CLAIM_LOST:
                self._late(namespace, job_id, token, CHECKPOINT)
            raise

    async def _claim_of(self, namespace: str, job_id: str, token: int, deadline: float) -> Claim:
        remembered = self._holders.running(namespace, job_id)
        if remembered is not None and remembered[1].token == token:
            return remembered[1]
        snapshot = await self._store.read(namespace, job_id, deadline=deadline)
        if snapshot.stored is None:
            raise RequestError(Reason.JOB_NOT_FOUND, "there is no such job", metadata={"job_id": job_id})
        if snapshot.claim is None or snapshot.claim.token != token:
            raise _lost(job_id, token, snapshot.stored, snapshot.claim)
        return snapshot.claim

    def _case(self, namespace: str, index: int, item: Settle) -> _Case:
        command, job_id = item.command, item.job_id
        progress = command.progress
        if progress is None:
            progress = self._holders.progress(namespace, job_id)
        digest = command.digest or settlement_digest(command, item.follow_ups)
        if isinstance(command, Fail):
            jitter = self._entropy.fraction()
            command = changed(command, digest=digest, progress=progress, jitter_number=jitter)
        elif digest is not command.digest or progress is not command.progress:
            command = changed(command, digest=digest, progress=progress)
        case = _Case(index, job_id, command, is_foreign(self._present, command.token))
        if item.follow_ups:
            case.follow_ups = FollowUps(
                namespace,
                job_id,
                command.token,
                item.follow_ups,
                submit_ms=self._clock.now_ms(),
                counter=self._entropy.counter,
                settings=self._settings,
            )
        return case

    async def _settle_cases(
        self, namespace: str, cases: list[_Case], results: list[_Result | None], deadline: float
    ) -> None:
        """Settle different jobs together: remember or read, decide, commit, and what lost again."""
        for case in cases:
            remembered = self._holders.running(namespace, case.job_id)
            if remembered is not None and remembered[1].token == case.command.token and not case.foreign:
                case.stored, case.claim = remembered
        await self._register_types(namespace, cases, results, deadline)
        for _ in range(self._config.max_rounds):
            await self._read_unknown(namespace, cases, results, deadline)
            operations: list[tuple[_Case, Operation]] = []
            for case in cases:
                if results[case.index] is None:
                    self._decide(case, results, operations, deadline)
            if not operations:
                return
            await failpoints.reached("settle.before-commit")
            commits = await commit_each(self._store, [operation for _, operation in operations])
            await failpoints.reached("settle.after-commit")
            cases = []
            for (case, operation), commit in zip(operations, commits, strict=True):
                self._holders.forget(namespace, case.job_id)
                if not isinstance(commit, Commit):
                    results[case.index] = refused(commit, {"job_id": case.job_id})
                elif commit.won:
                    assert operation.after is not None, "a settlement deletes no job"
                    ready_ms = operation.after.ready_ms if operation.after.state in _WAITING else 0
                    results[case.index] = Settled(case.job_id, operation.after.state, ready_ms)
                    if operation.after.state in _NOTABLE:
                        self._notices.publish(_notice(case, operation.after))
                else:
                    case.stored, case.claim, case.known = commit.stored, commit.claim, True
                    if case.follow_ups is not None:
                        case.follow_ups.met(commit.also)
                    cases.append(case)
            if not cases:
                return
        for case in cases:
            results[case.index] = RequestError(
                Reason.TOO_MANY_REQUESTS,
                "others change this job too fast; nothing was changed",
                metadata={"job_id": case.job_id},
                retry_after_ms=RETRY_MS,
            )

    async def _register_types(
        self, namespace: str, cases: Sequence[_Case], results: list[_Result | None], deadline: float
    ) -> None:
        """Whoever lists the types of a queue shall find those of its follow-ups."""
        for case in cases:
            if case.follow_ups is None:
                continue
            try:
                for queue, type_ in pairs_of(case.follow_ups.jobs):
                    await self._store.register_type(namespace, queue, type_, deadline=deadline)
            except StorageError as error:
                results[case.index] = refused(error, {"job_id": case.job_id})

    async def _read_unknown(
        self, namespace: str, cases: Sequence[_Case], results: list[_Result | None], deadline: float
    ) -> None:
        unread = [case for case in cases if case.stored is None and not case.known]
        if not unread:
            return
        try:
            found = await self._store.read_many(
                namespace, [case.job_id for case in unread], deadline=deadline
            )
        except StorageError as error:
            for case in unread:
                results[case.index] = refused(error, {"job_id": case.job_id})
            return
        for case, snapshot in zip(unread, found, strict=True):
            if snapshot.stored is None:
                # Absent, or not decodable: a single read tells these apart, and only absence is "not found".
                try:
                    snapshot = await self._store.read(namespace, case.job_id, deadline=deadline)
                except (StorageError, CodecError) as error:
                    results[case.index] = refused(error, {"job_id": case.job_id})
            case.stored, case.claim, case.known = snapshot.stored, snapshot.claim, True

    def _decide(
        self,
        case: _Case,
        results: list[_Result | None],
        operations: list[tuple[_Case, Operation]],
        deadline: float,
    ) -> None:
        """Answer ``case``, or add the operation that settles it."""
        stored = case.stored
        if case.foreign and stored is not None:
            results[case.index] = _lost(case.job_id, case.command.token, stored, case.claim)
            self._late(stored.job.namespace, case.job_id, case.command.token, SETTLEMENT)
            return
        job = stored.job if stored is not None else None
        outcome = decide(job, case.claim, case.command, self._clock.now_ms())
        if isinstance(outcome, Decision):
            assert stored is not None, "only a job that is there is settled"
            self._enlist(case, stored, outcome, results, operations, deadline)
        elif isinstance(outcome, Replay):
            attempt = outcome.attempt
            assert attempt.state_after is not None, "an attempt that has ended knows what became of the job"
            results[case.index] = Settled(case.job_id, attempt.state_after, attempt.ready_ms_after)
        elif isinstance(outcome, Refusal):
            facts = {"job_id": case.job_id, **outcome.metadata}
            results[case.index] = RequestError(outcome.reason, outcome.message, metadata=facts)
            if job is not None and outcome.reason is Reason.CLAIM_LOST:
                self._late(job.namespace, case.job_id, case.command.token, SETTLEMENT)
        else:
            assert isinstance(outcome, Unchanged)
            results[case.index] = Settled(case.job_id, outcome.job.state, 0)

    def _enlist(
        self,
        case: _Case,
        stored: Stored,
        decision: Decision,
        results: list[_Result | None],
        operations: list[tuple[_Case, Operation]],
        deadline: float,
    ) -> None:
        """Add the operation of ``decision`` with its follow-ups, or say why these cannot be."""
        follow_ups: tuple[Operation, ...] | Refusal = ()
        if case.follow_ups is not None:
            follow_ups = case.follow_ups.operations(stored.job, self._clock.now_ms(), deadline)
        if isinstance(follow_ups, Refusal):
            results[case.index] = RequestError(
                follow_ups.reason, follow_ups.message, metadata=follow_ups.metadata
            )
            return
        operation = operation_of(stored, decision, deadline, token=case.command.token, follow_ups=follow_ups)
        operations.append((case, operation))


def _notice(case: _Case, job: Job) -> Notice:
    last = job.attempts[-1]
    return Notice(
        kind=_NOTABLE[job.state],
        reason=job.end_reason,
        namespace=job.namespace,
        queue=job.terms.queue,
        type=job.terms.type,
        job_id=job.job_id,
        session_id=last.session,
        attempt=last.number,
        token=case.command.token,
        state_before=JobState.RUNNING,
        state_after=job.state,
        facts={"failure_type": last.failure_type} if last.failure_type else {},
    )


def _lost(job_id: str, token: int, stored: Stored, claim: Claim | None) -> RequestError:
    return RequestError(
        Reason.CLAIM_LOST,
        "the claim that this token stood for has ended",
        metadata={
            "job_id": job_id,
            "held": str(token),
            "current": str(claim.token if claim is not None else 0),
            "state": stored.job.state.name,
        },
    )
