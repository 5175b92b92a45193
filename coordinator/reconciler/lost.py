"""Recovers jobs whose holder has died: the record says RUNNING, and the claim went with its session's lease.

Suspicions come from the watch (``services.holders``); a paced sweep finds what no watch told: claims
deleted by hand, and whatever ended while no coordinator ran. Either way the pass reads record and claim at
one revision, and its Txn compares that the claim is absent and the record unchanged. So a live job is never
recovered, and of two recoverers one loses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
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
    JobStore,
    Membership,
    NamespaceFeeds,
    Notices,
    Operation,
    Present,
    Snapshot,
)
from coordinator.reconciler.report import Action, Report
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
    are left to a sweep. ``page`` and ``pace_s``: records examined at once by a sweep, and its pause after
    each page.
    """

    batch: int = 240
    others_s: float = 1.0
    retry_s: float = 0.2
    max_retry_s: float = 5.0
    timeout_s: float = 5.0
    max_queued: int = 200_000
    page: int = 200
    pace_s: float = 0.02
    share: float = 0.05
    first_share: float = 0.5


@dataclass(slots=True)
class _Queued:
    suspect: Suspect
    not_before: float
    tries: int = 0


class LostPass:
    """A queue of suspicions, the pass that judges them, and the sweep.

    Args:
        store: where jobs are.
        feeds: the namespaces that are swept.
        present: the epoch of tokens.
        membership: which coordinator acts first.
        clock: times.
        config: bounds.
        notices: told of each loss.
        leads: whether this process sweeps everything; None: it sweeps the namespaces that it prefers.
    """

    def __init__(
        self,
        store: JobStore,
        feeds: NamespaceFeeds,
        present: Present,
        membership: Membership,
        clock: Clock,
        config: LostConfig | None = None,
        *,
        notices: Notices,
        leads: Callable[[], bool] | None = None,
    ) -> None:
        self._store = store
        self._feeds = feeds
        self._present = present
        self._membership = membership
        self._clock = clock
        self._config = config or LostConfig()
        self._notices = notices
        self._leads = leads
        self._queue: dict[tuple[str, str], _Queued] = {}
        self._wake = asyncio.Event()
        self._sweep_wanted: set[str] = set()
        self._swept: set[str] = set()

    @property
    def name(self) -> str:
        """See ``report.Pass``."""
        return "lost"

    @property
    def queued(self) -> int:
        """Suspicions not yet judged."""
        return len(self._queue)

    def suspect(self, suspect: Suspect) -> None:
        """Queue a claim that seems lost. Never blocks; where there are too many, a sweep will find it."""
        if len(self._queue) >= self._config.max_queued:
            self._sweep_wanted.add(suspect.namespace)
            return
        wait = 0.0 if self._prefers(suspect.job_id) else self._config.others_s
        key = (suspect.namespace, suspect.job_id)
        self._queue[key] = _Queued(suspect, self._clock.monotonic() + wait)
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
                await self._judge(namespace, queued[start : start + self._config.batch], report)
        if report.changed:
            logger.info("lost jobs recovered: %d", report.changed)
        return report

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        """Look at every RUNNING record of the namespace, paced, and recover those without a claim.

        Raises:
            StorageError: a page could not be read; what was found until then is recovered.
        """
        report = Report(self.name)
        cursor = ""
        share = self._config.share if namespace in self._swept else self._config.first_share
        while True:
            began = self._clock.monotonic()
            deadline = began + self._config.timeout_s
            page = await self._store.list_jobs(
                namespace, cursor=cursor, limit=self._config.page, deadline=deadline, states=_RUNNING
            )
            found = [Suspect(namespace, stored.job.job_id, "", 0) for stored in page.jobs]
            await self._judge(namespace, [_Queued(one, 0.0) for one in found], report, dry_run)
            cursor = page.cursor
            if not cursor:
                self._swept.add(namespace)
                return report
            busy = self._clock.monotonic() - began
            await self._clock.sleep(max(self._config.pace_s, busy * (1 / share - 1)))

    async def sweep(self) -> bool:
        """Sweep the namespaces that are this process's to sweep, and those with too many suspicions.

        For a ``PassLoop``. Returns False: the next sweep may wait for the timer.
        """
        wanted, self._sweep_wanted = self._sweep_wanted, set()
        for namespace in self._feeds.namespaces():
            if namespace in wanted or (self._leads() if self._leads else self._prefers(namespace)):
                try:
                    await self.run_once(namespace)
                except StorageError:
                    self._sweep_wanted |= wanted
                    raise
        return False

    def _prefers(self, key: str) -> bool:
        members = self._membership.members()
        return not members or preferred(key, members) == self._membership.own_id

    async def _judge(
        self, namespace: str, batch: Sequence[_Queued], report: Report, dry_run: bool = False
    ) -> None:
        """Read, decide and commit a batch; what failed is queued again, later each time."""
        if not batch:
            return
        report.examined += len(batch)
        deadline = self._clock.monotonic() + self._config.timeout_s
        try:
            job_ids = [one.suspect.job_id for one in batch]
            found = await self._store.read_many(namespace, job_ids, deadline=deadline)
        except StorageError as error:
            logger.warning("jobs that seem lost could not be read: %s", error)
            self._again(batch, report)
            return
        pending: list[tuple[_Queued, Operation]] = []
        for one, snapshot in zip(batch, found, strict=True):
            operation = self._operation(one.suspect, snapshot, deadline)
            if operation is None:
                self._done(one)
            elif dry_run:
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
        self._again(failed, report)

    def _tell(self, operation: Operation) -> None:
        before, after = _jobs(operation)
        self._notices.publish(notice_of(NoticeKind.LOST, before, after, _WHY))
        end = end_of(before, after)
        if end is not None:
            self._notices.publish(end)

    def _operation(self, suspect: Suspect, found: Snapshot, deadline: float) -> Operation | None:
        if found.stored is None or found.claim is not None or found.stored.job.state is not JobState.RUNNING:
            return None
        job = found.stored.job
        outcome = decide(
            job, None, Lose(token=self._token(suspect, job, found.stored.revision)), self._clock.now_ms()
        )
        if not isinstance(outcome, Decision):
            return None
        return operation_of(found.stored, outcome, deadline)

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

    def _again(self, batch: Iterable[_Queued], report: Report) -> None:
        for one in batch:
            report.failed += 1
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
