"""A worker made with the SDK, whose handlers do what a job's payload says. Run with one JSON argument::

    {"endpoints", "namespace", "name", "sink", "queues": {name: slots}, "ttl", "drain", "poll_wait", "gates"}

Types: ``effect`` (async) and ``effect-sync`` (in a thread). The payload is JSON: ``work`` seconds to work;
``gate`` a file in the folder *gates* to wait for, where ``{attempt}`` is the attempt's number; ``deaf``: wait
without asking the SDK anything; ``fail``: raise before the effect; ``result``: bytes of result; ``wrong``:
see `misbehaviour`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.fault.support.misbehaviour import misbehave, swallow_cancels
from tests.fault.support.sink import Sink
from worker_sdk import ConnectionConfig, Context, SyncContext, Worker, WorkerConfig

_POLL = 0.01
_log = logging.getLogger("worker_program")


class Handlers:
    """The handlers and what they share."""

    def __init__(self, name: str, sink: Sink, gates: Path) -> None:
        self._name = name
        self._sink = sink
        self._gates = gates

    async def effect(self, ctx: Context) -> bytes:
        """Work, then write the effect under the token."""
        told: dict[str, Any] = json.loads(ctx.payload or b"{}")
        start = await asyncio.to_thread(self._sink.started, ctx.job_id, ctx.fencing_token, self._name)
        misbehave(told, ctx.attempt)
        await swallow_cancels(told, self._gates)
        try:
            until = time.monotonic() + told.get("work", 0.0)
            while self._shut(told, ctx.attempt):  # noqa: ASYNC110 - the gate is a file that another process makes
                await asyncio.sleep(_POLL)
            await asyncio.sleep(max(0.0, until - time.monotonic()))
        except asyncio.CancelledError:
            await asyncio.to_thread(
                self._sink.note, ctx.job_id, ctx.fencing_token, self._name, f"stopped: {ctx.stop_reason}"
            )
            raise
        if told.get("fail"):
            raise ValueError("told to fail")
        await asyncio.to_thread(self._sink.write, ctx.job_id, ctx.fencing_token, self._name, start)
        return b"r" * told.get("result", 0)

    def effect_sync(self, ctx: SyncContext) -> bytes:
        """The same in a thread, which nothing interrupts."""
        told: dict[str, Any] = json.loads(ctx.payload or b"{}")
        start = self._sink.started(ctx.job_id, ctx.fencing_token, self._name)
        misbehave(told, ctx.attempt)
        until = time.monotonic() + told.get("work", 0.0)
        while self._shut(told, ctx.attempt) or time.monotonic() < until:
            time.sleep(_POLL)
            if not told.get("deaf"):
                ctx.check()
        if told.get("fail"):
            raise ValueError("told to fail")
        self._sink.write(ctx.job_id, ctx.fencing_token, self._name, start)
        return b"r" * told.get("result", 0)

    def _shut(self, told: dict[str, Any], attempt: int) -> bool:
        gate = told.get("gate", "")
        return bool(gate) and not (self._gates / gate.format(attempt=attempt)).exists()


def _end_with_the_test(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


async def _main(options: dict[str, Any]) -> None:
    connection = ConnectionConfig(endpoints=options["endpoints"], namespace=options["namespace"])
    worker = Worker(
        connection,
        queues=options.get("queues", {"work": 4}),
        config=WorkerConfig(
            session_ttl=options.get("ttl", 2.0),
            identity=options["name"],
            poll_wait=options.get("poll_wait", 5.0),
            drain_timeout=options.get("drain", 5.0),
        ),
    )
    handlers = Handlers(options["name"], Sink(Path(options["sink"])), Path(options.get("gates", ".")))
    worker.handler("effect")(handlers.effect)
    worker.handler("effect-sync")(handlers.effect_sync)
    running = asyncio.create_task(worker.run())
    ready = asyncio.create_task(worker.ready())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        _log.info("worker ready")
    else:
        ready.cancel()
    await running


def main() -> None:
    """Work until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    parent = os.getppid()
    threading.Thread(target=_end_with_the_test, args=(parent,), daemon=True).start()
    asyncio.run(_main(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
