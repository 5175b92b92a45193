"""A loopback TCP proxy between a client and a server that hurts the connection on command."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from enum import Enum
from types import TracebackType
from typing import Self

__all__ = ["ProxyMode", "TcpProxy"]

_CHUNK = 64 * 1024
_THROTTLED_CHUNK = 512


class ProxyMode(Enum):
    """What happens to bytes that pass; it applies at once, also to connections that are open."""

    PASS = "pass"
    DELAY = "delay"
    """Every chunk waits `TcpProxy.delay` seconds, both ways; order is kept."""
    DROP = "drop"
    """Nothing passes either way; connections stay open, new ones are accepted and hang. Bytes are lost."""
    HALF_DROP = "half-drop"
    """Requests reach the server, replies are swallowed."""
    RESET = "reset"
    """Open and new connections are reset (TCP RST)."""
    THROTTLE = "throttle"
    """`TcpProxy.rate` bytes a second, both ways."""


class TcpProxy:
    """Forwards 127.0.0.1:`port` to *target*; an async context manager.

    A connection whose bytes were dropped is broken for good: `set_mode` resets such connections when it
    leaves DROP or HALF_DROP, as a path that comes back after a long cut would.

    Args:
        target: ``host:port`` of the server.
        delay: seconds, for DELAY.
        rate: bytes a second, for THROTTLE.
    """

    def __init__(self, target: str, *, delay: float = 0.1, rate: int = 10_000) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.delay = delay
        self.rate = rate
        self.mode = ProxyMode.PASS
        self.accepted = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._lossy: set[asyncio.StreamWriter] = set()
        self._port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        """``127.0.0.1:<port>``."""
        return f"127.0.0.1:{self._port}"

    @property
    def open_connections(self) -> int:
        """How many client connections are open."""
        return len(self._connections)

    def set_mode(self, mode: ProxyMode) -> None:
        """Switch; takes effect with the next chunk of every connection."""
        leaving_loss = self.mode in (ProxyMode.DROP, ProxyMode.HALF_DROP) and mode is not self.mode
        self.mode = mode
        if mode is ProxyMode.RESET:
            self._reset(self._writers)
        elif leaving_loss:
            self._reset(self._lossy)
            self._lossy.clear()

    def lead_to(self, target: str) -> None:
        """Forward to another server from now on; open connections are reset."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.close_connections()

    def close_connections(self) -> None:
        """Reset all open connections once; new ones pass by the mode."""
        self._reset(self._writers)

    @staticmethod
    def _reset(writers: set[asyncio.StreamWriter]) -> None:
        for writer in list(writers):
            raw = writer.get_extra_info("socket")
            if raw is not None:
                with contextlib.suppress(OSError):
                    # Linger 0 turns the close into a RST.
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.accepted += 1
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self.mode is ProxyMode.RESET:
                self._reset({writer})
                return
            server_reader, upstream = await asyncio.open_connection(*self._target)
            self._writers.add(upstream)
            pumps = [
                asyncio.ensure_future(self._pump(reader, upstream, writer, up=True)),
                asyncio.ensure_future(self._pump(server_reader, writer, writer, up=False)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the server is away, or the proxy closes: the client sees its connection end
        finally:
            for each in (writer, upstream):
                if each is not None:
                    self._writers.discard(each)
                    self._lossy.discard(each)
                    each.transport.abort()
            self._connections.discard(task)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        *,
        up: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if up:
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
                if self.mode is ProxyMode.DELAY:
                    await asyncio.sleep(self.delay)
                # Asked after the delay: bytes in flight when the path is cut are lost as well.
                if self.mode is ProxyMode.DROP or (self.mode is ProxyMode.HALF_DROP and not up):
                    self._lossy.add(client)
                    continue
                if self.mode is ProxyMode.THROTTLE:
                    for start in range(0, len(data), _THROTTLED_CHUNK):
                        piece = data[start : start + _THROTTLED_CHUNK]
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(len(piece) / self.rate)
                    continue
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
