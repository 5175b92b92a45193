"""The port for scrapes: what it answers, and that nobody can hold it up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from coordinator.errors import ConfigError
from coordinator.observability.admin_http import AdminHttp, AdminHttpConfig, Answer


@asynccontextmanager
async def serving(**config: float) -> AsyncIterator[str]:
    pages: dict[str, Callable[[str], Answer]] = {"/metrics": lambda accept: Answer(f"[{accept}]".encode())}
    server = AdminHttp(pages, AdminHttpConfig(listen="127.0.0.1:0", **config))  # type: ignore[arg-type]
    try:
        yield await server.start()
    finally:
        await server.close()


async def talk(address: str, request: bytes) -> bytes:
    """Everything that is answered until the server closes."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()


async def test_a_page_is_served_with_its_length_and_type() -> None:
    async with serving() as address:
        answer = await talk(address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: h\r\nACCEPT: text/html \r\n\r\n")

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 11\r\n" in head
    assert body == b"[text/html]"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /../metrics HTTP/1.1\r\n\r\n", 404),
        (b"\xff\xfe\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
    ],
)
async def test_what_is_no_request_for_a_page_is_refused(request_: bytes, status: int) -> None:
    async with serving() as address:
        answer = await talk(address, request_)

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


async def test_head_has_no_body() -> None:
    async with serving() as address:
        answer = await talk(address, b"HEAD /metrics HTTP/1.1\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n")


async def test_whoever_sends_too_much_or_nothing_is_let_go() -> None:
    async with serving(timeout_s=0.2, max_head_bytes=1_000) as address:
        assert await talk(address, b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 3_000 + b"\r\n\r\n") == b""
        assert await talk(address, b"GET /metr") == b""
        assert (await talk(address, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_one_connection_too_many_is_closed_at_once() -> None:
    async with serving(max_connections=1) as address:
        host, _, port = address.rpartition(":")
        _, silent = await asyncio.open_connection(host, int(port))
        assert await talk(address, b"") == b""
        silent.close()


async def test_an_address_that_is_taken_is_told_by_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"admin\.listen"):
            await AdminHttp({}, AdminHttpConfig(listen=listen)).start()


async def test_the_end_closes_connections_and_gives_the_address_back() -> None:
    async with serving() as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metr")
    async with asyncio.timeout(5):
        with suppress(ConnectionResetError):  # what it had sent is not read any more
            assert await reader.read() == b""
    writer.close()
    with socket.create_server((host, int(port))):
        pass
