"""SIGTERM at random moments, in real worker processes: no job is lost, doubled or charged."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.sdk.conftest import Sink, StartWorker, client, endpoint, exit_code, sink, start_worker
from worker_sdk import JobClient, JobSpec, JobState

__all__ = ["client", "endpoint", "sink", "start_worker"]

# What a process may end with that was told to: in order, or before Python could install a handler.
ENDS = {0, -signal.SIGTERM}
JOBS_A_ROUND = 6


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.slow)])
async def test_141_sigterm_at_any_moment_loses_doubles_and_charges_nothing(
    client: JobClient, start_worker: StartWorker, sink: Sink, tmp_path: Path, rounds: int
) -> None:
    """Fault case 141."""
    chance = random.Random(141)
    alive: list[subprocess.Popen[str]] = []
    ending: list[subprocess.Popen[str]] = []

    def start(number: int) -> None:
        # A long TTL: whatever comes back by a lease's end, and not by a release, shows as a loss.
        alive.append(start_worker(f"w{number}", ttl=20.0, slots=3, drain=chance.choice([0.0, 0.1, 5.0])))

    async def submit(number: int) -> None:
        await client.submit_many(
            JobSpec(
                queue="q",
                type=chance.choice(["write", "sleep"]),
                job_id=f"j{number}-{n}",
                payload=f"{chance.uniform(0, 0.3):.3f}".encode(),
            )
            for n in range(JOBS_A_ROUND)
        )

    start(0)
    for number in range(1, rounds + 1):
        start(number)
        await submit(number)
        await asyncio.sleep(chance.uniform(0, 0.3))
        # The older one mostly, which works; sometimes the one that has only begun to start.
        leaving = alive.pop(0 if chance.random() < 0.85 else 1)
        if chance.random() < 0.6:
            await asyncio.sleep(chance.uniform(0, 0.3))
        leaving.send_signal(signal.SIGTERM)
        ending.append(leaving)
        while len(ending) > 2:
            assert await exit_code(ending.pop(0), 30) in ENDS
    names = [f"j{number}-{n}" for number in range(1, rounds + 1) for n in range(JOBS_A_ROUND)]
    for name in names:
        job = await client.wait(name, timeout=60)
        assert (job.state, job.failures, job.lease_losses) == (JobState.SUCCEEDED, 0, 0), job
    for process in [*ending, *alive]:
        if process in alive:
            process.send_signal(signal.SIGTERM)
        assert await exit_code(process, 30) in ENDS
    written = Counter(job for job, _, _ in sink.rows("accepted"))
    assert set(names) == set(written)
    assert {name: count for name, count in written.items() if count != 1} == {}
    assert sink.rows("refused") == []
