"""Sets keys right that do not follow from their job's record.

Transitions write record and keys in one Txn, so this finds what was done by hand, restored in part, or left
by a fault of ours. Two ways lead through a namespace: every key of every kind is looked at beside its record
(too many), and every record beside its keys (missing). Whatever seems wrong is read once more, key and record
at one revision, and the Txn that mends it compares both. The rules stand in docs/reconciler.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator import failpoints
from coordinator.core.commands import Repair
from coordinator.core.effects import Slot
from coordinator.core.job import RETAINED, Job, JobState
from coordinator.core.machine import Decision, Guard, decide
from coordinator.core.notice import Notice, NoticeKind
from coordinator.core.upkeep import LOST_FOR_GOOD, Lack, lacks, repair_writes, why_stray
from coordinator.errors import StorageError
from coordinator.ports import Clock, Commit, JobStore, Notices, Operation, Stored
from coordinator.ports.upkeep import Beside, Sight, Upkeep
from coordinator.reconciler.report import Action, Report
from coordinator.reconciler.state_walk import Pace, Run, StateWalk
from coordinator.reconciler.telling import notice_of
from coordinator.services.commits import commit_each
from coordinator.services.holders import Suspect

__all__ = ["FIRST", "LATER", "RepairConfig", "RepairPass"]

_log = logging.getLogger(__name__)

FIRST: Final = (Slot.CLAIM, Slot.CANCEL, Slot.UNIQUE)
"""Kinds whose strays stand in somebody's way, so they are looked at before the records."""

LATER: Final = (Slot.READY, Slot.DUE, Slot.CHECKPOINT, Slot.RESULT, Slot.SPEC)

_STATES: Final = frozenset(JobState) - RETAINED
_RIVALS_KEPT: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairConfig:
    """``orphan_after_s``: how long a claim or a lock entry must have been seen without an open session,
    where its lease may still be about to end."""

    orphan_after_s: float = 60.0


@dataclass(slots=True)
class _Verdict:
    """What is wrong with a key. ``remove`` False: it is told, and stays."""

    kind: str
    reason: str
    remove: bool = True


class RepairPass:
    """Implements ``report.Pass`` and ``state_walk.Visitor``.

    Args:
        store: commits repairs.
        upkeep: single keys.
        walk: reads the records.
        clock: deadlines, and how long an orphan has been seen.
        notices: told of each repair.
        suspect: called with a claim that was removed although its job runs under it, so that the job is
            recovered at once.
        config: bounds.
    """

    def __init__(
        self,
        store: JobStore,
        upkeep: Upkeep,
        walk: StateWalk,
        clock: Clock,
        *,
        notices: Notices,
        suspect: Callable[[Suspect], None],
        config: RepairConfig | None = None,
    ) -> None:
        self._store = store
        self._upkeep = upkeep
        self._walk = walk
        self._clock = clock
        self._notices = notices
        self._suspect = suspect
        self._config = config or RepairConfig()
        self._orphans: dict[tuple[str, str, str, int], float] = {}

    @property
    def name(self) -> str:
        """See ``report.Pass``."""
        return "repair"

    @property
    def states(self) -> frozenset[JobState]:
        """See ``state_walk.Visitor``."""
        return _STATES

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        """Look at every key and every record.

        Raises:
            StorageError: a page could not be read; what was done until then stands.
        """
        run = Run(namespace=namespace, report=Report(self.name), dry_run=dry_run)
        await self.remove_strays(FIRST, run)
        await self._walk.walk([(self, run)])
        await self.remove_strays(LATER, run)
        await self.remove_locks(run)
        return run.report

    # -- too many

    async def remove_strays(self, slots: Sequence[Slot], run: Run) -> None:
        """Remove keys that no record wants, of these kinds.

        Raises:
            StorageError: as of ``run_once``.
        """
        for slot in slots:
            pace = Pace(self._clock, self._walk.config, hurry=run.hurry)
            keys = self._upkeep.walk(run.namespace, slot)
            while run.go_on():
                deadline = pace.begin() + self._walk.config.timeout_s
                page = await keys.page(deadline=deadline)
                if page is None:
                    break
                run.report.examined += len(page)
                for seen in await self._upkeep.suspects(run.namespace, page, deadline=deadline):
                    deadline = self._clock.monotonic() + self._walk.config.timeout_s
                    sight = await self._upkeep.sight(run.namespace, seen.where, deadline=deadline)
                    await self._look_at(sight, run, deadline)
                await pace.rest()

    async def _look_at(self, sight: Sight, run: Run, deadline: float) -> None:
        """Judge one key as seen beside its record, and remove it if that is the verdict."""
        verdict = self._judge(sight, run.namespace)
        if verdict is None or sight.key is None:
            return
        if verdict.remove and not run.dry_run:
            await failpoints.reached("repair.before-commit")
            try:
                gone = await self._upkeep.remove(
                    run.namespace, sight, as_leader=run.as_leader, deadline=deadline
                )
            except StorageError as error:
                _log.warning("a stray key could not be removed: %s", error)
                run.report.failed += 1
                return
            if not gone:
                return  # it, or its record, has changed since; the next run looks again
            self._recover(sight, run.namespace)
        job = sight.stored.job if sight.stored is not None else None
        state = job.state if job is not None else None
        run.report.add(
            Action(
                kind=verdict.kind,
                job_id=sight.key.where.job_id,
                reason=verdict.reason,
                state_before=state,
                state_after=state,
            )
        )
        if not run.dry_run:
            self._notices.publish(_stray_notice(sight, job, verdict))

    def _judge(self, sight: Sight, namespace: str) -> _Verdict | None:
        """What is wrong with the key, None if nothing is or nobody can tell."""
        key = sight.key
        if key is None or not sight.readable:
            return None
        slot = key.where.slot
        if slot is Slot.UNIQUE and not key.readable:
            return None
        removed = f"{slot.value}-key-removed"
        reason = why_stray(key, sight.stored.job if sight.stored is not None else None)
        if reason:
            return _Verdict(removed, reason)
        claim = key.claim
        if claim is None:
            return None
        foreign = key.lease != int(claim.session, 16)
        where = f"on lease {key.lease:016x}" if key.lease else "on no lease"
        if sight.session_open:
            if not foreign:
                return None
            why = f"it lies {where} and not on that of its session, which is open"
            return _Verdict("claim-on-foreign-lease", why, remove=False)
        if foreign:
            return _Verdict(removed, f"it lies {where}, and its session is not open")
        # A session that closes has no witness either, until its lease is revoked.
        if self._orphaned((namespace, "claim", key.where.job_id, key.modified)):
            return _Verdict(removed, f"it lies {where}, whose session has not been open for long")
        return None

    def _orphaned(self, orphan: tuple[str, str, str, int]) -> bool:
        """Whether it has been seen for long enough; what is forgotten for want of room only waits longer."""
        since = self._orphans.setdefault(orphan, self._clock.monotonic())
        if len(self._orphans) > _RIVALS_KEPT:
            del self._orphans[next(iter(self._orphans))]
        return self._clock.monotonic() - since >= self._config.orphan_after_s

    def _recover(self, sight: Sight, namespace: str) -> None:
        """The job of a claim that was removed may run under it no more."""
        claim = sight.key.claim if sight.key is not None else None
        stored = sight.stored
        if claim is not None and stored is not None and stored.job.state is JobState.RUNNING:
            self._suspect(Suspect(namespace, stored.job.job_id, claim.session, claim.token))

    async def remove_locks(self, run: Run) -> None:
        """Remove entries of locks that no session's end will remove, or that no claim stands for.

        Raises:
            StorageError: as of ``run_once``.
        """
        pace = Pace(self._clock, self._walk.config, hurry=run.hurry)
        locks = self._upkeep.walk_locks(run.namespace)
        while run.go_on():
            deadline = pace.begin() + self._walk.config.timeout_s
            page = await locks.page(deadline=deadline)
            if page is None:
                return
            run.report.examined += len(page)
            for lock in page:
                orphan = (run.namespace, "lock", f"{lock.name}/{lock.waiter}", lock.modified)
                abandoned = lock.claim is not None and lock.claim != lock.created
                if not abandoned and (lock.session_open or (lock.lease and not self._orphaned(orphan))):
                    continue
                if abandoned:
                    where = "there though the claim that made it has ended"
                elif lock.lease:
                    where = f"on lease {lock.lease:016x}, which is no open session's"
                else:
                    where = "on no lease"
                if not run.dry_run:
                    try:
                        if not await self._upkeep.remove_lock(
                            run.namespace, lock, as_leader=run.as_leader, deadline=deadline
                        ):
                            continue
                    except StorageError as error:
                        _log.warning("a stray lock entry could not be removed: %s", error)
                        run.report.failed += 1
                        continue
                reason = f"an entry of lock {lock.name} lies {where}"
                run.report.add(Action(kind="lock-entry-removed", job_id=lock.job_id, reason=reason))
                if not run.dry_run:
                    self._notices.publish(
                        Notice(
                            kind=NoticeKind.REPAIRED,
                            reason=reason,
                            namespace=run.namespace,
                            job_id=lock.job_id,
                            facts={"lease": f"{lock.lease:016x}"},
                        )
                    )
            await pace.rest()

    # -- missing

    async def visit(self, found: Sequence[Stored], run: Run) -> None:
        """See ``state_walk.Visitor``."""
        run.report.examined += len(found)
        deadline = self._clock.monotonic() + self._walk.config.timeout_s
        try:
            looks = await self._upkeep.look(run.namespace, found, deadline=deadline)
        except StorageError as error:
            _log.warning("keys beside records could not be read: %s", error)
            run.report.failed += len(found)
            return
        mending: list[tuple[Operation, tuple[Lack, ...]]] = []
        for beside in looks:
            if beside is None:
                continue  # it changes, so whoever changes it writes its keys
            missing = lacks(beside.stored.job, beside.stored.revision, beside.keys)
            for lack in missing:
                if lack.where.slot is Slot.SPEC:
                    self._report(beside.stored.job, lack, "spec-missing", run)
                elif lack.where.slot is Slot.LOCK:
                    if beside.claim is not None:  # else the lost pass will end it
                        self._report(beside.stored.job, lack, "lock-entry-missing", run)
                elif lack.rival and await self._rivals(beside.stored.job, lack, run, deadline):
                    self._report(beside.stored.job, lack, "unique-key-conflict", run)
            wanted = tuple(
                lack for lack in missing if lack.where.slot not in LOST_FOR_GOOD and not lack.rival
            )
            operation = self._operation(beside, wanted, run, deadline) if wanted else None
            if operation is not None:
                mending.append((operation, wanted))
        if run.dry_run:
            for operation, wanted in mending:
                self._mended(operation, wanted, run)
            return
        await failpoints.reached("repair.before-commit")
        commits = await commit_each(self._store, [operation for operation, _ in mending])
        for (operation, wanted), commit in zip(mending, commits, strict=True):
            if not isinstance(commit, Commit):
                run.report.failed += 1
            elif commit.won:
                self._mended(operation, wanted, run)

    def _operation(
        self, beside: Beside, missing: tuple[Lack, ...], run: Run, deadline: float
    ) -> Operation | None:
        token = beside.claim.token if beside.claim is not None else 0
        job = beside.stored.job
        outcome = decide(job, beside.claim, Repair(token=token), self._clock.now_ms())
        if not isinstance(outcome, Decision) or outcome.job is None:
            return None
        assert outcome.guard is Guard.SEEN, "a repair compares record and claim"
        return Operation(
            guard=outcome.guard,
            before=beside.stored,
            after=outcome.job,
            writes=repair_writes(outcome.job, missing),
            deadline=deadline,
            token=token,
            cancelled_by=job.cancel_reason,
            as_leader=run.as_leader,
        )

    def _mended(self, operation: Operation, missing: tuple[Lack, ...], run: Run) -> None:
        assert operation.after is not None, "a repair deletes no job"
        job = operation.after
        for lack in missing:
            kind = f"{lack.where.slot.value}-key-put"
            run.report.add(_action(job, kind, lack.reason))
        if not run.dry_run:
            reasons = "; ".join(lack.reason for lack in missing)
            self._notices.publish(notice_of(NoticeKind.REPAIRED, job, job, reasons))

    def _report(self, job: Job, lack: Lack, kind: str, run: Run) -> None:
        """Tell of what only an operator can mend."""
        reason = f"{lack.reason}: {lack.rival}" if lack.rival else lack.reason
        run.report.add(_action(job, kind, reason))
        if not run.dry_run:
            self._notices.publish(notice_of(NoticeKind.REPAIRED, job, job, f"not repaired: {reason}"))

    async def _rivals(self, job: Job, lack: Lack, run: Run, deadline: float) -> bool:
        """Whether the other job owns the key too; if not, its key is a stray, and goes as such."""
        sight = await self._upkeep.sight(
            run.namespace, lack.where._replace(job_id=lack.rival), deadline=deadline
        )
        key = sight.key
        if key is None or key.where.job_id == job.job_id:
            return False
        return not sight.readable or not why_stray(key, sight.stored.job if sight.stored else None)


def _action(job: Job, kind: str, reason: str) -> Action:
    return Action(kind=kind, job_id=job.job_id, reason=reason, state_before=job.state, state_after=job.state)


def _stray_notice(sight: Sight, job: Job | None, verdict: _Verdict) -> Notice:
    key = sight.key
    assert key is not None, "only a key that was there is told of"
    name = key.where.slot.value
    reason = f"{name} key: {verdict.reason}"
    if not verdict.remove:
        reason = f"not repaired: {reason}"
    facts = {"key": name, "lease": f"{key.lease:016x}"}
    if job is not None:
        return notice_of(NoticeKind.REPAIRED, job, job, reason, facts=facts)
    return Notice(
        kind=NoticeKind.REPAIRED,
        reason=reason,
        namespace=key.where.namespace,
        job_id=key.where.job_id,
        facts=facts,
    )
