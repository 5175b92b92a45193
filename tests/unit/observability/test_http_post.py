"""One POST: its form on the wire, its deadline, and what it does not do."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trustme

from coordinator.observability.http_post import HttpPost, PostError

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(behaviour: Behaviour, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server on loopback that does this with each connection; its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await behaviour(reader, writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answering(text: bytes, seen: list[bytes] | None = None) -> Behaviour:
    """Reads one request whole, then answers *text*."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
        body = await reader.readexactly(length)
        if seen is not None:
            seen.append(head + body)
        writer.write(text)
        await writer.drain()

    return behave


async def test_a_request_is_whole_and_its_status_is_answered() -> None:
    seen: list[bytes] = []
    async with listening(answering(b"HTTP/1.1 204 No Content\r\n\r\n", seen)) as port:
        post = HttpPost(f"http://127.0.0.1:{port}/hook/%C3%A4?a=b", 5.0)
        status = await post(b'{"a":1}', {"X-A": "1"})

    assert status == 204
    assert seen == [
        b"POST /hook/%C3%A4?a=b HTTP/1.1\r\n"
        + f"Host: 127.0.0.1:{port}\r\n".encode()
        + b"Connection: close\r\nX-A: 1\r\nContent-Length: 7\r\n\r\n"
        + b'{"a":1}'
    ]


async def test_a_redirect_is_answered_and_not_followed() -> None:
    seen: list[bytes] = []
    answer = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/other\r\n\r\n"
    async with listening(answering(answer, seen)) as port:
        status = await HttpPost(f"http://127.0.0.1:{port}", 5.0)(b"", {})

    assert (status, len(seen)) == (302, 1)


async def test_interim_answers_are_passed_over() -> None:
    answer = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"
    async with listening(answering(answer)) as port:
        assert await HttpPost(f"http://127.0.0.1:{port}", 5.0)(b"", {}) == 200


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 99 X\r\n\r\n", b"x" * 100_000])
async def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    async with listening(answering(answer)) as port:
        with pytest.raises(PostError):
            await HttpPost(f"http://127.0.0.1:{port}", 5.0)(b"", {})


async def test_a_peer_that_drips_its_answer_is_cut_off_at_the_deadline() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n"[:1])
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await asyncio.Event().wait()

    async with listening(drip) as port:
        with pytest.raises(PostError, match=r"within 0\.2 s"):
            await HttpPost(f"http://127.0.0.1:{port}", 0.2)(b"", {})


async def test_nobody_there_is_an_error() -> None:
    async with listening(answering(b"")) as port:
        pass
    with pytest.raises(PostError):
        await HttpPost(f"http://127.0.0.1:{port}", 5.0)(b"", {})


async def test_tls_is_verified_against_authorities_and_name() -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with listening(answering(b"HTTP/1.1 200 OK\r\n\r\n"), server) as port:
        assert await HttpPost(f"https://localhost:{port}", 5.0, tls=trusting)(b"x", {}) == 200
        with pytest.raises(PostError, match="certificate"):
            await HttpPost(f"https://localhost:{port}", 5.0)(b"x", {})
        with pytest.raises(PostError, match="certificate"):
            await HttpPost(f"https://127.0.0.1:{port}", 5.0, tls=trusting)(b"x", {})


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host/",
        "file:///etc/passwd",
        "http://",
        "http://user:pw@host/",
        "http://host/#part",
        "http://host/a b",
        "http://host/ä",
        "http://host:99999/",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be|[Pp]ort"):
        HttpPost(url, 1.0)
