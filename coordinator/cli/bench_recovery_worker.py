"""A worker of `leasekeeper bench recovery`: a process that notes when each handler starts and ends.

``python -m coordinator.cli.bench_recovery_worker --help`` lists what the bench tells it. Times are seconds of
the machine's monotonic clock, which all processes of one machine share on Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
import time
from pathlib import Path

from worker_sdk import ConnectionConfig, Context, Worker, WorkerConfig

__all__ = ["arguments"]


def arguments() -> argparse.Namespace:
    """What the bench says."""
    parser = argparse.ArgumentParser(prog="bench_recovery_worker", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="host:port of the coordinator")
    parser.add_argument("--namespace", required=True, help="of the jobs")
    parser.add_argument("--queue", required=True, help="to serve")
    parser.add_argument("--type", required=True, help="of the jobs")
    parser.add_argument("--slots", required=True, type=int, help="jobs at a time")
    parser.add_argument("--hold", required=True, type=float, help="seconds that a handler takes")
    parser.add_argument("--ttl", required=True, type=float, help="of the session, seconds")
    parser.add_argument("--notes", required=True, type=Path, help="file to append to")
    return parser.parse_args()


def _end_with_the_bench() -> None:
    """End at once when the bench is gone: it holds the other end of our standard input."""
    os.read(0, 1)  # not through sys.stdin, whose lock the interpreter wants when it ends
    os._exit(1)


def main() -> None:
    """Work until SIGTERM."""
    options = arguments()
    threading.Thread(target=_end_with_the_bench, name="bench's end", daemon=True).start()
    notes = os.open(options.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(what: str, job_id: str) -> None:
        # One write a line: appends of several processes do not mix.
        os.write(notes, f"{what} {job_id} {time.monotonic():.6f} {os.getpid()}\n".encode())

    async def handle(ctx: Context) -> None:
        note("start", ctx.job_id)
        await asyncio.sleep(options.hold)
        note("end", ctx.job_id)

    worker = Worker(
        ConnectionConfig(endpoints=options.endpoint, namespace=options.namespace),
        queues={options.queue: options.slots},
        config=WorkerConfig(session_ttl=options.ttl, drain_timeout=0.0, poll_wait=5.0),
    )
    worker.handler(options.type)(handle)
    asyncio.run(worker.run())


if __name__ == "__main__":
    main()
