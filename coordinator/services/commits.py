"""Await many commits together, without a task per job."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.errors import LeasekeeperError, StorageError
from coordinator.ports import Commit, PendingCommit

__all__ = ["settle_all"]


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
