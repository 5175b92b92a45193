"""Says whether a worker does well: by HTTP, by a file, and by ending a process that is stuck for good.

In threads of its own: a stuck event loop must be told, not share its fate.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from worker_sdk.errors import ConfigError
from worker_sdk.stats import WorkerHealth

__all__ = ["STUCK_EXIT_CODE", "HealthLimits", "HealthWatch", "judged"]

_log = logging.getLogger("worker_sdk.health")
STUCK_EXIT_CODE = 70
_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 2.0
# How often the server looks whether it is to stop: so long may the worker's end wait for it.
_STOP_SECONDS = 0.1
_CLIENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Seconds without a turn of the loop, a new try of a claim loop, and an answer to a claim."""

    loop: float
    tries: float
    answers: float


def judged(health: WorkerHealth, limits: HealthLimits) -> WorkerHealth:
    """Return *health* with its verdicts. Pure."""
    not_live: list[str] = []
    if health.loop_silent_for > limits.loop:
        not_live.append(f"the event loop has not turned for {health.loop_silent_for:.0f} s")
    if health.oldest_try is not None and health.oldest_try > limits.tries:
        not_live.append(f"a claim loop has tried nothing for {health.oldest_try:.0f} s")
    not_ready = list(not_live)
    if health.stopping:
        not_ready.append("the worker is stopping")
    elif health.session_safe_for <= 0:
        not_ready.append("there is no safe session")
    elif health.oldest_poll is not None and health.oldest_poll > limits.answers:
        not_ready.append(f"no coordinator has answered a claim for {health.oldest_poll:.0f} s")
    return replace(health, not_live=tuple(not_live), not_ready=tuple(not_ready))


class HealthWatch:
    """Owner of the health thread and the HTTP server.

    Args:
        look: returns the health with its verdicts; called from these threads.
        listen: ``host:port``, port 0 takes a free one; empty: no server.
        file: written each second while the worker is live, removed while it is not; None: none.
        exit_after: seconds without being live after which the process ends; 0: never.
    """

    def __init__(
        self, look: Callable[[], WorkerHealth], *, listen: str, file: Path | None, exit_after: float
    ) -> None:
        self._look = look
        self._file = file
        self._exit_after = exit_after
        self._ended = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        # ``host:port`` of the server, or empty.
        self.address = ""
        if listen:
            host, _, port = listen.rpartition(":")
            try:
                self._server = _Server((host.strip("[]"), int(port)), _handler(look))
            except OSError as error:
                raise ConfigError(f"health_listen {listen!r} cannot be used: {error}") from error
            self.address = f"{host}:{self._server.server_address[1]}"

    def start(self) -> None:
        """Start the threads."""
        work: list[tuple[str, Callable[[], None]]] = []
        if self._server is not None:
            work.append(("leasekeeper-health-http", partial(self._server.serve_forever, _STOP_SECONDS)))
            _log.info("health at http://%s/livez and /readyz", self.address)
        if self._file is not None or self._exit_after:
            work.append(("leasekeeper-health", self._watch))
        for name, run in work:
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads and remove the file."""
        self._ended.set()
        if self._server is not None:
            if self._threads:
                self._server.shutdown()
            self._server.server_close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        self._remove()

    def _watch(self) -> None:
        stuck_for = 0.0
        while not self._ended.is_set():
            health = self._look()
            if health.not_live:
                stuck_for += _LOOK_SECONDS
                self._remove()
                if self._exit_after and stuck_for > self._exit_after:
                    _log.critical("this process ends, for it is stuck: %s", "; ".join(health.not_live))
                    logging.shutdown()
                    os._exit(STUCK_EXIT_CODE)
            else:
                stuck_for = 0.0
                self._write(health)
            self._ended.wait(_LOOK_SECONDS)

    def _write(self, health: WorkerHealth) -> None:
        if self._file is None:
            return
        fresh = self._file.with_name(f"{self._file.name}.{self._pid}")
        try:
            fresh.write_text(_json(health))
            fresh.replace(self._file)
        except OSError as error:
            _log.warning("the health file cannot be written: %s", error)

    def _remove(self) -> None:
        if self._file is not None:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("the health file cannot be removed: %s", error)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Threads of clients that hang must not hold up the worker's end.
    block_on_close = False


def _json(health: WorkerHealth) -> str:
    return json.dumps(asdict(health)) + "\n"


def _handler(look: Callable[[], WorkerHealth]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_SECONDS

        def do_GET(self) -> None:
            health = look()
            problems = {
                "/livez": health.not_live,
                "/healthz": health.not_live,
                "/readyz": health.not_ready,
            }.get(self.path)
            if problems is None:
                self.send_error(404)
                return
            body = _json(health).encode()
            self.send_response(503 if problems else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            _log.debug(format, *arguments)

    return Handler
