"""Everything at once: processes die, freeze and come back while jobs run; at the end the judge decides."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import types_pb2 as types
from tests.fault.support.calls import Calls, available
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy

TTL = 3.0
WORKERS = 3


class Storm:
    """Two coordinators (one behind a proxy to etcd), three workers, a producer, and what befalls them."""

    def __init__(self, etcd: EtcdProcess, court: Court, folder: Path, seed: int) -> None:
        self.etcd = etcd
        self.court = court
        self.folder = folder
        self.chance = random.Random(seed)
        self.ids: list[str] = []
        self.story: list[str] = []
        self.workers: dict[int, WorkerProcess] = {}
        self._born = 0
        self._calm = asyncio.Event()

    async def rage(self, seconds: float) -> None:
        """Bring about faults for so long, then heal everything and wait until all jobs have ended."""
        async with AsyncExitStack() as stack:
            self.path = await stack.enter_async_context(TcpProxy(self.etcd.endpoint, delay=0.2))
            self.coordinators = [
                Coordinator([self.path.endpoint], self.folder, name="c1"),
                Coordinator(self.etcd.endpoints, self.folder, name="c2"),
            ]
            for coordinator in self.coordinators:
                await stack.enter_async_context(coordinator)
            self.endpoints = ",".join(coordinator.endpoint for coordinator in self.coordinators)
            stack.push_async_callback(self._end_workers)
            for place in range(WORKERS):
                await self._employ(place)
            producing = [asyncio.create_task(self._produce(coordinator)) for coordinator in self.coordinators]
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                fault = self.chance.choice(self._faults())
                self.story.append(fault.__name__)
                await fault()
            self.path.set_mode(ProxyMode.PASS)
            self._calm.set()
            await asyncio.gather(*producing)
            await self.court.ended(self.ids, timeout=60)

    def _faults(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            self._kill_coordinator,
            self._freeze_coordinator,
            self._kill_worker,
            self._freeze_worker,
            self._freeze_worker,
            self._hurt_path,
            self._hurt_path,
            self._restart_etcd,
        ]

    async def _pause(self) -> None:
        await asyncio.sleep(self.chance.uniform(0.1, 1.5 * TTL))

    async def _kill_coordinator(self) -> None:
        coordinator = self.chance.choice(self.coordinators)
        await coordinator.kill()
        # Behind a hurt path it may not come up ready; it is not hurt here.
        await coordinator.start()

    async def _freeze_coordinator(self) -> None:
        coordinator = self.chance.choice(self.coordinators)
        coordinator.pause()
        await self._pause()
        coordinator.resume()

    async def _employ(self, place: int) -> None:
        self._born += 1
        worker = WorkerProcess(
            self.endpoints, self.court.namespace, self.folder, name=f"w{self._born}",
            sink=self.court.sink.path, queues={"work": 3}, ttl=TTL,
        )  # fmt: skip
        self.workers[place] = worker
        await worker.__aenter__()

    async def _end_workers(self) -> None:
        for worker in self.workers.values():
            await worker.kill()

    async def _kill_worker(self) -> None:
        place = self.chance.randrange(WORKERS)
        await self.workers[place].kill()
        await self._employ(place)

    async def _freeze_worker(self) -> None:
        worker = self.workers[self.chance.randrange(WORKERS)]
        worker.pause()
        await self._pause()
        worker.resume()

    async def _hurt_path(self) -> None:
        modes = (ProxyMode.DROP, ProxyMode.HALF_DROP, ProxyMode.RESET, ProxyMode.DELAY)
        self.path.set_mode(self.chance.choice(modes))
        await self._pause()
        self.path.set_mode(ProxyMode.PASS)

    async def _restart_etcd(self) -> None:
        await asyncio.to_thread(self.etcd.kill)
        await asyncio.sleep(self.chance.uniform(0, 1))
        await asyncio.to_thread(self.etcd.restart)

    async def _produce(self, coordinator: Coordinator) -> None:
        """Submit jobs, cancel a few; repeat with the same request id whatever is not answered."""
        async with Calls(coordinator.endpoint, self.court.namespace, timeout=3.0) as calls:
            number = 0
            while not self._calm.is_set():
                job_id = f"{coordinator.endpoint[-5:]}-{number:05}"
                number += 1
                retry = types.RetryPolicy(max_lease_losses=1000)
                spec = {"work": self.chance.choice((0.0, 0.02, 0.3))}
                await self._answered(
                    lambda job_id=job_id, spec=spec, retry=retry: calls.submit(
                        job_id, spec, retry_policy=retry, unique_key=f"k{job_id}"
                    )
                )
                self.ids.append(job_id)
                if self.chance.random() < 0.05:
                    await self._answered(lambda job_id=job_id: calls.cancel(job_id))
                await asyncio.sleep(self.chance.uniform(0, 0.06))

    @staticmethod
    async def _answered(call: Callable[[], Awaitable[object]]) -> None:
        async def ask() -> bool:
            try:
                await available(call, timeout=30)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    return True  # it ended before it could be cancelled
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                return False
            return True

        await eventually(ask, timeout=60, interval=0.05, what="an answer")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
async def test_no_storm_breaks_a_promise(
    seed: int, own_etcd: EtcdProcess, own_court: Court, tmp_path: Path
) -> None:
    """O1 to O3 over 40 s of faults: P1 to P5 and P7, and every job ends."""
    storm = Storm(own_etcd, own_court, tmp_path, seed)

    await storm.rage(40.0)

    judgement = await own_court.judge(submitted=storm.ids)
    assert set(judgement.states) <= {"SUCCEEDED", "CANCELLED"}, judgement.states
    assert {job.failures for job in judgement.jobs.values()} == {0}
    assert judgement.claims > 100
    assert judgement.outcomes["LOST"] > 0, "a storm that hurt nobody proves nothing"
