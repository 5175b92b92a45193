"""Await many commits together, without a task per job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from coordinator.errors import StorageError
from coordinator.ports import Commit

__all__ = ["settle_all"]


async def settle_all(commits: Sequence[Awaitable[Commit]]) -> list[Commit | StorageError]:
    """What became of each, in order. Errors other than StorageError are raised, once all have ended.

    If the caller is cancelled, so is each: an operation that was not sent is dropped, one that was sent
    goes on unheard.
    """
    if len(commits) == 1:
        try:
            return [await commits[0]]
        except StorageError as error:
            return [error]
    results: list[Commit | StorageError] = []
    for one in await asyncio.gather(*commits, return_exceptions=True):
        if isinstance(one, BaseException) and not isinstance(one, StorageError):
            raise one
        results.append(one)
    return results
