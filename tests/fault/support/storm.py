"""Faults at random under load: what befalls coordinators, workers, etcd and the paths between, by a seed.

The seed decides which faults come in which order, whom they hit and how long they last, and what each
producer submits. When they come follows the machine: a replay repeats the story, not each millisecond.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc

from coordinator.embedded.etcd_process import EtcdProcess
from leasekeeper.v1 import types_pb2 as types
from tests.fault.support.calls import Calls, available
from tests.fault.support.court import Court
from tests.fault.support.holdings import leaked_leases
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy

__all__ = ["Storm"]

TTL = 3.0
WORKERS = 3
_MODES = (ProxyMode.DROP, ProxyMode.HALF_DROP, ProxyMode.RESET, ProxyMode.DELAY, ProxyMode.THROTTLE)


class Storm:
    """Two coordinators (one behind a proxy to etcd), three workers, two producers, and what befalls them.

    Args:
        members: of etcd, one or three.
        court: judges; knows the members.
        folder: for logs.
        seed: see the module.
        tell: called with each fault as it begins.
    """

    def __init__(
        self,
        members: Sequence[EtcdProcess],
        court: Court,
        folder: Path,
        seed: int,
        *,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.members = list(members)
        self.court = court
        self.folder = folder
        self.seed = seed
        self.ids: list[str] = []
        self.story: list[str] = []
        self._chance = random.Random(seed)
        self._tell = tell
        self._workers: dict[int, WorkerProcess] = {}
        self._born = 0
        self._calm = asyncio.Event()

    async def rage(self, seconds: float, *, heal_timeout: float = 60.0) -> None:
        """Bring about faults for so long, then heal everything and wait until all jobs have ended.

        Raises:
            AssertionError: a job has not ended, a call outlived its deadline (O5), a lease was leaked (O4).
        """
        async with AsyncExitStack() as stack:
            self.path = await stack.enter_async_context(TcpProxy(self.members[0].endpoint, delay=0.2))
            others = [member.endpoint for member in self.members[1:]]
            ends = [self.path.endpoint, *others]
            self.coordinators = [
                Coordinator(ends, self.folder, name="c1"),
                Coordinator([member.endpoint for member in self.members], self.folder, name="c2"),
            ]
            for coordinator in self.coordinators:
                await stack.enter_async_context(coordinator)
            self.endpoints = ",".join(coordinator.endpoint for coordinator in self.coordinators)
            stack.push_async_callback(self._end_workers)
            for place in range(WORKERS):
                await self._employ(place)
            producing = [
                asyncio.create_task(self._produce(number, coordinator))
                for number, coordinator in enumerate(self.coordinators)
            ]
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                await self._next_fault()
                for task in producing:
                    if task.done():
                        await task  # raises what it met
            self.path.set_mode(ProxyMode.PASS)
            self._calm.set()
            await asyncio.gather(*producing)
            await self.court.ended(self.ids, timeout=heal_timeout)
            await self._end_workers()
            # Sessions end with their leases; whatever else is left by then was leaked (O4).
            await eventually(
                self._no_lease_leaks, timeout=6 * TTL + 20, interval=0.5, what="no lease is left"
            )

    async def _next_fault(self) -> None:
        """Draw everything about the fault at once, so that the story depends on the seed alone."""
        draw = self._chance
        name = draw.choice(("kill coordinator", "freeze coordinator", "kill worker", *("freeze worker",) * 2))
        name = draw.choice((name, name, name, "hurt path", "hurt path", "restart etcd", "freeze etcd"))
        place, span = draw.randrange(1000), draw.uniform(0.1, 1.5 * TTL)
        mode = draw.choice(_MODES)
        line = f"{name} {place} {span:.1f} s" + (f" {mode.value}" if name == "hurt path" else "")
        self.story.append(line)
        self._tell(line)
        await self._faults()[name](place, span, mode)

    def _faults(self) -> dict[str, Callable[[int, float, ProxyMode], Awaitable[None]]]:
        return {
            "kill coordinator": self._kill_coordinator,
            "freeze coordinator": self._freeze_coordinator,
            "kill worker": self._kill_worker,
            "freeze worker": self._freeze_worker,
            "hurt path": self._hurt_path,
            "restart etcd": self._restart_etcd,
            "freeze etcd": self._freeze_etcd,
        }

    async def _kill_coordinator(self, place: int, span: float, mode: ProxyMode) -> None:
        coordinator = self.coordinators[place % 2]
        await coordinator.kill()
        # Behind a hurt path it may not come up ready; it is not hurt here.
        await coordinator.start()

    async def _freeze_coordinator(self, place: int, span: float, mode: ProxyMode) -> None:
        coordinator = self.coordinators[place % 2]
        coordinator.pause()
        try:
            await asyncio.sleep(span)
        finally:
            coordinator.resume()

    async def _kill_worker(self, place: int, span: float, mode: ProxyMode) -> None:
        await self._workers[place % WORKERS].kill()
        await self._employ(place % WORKERS)

    async def _freeze_worker(self, place: int, span: float, mode: ProxyMode) -> None:
        worker = self._workers[place % WORKERS]
        worker.pause()
        try:
            await asyncio.sleep(span)
        finally:
            worker.resume()

    async def _hurt_path(self, place: int, span: float, mode: ProxyMode) -> None:
        self.path.set_mode(mode)
        await asyncio.sleep(span)
        self.path.set_mode(ProxyMode.PASS)

    async def _restart_etcd(self, place: int, span: float, mode: ProxyMode) -> None:
        member = self.members[place % len(self.members)]
        await asyncio.to_thread(member.kill)
        await asyncio.sleep(min(span, 1.0))
        await asyncio.to_thread(member.restart)

    async def _freeze_etcd(self, place: int, span: float, mode: ProxyMode) -> None:
        member = self.members[place % len(self.members)]
        member.pause()
        try:
            await asyncio.sleep(span)
        finally:
            member.resume()

    async def _employ(self, place: int) -> None:
        self._born += 1
        worker = WorkerProcess(
            self.endpoints, self.court.namespace, self.folder, name=f"w{self._born}",
            sink=self.court.sink.path, queues={"work": 3}, ttl=TTL,
        )  # fmt: skip
        self._workers[place] = worker
        await worker.__aenter__()

    async def _end_workers(self) -> None:
        for worker in self._workers.values():
            await worker.kill()

    async def _produce(self, number: int, coordinator: Coordinator) -> None:
        """Submit jobs, cancel a few; repeat with the same request id whatever is not answered."""
        draw = random.Random(f"{self.seed} {number}")
        async with Calls(coordinator.endpoint, self.court.namespace, timeout=3.0) as calls:
            count = 0
            while not self._calm.is_set():
                job_id = f"p{number}-{count:06}"
                count += 1
                retry = types.RetryPolicy(max_lease_losses=1000)
                spec = {"work": draw.choice((0.0, 0.02, 0.3))}
                cancels, pause = draw.random() < 0.05, draw.uniform(0, 0.06)
                await self._answered(
                    lambda job_id=job_id, spec=spec, retry=retry: calls.submit(
                        job_id, spec, request_id=job_id, retry_policy=retry, unique_key=f"k{job_id}"
                    )
                )
                self.ids.append(job_id)
                if cancels:
                    await self._answered(lambda job_id=job_id: calls.cancel(job_id))
                await asyncio.sleep(pause)

    async def _no_lease_leaks(self) -> bool:
        leaked = await leaked_leases(self.court, coordinators=len(self.coordinators))
        return leaked == 0 and await self.court.sessions() == 0

    @staticmethod
    async def _answered(call: Callable[[], Awaitable[object]]) -> None:
        async def ask() -> bool:
            try:
                await available(call, timeout=30)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    return True  # it ended before it could be cancelled
                if error.code() not in (
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                ):
                    raise
                return False
            except TimeoutError:
                return False
            return True

        await eventually(ask, timeout=120, interval=0.05, what="an answer")
