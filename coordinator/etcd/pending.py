"""One transition between ``commit`` and its answer."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from coordinator.errors import LeaseNotFound
from coordinator.etcd.committer import Committer, Entry, OpResult, Responses
from coordinator.etcd.txn import TxnCodec
from coordinator.ports import Commit, CommitObserver, Operation

__all__ = ["Pending", "PendingStore"]


class PendingStore(Protocol):
    """What an operation on its way needs of the store."""

    codec: TxnCodec
    committer: Committer
    observer: CommitObserver

    def another_lease(self, operation: Operation, dead: int, retained: int) -> int:
        """Another retention lease than the one that etcd called dead; 0: there is none at hand."""

    async def commit_with_lease(self, operation: Operation, dead: int, retained: int) -> Commit:
        """Wait for another retention lease and commit under it."""

    def finish(self, commit: Commit) -> Commit:
        """What the caller is told of a win."""


class Pending(Entry):
    """Implements ``ports.PendingCommit``. Awaited once; no task and no callback of its own.

    One object from the caller's hand to etcd's answer: an operation is one of thousands a second.

    Args:
        store: commits it.
        operation: what to commit.
        lease: the retention lease for what it retains; 0: it retains nothing.
        retained: how many of its writes lie on that lease, for another; 0: it is not built again.

    Raises:
        KeyFormatError: an id cannot be a key.
    """

    __slots__ = ("_commit", "_operation", "_reads_at", "_retained", "_store")

    def __init__(self, store: PendingStore, operation: Operation, lease: int = 0, retained: int = 0) -> None:
        super().__init__(operation.deadline, starts=operation.before is None)
        self._store = store
        self._operation = operation
        self._retained = retained
        self._commit: Commit | None = None
        self._compile(lease)
        store.committer.take(self)

    def _compile(self, lease: int) -> None:
        compiled = self._store.codec.compile(self._operation, lease)
        self.lane_names, self.nested, self.width, self.reply_bytes, self._reads_at = compiled
        self.retention = lease

    def cancel(self) -> None:
        """Nobody will wait for it."""
        future = self.future
        if not future.cancel() and not future.cancelled():
            future.exception()  # seen

    def __await__(self) -> Generator[object, None, Commit]:
        store, operation = self._store, self._operation
        try:
            answer = yield from self.future
        except LeaseNotFound:
            if not self._retained:
                raise
            # Certain: nothing was written. There was no other retention lease at hand.
            waiting = store.commit_with_lease(operation, self.retention, self._retained)
            return (yield from waiting.__await__())
        if isinstance(answer, Commit):
            return store.finish(answer)
        result: OpResult = answer
        revision, responses = result.revision, result.responses
        if not result.won:
            return store.codec.lost(operation, revision, responses, result.resent)
        commit = store.codec.won(operation, self._reads_at, revision, responses, result.resent)
        return store.finish(commit)

    # --- as an entry ------------------------------------------------------------------------------

    def applied(self, revision: int, responses: Responses) -> None:
        """Tell the observer."""
        commit = self._store.codec.won(self._operation, self._reads_at, revision, responses)
        self._commit = commit
        observer = self._store.observer
        observer.applied(self._operation, commit)
        for follow_up in self._operation.also:
            observer.applied(follow_up, self._store.codec.won(follow_up, 0, revision, ()))

    def answer(self, won: bool, revision: int, responses: Responses) -> object:
        """The commit as observed; what a loser or a try of unknown outcome met is read by the caller."""
        if won and self._commit is not None and not self.unknown:
            return self._commit
        return OpResult(won, revision, responses, self.unknown)

    def needs_space(self) -> bool:
        """See ``Entry.needs_space``."""
        return any(write.put for write in self._operation.writes)

    def rebuild(self) -> bool:
        """Under another retention lease, if one is at hand."""
        if not self._retained:
            return False
        lease = self._store.another_lease(self._operation, self.retention, self._retained)
        if lease:
            self._compile(lease)
        return bool(lease)
