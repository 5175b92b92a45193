"""From decisions to commits: make the operation of a decision, and await many together."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core.job import FAILED, Claim, Job
from coordinator.core.machine import Decision, Guard
from coordinator.core.rollback import enqueue_rollback
from coordinator.errors import LeasekeeperError
from coordinator.ports import Commit, JobStore, Operation, PendingCommit, Spec, Stored

__all__ = ["commit_each", "operation_of"]


def operation_of(
    before: Stored | None,
    decision: Decision,
    deadline: float,
    *,
    token: int = 0,
    claim: Claim | None = None,
    spec: Spec | None = None,
    cancelled_by: str = "",
    want_spec: bool = False,
    want_checkpoint: bool = False,
    lock_revisions: tuple[int, ...] = (),
    as_leader: bool = False,
    follow_ups: tuple[Operation, ...] = (),
) -> Operation:
    """The operation that commits ``decision``, which was based on ``before``. See ``ports.Operation``.

    ``follow_ups`` are submissions that are committed with it, all or none. A job that becomes DEAD or
    QUARANTINED takes its rollback job with it, whoever decided that.
    """
    after = decision.job
    also = follow_ups
    if after is not None and after.terms.rollback is not None and after.state in FAILED:
        assert not follow_ups, "a job that has failed has no follow-ups"
        after, also = _with_rollback(before, after, deadline)
    return Operation(
        guard=decision.guard,
        before=before,
        after=after,
        deadline=deadline,
        token=token,
        claim=claim,
        spec=spec,
        big_result=decision.big_result,
        cancelled_by=cancelled_by,
        want_spec=want_spec,
        want_checkpoint=want_checkpoint,
        as_leader=as_leader,
        also=also,
        guards_also=bool(follow_ups),
        lock_revisions=lock_revisions,
    )


def _with_rollback(before: Stored | None, after: Job, deadline: float) -> tuple[Job, tuple[Operation, ...]]:
    assert before is not None, "no job fails before it is there"
    enqueued = enqueue_rollback(before.job, after, before.revision)
    wanted = after.terms.rollback
    if enqueued is None or wanted is None:
        return after, ()
    parent, child = enqueued
    spec = Spec(payload=wanted.payload, content_type=wanted.content_type)
    return parent, (Operation(guard=Guard.ABSENT, before=None, after=child, deadline=deadline, spec=spec),)


async def commit_each(store: JobStore, operations: Sequence[Operation]) -> list[Commit | LeasekeeperError]:
    """Commit ``operations`` together; what became of each, in order. No error of one touches another.

    They are under way already, so waiting for one after the other costs no time. If the caller is cancelled,
    so is each: an operation that was not sent is dropped, one that was sent goes on unheard.
    """
    results: list[Commit | LeasekeeperError] = []
    pending: list[PendingCommit | LeasekeeperError] = []
    try:
        for operation in operations:
            try:
                pending.append(store.commit(operation))
            except LeasekeeperError as error:
                pending.append(error)
        for one in pending:
            if isinstance(one, LeasekeeperError):
                results.append(one)
                continue
            try:
                results.append(await one)
            except LeasekeeperError as error:
                results.append(error)
    finally:
        for one in pending[len(results) :]:
            if not isinstance(one, LeasekeeperError):
                one.cancel()
    return results
