"""`leasekeeper bench recovery`: how long work rests when its workers are killed, leave, or all freeze.

Workers are processes; what counts is when a handler starts again, by notes that the workers write.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.cli.bench_numbers import Number, percentile
from coordinator.cli.bench_raw import raw_load
from worker_sdk import ConnectionConfig, JobClient, JobSpec

__all__ = ["RecoverySizes", "recovery"]

_NAMESPACE: Final = "bench"
_TYPE: Final = "noop"
_MODULE: Final = "coordinator.cli.bench_recovery_worker"
_LOOK_EVERY_S: Final = 0.01
_LIMIT_S: Final = 90.0
_FOR_EVER_S: Final = 3_600.0
_KEYS_PER_SESSION: Final = 450
_WINDOW_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySizes:
    """How much the bench does.

    Args:
        ttl_s: of every session.
        kills: workers killed one after the other.
        releases: jobs given back one after the other.
        mass_jobs: jobs claimed by ``mass_workers`` that are killed together.
        storm_workers: workers frozen together for two TTLs, at 80 % of what they can do.
        storm_rate: jobs a second submitted to them.
    """

    ttl_s: float = 5.0
    kills: int = 5
    releases: int = 20
    mass_jobs: int = 5_000
    mass_workers: int = 12
    storm_workers: int = 5
    storm_rate: int = 160


class _Notes:
    """What the workers wrote: start and end of handlers, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def read(self) -> Iterator[tuple[str, str, float, int]]:
        for line in self.path.read_text().splitlines():
            what, job_id, at, pid = line.split()
            yield what, job_id, float(at), int(pid)

    async def start_of(self, job_id: str, *, not_by: int = 0) -> tuple[float, int]:
        """When and in which process the job's handler started.

        Raises:
            TimeoutError: it did not.
        """
        async with asyncio.timeout(_LIMIT_S):
            while True:
                for what, noted, at, pid in self.read():
                    if what == "start" and noted == job_id and pid != not_by:
                        return at, pid
                await asyncio.sleep(_LOOK_EVERY_S)

    async def starts(self, count: int) -> None:
        """Wait until ``count`` handlers have started.

        Raises:
            TimeoutError: they did not.
        """
        async with asyncio.timeout(_LIMIT_S):
            while True:
                if sum(1 for what, *_ in self.read() if what == "start") >= count:
                    return
                await asyncio.sleep(_LOOK_EVERY_S * 10)


@contextlib.contextmanager
def _worker(
    endpoint: str, notes: _Notes, *, queue: str, slots: int, hold: float, ttl: float
) -> Iterator[subprocess.Popen[bytes]]:
    with open(notes.path.with_suffix(".log"), "ab") as log:
        child = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", _MODULE),
                *(f"--endpoint={endpoint}", f"--namespace={_NAMESPACE}", f"--queue={queue}"),
                *(f"--type={_TYPE}", f"--slots={slots}", f"--hold={hold}", f"--ttl={ttl}"),
                f"--notes={notes.path}",
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)
            child.terminate()
        try:
            child.wait(15.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.asynccontextmanager
async def _jobs(endpoint: str) -> AsyncIterator[JobClient]:
    async with JobClient(ConnectionConfig(endpoints=endpoint, namespace=_NAMESPACE)) as client:
        yield client


async def recovery(endpoint: str, folder: Path, sizes: RecoverySizes) -> dict[str, Number]:
    """Run all four parts against one coordinator; the fields of the output line.

    Raises:
        TimeoutError: a job did not come back at all.
    """
    killed = await _killed(endpoint, _Notes(folder / "killed"), sizes)
    released = await _released(endpoint, _Notes(folder / "released"), sizes)
    mass = await _mass(endpoint, _Notes(folder / "mass"), sizes)
    storm = await _storm(endpoint, _Notes(folder / "storm"), sizes)
    return {
        "ttl_s": sizes.ttl_s,
        "killed_p50_s": round(statistics.median(killed), 2),
        "killed_max_s": round(max(killed), 2),
        "released_p50_ms": round(percentile(released, 0.5) * 1000, 1),
        "released_max_ms": round(max(released) * 1000, 1),
        "mass_jobs": sizes.mass_jobs,
        "mass_workers": sizes.mass_workers,
        **mass,
        **storm,
    }


async def _killed(endpoint: str, notes: _Notes, sizes: RecoverySizes) -> list[float]:
    """Kill the worker that runs a job at a random moment between its beats; seconds until it runs again."""
    found: list[float] = []
    async with _jobs(endpoint) as client:
        for number in range(sizes.kills):
            queue, job_id = f"killed-{number}", f"killed-{number}"
            with (
                _worker(endpoint, notes, queue=queue, slots=1, hold=_FOR_EVER_S, ttl=sizes.ttl_s) as first,
                _worker(endpoint, notes, queue=queue, slots=1, hold=_FOR_EVER_S, ttl=sizes.ttl_s) as second,
            ):
                await client.submit(JobSpec(queue=queue, type=_TYPE, job_id=job_id))
                _, pid = await notes.start_of(job_id)
                await asyncio.sleep(sizes.ttl_s / 2 + random.uniform(0, sizes.ttl_s / 3))
                holder = first if first.pid == pid else second
                began = time.monotonic()
                holder.kill()
                again, _ = await notes.start_of(job_id, not_by=pid)
                found.append(again - began)
    return found


async def _released(endpoint: str, notes: _Notes, sizes: RecoverySizes) -> list[float]:
    """Give a job back while a worker waits; seconds from the call until it runs there."""
    found: list[float] = []
    queue = "released"
    async with _jobs(endpoint) as client, raw_load(endpoint, _NAMESPACE) as holder:
        for number in range(sizes.releases):
            job_id = f"released-{uuid.uuid4().hex[:8]}-{number}"
            await client.submit(JobSpec(queue=queue, type=_TYPE, job_id=job_id))
            [claim] = await holder.claim(1, queue=queue)
            with _worker(endpoint, notes, queue=queue, slots=1, hold=0.0, ttl=sizes.ttl_s) as waiting:
                await _polls(waiting)
                began = time.monotonic()
                await holder.release(claim)
                again, _ = await notes.start_of(job_id)
                found.append(again - began)
    return found


async def _polls(worker: subprocess.Popen[bytes]) -> None:
    """Give a fresh worker time to open its session and to wait for a job."""
    await asyncio.sleep(1.5)
    if worker.poll() is not None:
        raise RuntimeError(f"a worker ended with {worker.returncode}")


async def _mass(endpoint: str, notes: _Notes, sizes: RecoverySizes) -> dict[str, Number]:
    """Kill all workers at once; seconds until the first and the last of their jobs is claimed again."""
    queue = "mass"
    slots = -(-sizes.mass_jobs // sizes.mass_workers)
    if slots > _KEYS_PER_SESSION:
        raise ValueError(f"{slots} jobs a worker are more than one session may hold")
    async with _jobs(endpoint) as client, contextlib.AsyncExitStack() as stack:
        await client.submit_many(
            JobSpec(queue=queue, type=_TYPE, job_id=f"mass-{number}") for number in range(sizes.mass_jobs)
        )
        workers = [
            stack.enter_context(
                _worker(endpoint, notes, queue=queue, slots=slots, hold=_FOR_EVER_S, ttl=sizes.ttl_s)
            )
            for _ in range(sizes.mass_workers)
        ]
        await notes.starts(sizes.mass_jobs)
        await asyncio.sleep(sizes.ttl_s / 2)
        began = time.monotonic()
        for worker in workers:
            worker.kill()
        first, back = 0.0, 0
        async with raw_load(endpoint, _NAMESPACE) as claimer, asyncio.timeout(_LIMIT_S):
            while back < sizes.mass_jobs:
                claims = await claimer.claim(100, queue=queue)
                if claims:
                    await claimer.settle(claims)
                    first = first or time.monotonic() - began
                    back += len(claims)
            last = time.monotonic() - began
    return {"mass_first_back_s": round(first, 2), "mass_all_back_s": round(last, 2)}


async def _storm(endpoint: str, notes: _Notes, sizes: RecoverySizes) -> dict[str, Number]:
    """Freeze all workers for two TTLs under steady load; seconds until they do 90 % of what they did before.

    Rates are over five seconds, so five are the least that can be told.
    """
    queue, slots = "storm", 10
    hold = sizes.storm_workers * slots * 0.8 / sizes.storm_rate
    async with _jobs(endpoint) as client, contextlib.AsyncExitStack() as stack:
        workers = [
            stack.enter_context(
                _worker(endpoint, notes, queue=queue, slots=slots, hold=hold, ttl=sizes.ttl_s)
            )
            for _ in range(sizes.storm_workers)
        ]
        submitting = asyncio.create_task(_submit_steadily(client, queue, sizes.storm_rate), name="load")
        stack.callback(submitting.cancel)
        await notes.starts(1)
        await asyncio.sleep(2 * _WINDOW_S)
        before = _rate(notes, time.monotonic())
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2 * sizes.ttl_s)
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
        woken = time.monotonic()
        back = await _rate_is_back(notes, 0.9 * before, woken)
        if submitting.done():
            await submitting
        # What runs twice after the storm is what the storm leaves behind; what was frozen has run twice by
        # then.
        settled = time.monotonic()
        await asyncio.sleep(_WINDOW_S)
    seen: set[str] = set()
    late = repeats = 0
    for what, job_id, at, _ in notes.read():
        if what == "start":
            late += at > settled
            repeats += at > settled and job_id in seen
            seen.add(job_id)
    return {
        "storm_jobs_per_second_before": round(before, 1),
        "storm_back_to_90_percent_s": round(back, 2),
        "storm_repeated_share_after": round(repeats / late, 4) if late else 0.0,
    }


async def _rate_is_back(notes: _Notes, wanted: float, since: float) -> float:
    async with asyncio.timeout(_LIMIT_S):
        while True:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            if now - since >= _WINDOW_S and _rate(notes, now) >= wanted:
                return now - since


def _rate(notes: _Notes, now: float) -> float:
    """Handlers ended a second, over the last window."""
    ended = sum(1 for what, _, at, _ in notes.read() if what == "end" and at > now - _WINDOW_S)
    return ended / _WINDOW_S


async def _submit_steadily(client: JobClient, queue: str, rate: int) -> None:
    """Submit ``rate`` jobs a second, ten calls a second, until cancelled."""
    number = 0
    due = time.monotonic()
    while True:  # each round waits for its time
        batch = [JobSpec(queue=queue, type=_TYPE, job_id=f"storm-{number + at}") for at in range(rate // 10)]
        number += len(batch)
        await client.submit_many(batch)
        due += 0.1
        await asyncio.sleep(max(0.0, due - time.monotonic()))
