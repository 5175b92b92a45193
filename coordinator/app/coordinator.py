"""One coordinator from start to stop: order, ownership, readiness.

Start: take the address, make all parts, listen (health says alive and not ready, calls are told NOT_READY),
find etcd and judge its version, run the background work, open the guard.

Stop, all of it within the grace: health NOT_SERVING; long polls, waits and streams are answered; the
listener closes and calls under way finish; the passes end; the committer drains; the membership lease is
revoked. A second ``stop`` does not wait for calls under way.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from coordinator.app.composition import COORDINATOR
from coordinator.app.etcd_version import check_etcd_version
from coordinator.app.machine import SystemClock, SystemEntropy
from coordinator.app.parts import Parts, Role
from coordinator.app.store_settings import guard_config, listen_config
from coordinator.config import AdminSettings, Settings
from coordinator.errors import ConfigError, StorageError
from coordinator.observability.admin_http import AdminHttp, AdminHttpConfig, Answer
from coordinator.observability.metrics import Metrics
from coordinator.ports import Clock, Entropy
from coordinator.rpc.auth import TokenTable
from coordinator.rpc.call_guard import CallGuard
from coordinator.rpc.health import Health
from coordinator.rpc.server import RpcServer

__all__ = ["Coordinator", "running_coordinator"]

_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S: Final = 1.0
_UNREADY_AFTER: Final = 2
"""Failed looks in a row until the services are NOT_SERVING: one may be a leader election."""
_RETRY_S: Final = 1.0
_SHARE_OF_CALLS: Final = 0.5
_SHARE_OF_STORE: Final = 0.4
"""Shares of the grace: for calls under way, and for the committer, the leases and the connections."""


def software_version() -> str:
    """The version of the distribution, "0" in a tree that is not installed."""
    try:
        return importlib.metadata.version("leasekeeper")
    except importlib.metadata.PackageNotFoundError:
        return "0"


class Coordinator:
    """A coordinator, or another process of the service; ``run`` once, inside one event loop.

    Args:
        settings: checked settings.
        role: what it consists of.
        clock: time.
        entropy: randomness and ids.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        role: Role = COORDINATOR,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._settings = settings
        self._role = role
        self._clock = clock or SystemClock()
        self._entropy = entropy or SystemEntropy()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self.started = asyncio.Event()
        self.health = Health(role.services)
        self._trouble = ""
        self.address = ""
        self.admin_address = ""
        self._guard: CallGuard | None = None
        self._tokens: TokenTable | None = None
        self.defects: list[str] = []

    @property
    def calls(self) -> int:
        """Unary calls under way."""
        return self._guard.calls if self._guard is not None else 0

    def stop(self) -> None:
        """Stop in order; the second time: now. Does not wait, ``run`` returns when it is done."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def reload(self) -> None:
        """Read the tokens file again. A file that cannot be read changes nothing but the log."""
        path, tokens = self._settings.auth.tokens_file, self._tokens
        if path is None or tokens is None:
            _LOG.info("nothing to reload: there is no tokens file")
            return
        try:
            tokens.replace(TokenTable.load(path))
        except ConfigError as error:
            _LOG.error("the tokens stay as they were: %s", error)
        else:
            _LOG.info("the tokens were read again")

    async def run(self) -> None:
        """Start, serve until ``stop``, stop.

        Raises:
            ConfigError: the address, a file or the etcd version cannot be used.
            ExceptionGroup: a part failed for good; the process should exit and be started again.
        """
        settings = self._settings
        if settings.auth.tokens_file is not None:
            self._tokens = TokenTable.load(settings.auth.tokens_file)
        guard = CallGuard(self._clock, self._entropy, self._tokens, guard_config(settings.server))
        self._guard = guard
        server = RpcServer(listen_config(settings.server))
        self.address = server.bind()
        parts = self._role.compose(
            settings, self._clock, self._entropy, endpoint=self.address, version=software_version()
        )
        assert set(parts.servicers) == set(self._role.services), "every service of the role has a servicer"
        server.register(guard, self.health, parts.servicers)
        admin = _admin_http(settings.admin, parts.metrics)
        if admin is not None:
            self.admin_address = await admin.start()
            _LOG.info("metrics are served", extra={"address": self.admin_address})
        await server.start()
        _LOG.info("listening", extra={"address": self.address, "etcd": settings.etcd.endpoints})
        try:
            if await self._find_store(parts):
                await self._serve(parts, guard, server)
        finally:
            self.health.drain()
            await server.stop(0)
            if admin is not None:
                await admin.close()
            await self._close_store(parts)
        _LOG.info("stopped", extra={"address": self.address})

    async def _find_store(self, parts: Parts) -> bool:
        """Wait for etcd as long as it takes; False: stopped meanwhile."""
        waiting = ""
        judged = False
        while not self._stop.is_set():
            try:
                if not judged:
                    self.defects = await check_etcd_version(
                        parts.store.client,
                        allow_unsafe=self._settings.etcd.allow_unsafe,
                        timeout=self._settings.etcd.request_timeout_s,
                    )
                    judged = True
                await parts.store.start()
            except StorageError as error:
                # Also where etcd refuses us: whoever mends that need not start every coordinator again.
                if str(error) != waiting:
                    _LOG.warning("waiting for etcd: %s", error)
                waiting = str(error)
            else:
                return True
            try:
                async with asyncio.timeout(_RETRY_S):
                    await self._stop.wait()
            except TimeoutError:
                pass
        return False

    async def _serve(self, parts: Parts, guard: CallGuard, server: RpcServer) -> None:
        async with asyncio.TaskGroup() as tasks:
            storing = tasks.create_task(parts.store.run(), name="store")
            background = [tasks.create_task(run(), name=name) for name, run in parts.background.items()]
            background.append(tasks.create_task(self._watch_readiness(parts), name="readiness"))
            try:
                guard.open()
                self.started.set()
                await self._stop.wait()
                await self._drain(parts, guard, server)
            finally:
                for task in background:
                    task.cancel()
                for close in parts.closes:
                    await close()
                await self._close_store(parts)
                storing.cancel()

    async def _drain(self, parts: Parts, guard: CallGuard, server: RpcServer) -> None:
        self.health.drain()
        grace = self._settings.server.grace_s * _SHARE_OF_CALLS
        _LOG.info("stopping", extra={"grace_s": grace, "calls": guard.calls, "streams": guard.streams})
        for drain in parts.drains:
            drain()
        guard.drain()
        closing = asyncio.create_task(server.stop(grace), name="server stop")
        hurry = asyncio.create_task(self._hurry.wait(), name="second stop")
        try:
            await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
            # A shorter grace takes the place of the longer one; at once if that is over already.
            await server.stop(0)
            await closing

    async def _close_store(self, parts: Parts) -> None:
        """Close the store within its share of the grace; after a second ``stop``, leave it as it is."""
        closing = asyncio.create_task(parts.store.close(), name="store close")
        hurry = asyncio.create_task(self._hurry.wait(), name="second stop")
        try:
            await asyncio.wait(
                {closing, hurry},
                timeout=self._settings.server.grace_s * _SHARE_OF_STORE,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            hurry.cancel()
            if not closing.done():
                _LOG.warning("the store is left before everything was settled")
                closing.cancel()
            [result] = await asyncio.gather(closing, return_exceptions=True)
        if isinstance(result, Exception):
            raise result

    async def _watch_readiness(self, parts: Parts) -> None:
        """Ready while etcd answers a linearizable read, every namespace is listed and watched, and no part is
        in trouble.
        """
        failed = _UNREADY_AFTER
        while True:
            try:
                await parts.store.present.refresh(deadline=self._clock.monotonic() + _LOOK_EVERY_S)
                sound = parts.listed()
            except StorageError:
                sound = False
            trouble = parts.trouble()
            if trouble and not self._trouble:
                _LOG.warning("not ready: %s", trouble)
            self._trouble = trouble
            failed = 0 if sound and not trouble else failed + 1
            ready = failed < _UNREADY_AFTER
            if ready is not self.health.ready:
                _LOG.log(logging.INFO if ready else logging.WARNING, "ready" if ready else "not ready")
                self.health.set_ready(ready)
            await self._clock.sleep(_LOOK_EVERY_S if ready else _LOOK_EVERY_S / 4)


def _admin_http(settings: AdminSettings, metrics: Metrics) -> AdminHttp | None:
    def page(accept: str) -> Answer:
        body, content_type = metrics.render(accept)
        return Answer(body, content_type)

    if not settings.listen:
        return None
    return AdminHttp({"/metrics": page}, AdminHttpConfig(listen=settings.listen))


@asynccontextmanager
async def running_coordinator(settings: Settings, *, role: Role = COORDINATOR) -> AsyncIterator[str]:
    """A coordinator, or what ``role`` says, that serves inside the block; it stops in order afterwards.

    Gives its ``host:port``.

    Raises:
        ConfigError: as of ``Coordinator.run``.
    """
    coordinator = Coordinator(settings, role=role)
    running = asyncio.create_task(coordinator.run(), name="coordinator")
    started = asyncio.create_task(coordinator.started.wait(), name="coordinator started")
    try:
        await asyncio.wait({running, started}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
            raise RuntimeError("the coordinator stopped before it had started")
        yield coordinator.address
    finally:
        started.cancel()
        coordinator.stop()
        await running
