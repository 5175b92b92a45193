"""One transition between ``commit`` and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Protocol

from coordinator.errors import LeaseNotFound
from coordinator.etcd.committer import Committer, GuardedOp, OpResult, Responses
from coordinator.etcd.txn import Plan, TxnCodec
from coordinator.ports import Commit, CommitObserver

__all__ = ["Pending", "PendingStore"]


class PendingStore(Protocol):
    """What an operation on its way needs of the store."""

    codec: TxnCodec
    committer: Committer
    observer: CommitObserver

    def replan(self, plan: Plan, retained: int) -> Plan | None:
        """The same operation under another retention lease; None: there is none at hand."""

    async def commit_with_lease(self, plan: Plan, retained: int) -> Commit:
        """Wait for a retention lease and commit under it."""

    def finish(self, plan: Plan, commit: Commit | None, result: OpResult) -> Commit:
        """What the caller is told."""


class Pending:
    """Implements ``ports.PendingCommit``. Awaited once; no task and no callback of its own.

    Args:
        store: commits it.
        plan: what to commit.
        retained: how many of its writes lie on the retention lease; 0: none.
    """

    __slots__ = ("_commit", "_future", "_plan", "_retained", "_store")

    def __init__(self, store: PendingStore, plan: Plan, retained: int = 0) -> None:
        self._store = store
        self._plan = plan
        self._retained = retained
        self._commit: Commit | None = None
        guarded = plan.guarded
        guarded.on_won = self._on_won
        if retained:
            guarded.rebuild = self._rebuild
        self._future: asyncio.Future[OpResult] = store.committer.enqueue(guarded)

    def cancel(self) -> None:
        """Nobody will wait for it."""
        if not self._future.cancel() and not self._future.cancelled():
            self._future.exception()  # seen

    def __await__(self) -> Generator[object, None, Commit]:
        try:
            result: OpResult = yield from self._future
        except LeaseNotFound:
            if not self._retained:
                raise
            # Certain: nothing was written. There was no other retention lease at hand.
            return (yield from self._store.commit_with_lease(self._plan, self._retained).__await__())
        return self._store.finish(self._plan, self._commit, result)

    def _on_won(self, revision: int, responses: Responses) -> None:
        self._commit = self._store.codec.won(self._plan, revision, responses)
        self._store.observer.applied(self._plan.operation, self._commit)

    def _rebuild(self) -> GuardedOp | None:
        """The same operation under another retention lease, if one is at hand."""
        plan = self._store.replan(self._plan, self._retained)
        if plan is None:
            return None
        self._plan = plan
        plan.guarded.on_won = self._on_won
        plan.guarded.rebuild = self._rebuild
        return plan.guarded
