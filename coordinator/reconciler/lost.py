"""Recovers jobs whose holder has died: the record says RUNNING, and the claim went with its session's lease.

One that is lost alone is claimable again at once. Where many are lost together they come back one after the
other, so that those who take over are not run down by all of them in the same moment. What is lost again
waits longer each time and each for itself, so that what died beside a job that kills its holders is not
claimed beside it until it is set aside too.

Suspicions come from the watch (``services.holders``); a paced sweep finds what no watch told: claims
deleted by hand, and whatever ended while no coordinator ran. Either way the pass reads record and claim at
one revision, and its Txn compares that the claim is absent and the record unchanged. So a live job is never
recovered, and of two recoverers one loses.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator import failpoints
from coordinator.core.commands import Lose
from coordinator.core.fencing import make_token
from coordinator.core.job import Job, JobState
from coordinator.core.machine import Decision, decide
from coordinator.core.notice import NoticeKind
from coordinator.core.rendezvous import preferred
from coordinator.errors import StorageError
from coordinator.ports import (
    Clock,
    Commit,
    Entropy,
    JobStore,
    Membership,
    Notices,
    Operation,
    Present,
    Snapshot,
    Stored,
)
from coordinator.reconciler.report import Action, Report
from coordinator.reconciler.state_walk import Run, StateWalk
from coordinator.reconciler.telling import end_of, notice_of
from coordinator.services.commits import commit_each, operation_of
from coordinator.services.holders import Suspect
from coordinator.services.waiting import wait_event

__all__ = ["RECOVERED", "LostConfig", "LostPass"]

logger = logging.getLogger(__name__)

RECOVERED: Final = "recovered"

_WHY: Final = "its holder's lease has ended"
_RUNNING = frozenset({JobState.RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class LostConfig:
    """Spans are seconds.

    ``batch``: jobs read and committed together. ``others_s``: how long a suspicion waits that another
    coordinator prefers. ``retry_s`` doubles up to ``max_retry_s``. ``max_queued``: suspicions kept; more
    are left to a sweep. ``spread_ms`` for each job lost within a second, ``max_spread_s`` at most: over so
    long they come back. A spread below ``least_spread_s`` is none, as promotion looks no more often.
    ``again_s``: over so long what is lost for the second time comes back, and over twice as long each
    further time, up to ``max_spread_s``.
    """

    batch: int = 240
    others_s: float = 1.0
    retry_s: float = 0.2
    max_retry_s: float = 5.0
    timeout_s: float = 5.0
    max_queued: int = 200_000
    spread_ms: int = 2
    max_spread_s: float = 5.0
    least_spread_s: float = 0.25
    again_s: float = 2.0


@dataclass(slots=True)
class _Queued:
    suspect: Suspect
    not_before: float
    tries: int = 0


class LostPass:
    """A queue of suspicions, and the pass that judges them. Implements ``report.Pass`` and
    ``state_walk.Visitor``.

    Args:
        store: where jobs are.
        walk: reads the records.
        present: the epoch of tokens.
        membership: which coordinator acts first.
        clock: times.
        entropy: when a job comes back that was lost among many.
        config: bounds.
        notices: told of each loss.
    """

    def __init__(
        self,
        store: JobStore,
        walk: StateWalk,
        present: Present,
        membership: Membership,
        clock: Clock,
        entropy: Entropy,
        config: LostConfig | None = None,
        *,
        notices: Notices,
    ) -> None:
        self._store = store
        self._walk = walk
        self._present = present
        self._membership = membership
        self._clock = clock
        self._entropy = entropy
        self._config = config or LostConfig()
        self._notices = notices
        self._queue: dict[tuple[str, str], _Queued] = {}
        self._wake = asyncio.Event()
        self._recent: deque[float] = deque()
        self.overflowed = 0

    @property
    def name(self) -> str:
        """See ``report.Pass``."""
        return "lost"

    @property
    def states(self) -> frozenset[JobState]:
        """See ``state_walk.Visitor``."""
        return _RUNNING

    @property
    def queued(self) -> int:
        """Suspicions not yet judged."""
        return len(self._queue)

    def suspect(self, suspect: Suspect) -> None:
        """Queue a claim that seems lost. Never blocks; where there are too many, a sweep will find it."""
        if len(self._queue) >= self._config.max_queued:
            self.overflowed += 1
            return
        wait = 0.0 if self._prefers(suspect.job_id) else self._config.others_s
        key = (suspect.namespace, suspect.job_id)
        now = self._clock.monotonic()
        if key not in self._queue:
            self._note(1)
        self._queue[key] = _Queued(suspect, now + wait)
        self._wake.set()

    async def run(self) -> None:
        """Judge suspicions as they come, until cancelled."""
        while True:
            self._wake.clear()
            try:
                await self.judge_queued()
            except Exception:
                logger.exception("the recovery of lost jobs failed, and is tried again")
                await self._clock.sleep(self._config.max_retry_s)
            if self._queue:
                soonest = min(one.not_before for one in self._queue.values())
                await wait_event(self._clock, self._wake, max(0.001, soonest - self._clock.monotonic()))
            else:
                await self._wake.wait()

    async def judge_queued(self) -> Report:
        """Judge everything that is queued and whose time has come."""
        report = Report(self.name)
        now = self._clock.monotonic()
        ready = [one for one in self._queue.values() if one.not_before <= now]
        by_namespace: dict[str, list[_Queued]] = {}
        for one in ready:
            by_namespace.setdefault(one.suspect.namespace, []).append(one)
        for namespace, queued in by_namespace.items():
            for start in range(0, len(queued), self._config.batch):
                run = Run(namespace=namespace, report=report)
                await self._judge(queued[start : start + self._config.batch], run)
        if report.changed:
            logger.info("lost jobs recovered: %d", report.changed)
        return report

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        """Look at every RUNNING record of the namespace, paced, and recover those without a claim.

        Raises:
            StorageError: a page could not be read; what was found until then is recovered.
        """
        run = Run(namespace=namespace, report=Report(self.name), dry_run=dry_run)
        await self._walk.walk([(self, run)])
        return run.report

    async def visit(self, found: Sequence[Stored], run: Run) -> None:
        """See ``state_walk.Visitor``."""
        suspects = [_Queued(Suspect(run.namespace, stored.job.job_id, "", 0), 0.0) for stored in found]
        for start in range(0, len(suspects), self._config.batch):
            await self._judge(suspects[start : start + self._config.batch], run, queued=False)

    def _note(self, lost: int) -> None:
        """So many seem lost now."""
        now = self._clock.monotonic()
        self._recent.extend([now] * lost)
        while self._recent and self._recent[0] < now - 1.0:
            self._recent.popleft()

    def _delay_ms(self, losses: int) -> int:
        """When one comes back that was lost, and *losses* times before: at once if alone and for the first
        time, else somewhen within the spread.
        """
        self._note(0)
        again = self._config.again_s * 1000 * 2 ** min(losses - 1, 10) if losses else 0
        most = max(again, self._config.spread_ms * len(self._recent))
        spread = min(self._config.max_spread_s * 1000, most)
        if spread < self._config.least_spread_s * 1000:
            return 0
        return int(spread * self._entropy.fraction())

    def _prefers(self, key: str) -> bool:
        members = self._membership.members()
        return not members or preferred(key, members) == self._membership.own_id

    async def _judge(self, batch: Sequence[_Queued], run: Run, *, queued: bool = True) -> None:
        """Read, decide and commit a batch. Of what was ``queued`` that which failed is queued again, later
        each time; the rest the next sweep finds, under the guard of whoever leads then.
        """
        if not batch:
            return
        report = run.report
        report.examined += len(batch)
        deadline = self._clock.monotonic() + self._config.timeout_s
        try:
            job_ids = [one.suspect.job_id for one in batch]
            found = await self._store.read_many(run.namespace, job_ids, deadline=deadline)
        except StorageError as error:
            logger.warning("jobs that seem lost could not be read: %s", error)
            self._failed(batch, report, queued)
            return
        if not queued:
            self._note(sum(one.claim is None for one in found))
        pending: list[tuple[_Queued, Operation]] = []
        for one, snapshot in zip(batch, found, strict=True):
            operation = self._operation(one.suspect, snapshot, deadline, as_leader=run.as_leader)
            if operation is None:
                self._done(one)
            elif run.dry_run:
                report.add(_action(operation))
            else:
                pending.append((one, operation))
        await failpoints.reached("lost.before-commit")
        commits = await commit_each(self._store, [operation for _, operation in pending])
        await failpoints.reached("lost.after-commit")
        failed: list[_Queued] = []
        for (one, operation), commit in zip(pending, commits, strict=True):
            if isinstance(commit, Commit) and commit.won:
                report.add(_action(operation))
                self._tell(operation)
                self._done(one)
            elif isinstance(commit, Commit) and not _is_lost(
                commit.stored.job if commit.stored else None, commit
            ):
                self._done(one)  # another recoverer was first, or it was our own first try
            else:
                failed.append(one)
        self._failed(failed, report, queued)

    def _tell(self, operation: Operation) -> None:
        before, after = _jobs(operation)
        self._notices.publish(notice_of(NoticeKind.LOST, before, after, _WHY))
        end = end_of(before, after)
        if end is not None:
            self._notices.publish(end)

    def _operation(
        self, suspect: Suspect, found: Snapshot, deadline: float, *, as_leader: bool = False
    ) -> Operation | None:
        if found.stored is None or found.claim is not None or found.stored.job.state is not JobState.RUNNING:
            return None
        job = found.stored.job
        command = Lose(
            token=self._token(suspect, job, found.stored.revision), delay_ms=self._delay_ms(job.lease_losses)
        )
        outcome = decide(job, None, command, self._clock.now_ms())
        if not isinstance(outcome, Decision):
            return None
        return operation_of(found.stored, outcome, deadline, as_leader=as_leader)

    def _token(self, suspect: Suspect, job: Job, revision: int) -> int:
        """The lost claim's token: as the record says, if it was written again since the claim; as the watch
        knew it; else from the record's revision, for the claim wrote it last.
        """
        if job.current is not None and job.current.token:
            return job.current.token
        if suspect.token and job.current is not None and job.current.session == suspect.session_id:
            return suspect.token
        return 0 if job.cancel_requested else make_token(self._present.epoch, revision)

    def _done(self, one: _Queued) -> None:
        key = (one.suspect.namespace, one.suspect.job_id)
        if self._queue.get(key) is one:
            del self._queue[key]

    def _failed(self, batch: Sequence[_Queued], report: Report, queued: bool) -> None:
        report.failed += len(batch)
        for one in batch if queued else ():
            pause = min(self._config.max_retry_s, self._config.retry_s * 2 ** min(one.tries, 16))
            one.tries += 1
            one.not_before = self._clock.monotonic() + pause
            self._queue.setdefault((one.suspect.namespace, one.suspect.job_id), one)
            self._wake.set()


def _is_lost(job: Job | None, commit: Commit) -> bool:
    return job is not None and job.state is JobState.RUNNING and commit.claim is None


def _jobs(operation: Operation) -> tuple[Job, Job]:
    assert operation.before is not None, "a loss is of a job that is there"
    assert operation.after is not None, "a loss deletes no job"
    return operation.before.job, operation.after


def _action(operation: Operation) -> Action:
    before, after = _jobs(operation)
    return Action(
        kind=RECOVERED, job_id=after.job_id, reason=_WHY, state_before=before.state, state_after=after.state
    )
