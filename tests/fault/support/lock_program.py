"""A process that takes exclusive locks with the SDK and writes under their tokens, until it is killed.

Run with one JSON argument: ``{"endpoints", "namespace", "names", "ttl", "sink", "seed"}``; ``sink`` is the
port of a `FencedSink`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from typing import Any

from worker_sdk import LeasekeeperError, LockClient

_POLL = 0.2
_WAIT = 20.0
_PAUSE = 0.01


async def work(told: dict[str, Any]) -> None:
    """Take one lock after the other; write a few times under each."""
    chance = random.Random(told["seed"])
    reader, writer = await asyncio.open_connection("127.0.0.1", told["sink"])
    print("lock program ready", flush=True)
    async with LockClient(told["endpoints"], namespace=told["namespace"], ttl=told["ttl"]) as client:
        while True:
            name = chance.choice(told["names"])
            try:
                async with client.lock(name, wait=_WAIT) as lock:
                    for _ in range(3):
                        lock.check()
                        writer.write(f"{os.getpid()} {name} {lock.token}\n".encode())
                        await reader.readline()
                        await asyncio.sleep(chance.random() * _PAUSE)
            except LeasekeeperError:
                await asyncio.sleep(_PAUSE)


async def main() -> None:
    """End with the test, however that ends."""
    parent = os.getppid()
    working = asyncio.create_task(work(json.loads(sys.argv[1])))
    while os.getppid() == parent and not working.done():
        await asyncio.wait([working], timeout=_POLL)
    if working.done():
        working.result()
    os._exit(1)


if __name__ == "__main__":
    asyncio.run(main())
