"""Commits that are awaited together: no error of one touches another, and nobody is left waiting."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core.effects import effects
from coordinator.core.machine import Guard
from coordinator.errors import KeyFormatError, NotApplied, Reason, RequestError
from coordinator.ports import Commit, Operation, Spec
from coordinator.services.commits import commit_each
from tests.support.builders import FAR, a_job


class Store:
    """Futures that the test ends; an id of `bad` cannot even be queued."""

    def __init__(self) -> None:
        self.futures: list[asyncio.Future[Commit]] = []

    def commit(self, operation: Operation) -> asyncio.Future[Commit]:
        assert operation.after is not None
        if operation.after.job_id == "bad":
            raise KeyFormatError("planned")
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]


def operations(*job_ids: str) -> list[Operation]:
    jobs = [a_job(job_id) for job_id in job_ids]
    return [
        Operation(
            guard=Guard.ABSENT,
            before=None,
            after=job,
            writes=effects(None, job),
            deadline=FAR,
            spec=Spec(payload=b""),
        )
        for job in jobs
    ]


async def test_each_has_its_own_outcome_in_order() -> None:
    store = Store()
    waiting = asyncio.ensure_future(commit_each(store, operations("a", "bad", "b", "c")))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    store.futures[2].set_exception(RequestError(Reason.EPOCH_REGRESSED, "planned"))
    store.futures[1].set_exception(NotApplied("planned"))
    store.futures[0].set_result(Commit(won=True, revision=1))
    kinds = [type(one) for one in await waiting]
    assert kinds == [Commit, KeyFormatError, NotApplied, RequestError]


async def test_a_caller_that_goes_away_takes_its_waiting_commits_along() -> None:
    store = Store()
    waiting = asyncio.ensure_future(commit_each(store, operations("a", "b")))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert all(future.cancelled() for future in store.futures)
