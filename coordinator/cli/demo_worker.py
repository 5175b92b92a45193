"""A worker of the demo: a process of its own, made with the SDK as anybody's worker is.

``python -m coordinator.cli.demo_worker --help`` lists what the driver tells it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from coordinator.cli.demo_control import FREEZE, Control, Held
from coordinator.cli.demo_input import Unit
from coordinator.cli.demo_late import complete_late
from coordinator.cli.demo_parse import Counts, count_file
from coordinator.cli.demo_sink import Sink
from worker_sdk import ConnectionConfig, SyncContext, Worker, WorkerConfig

__all__ = ["QUEUE", "TYPE", "DemoHandler", "HandlerConfig"]

QUEUE, TYPE = "demo", "parse"
_SLOTS = 2
_POLL_SECONDS = 5.0
_DRAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerConfig:
    """Where a worker reads and writes; see `CrewConfig`."""

    name: str
    endpoint: str
    namespace: str
    input_folder: Path


class DemoHandler:
    """Counts a file and stores the counts under the job's fencing token."""

    def __init__(self, config: HandlerConfig, sink: Sink, control: Control) -> None:
        self._config = config
        self._sink = sink
        self._control = control
        # One write at a time, and none while this process waits to be frozen: a process that is frozen in
        # the middle of a transaction would hold up every other writer of the file.
        self._writing = threading.Lock()

    def handle(self, ctx: SyncContext) -> bytes:
        """One job; the result is the counts as JSON."""
        unit, number = Unit.from_payload(ctx.payload)
        counts = count_file(self._config.input_folder / unit.path, unit.first, unit.last)
        with self._writing:
            ticket = self._control.take_ticket(number)
            if ticket is None:
                self._sink.write(ctx.job_id, ctx.fencing_token, counts)
            else:
                self._write_late(ticket, ctx.job_id, ctx.fencing_token, counts)
        content = {"status": counts.status, "lines": counts.lines}
        return json.dumps({**content, "functions": counts.functions, "classes": counts.classes}).encode()

    def _write_late(self, ticket: str, job_id: str, token: int, counts: Counts) -> None:
        """Wait for the fault, then write at once, asking the SDK nothing."""
        config = self._config
        held = Held(worker=config.name, pid=os.getpid(), job_id=job_id, token=token)
        self._control.wait_here(ticket, held)
        self._sink.write(job_id, token, counts)
        if ticket == FREEZE:
            answer = complete_late(config.endpoint, config.namespace, job_id, token)
            self._sink.note_stale_settlement(job_id, token, answer)
        self._control.finish(ticket)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo_worker", description=__doc__)
    parser.add_argument("--name", required=True, help="of this worker")
    parser.add_argument("--endpoint", required=True, help="host:port of the coordinator")
    parser.add_argument("--namespace", required=True, help="of the jobs")
    parser.add_argument("--input", required=True, type=Path, help="folder of the files")
    parser.add_argument("--sink", required=True, type=Path, help="SQLite file for the counts")
    parser.add_argument("--control", required=True, type=Path, help="folder of the driver's tickets")
    parser.add_argument("--session-ttl", required=True, type=float, help="seconds")
    return parser.parse_args()


def _end_with_the_driver() -> None:
    """End at once when the driver is gone: it holds the other end of our standard input."""
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Work until SIGTERM."""
    options = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    threading.Thread(target=_end_with_the_driver, name="driver's end", daemon=True).start()
    worker = Worker(
        ConnectionConfig(endpoints=options.endpoint, namespace=options.namespace),
        queues={QUEUE: _SLOTS},
        config=WorkerConfig(
            session_ttl=options.session_ttl,
            identity=options.name,
            poll_wait=_POLL_SECONDS,
            drain_timeout=_DRAIN_SECONDS,
        ),
    )
    config = HandlerConfig(
        name=options.name,
        endpoint=options.endpoint,
        namespace=options.namespace,
        input_folder=options.input,
    )
    sink = Sink(options.sink, options.name)
    handler = DemoHandler(config, sink, Control(options.control))
    worker.handler(TYPE)(handler.handle)
    try:
        asyncio.run(worker.run())
    finally:
        sink.close()


if __name__ == "__main__":
    main()
