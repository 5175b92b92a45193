"""What the demo does to its workers: one is killed, one is frozen until others have done its work."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from coordinator.cli.demo_control import FREEZE, KILL, Control, Held
from coordinator.cli.demo_ledger import Ledger
from coordinator.cli.demo_workers import Crew
from coordinator.core.job import JobState

__all__ = ["FaultTimes", "freeze_one", "kill_one"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTimes:
    """Seconds: how often to look, and how long each step may take."""

    poll: float = 0.02
    step: float = 90.0


async def kill_one(crew: Crew, control: Control, tell: Callable[[str], None], times: FaultTimes) -> None:
    """SIGKILL the worker that took the ticket, while it holds a claim; another worker takes its place.

    Raises:
        TimeoutError: no worker got there.
    """
    held = await _until(functools.partial(_taker, control, KILL), times)
    worker = crew.named(held.worker)
    worker.kill()
    tell(f"killed {held.worker} (pid {held.pid}) while it held {held.job_id}, token {held.token}")
    replacement = crew.hire()
    tell(f"started {replacement.name} (pid {replacement.pid}) in its place")


async def freeze_one(
    crew: Crew, control: Control, ledger: Ledger, tell: Callable[[str], None], times: FaultTimes
) -> None:
    """Stop the worker that took the ticket before its write, and continue it once others have done its jobs.

    Raises:
        TimeoutError: a step did not come about.
    """
    held = await _until(functools.partial(_taker, control, FREEZE), times)
    worker = crew.named(held.worker)
    await asyncio.to_thread(worker.freeze)
    lost = await _held_by_session_of(ledger, held)
    if not any(other.state == "working" for other in crew):
        crew.hire()  # somebody has to do the work
    tell(f"froze {held.worker} (pid {held.pid}) before its write of {held.job_id}, token {held.token}")
    for job_id in lost:
        await _until(functools.partial(_done_elsewhere, ledger, job_id, held), times)
    tell(f"what it held has run elsewhere ({len(lost)}); {held.worker} goes on and writes at once")
    control.let_go(FREEZE)
    worker.resume()
    await _until(functools.partial(_finished, control, FREEZE), times)
    tell(f"{held.worker} has tried its write and its settlement with token {held.token}")


async def _held_by_session_of(ledger: Ledger, held: Held) -> list[str]:
    claims = await ledger.claims()
    claim = claims.get(held.job_id)
    if claim is None or claim.token != held.token:
        raise RuntimeError(f"etcd does not know the claim of {held.worker} on {held.job_id}")
    return sorted(job_id for job_id, other in claims.items() if other.session == claim.session)


async def _done_elsewhere(ledger: Ledger, job_id: str, held: Held) -> bool:
    job = await ledger.job(job_id)
    if job is None or job.state is not JobState.SUCCEEDED:
        return False
    # Of the other jobs a settlement may have been on its way when the worker froze.
    return job_id != held.job_id or job.attempts[-1].token > held.token


async def _until(probe: Callable[[], Awaitable[T | None]], times: FaultTimes) -> T:
    """The first answer of ``probe`` that is true."""
    async with asyncio.timeout(times.step):
        while True:
            found = await probe()
            if found:
                return found
            await asyncio.sleep(times.poll)


async def _taker(control: Control, ticket: str) -> Held | None:
    return control.held(ticket)


async def _finished(control: Control, ticket: str) -> bool:
    return control.finished(ticket)
