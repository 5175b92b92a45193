"""A crashed holder and two hundred who want its job by id: what reaches etcd, and how soon somebody has it.

Counted in the requests that reach etcd (`EtcdSpy`), never by the coordinator's own numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import worker_service_pb2 as workers
from tests.fault.support.calls import Calls, Refused, told
from tests.fault.support.court import Court
from tests.fault.support.etcd_spy import EtcdSpy
from tests.fault.support.processes import Coordinator

CONTENDERS = 200
JOB = "wanted"
TTL = 2.0
BOUND = 5.5
"""docs/contention.md: the longest delay and half a second."""


def most_in_a_second(times: Sequence[float]) -> int:
    """The most of them in any second."""
    return max((sum(start <= one <= start + 1.0 for one in times) for start in times), default=0)


@dataclass
class Storm:
    """Coordinators, each behind a spy of its own; job ``wanted``, held by a session that beats no more."""

    spies: list[EtcdSpy]
    calls: list[Calls]
    sessions: list[str]
    answers: list[Refused] = field(default_factory=list)
    won: list[tuple[float, int, workers.Claim]] = field(default_factory=list)

    def at(self, number: int) -> Calls:
        """The coordinator of this contender."""
        return self.calls[number % len(self.calls)]

    async def contend(self, number: int, *, wait: float = 0.0, obey: bool) -> None:
        """Try until somebody has it."""
        while not self.won:
            try:
                claim = await self.at(number).claim_one(self.sessions[number], JOB, wait=wait)
            except grpc.aio.AioRpcError as error:
                answer = told(error)
                self.answers.append(answer)
                await asyncio.sleep((answer.retry_after or 0.0) if obey else 0.05)
            else:
                self.won.append((time.monotonic(), number, claim))

    async def rage(self, *, wait: float = 0.0, obey: bool) -> float:
        """All of them at once, until one has it; seconds from the job's becoming free."""
        tasks = [
            asyncio.create_task(self.contend(number, wait=wait, obey=obey))
            for number in range(len(self.sessions))
        ]
        try:
            async with asyncio.timeout(60):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        [(when, _, _)] = self.won
        return when - max(one for spy in self.spies for one in spy.readied if one < when)

    def failing(self) -> list[list[float]]:
        """Looks by coordinator, without the one that won."""
        _, number, _ = self.won[0]
        looks = [list(spy.looks) for spy in self.spies]
        winner = looks[number % len(self.spies)]
        claimed = self.spies[number % len(self.spies)].claims[-1]
        winner.remove(max(one for one in winner if one <= claimed))
        return looks


@asynccontextmanager
async def storm(etcd: EtcdProcess, namespace: str, folder: Path, coordinators: int) -> AsyncIterator[Storm]:
    async with AsyncExitStack() as stack:
        spies = [await stack.enter_async_context(EtcdSpy(etcd.endpoint, JOB)) for _ in range(coordinators)]
        calls = []
        for number, spy in enumerate(spies):
            # A sweep reads specs too, and is none of those who want the job.
            alone = {"RECONCILER__ENABLED": "false"}
            made = Coordinator([spy.endpoint], folder, name=f"c{number}", settings=alone)
            coordinator = await stack.enter_async_context(made)
            calls.append(await stack.enter_async_context(Calls(coordinator.endpoint, namespace, timeout=10)))
        await calls[0].submit(JOB)
        opening = [calls[number % coordinators].open(ttl=120.0) for number in range(CONTENDERS)]
        sessions = await asyncio.gather(*opening)
        holder = await calls[0].open(ttl=TTL)
        await calls[0].claim_one(holder, JOB)
        for spy in spies:
            spy.looks.clear()
        # Nothing ever beats for the holder again: as if its process had been killed.
        yield Storm(spies, calls, sessions)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("obey", [True, False], ids=["obey", "ignore"])
async def test_of_two_hundred_contenders_four_a_second_reach_etcd_and_one_has_the_job_in_time(
    obey: bool, own_etcd: EtcdProcess, own_court: Court, tmp_path: Path
) -> None:
    async with storm(own_etcd, own_court.namespace, tmp_path, 1) as raging:
        took = await raging.rage(obey=obey)

        assert {one.reason for one in raging.answers} == {"CLAIM_HELD", "RELOCK_THROTTLED"}
        assert all(one.retry_after and one.retry_after <= 5.0 for one in raging.answers)
        [looks] = raging.failing()
        assert most_in_a_second(looks) <= 4, looks
        assert len(looks) >= 4, "somebody tried"
        assert took <= BOUND
        [(_, _, claim)] = raging.won
        assert await raging.calls[0].complete(claim) == "SUCCEEDED"
    await own_court.judge(submitted=[JOB])


@pytest.mark.timeout(120)
async def test_of_two_hundred_who_wait_at_two_coordinators_one_is_woken_and_few_look(
    own_etcd: EtcdProcess, own_court: Court, tmp_path: Path
) -> None:
    async with storm(own_etcd, own_court.namespace, tmp_path, 2) as raging:
        took = await raging.rage(wait=25.0, obey=True)

        for looks in raging.failing():
            assert most_in_a_second(looks) <= 4, looks
            spent = max(looks) - min(looks)
            assert len(looks) <= 4 + spent / 2, f"waiting is not polling: {len(looks)} in {spent} s"
        assert raging.answers == []
        assert took <= BOUND
        [(_, _, claim)] = raging.won
        assert await raging.calls[0].complete(claim) == "SUCCEEDED"
    await own_court.judge(submitted=[JOB])
