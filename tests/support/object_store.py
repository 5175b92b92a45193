"""A small object store over HTTP with the conditional writes of S3: ETag, If-Match, If-None-Match."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

__all__ = ["ObjectStore"]


class ObjectStore:
    """Start it with ``with``; ``host`` is its address.

    Attributes:
        objects: data and metadata by path.
        before_put: called before each write is judged.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.before_put: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                with store._lock:
                    found = store.objects.get(self.path)
                self.send_response(404 if found is None else 200)
                if found is not None:
                    self.send_header("ETag", etag(found))
                    for name, value in found[1].items():
                        self.send_header(name, value)
                self.end_headers()

            def do_PUT(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                kept = {n.lower(): v for n, v in self.headers.items() if n.lower().startswith("x-amz-meta-")}
                with store._lock:
                    store.before_put()
                    found = store.objects.get(self.path)
                    wanted, absent = self.headers.get("If-Match"), self.headers.get("If-None-Match")
                    matches = wanted is None or (found is not None and etag(found) == wanted)
                    if not matches or (absent == "*" and found is not None):
                        status = 412
                    else:
                        status = 200
                        store.objects[self.path] = (data, kept)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def etag(found: tuple[bytes, dict[str, str]]) -> str:
    """Changes with data and metadata."""
    return '"' + hashlib.sha256(repr(found).encode()).hexdigest()[:32] + '"'
