"""Breaks the one circle of the composition: the store tells the index, and the index asks the store.

The store is made with a relay, the index with the store; then the relay is bound. Nothing is told before.
So it is with named locks and the lines of them, with circuits and with queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.core.job import Claim
from coordinator.core.lock_order import LockEntry
from coordinator.core.rank import Rank
from coordinator.ports import (
    Changes,
    CircuitChanges,
    Commit,
    CommitObserver,
    LockChanges,
    Operation,
    QueueChanges,
    Session,
    Stored,
    StoredCircuit,
    StoredQueue,
)

__all__ = ["ChangesRelay", "CircuitsRelay", "CommitRelay", "LocksRelay", "QueuesRelay", "StopsRelay"]


class ChangesRelay:
    """Implements ``ports.Changes`` by handing everything on."""

    def __init__(self) -> None:
        self._target: Changes | None = None

    def bind(self, target: Changes) -> None:
        """From now on ``target`` is told."""
        self._target = target

    @property
    def _bound(self) -> Changes:
        assert self._target is not None, "the relay is bound before the store runs"
        return self._target

    async def relist(self, namespace: str, revision: int) -> None:
        """See ``ports.Changes``."""
        await self._bound.relist(namespace, revision)

    def ready_put(self, namespace: str, stored: Stored, *, created: bool) -> None:
        """See ``ports.Changes``."""
        self._bound.ready_put(namespace, stored, created=created)

    def ready_deleted(
        self, namespace: str, queue: str, type_: str, rank: Rank, job_id: str, revision: int
    ) -> None:
        """See ``ports.Changes``."""
        self._bound.ready_deleted(namespace, queue, type_, rank, job_id, revision)

    def claim_put(self, namespace: str, job_id: str, claim: Claim, revision: int) -> None:
        """See ``ports.Changes``."""
        self._bound.claim_put(namespace, job_id, claim, revision)

    def claim_deleted(self, namespace: str, job_id: str, revision: int) -> None:
        """See ``ports.Changes``."""
        self._bound.claim_deleted(namespace, job_id, revision)

    def session_put(self, session: Session, revision: int) -> None:
        """See ``ports.Changes``."""
        self._bound.session_put(session, revision)

    def session_deleted(self, namespace: str, session_id: str, revision: int) -> None:
        """See ``ports.Changes``."""
        self._bound.session_deleted(namespace, session_id, revision)

    def cancel_put(self, namespace: str, job_id: str, revision: int) -> None:
        """See ``ports.Changes``."""
        self._bound.cancel_put(namespace, job_id, revision)

    def passed(self, namespace: str, kind: str, revision: int) -> None:
        """See ``ports.Changes``."""
        self._bound.passed(namespace, kind, revision)

    def freshness(self, namespace: str, fresh: bool) -> None:
        """See ``ports.Changes``."""
        self._bound.freshness(namespace, fresh)


class CommitRelay:
    """Implements ``ports.CommitObserver`` for several observers, in their order."""

    def __init__(self) -> None:
        self._targets: tuple[CommitObserver, ...] = ()

    def bind(self, targets: Sequence[CommitObserver]) -> None:
        """From now on ``targets`` are told."""
        self._targets = tuple(targets)

    def applied(self, operation: Operation, commit: Commit) -> None:
        """See ``ports.CommitObserver``."""
        for target in self._targets:
            target.applied(operation, commit)


class LocksRelay:
    """Implements ``ports.LockChanges`` by handing everything on."""

    def __init__(self) -> None:
        self._target: LockChanges | None = None

    def bind(self, target: LockChanges) -> None:
        """From now on ``target`` is told."""
        self._target = target

    @property
    def _bound(self) -> LockChanges:
        assert self._target is not None, "the relay is bound before the store runs"
        return self._target

    async def relist(self, namespace: str, revision: int) -> None:
        """See ``ports.LockChanges``."""
        await self._bound.relist(namespace, revision)

    def own_put(self, namespace: str, name: str, waiter: str, revision: int) -> LockEntry | None:
        """See ``ports.LockChanges``."""
        return self._bound.own_put(namespace, name, waiter, revision)

    def lock_put(self, namespace: str, entry: LockEntry) -> None:
        """See ``ports.LockChanges``."""
        self._bound.lock_put(namespace, entry)

    def lock_deleted(self, namespace: str, name: str, waiter: str, revision: int) -> None:
        """See ``ports.LockChanges``."""
        self._bound.lock_deleted(namespace, name, waiter, revision)

    def locks_passed(self, namespace: str, revision: int) -> None:
        """See ``ports.LockChanges``."""
        self._bound.locks_passed(namespace, revision)


class CircuitsRelay:
    """Implements ``ports.CircuitChanges`` by handing everything on."""

    def __init__(self) -> None:
        self._target: CircuitChanges | None = None

    def bind(self, target: CircuitChanges) -> None:
        """From now on ``target`` is told."""
        self._target = target

    @property
    def _bound(self) -> CircuitChanges:
        assert self._target is not None, "the relay is bound before the store runs"
        return self._target

    async def relist(self, namespace: str, revision: int) -> None:
        """See ``ports.CircuitChanges``."""
        await self._bound.relist(namespace, revision)

    def circuit_changed(
        self, namespace: str, queue: str, type_: str, stored: StoredCircuit, revision: int
    ) -> None:
        """See ``ports.CircuitChanges``."""
        self._bound.circuit_changed(namespace, queue, type_, stored, revision)


class StopsRelay:
    """Hands on the requests to stop that the index hears of; streams are made from what is made from it."""

    def __init__(self) -> None:
        self._target: Callable[[str, str], None] | None = None

    def bind(self, target: Callable[[str, str], None]) -> None:
        """From now on ``target`` is told."""
        self._target = target

    def asked(self, namespace: str, job_id: str) -> None:
        """A running job is asked to stop."""
        assert self._target is not None, "the relay is bound before the store runs"
        self._target(namespace, job_id)


class QueuesRelay:
    """Implements ``ports.QueueChanges`` by handing everything on."""

    def __init__(self) -> None:
        self._target: QueueChanges | None = None

    def bind(self, target: QueueChanges) -> None:
        """From now on ``target`` is told."""
        self._target = target

    @property
    def _bound(self) -> QueueChanges:
        assert self._target is not None, "the relay is bound before the store runs"
        return self._target

    async def relist(self, namespace: str, revision: int) -> None:
        """See ``ports.QueueChanges``."""
        await self._bound.relist(namespace, revision)

    def queue_changed(self, namespace: str, queue: str, stored: StoredQueue, revision: int) -> None:
        """See ``ports.QueueChanges``."""
        self._bound.queue_changed(namespace, queue, stored, revision)
