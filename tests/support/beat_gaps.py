"""Measures the longest gap between heartbeats while handlers block the event loop and hog the GIL.

    .venv/bin/python -m tests.support.beat_gaps [--interval SECONDS] [--block SECONDS] [--hog SECONDS]

The worker is a process of its own, and the beats are timed where they arrive, in this one. Prints one JSON
object: the interval, the longest gap without load, while an ``async def`` sleeps in ``time.sleep``, and while
a plain function counts in pure Python without end; seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.fake_worker_server import FakeCoordinator

__all__ = ["measure"]

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import asyncio, time
from worker_sdk import ConnectionConfig, Context, SyncContext, Worker

worker = Worker(ConnectionConfig.from_env(), queues=["q"])

@worker.handler("block")
async def block(ctx: Context, seconds: float) -> None:
    time.sleep(seconds)

def hogging(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))

@worker.handler("hog")
def hog(ctx: SyncContext, seconds: float) -> None:
    hogging(seconds)

@worker.handler("hog-loop")
async def hog_loop(ctx: Context, seconds: float) -> None:
    hogging(seconds)

asyncio.run(worker.run())
"""


def measure(*, interval: float, block: float, hog: float) -> dict[str, float]:
    """Run the worker through all phases; return the longest gap of each, seconds.

    Raises:
        TimeoutError: a phase did not end.
    """
    gaps: dict[str, float] = {"interval": interval}
    with FakeCoordinator(interval=interval) as server:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}",
            "LEASEKEEPER_ENDPOINTS": server.endpoint,
        }
        worker = subprocess.Popen([sys.executable, "-c", WORKER], env=environment)
        try:
            beats = server.times["Heartbeat"]
            _until(lambda: len(beats) >= 4)
            gaps["idle"] = _longest(beats, 0, 4)
            for kind, seconds in (("block", block), ("hog", hog), ("hog-loop", hog)):
                before = len(beats) - 1
                server.add(kind, type=kind, payload=str(seconds).encode())
                _until(lambda kind=kind: server.how(kind) == ["complete"], seconds + 20)
                after = len(beats)
                _until(lambda after=after: len(beats) > after)
                gaps[kind] = _longest(beats, before, len(beats))
        finally:
            worker.kill()
            worker.wait(10)
    return {name: round(gap, 3) for name, gap in gaps.items()}


def _until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.01)


def _longest(times: list[float], first: int, last: int) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(times[first:last]))


def main() -> None:
    """Measure with the interval of the default TTL, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("interval", 10 / 3), ("block", 3.0), ("hog", 2.0)):
        parser.add_argument(f"--{name}", type=float, default=default, metavar="SECONDS")
    given = parser.parse_args()
    print(json.dumps(measure(interval=given.interval, block=given.block, hog=given.hog)))


if __name__ == "__main__":
    main()
