"""One POST over asyncio: one deadline, verified TLS; no redirects, no proxies, no kept connection.

Only the status is read. A thread with urllib could not be cancelled, and a peer that drips its answer would
hold the process up at its stop.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

__all__ = ["HttpPost", "PostError"]

_PORTS: Final = {"http": 80, "https": 443}
_TARGET: Final = re.compile(r"[\x21-\x7e]*")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: |\r?\n|$)")
_LONGEST_LINE: Final = 4_096
_INTERIM: Final = range(100, 200)
_INTERIM_ANSWERS: Final = 5


class PostError(Exception):
    """No status came: the request may or may not have been taken."""


class HttpPost:
    """Posts to one URL.

    Args:
        url: ``http://`` or ``https://``, without user, password and fragment.
        timeout_s: seconds for a whole request, from the look-up of the name to the status.
        tls: for https; by default the system's authorities, with the host's name checked.

    Raises:
        ValueError: the URL is of another form.
    """

    def __init__(self, url: str, timeout_s: float, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        host, scheme = parts.hostname, parts.scheme
        if scheme not in _PORTS or not host or parts.username is not None or parts.fragment:
            # The text is not repeated: addresses of webhooks often hold a key.
            raise ValueError("must be http://host… or https://host…, without user and fragment")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not _TARGET.fullmatch(target) or not _TARGET.fullmatch(parts.netloc):
            raise ValueError("must be plain ASCII; write other characters percent-encoded")
        self._host, self._port = host, parts.port or _PORTS[scheme]
        self._tls = (tls or ssl.create_default_context()) if scheme == "https" else None
        self._timeout_s = timeout_s
        self._head = f"POST {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"

    async def __call__(self, body: bytes, headers: Mapping[str, str]) -> int:
        """Post ``body``; answers the status.

        Raises:
            PostError: no connection, or no status in time.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        request = f"{self._head}{lines}Content-Length: {len(body)}\r\n\r\n".encode("ascii") + body
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(request)
        except TimeoutError as error:
            raise PostError(f"no answer within {self._timeout_s:g} s") from error
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise PostError(str(error) or type(error).__name__) from error

    async def _exchange(self, request: bytes) -> int:
        reader, writer = await asyncio.open_connection(
            self._host,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls is not None else None,
            limit=_LONGEST_LINE,
        )
        try:
            writer.write(request)
            await writer.drain()
            for _ in range(_INTERIM_ANSWERS):
                found = _STATUS_LINE.match(await reader.readline())
                if found is None:
                    raise PostError("the answer is not HTTP")
                status = int(found[1])
                if status not in _INTERIM:
                    return status
                while (await reader.readline()).strip():
                    pass
            raise PostError("the answer never comes to its end")
        finally:
            # Not awaited: a peer that does not close its side of TLS would be waited for.
            writer.transport.abort()
