"""Await many commits together, without a task per job."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.errors import LeasekeeperError, StorageError
from coordinator.ports import Commit, JobStore, Operation, PendingCommit

__all__ = ["commit_each", "settle_all"]


async def commit_each(store: JobStore, operations: Sequence[Operation]) -> list[Commit | LeasekeeperError]:
    """Commit ``operations`` together; what became of each, in order. No error of one touches another.

    Cancellation is as in ``settle_all``.
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


async def settle_all(commits: Sequence[PendingCommit]) -> list[Commit | StorageError]:
    """What became of each, in order. Errors other than StorageError are raised, once all have ended.

    They are under way already, so waiting for one after the other costs no time. If the caller is cancelled,
    so is each: an operation that was not sent is dropped, one that was sent goes on unheard.
    """
    results: list[Commit | StorageError] = []
    other: LeasekeeperError | None = None
    waited = 0
    try:
        for one in commits:
            waited += 1
            try:
                results.append(await one)
            except StorageError as error:
                results.append(error)
            except LeasekeeperError as error:
                other = other or error
    finally:
        for one in commits[waited:]:
            one.cancel()
    if other is not None:
        raise other
    return results
