"""What each bench runs, on servers of its own, and the line that it prints."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import uvloop

from coordinator.cli.bench_echo import echo_round, echo_server
from coordinator.cli.bench_floor import etcd_floor
from coordinator.cli.bench_lock_peers import EtcdStyleLocks, RedisLocks
from coordinator.cli.bench_locks import raw_locks, timed_handovers, timed_pairs
from coordinator.cli.bench_numbers import (
    Measured,
    Number,
    cpu_seconds,
    environment,
    median_of,
    percentile,
    write_line,
)
from coordinator.cli.bench_raw import raw_load
from coordinator.cli.bench_recovery import RecoverySizes, recovery
from coordinator.cli.bench_sdk import SdkLoad
from coordinator.cli.dev_servers import CoordinatorProcess, dev_valkey, running_etcd
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdClient, EtcdConfig

__all__ = ["BenchSizes", "Suite"]

T = TypeVar("T")

_NAMESPACE = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSizes:
    """How much each bench does.

    Args:
        batch_jobs: jobs a round of the batch lifecycle.
        unary_jobs: jobs a round of the unary lifecycle.
        idle_jobs: jobs a round of idle latency.
        floor_jobs: lifecycles a round of the etcd floor.
        echo_calls: calls a round of the echo.
        lock_pairs: locks taken and given back a round.
        handovers: of one contended lock, a round.
        warm_up: jobs or calls before the first round, not counted.
        rounds: of each; medians are printed.
    """

    batch_jobs: int = 20_000
    unary_jobs: int = 6_000
    idle_jobs: int = 500
    floor_jobs: int = 20_000
    echo_calls: int = 20_000
    lock_pairs: int = 6_000
    handovers: int = 500
    warm_up: int = 2_000
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class _Stack:
    etcd: EtcdProcess
    coordinator: CoordinatorProcess

    def cpu(self) -> tuple[float, float]:
        return cpu_seconds(self.etcd.pid), cpu_seconds(self.coordinator.pid)


class Suite:
    """Runs benches one after the other; each prints one line.

    Args:
        sizes: see `BenchSizes`.
        folder: where etcd writes; a temporary one if None.
    """

    def __init__(self, sizes: BenchSizes, folder: Path | None = None) -> None:
        self._sizes = sizes
        self._parent = folder
        self._results: dict[str, float] = {}

    def environment(self) -> None:
        """Print the machine and the versions."""
        with self._folder() as folder:
            write_line("environment", environment(folder))

    def lifecycle_batch(self, client: str) -> None:
        """Submit, claim, complete, a hundred jobs a call.

        Args:
            client: "sdk" or "raw".
        """
        sizes = self._sizes
        with self._stack() as stack:

            async def run() -> list[Measured]:
                address = stack.coordinator.endpoint
                if client == "sdk":
                    load = SdkLoad(address, _NAMESPACE)
                    return await self._rounds(load.batch_round, sizes.batch_jobs)
                async with raw_load(address, _NAMESPACE) as raw:
                    return await self._rounds(raw.batch_round, sizes.batch_jobs)

            fields = self._measure(stack, run, sizes.batch_jobs)
            self._results[f"batch_{client}"] = float(fields["jobs_per_second"] or 0)
            shape: dict[str, Number] = {"mode": "batch", "client": client, "batch": 100}
            until = "handler ended" if client == "sdk" else "complete acknowledged"
            write_line(
                "lifecycle", {**shape, "submitters": 4, "claimers": 4, **fields, "latency_until": until}
            )

    def lifecycle_unary(self) -> None:
        """64 callers, each submitting one job, claiming one, completing it."""
        jobs = self._sizes.unary_jobs
        with self._stack() as stack:

            async def run() -> list[Measured]:
                async with raw_load(stack.coordinator.endpoint, _NAMESPACE) as raw:
                    return await self._rounds(raw.unary_round, jobs)

            fields = self._measure(stack, run, jobs)
            self._results["unary"] = float(fields["jobs_per_second"] or 0)
            write_line("lifecycle", {"mode": "unary", "client": "raw", "callers": 64, **fields})

    def idle_latency(self) -> None:
        """One job every 10 ms through the SDK: from submit sent to the handler's start."""
        jobs = self._sizes.idle_jobs
        with self._stack() as stack:
            load = SdkLoad(stack.coordinator.endpoint, _NAMESPACE)

            async def run() -> list[Measured]:
                return await self._rounds(load.idle_round, jobs, warm_up=min(50, jobs))

            fields = self._measure(stack, run, jobs)
            write_line("idle_latency", {"client": "sdk", "gap_ms": 10, **fields})

    def etcd_floor(self) -> None:
        """The same writes straight to etcd."""
        sizes = self._sizes
        with self._folder() as folder, running_etcd(folder) as etcd:

            async def run() -> list[float]:
                async with EtcdClient(EtcdConfig(endpoints=(etcd.endpoint,))) as client:
                    await etcd_floor(client, max(1, sizes.warm_up))
                    return [await etcd_floor(client, sizes.floor_jobs) for _ in range(sizes.rounds)]

            rates = _on_loop(run)
            rate = round(statistics.median(rates), 1)
            self._results["floor"] = rate
            write_line(
                "etcd_floor",
                {
                    "lifecycles_per_second": rate,
                    "ops_per_txn": 60,
                    "in_flight": 4,
                    "jobs": sizes.floor_jobs,
                    "rounds": sizes.rounds,
                    "slowest_round": round(min(rates), 1),
                    "fastest_round": round(max(rates), 1),
                    "etcd": _version(etcd),
                },
            )

    def grpc_echo(self) -> None:
        """An empty grpc.aio server, 64 callers."""
        sizes = self._sizes

        with echo_server() as address:

            async def one(calls: int) -> Measured:
                return await echo_round(address, calls)

            async def run() -> list[Measured]:
                return await self._rounds(one, sizes.echo_calls)

            fields = median_of(_on_loop(run), "calls_per_second")
        self._results["echo"] = float(fields["calls_per_second"] or 0)
        write_line("grpc_echo", {"callers": 64, "calls": sizes.echo_calls, **fields})

    def locks(self) -> None:
        """64 callers on names of their own, then eight on one, beside other makers' locks in the same run.

        The peers' rounds stand between ours, so that a change of the machine meets all of them; the leases
        that the etcd3 way leaves behind expire in an etcd of its own.
        """
        sizes = self._sizes
        with (
            self._stack() as stack,
            self._folder() as folder,
            dev_valkey(folder) as valkey,
            running_etcd(folder / "etcd3") as other_etcd,
        ):

            async def run() -> list[dict[str, Number]]:
                async with (
                    raw_locks(stack.coordinator.endpoint, _NAMESPACE) as ours,
                    EtcdClient(EtcdConfig(endpoints=(other_etcd.endpoint,))) as client,
                    contextlib.aclosing(RedisLocks(valkey.url)) as redis,
                ):
                    etcd3 = EtcdStyleLocks(client)
                    pairs: dict[str, list[Measured]] = {"": [], "redis_": [], "etcd3_": []}
                    handed: dict[str, list[Measured]] = {"": [], "redis_": []}
                    used = [0.0, 0.0, 0.0]  # etcd, coordinator, this process
                    await timed_pairs(ours, max(1, sizes.warm_up))
                    for _ in range(sizes.rounds):
                        before = (*stack.cpu(), time.process_time())
                        pairs[""].append(await timed_pairs(ours, sizes.lock_pairs))
                        after = (*stack.cpu(), time.process_time())
                        used = [
                            sum_ + end - start for sum_, start, end in zip(used, before, after, strict=True)
                        ]
                        pairs["redis_"].append(await timed_pairs(redis, sizes.lock_pairs))
                        pairs["etcd3_"].append(await timed_pairs(etcd3, sizes.lock_pairs))
                        handed[""].append(await timed_handovers(ours, sizes.handovers))
                        handed["redis_"].append(await timed_handovers(redis, max(1, sizes.handovers // 10)))
                fields: dict[str, Number] = {}
                for maker, rounds in pairs.items():
                    found = median_of(rounds, "pairs_per_second")
                    fields |= {
                        f"{maker}{name}": found[name] for name in ("pairs_per_second", "p50_ms", "p99_ms")
                    }
                for maker, rounds in handed.items():
                    slow = statistics.median(percentile(one.latencies, 0.99) for one in rounds)
                    fields[f"{maker}handover_p99_ms"] = round(slow * 1000, 2)
                count = sizes.lock_pairs * sizes.rounds
                for who, seconds in zip(("etcd", "coordinator", "client"), used, strict=True):
                    fields[f"{who}_cpu_us_per_pair"] = round(seconds / count * 1e6, 1)
                return [fields]

            [fields] = _on_loop(run)
            shape: dict[str, Number] = {"callers": 64, "waiters": 8, "pairs": sizes.lock_pairs}
            write_line(
                "locks",
                {**fields, **shape, "rounds": sizes.rounds, "etcd": _version(stack.etcd)},
            )

    def recovery(self, sizes: RecoverySizes) -> None:
        """Kill, release, kill thousands, freeze all: how long the work rests."""
        with self._stack() as stack, self._folder() as folder:

            async def run() -> list[dict[str, Number]]:
                return [await recovery(stack.coordinator.endpoint, folder, sizes)]

            [fields] = _on_loop(run)
            write_line("recovery", {**fields, "etcd": _version(stack.etcd)})

    def shares(self) -> None:
        """Print how the lifecycles stand to the floors of the same run."""
        found = self._results
        fields: dict[str, Number] = {
            f"{name}_share_of_etcd_floor": round(found[name] / found["floor"], 3)
            for name in ("batch_sdk", "batch_raw")
            if name in found and found.get("floor")
        }
        if "unary" in found and found.get("echo"):
            fields["unary_share_of_a_third_of_echo"] = round(found["unary"] / (found["echo"] / 3), 3)
        write_line("shares", fields)

    async def _rounds(
        self, load: Callable[[int], Awaitable[Measured]], size: int, *, warm_up: int | None = None
    ) -> list[Measured]:
        await load(max(1, self._sizes.warm_up if warm_up is None else warm_up))
        return [await load(size) for _ in range(self._sizes.rounds)]

    def _measure(
        self, stack: _Stack, run: Callable[[], Awaitable[list[Measured]]], jobs: int
    ) -> dict[str, Number]:
        etcd_before, coordinator_before = stack.cpu()
        rounds = _on_loop(run)
        etcd_after, coordinator_after = stack.cpu()
        # The warm-up is in the processor time too, so it is in the count.
        count = sum(one.count for one in rounds) + self._sizes.warm_up
        return {
            **median_of(rounds, "jobs_per_second"),
            "jobs": jobs,
            "etcd": _version(stack.etcd),
            "etcd_cpu_us_per_job": round((etcd_after - etcd_before) / count * 1e6, 1),
            "coordinator_cpu_us_per_job": round((coordinator_after - coordinator_before) / count * 1e6, 1),
        }

    @contextlib.contextmanager
    def _stack(self) -> Iterator[_Stack]:
        with (
            self._folder() as folder,
            running_etcd(folder / "etcd") as etcd,
            CoordinatorProcess(etcd.endpoint, folder) as coordinator,
        ):
            try:
                yield _Stack(etcd, coordinator)
            except BaseException:
                print(coordinator.log_tail(), file=sys.stderr)
                raise

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix="leasekeeper-bench-", dir=self._parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _version(etcd: EtcdProcess) -> str:
    return ".".join(map(str, etcd.version()))


def _on_loop(run: Callable[[], Awaitable[list[T]]]) -> list[T]:
    async def whole() -> list[T]:
        return await run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(whole())
