"""Await many commits together, without a task per job."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.errors import LeasekeeperError
from coordinator.ports import Commit, JobStore, Operation, PendingCommit

__all__ = ["commit_each"]


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
