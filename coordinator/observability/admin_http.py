"""The port for machines that watch: ``GET /metrics``, and nothing else that a browser could want.

A small HTTP/1.1 server inside the event loop, because the numbers belong to the loop: a thread would read
them while they change. A request has few bytes and little time; a connection serves one request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from coordinator.errors import ConfigError

__all__ = ["AdminHttp", "AdminHttpConfig", "Answer", "Page"]

_LOG = logging.getLogger(__name__)
_TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page answers."""

    body: bytes
    content_type: str = _TEXT
    status: int = 200


Page = Callable[[str], Answer]
"""Makes a page; it is given the request's ``Accept`` header, and does not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminHttpConfig:
    """``listen``: ``host:port``, port 0 takes a free one.

    ``timeout_s``: seconds for a whole request. ``max_connections``: more are closed at once.
    """

    listen: str
    timeout_s: float = 5.0
    max_head_bytes: int = 16_384
    max_connections: int = 32


class AdminHttp:
    """Serves pages, from ``start`` to ``close``.

    Args:
        pages: by path.
        config: see ``AdminHttpConfig``.
    """

    def __init__(self, pages: Mapping[str, Page], config: AdminHttpConfig) -> None:
        self._pages = dict(pages)
        self._config = config
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self) -> str:
        """Take the address, and answer.

        Returns:
            ``host:port`` with the port that was taken.

        Raises:
            ConfigError: it cannot be taken.
        """
        host, _, port = self._config.listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._connected,
                host.strip("[]"),
                int(port),
                limit=self._config.max_head_bytes,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"admin.listen: cannot listen at {self._config.listen}: {error}") from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    async def close(self) -> None:
        """Give the address back, end what is under way, and wait for its end. Repeatable."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "streams call this in a task"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if len(self._tasks) <= self._config.max_connections:
                async with asyncio.timeout(self._config.timeout_s):
                    await self._serve(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever sends nothing whole, or takes nothing, is let go
        except asyncio.CancelledError:
            pass  # the server stops; a task that ends cancelled would be logged by the streams
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, answer = self._answer(head)
        status = f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}"
        headers = (
            status,
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Connection: close",
            "X-Content-Type-Options: nosniff",
        )
        writer.write("\r\n".join((*headers, "", "")).encode())
        if method != "HEAD":
            writer.write(answer.body)
        await writer.drain()

    def _answer(self, head: bytes) -> tuple[str, Answer]:
        request, *lines = head.decode("latin-1").split("\r\n")
        parts = request.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return "", Answer(b"not a request\n", status=400)
        method, target, _ = parts
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return method, Answer(b"no such page\n", status=404)
        if method not in ("GET", "HEAD"):
            return method, Answer(b"only GET\n", status=405)
        accept = ""
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() == "accept":
                accept = value.strip()
        return method, page(accept)
