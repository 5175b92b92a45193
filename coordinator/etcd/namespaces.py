"""Which namespaces there are, and one feed for each: the registry keys are watched by every coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.errors import (
    KeyFormatError,
    OutcomeUnknown,
    Reason,
    RequestError,
)
from coordinator.etcd import wire
from coordinator.etcd.change_feed import ChangeEvent, ChangeFeed, FeedConfig, WatchRange
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import FORMAT
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.namespace_feed import NamespaceFeed
from coordinator.etcd.paging import pages
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.time_left import write_timeout
from coordinator.ports import Clock
from leasekeeper.internal.etcd.v1.watch_pb2 import Event
from leasekeeper.internal.storage.v1.records_pb2 import NamespaceRecord

__all__ = ["EtcdNamespaceFeeds", "NamespacesConfig"]

_log = logging.getLogger(__name__)

_LIST_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacesConfig:
    """Sizes and times.

    Attributes:
        limit: namespaces of one installation; each costs every coordinator a watch stream and an index.
        feed: times of the watches.
    """

    limit: int = 100
    feed: FeedConfig = field(default_factory=FeedConfig)


class EtcdNamespaceFeeds:
    """Implements ``ports.NamespaceFeeds``.

    Args:
        client: the etcd client.
        space: the keys.
        make: makes the feed of a namespace.
        set_aside: told of undecodable keys.
        clock: time.
        config: see ``NamespacesConfig``.
        fraction: uniform in [0, 1), for jitter.
    """

    def __init__(
        self,
        client: EtcdClient,
        space: KeySpace,
        make: Callable[[str], NamespaceFeed],
        *,
        set_aside: SetAside,
        clock: Clock,
        config: NamespacesConfig,
        fraction: Callable[[], float],
    ) -> None:
        self._client = client
        self._space = space
        self._make = make
        self._set_aside = set_aside
        self._clock = clock
        self._config = config
        self._feeds: dict[str, NamespaceFeed] = {}
        self._tasks: asyncio.TaskGroup | None = None
        span = space.all_registered()
        self._registry = ChangeFeed(
            client,
            [WatchRange("namespace", span.start, span.end)],
            self,
            config.feed,
            clock,
            fraction=fraction,
        )

    def namespaces(self) -> Sequence[str]:
        """Those that are listed and watched."""
        return tuple(name for name, feed in self._feeds.items() if feed.ready.is_set())

    @property
    def listed(self) -> bool:
        """Whether the registry is known to be up to date, and every namespace in it is listed."""
        return self._registry.fresh and all(feed.ready.is_set() for feed in self._feeds.values())

    def feed(self, namespace: str) -> NamespaceFeed | None:
        """The feed of a namespace, if there is one."""
        return self._feeds.get(namespace)

    async def ensure(self, namespace: str, *, deadline: float) -> None:
        """Make sure that the namespace is registered, listed and watched.

        Raises:
            RequestError: NOT_READY (listing is not done by the deadline), RATE_LIMITED (too many namespaces).
            KeyFormatError: no namespace name.
            StorageError: it could not be registered.
        """
        feed = self._feeds.get(namespace)
        if feed is not None and feed.ready.is_set():
            return
        if feed is None:
            await self._register(namespace, deadline)
            feed = self._follow(namespace)
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                await feed.ready.wait()
        except TimeoutError:
            raise RequestError(
                Reason.NOT_READY,
                f"namespace {namespace} is still being listed",
                metadata={"namespace": namespace},
                retry_after_ms=200,
            ) from None

    async def run(self) -> None:
        """Watch the registry and every registered namespace, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                for feed in self._feeds.values():
                    tasks.create_task(feed.run(), name=f"feed-{feed.namespace}")
                await self._registry.run()
            finally:
                self._tasks = None

    # --- registry ---------------------------------------------------------------------------------

    async def _register(self, namespace: str, deadline: float) -> None:
        key = self._space.registered(namespace)
        if len(self._feeds) >= self._config.limit and not await self._is_registered(key, deadline):
            raise RequestError(
                Reason.RATE_LIMITED,
                f"there are {len(self._feeds)} namespaces, at most {self._config.limit} are allowed",
                metadata={"namespace": namespace, "limit": str(self._config.limit)},
                retry_after_ms=60_000,
            )
        value = NamespaceRecord(format=FORMAT, first_ms=self._clock.now_ms()).SerializeToString()
        request = wire.txn((wire.create_eq(key, 0),), (wire.put(key, value),), ())
        try:
            await self._client.txn_bytes(request, timeout=write_timeout(self._clock, deadline))
        except OutcomeUnknown:
            if not await self._is_registered(key, deadline):
                raise

    async def _is_registered(self, key: bytes, deadline: float) -> bool:
        reply = await self._client.range(key, count_only=True, timeout=write_timeout(self._clock, deadline))
        return reply.count > 0

    def _follow(self, namespace: str) -> NamespaceFeed:
        feed = self._feeds.get(namespace)
        if feed is None:
            feed = self._feeds[namespace] = self._make(namespace)
            if self._tasks is not None:
                self._tasks.create_task(feed.run(), name=f"feed-{namespace}")
        return feed

    async def relist(self, revision: int) -> None:
        """See ``FeedHandler.relist``."""
        deadline = self._clock.monotonic() + _LIST_SECONDS
        span = self._space.all_registered()
        async for kv in pages(self._client, span, clock=self._clock, deadline=deadline):
            self._registered(kv.key)

    def changes(self, range_name: str, revision: int, events: Sequence[ChangeEvent]) -> None:
        """See ``FeedHandler.changes``. A registration is never taken back while coordinators run."""
        for event in events:
            if event.type == Event.PUT:
                self._registered(event.kv.key)

    def freshness(self, fresh: bool) -> None:
        """See ``FeedHandler.freshness``."""

    def _registered(self, key: bytes) -> None:
        try:
            self._follow(self._space.parse_registered(key))
        except KeyFormatError as error:
            self._set_aside.add("namespace", key, error)
