"""A store that checks fencing tokens, for processes that hold locks, and the processes themselves."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.fault.support.lock_judge import Sink
from tests.fault.support.processes import Process

__all__ = ["FencedSink", "LockProcess"]

_START_SECONDS = 30.0


class FencedSink:
    """Listens for lines ``pid name token``; an async context manager.

    Each name keeps its largest token, and a smaller one is refused. What it accepts counts in *beside*, the
    judge of callers of the same locks in this process, too: who is refused there was overtaken as an owner.

    Attributes:
        accepted: tokens of each name, in order.
        refused: writes refused, by pid.
    """

    def __init__(self, beside: Sink) -> None:
        self._beside = beside
        self.accepted: dict[str, list[int]] = {}
        self.refused: Counter[int] = Counter()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                pid, name, token = line.decode().split()
                writer.write(b"ok\n" if self.write(int(pid), name, int(token)) else b"refused\n")
        except ConnectionError:
            pass
        finally:
            writer.close()

    def write(self, pid: int, name: str, token: int) -> bool:
        """Take a write, or refuse it."""
        if token < self._beside.largest.get(name, 0):
            self.refused[pid] += 1
            return False
        self._beside.largest[name] = token
        self.accepted.setdefault(name, []).append(token)
        return True


class LockProcess(Process):
    """`tests.fault.support.lock_program` as a process; an async context manager that starts and kills it."""

    def __init__(
        self,
        endpoints: str,
        namespace: str,
        folder: Path,
        *,
        name: str,
        names: Sequence[str],
        sink: int,
        seed: int,
        ttl: float = 2.0,
    ) -> None:
        told = {
            "endpoints": endpoints,
            "namespace": namespace,
            "names": list(names),
            "sink": sink,
            "seed": seed,
            "ttl": ttl,
        }
        command = (sys.executable, "-m", "tests.fault.support.lock_program", json.dumps(told))
        super().__init__(command, folder / f"{name}.log")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Start, also again; returns once it is about to ask for its first lock."""
        self.child.spawn()
        await asyncio.to_thread(
            self.child.wait_ready, lambda: "lock program ready" in self.log, timeout=_START_SECONDS
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
