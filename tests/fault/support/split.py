"""A cluster whose members reach each other through proxies, so that one of them can be cut off from the rest.

A raft peer both dials and is dialled, so a member's own proxy sees half of its traffic alone. The other half
runs through the other members' proxies; they tell who dials by the socket's owner.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from coordinator.embedded.etcd_process import EtcdOptions, EtcdProcess

__all__ = ["SplitCluster"]


def owner_of(port: int, pids: set[int]) -> int:
    """Which of the processes has the connected socket with this local port; 0: none."""
    inodes = set()
    with open("/proc/net/tcp", encoding="ascii") as lines:
        next(lines)
        for line in lines:
            fields = line.split()
            if int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for pid in pids:
        with suppress(OSError):
            for descriptor in list(os.scandir(f"/proc/{pid}/fd")):
                with suppress(OSError):
                    if os.readlink(descriptor.path) in inodes:
                        return pid
    return 0


class PeerProxy:
    """Leads to one member's peer port, but for connections from or to a member that is cut off."""

    def __init__(self, cluster: SplitCluster, member: EtcdProcess) -> None:
        self._cluster = cluster
        self._member = member
        self.target = 0
        self.port = 0
        self._open: dict[asyncio.StreamWriter, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; `port` is known afterwards."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close everything."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop(self, which: Callable[[int], bool]) -> None:
        """End connections whose dialler *which* accepts."""
        for writer, dialler in list(self._open.items()):
            if which(dialler):
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            pids = {member.pid for member in self._cluster.members if member.running}
            dialler = await asyncio.to_thread(owner_of, writer.get_extra_info("peername")[1], pids)
            self._open[writer] = dialler
            if self._cluster.apart(dialler, self._member):
                await _swallow(reader)
                return
            other, upstream = await asyncio.open_connection("127.0.0.1", self.target)
            writers.append(upstream)
            self._open[upstream] = dialler
            ways = [
                asyncio.ensure_future(_pump(reader, upstream)),
                asyncio.ensure_future(_pump(other, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # a member is away, or the test ends
        finally:
            for each in writers:
                self._open.pop(each, None)
                each.transport.abort()
            self._tasks.discard(task)


async def _swallow(reader: asyncio.StreamReader) -> None:
    """Take everything and answer nothing, until the other side gives up."""
    with suppress(OSError):
        while await reader.read(65_536):
            pass


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


class SplitCluster:
    """Three members. `cut` takes one away from the other two, both ways; clients still reach it."""

    def __init__(self, folder: Path) -> None:
        options = EtcdOptions(version="3.6")
        self.members = [EtcdProcess(folder / f"m{n}", options, name=f"m{n}") for n in range(3)]
        self._proxies = [PeerProxy(self, member) for member in self.members]
        self._away: EtcdProcess | None = None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Client endpoints, in member order."""
        return tuple(member.endpoint for member in self.members)

    def apart(self, dialler: int, member: EtcdProcess) -> bool:
        """Whether a connection from process *dialler* to *member* must not be."""
        away = self._away
        return away is not None and (member is away or dialler == away.pid)

    def cut(self, member: EtcdProcess) -> None:
        """Cut *member* off, open connections and all."""
        self._away = member
        for proxy, each in zip(self._proxies, self.members, strict=True):
            proxy.drop(lambda dialler, each=each: each is member or dialler in (member.pid, 0))

    def heal(self) -> None:
        """All reach all again: what was swallowed is dropped, so that it is dialled anew."""
        self._away = None
        for proxy in self._proxies:
            proxy.drop(lambda dialler: True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SplitCluster]:
        """Found the cluster, and kill it at the end."""
        async with AsyncExitStack() as stack:
            for proxy, member in zip(self._proxies, self.members, strict=True):
                proxy.target = member.choose_ports()
                await proxy.start()
                stack.push_async_callback(proxy.stop)
            peers = {
                member.name: proxy.port for proxy, member in zip(self._proxies, self.members, strict=True)
            }
            for member in self.members:
                member.place(peers, token="split")
                await asyncio.to_thread(member.spawn)
                stack.push_async_callback(asyncio.to_thread, member.kill)
            for member in self.members:
                await asyncio.to_thread(member.wait_healthy)
            yield self
