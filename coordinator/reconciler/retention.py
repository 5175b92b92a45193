"""Deletes DEAD and QUARANTINED jobs that nobody came back for.

Their records lie on no lease, since an operator may want them for long; SUCCEEDED and CANCELLED ones go with
their retention lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from coordinator.core.commands import Delete
from coordinator.core.job import JobState
from coordinator.core.machine import Decision, decide
from coordinator.ports import Clock, Commit, JobStore, Operation, Stored
from coordinator.reconciler.report import Action, Report
from coordinator.reconciler.state_walk import Run, StateWalk
from coordinator.services.commits import commit_each, operation_of

__all__ = ["DELETED", "RetentionPass"]

DELETED: Final = "deleted"

_STATES: Final = frozenset({JobState.DEAD, JobState.QUARANTINED})


class RetentionPass:
    """Implements ``report.Pass`` and ``state_walk.Visitor``.

    Args:
        store: where jobs are.
        walk: reads the records.
        clock: wall time for what is old.
        keep_ms: how long such a job is kept after its end.
    """

    def __init__(self, store: JobStore, walk: StateWalk, clock: Clock, *, keep_ms: int) -> None:
        self._store = store
        self._walk = walk
        self._clock = clock
        self._keep_ms = keep_ms

    @property
    def name(self) -> str:
        """See ``report.Pass``."""
        return "retention"

    @property
    def states(self) -> frozenset[JobState]:
        """See ``state_walk.Visitor``."""
        return _STATES

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        """Look at every record.

        Raises:
            StorageError: a page could not be read; what was done until then stands.
        """
        run = Run(namespace=namespace, report=Report(self.name), dry_run=dry_run)
        await self._walk.walk([(self, run)])
        return run.report

    async def visit(self, found: Sequence[Stored], run: Run) -> None:
        """See ``state_walk.Visitor``."""
        report = run.report
        report.examined += len(found)
        now_ms = self._clock.now_ms()
        deadline = self._clock.monotonic() + self._walk.config.timeout_s
        old = [one for one in found if one.job.settle_ms and one.job.settle_ms + self._keep_ms <= now_ms]
        operations: list[Operation] = []
        for stored in old:
            outcome = decide(stored.job, None, Delete(), now_ms)
            assert isinstance(outcome, Decision), "a terminal job may be deleted"
            operations.append(operation_of(stored, outcome, deadline, as_leader=run.as_leader))
        if run.dry_run:
            for operation in operations:
                report.add(_action(operation))
            return
        for operation, commit in zip(operations, await commit_each(self._store, operations), strict=True):
            if not isinstance(commit, Commit):
                report.failed += 1
            elif commit.won:
                report.add(_action(operation))
            # Else somebody was faster: retried, redriven or deleted it.


def _action(operation: Operation) -> Action:
    assert operation.before is not None, "only what is there is deleted"
    job = operation.before.job
    return Action(
        kind=DELETED,
        job_id=job.job_id,
        reason=f"{job.state.name} and kept for long enough",
        state_before=job.state,
    )
