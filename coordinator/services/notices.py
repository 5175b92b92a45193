"""Hands notices to everybody who wants them: sinks (log, metrics, webhook), streams, and a short memory.

Whoever raises a notice never waits and never fails for it. A stream that does not keep up loses the oldest
and is told how many; a flood of one kind pushes no other kind out of the memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.core.notice import Notice, NoticeKind, PublishedNotice
from coordinator.errors import Reason, RequestError
from coordinator.ports import Clock, Entropy
from coordinator.services.storage_errors import RETRY_MS

__all__ = ["NoticeConfig", "NoticeHub", "NoticeSink", "StreamedNotice"]

_logger = logging.getLogger(__name__)

NoticeSink = Callable[[PublishedNotice], None]
"""Takes a notice in without blocking."""

ALL_KINDS: Final = frozenset(NoticeKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeConfig:
    """``recent``: notices of one kind that are remembered. ``buffer``: notices kept for a slow stream."""

    recent: int = 200
    buffer: int = 1_000
    max_streams: int = 100


@dataclass(frozen=True, slots=True)
class StreamedNotice:
    """A notice, and how many this reader missed before it."""

    published: PublishedNotice
    missed: int


class _Stream:
    """What one reader has still to read."""

    __slots__ = ("buffer", "kinds", "missed", "namespace", "woken")

    def __init__(self, namespace: str, kinds: frozenset[NoticeKind], size: int) -> None:
        self.namespace = namespace
        self.kinds = kinds
        self.buffer: deque[PublishedNotice] = deque(maxlen=size)
        self.missed = 0
        self.woken = asyncio.Event()

    def wants(self, notice: Notice) -> bool:
        return notice.kind in self.kinds and notice.namespace in ("", self.namespace)

    def add(self, published: PublishedNotice) -> None:
        self.missed += len(self.buffer) == self.buffer.maxlen
        self.buffer.append(published)
        self.woken.set()


class NoticeHub:
    """Implements ``ports.Notices``. One a coordinator, used in its event loop alone.

    Args:
        clock: when a notice was raised.
        entropy: ids of notices.
        coordinator_id: who raised it.
        sinks: told of each notice, in their order; one that fails is logged and harms no other.
        config: bounds.
    """

    def __init__(
        self,
        clock: Clock,
        entropy: Entropy,
        *,
        coordinator_id: str,
        sinks: Sequence[NoticeSink] = (),
        config: NoticeConfig | None = None,
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self._coordinator_id = coordinator_id
        self._sinks = tuple(sinks)
        self._config = config or NoticeConfig()
        self._recent = {kind: deque[PublishedNotice](maxlen=self._config.recent) for kind in NoticeKind}
        self._streams: set[_Stream] = set()
        self._order = 0
        self.sink_failures = 0

    @property
    def streams(self) -> int:
        """Streams that follow."""
        return len(self._streams)

    def publish(self, notice: Notice) -> None:
        """Give it an id, the time and this coordinator's id, and tell everybody; see ``ports.Notices``."""
        self._order += 1
        published = PublishedNotice(
            notice_id=self._entropy.identifier(),
            order=self._order,
            time_ms=self._clock.now_ms(),
            coordinator_id=self._coordinator_id,
            notice=notice,
        )
        self._recent[notice.kind].append(published)
        for stream in self._streams:
            if stream.wants(notice):
                stream.add(published)
        for sink in self._sinks:
            try:
                sink(published)
            except Exception:
                # Whoever raised the notice is in the middle of something that matters more.
                self.sink_failures += 1
                if self.sink_failures == 1:
                    _logger.exception("a sink of notices failed; further failures are only counted")

    def recent(self, namespace: str, kinds: frozenset[NoticeKind] = ALL_KINDS) -> list[PublishedNotice]:
        """What is remembered for a namespace, oldest first. Notices of no namespace belong to all."""
        wanted = [
            published
            for kind in kinds
            for published in self._recent[kind]
            if published.notice.namespace in ("", namespace)
        ]
        return sorted(wanted, key=lambda published: published.order)

    async def watch(
        self, namespace: str, kinds: frozenset[NoticeKind] = frozenset(), *, include_recent: bool = False
    ) -> AsyncGenerator[StreamedNotice, None]:
        """Notices of a namespace as they arise, and those of no namespace. It does not end by itself.

        Args:
            namespace: whose.
            kinds: which; empty: all.
            include_recent: first what is remembered, oldest first.

        Raises:
            RequestError: TOO_MANY_REQUESTS: there are too many streams.
        """
        if len(self._streams) >= self._config.max_streams:
            raise RequestError(
                Reason.TOO_MANY_REQUESTS,
                f"{self._config.max_streams} streams follow notices already",
                retry_after_ms=RETRY_MS,
            )
        stream = _Stream(namespace, kinds or ALL_KINDS, self._config.buffer)
        self._streams.add(stream)
        try:
            for published in self.recent(namespace, stream.kinds) if include_recent else ():
                yield StreamedNotice(published, 0)
            while True:
                while stream.buffer:
                    missed, stream.missed = stream.missed, 0
                    yield StreamedNotice(stream.buffer.popleft(), missed)
                stream.woken.clear()
                await stream.woken.wait()
        finally:
            self._streams.discard(stream)
