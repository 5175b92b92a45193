"""Makes jobs claimable when their time has come, ends those whose time is over, clears stray due keys.

Every coordinator looks; the one that prefers a job acts at once, the others a second later, and the Txn
compares the record. A job taken away from a live session waits until whoever promotes it has itself seen it
waiting one session TTL on its monotonic clock (docs/guarantees.md, P8), whatever wall clocks say.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator import failpoints
from coordinator.core.commands import FallDue
from coordinator.core.job import JobState
from coordinator.core.machine import Decision, decide
from coordinator.core.rendezvous import preferred
from coordinator.errors import CodecError, StorageError
from coordinator.ports import (
    Clock,
    Commit,
    Due,
    JobStore,
    Membership,
    Notices,
    Operation,
    Snapshot,
)
from coordinator.reconciler.report import Action, Report
from coordinator.reconciler.telling import end_of
from coordinator.services.commits import commit_each, operation_of

__all__ = ["ENDED", "PROMOTED", "STRAY_REMOVED", "DueConfig", "DuePass"]

logger = logging.getLogger(__name__)

PROMOTED: Final = "promoted"
ENDED: Final = "timed-out"
STRAY_REMOVED: Final = "due-key-removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DueConfig:
    """``others_ms``: how late a job must be that another coordinator prefers.

    ``page``: due keys listed at once; it grows up to ``max_page`` while all that are listed have to wait.
    ``batch``: jobs read and committed together. ``max_rounds``: pages worked off in one run. ``max_seen``:
    sightings kept. ``timeout_s``: for one batch.
    """

    others_ms: int = 1_000
    page: int = 1_000
    max_page: int = 16_000
    batch: int = 240
    max_rounds: int = 20
    max_seen: int = 100_000
    timeout_s: float = 5.0


_Sighting = tuple[str, str, int]


class DuePass:
    """The pass over due keys.

    It is also told of own commits (``applied``): a job that this coordinator took away has been seen
    waiting from then on.

    Args:
        store: where jobs are.
        membership: which coordinator acts first.
        clock: wall time for what is due, monotonic time for holds.
        config: bounds.
        notices: told of jobs whose time is over.
    """

    def __init__(
        self,
        store: JobStore,
        membership: Membership,
        clock: Clock,
        config: DueConfig | None = None,
        *,
        notices: Notices,
    ) -> None:
        self._store = store
        self._membership = membership
        self._clock = clock
        self._config = config or DueConfig()
        self._notices = notices
        self._seen: dict[_Sighting, float] = {}

    @property
    def name(self) -> str:
        """See ``report.Pass``."""
        return "due"

    @property
    def sightings(self) -> int:
        """Jobs on hold that are remembered."""
        return len(self._seen)

    def applied(self, operation: Operation, commit: Commit) -> None:
        """Note when a job was put on hold here; see ``ports.CommitObserver``."""
        job = operation.after
        if job is not None and job.hold_ms and job.due_key_ms:
            self._first_sight((job.namespace, job.job_id, job.due_key_ms))

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        """Work off what is due now.

        Raises:
            StorageError: due keys could not be listed.
        """
        report = Report(self.name)
        page = self._config.page if not dry_run else self._config.max_page
        for _ in range(self._config.max_rounds):
            now_ms = self._clock.now_ms()
            deadline = self._clock.monotonic() + self._config.timeout_s
            listed = await self._store.list_due(namespace, until_ms=now_ms, limit=page, deadline=deadline)
            complete = len(listed) < page
            if complete and not dry_run:
                self._forget_vanished(namespace, listed, now_ms)
            changed = report.changed
            report.waiting = 0
            acting = [due for due in listed if self._may_act(namespace, due, now_ms)]
            report.waiting += len(listed) - len(acting)
            report.examined += len(listed)
            for start in range(0, len(acting), self._config.batch):
                await self._work(namespace, acting[start : start + self._config.batch], report, dry_run)
            if complete or dry_run:
                return report
            if report.changed == changed:
                # Only such as have to wait: look behind them.
                if page >= self._config.max_page:
                    return report
                page = min(self._config.max_page, page * 2)
        report.more = True
        return report

    def _may_act(self, namespace: str, due: Due, now_ms: int) -> bool:
        if due.hold_ms and not self._waited(namespace, due, due.hold_ms):
            return False
        members = self._membership.members()
        if not members or due.ms + self._config.others_ms <= now_ms:
            return True
        return preferred(due.job_id, members) == self._membership.own_id

    async def _work(self, namespace: str, batch: Sequence[Due], report: Report, dry_run: bool) -> None:
        deadline = self._clock.monotonic() + self._config.timeout_s
        try:
            job_ids = [due.job_id for due in batch]
            found = await self._store.read_many(namespace, job_ids, deadline=deadline)
            pending: list[tuple[Due, Operation]] = []
            for due, snapshot in zip(batch, found, strict=True):
                if await self._is_stray(namespace, due, snapshot, deadline):
                    if dry_run or await self._store.delete_stray(namespace, due, deadline=deadline):
                        report.add(
                            Action(kind=STRAY_REMOVED, job_id=due.job_id, reason="no job has this due key")
                        )
                    continue
                if snapshot.stored is None:
                    report.waiting += 1
                    continue
                operation = self._operation(namespace, due, snapshot, deadline)
                if operation is None:
                    report.waiting += 1
                else:
                    pending.append((due, operation))
        except StorageError as error:
            logger.warning("jobs that are due could not be read: %s", error)
            report.failed += len(batch)
            return
        if dry_run:
            for _, operation in pending:
                report.add(_action(operation))
            return
        await failpoints.reached("due.before-commit")
        commits = await commit_each(self._store, [operation for _, operation in pending])
        await failpoints.reached("due.after-commit")
        for (due, operation), commit in zip(pending, commits, strict=True):
            if not isinstance(commit, Commit):
                report.failed += 1
            elif commit.won:
                report.add(_action(operation))
                self._tell(operation)
                self._seen.pop((namespace, due.job_id, due.ms), None)
            else:
                report.waiting += 1  # somebody was first; if it is still due, the next run finds it

    def _tell(self, operation: Operation) -> None:
        if operation.before is not None and operation.after is not None:
            notice = end_of(operation.before.job, operation.after)
            if notice is not None:
                self._notices.publish(notice)

    async def _is_stray(self, namespace: str, due: Due, found: Snapshot, deadline: float) -> bool:
        """Whether no job has this key. A record that cannot be decoded keeps its keys until somebody can."""
        if found.stored is not None:
            return found.stored.job.due_key_ms != due.ms
        try:
            return (await self._store.read(namespace, due.job_id, deadline=deadline)).stored is None
        except CodecError:
            return False

    def _operation(self, namespace: str, due: Due, found: Snapshot, deadline: float) -> Operation | None:
        """What time does to the job, None if that is not yet."""
        assert found.stored is not None, "what has no record is dealt with before"
        job = found.stored.job
        outcome = decide(job, None, FallDue(), self._clock.now_ms())
        if not isinstance(outcome, Decision) or outcome.job is None:
            return None
        hold_ms = max(due.hold_ms, job.hold_ms)
        if outcome.job.state is JobState.PENDING and hold_ms and not self._waited(namespace, due, hold_ms):
            return None
        return operation_of(found.stored, outcome, deadline)

    def _waited(self, namespace: str, due: Due, hold_ms: int) -> bool:
        since = self._first_sight((namespace, due.job_id, due.ms))
        return round((self._clock.monotonic() - since) * 1000) >= hold_ms

    def _first_sight(self, sighting: _Sighting) -> float:
        """When it was first seen here, maybe now. What is forgotten for want of room only waits longer."""
        since = self._seen.setdefault(sighting, self._clock.monotonic())
        if len(self._seen) > self._config.max_seen:
            del self._seen[next(iter(self._seen))]
        return since

    def _forget_vanished(self, namespace: str, listed: Sequence[Due], now_ms: int) -> None:
        if not self._seen:
            return
        there = {(due.job_id, due.ms) for due in listed}
        for sighting in [one for one in self._seen if one[0] == namespace]:
            _, job_id, ms = sighting
            if ms <= now_ms and (job_id, ms) not in there:
                del self._seen[sighting]


def _action(operation: Operation) -> Action:
    before, after = operation.before, operation.after
    assert before is not None, "time moves what is there"
    assert after is not None, "time deletes no job"
    ended = after.state is not JobState.PENDING
    return Action(
        kind=ENDED if ended else PROMOTED,
        job_id=after.job_id,
        reason=after.end_reason if ended else "its time has come",
        state_before=before.job.state,
        state_after=after.state,
    )
