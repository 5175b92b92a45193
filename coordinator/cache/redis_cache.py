"""The reference cache on Redis or Valkey, standalone, Sentinel or Cluster: ``ports.ReferenceCache``.

One hash an entry, one script a step (``redis_scripts``). Whatever goes wrong is `CacheAway`, in time: each
call has a deadline of its own, connections are bounded, and after some failures in a row nobody is sent there
for a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from redis.exceptions import NoScriptError, RedisError

from coordinator.cache import redis_scripts as scripts
from coordinator.cache.breaker import Breaker
from coordinator.errors import CacheAway
from coordinator.ports import Clock
from coordinator.ports.references import (
    Applied,
    CachedEntry,
    EntryKey,
    Fill,
    FillAnswer,
    FillWish,
    Found,
    ReferenceValue,
    VersionSource,
)

__all__ = ["RedisCache", "RedisCacheConfig", "RedisCommands"]

_log = logging.getLogger(__name__)

_EVAL_BATCH: Final = 100


class RedisCommands(Protocol):
    """What is used of redis-py's asyncio clients, ``Redis`` and ``RedisCluster`` alike."""

    def execute_command(self, *args: Any) -> Awaitable[Any]:
        """Send one command."""

    def pipeline(self, transaction: bool = ...) -> Any:
        """Collect commands; without a transaction each stands for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisCacheConfig:
    """Attributes:
    prefix: of every key.
    call_s: seconds that a call may take, waits for a connection included.
    keep_ms: how long an entry's traces (versions, tombstones) last: longer than any load.
    """

    prefix: str = "leasekeeper"
    call_s: float = 0.05
    keep_ms: int = 120_000


class _Script:
    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RedisCache:
    """Implements ``ports.ReferenceCache``.

    Args:
        client: of redis-py, made by ``redis_connect``; closed by whoever made it.
        clock: time of deadlines.
        marks: makes a new mark, unlike all others.
        config: see `RedisCacheConfig`.
        breaker: whether the server is worth a try.
    """

    def __init__(
        self,
        client: RedisCommands,
        clock: Clock,
        marks: Callable[[], str],
        config: RedisCacheConfig,
        breaker: Breaker,
    ) -> None:
        self._client = client
        self._clock = clock
        self._marks = marks
        self._config = config
        self.breaker = breaker
        self._get = _Script(scripts.GET)
        self._fill = _Script(scripts.FILL)
        self._abandon = _Script(scripts.ABANDON)
        self._plant = _Script(scripts.PLANT)
        self._put = _Script(scripts.PUT)
        self._invalidate = _Script(scripts.INVALIDATE)

    async def get(
        self, keys: Sequence[EntryKey], wish: FillWish | None, *, epoch: int, deadline: float
    ) -> list[CachedEntry]:
        """See ``ports.ReferenceCache``."""
        words: tuple[object, ...] = ("", 0, _padded(0), 0)
        if wish is not None:
            words = (wish.token, wish.good_ms, _padded(wish.known_revision), wish.early_ms)
        words = (_padded(epoch), self._config.keep_ms, *words, self._marks())
        rows: list[Any] = []
        for at in range(0, len(keys), _EVAL_BATCH):
            batch = keys[at : at + _EVAL_BATCH]
            rows += await self._run(self._get, [(key, words) for key in batch], deadline)
        return [_entry(row) for row in rows]

    async def fill(self, key: EntryKey, fill: Fill, *, epoch: int, deadline: float) -> FillAnswer:
        """See ``ports.ReferenceCache``."""
        value = fill.value
        return await self._written(
            self._fill, key, epoch, (fill.token, *_version(value), *_spans(value), *_content(value)), deadline
        )

    async def abandon(self, key: EntryKey, token: str, *, epoch: int, deadline: float) -> None:
        """See ``ports.ReferenceCache``."""
        await self._written(self._abandon, key, epoch, (token,), deadline)

    async def plant(self, key: EntryKey, mark: str, *, epoch: int, keep_ms: int, deadline: float) -> str:
        """See ``ports.ReferenceCache``."""
        words = (_padded(epoch), max(keep_ms, self._config.keep_ms), mark)
        [row] = await self._run(self._plant, [(key, words)], deadline)
        return _text(row[0])

    async def put(
        self, key: EntryKey, value: ReferenceValue, *, mark: str, revision: int, epoch: int, deadline: float
    ) -> FillAnswer:
        """See ``ports.ReferenceCache``."""
        words = (mark, _padded(revision), *_version(value), *_spans(value), *_content(value))
        return await self._written(self._put, key, epoch, words, deadline)

    async def invalidate(
        self, key: EntryKey, *, revision: int, keep_ms: int, epoch: int, deadline: float
    ) -> Applied:
        """See ``ports.ReferenceCache``."""
        words = (_padded(epoch), max(keep_ms, self._config.keep_ms), _padded(revision), self._marks())
        [row] = await self._run(self._invalidate, [(key, words)], deadline)
        return Applied(_text(row[0]))

    async def _written(
        self, script: _Script, key: EntryKey, epoch: int, words: tuple[object, ...], deadline: float
    ) -> FillAnswer:
        [row] = await self._run(script, [(key, (_padded(epoch), self._config.keep_ms, *words))], deadline)
        return FillAnswer(Applied(_text(row[0])), int(_text(row[1])))

    async def _run(
        self, script: _Script, calls: Sequence[tuple[EntryKey, tuple[object, ...]]], deadline: float
    ) -> list[Any]:
        """One reply for each call.

        A caller that is cancelled closes the connection that it was using (redis-py does), so nobody reads
        its reply.
        """
        left = min(self._config.call_s, deadline - self._clock.monotonic())
        if left <= 0 or not self.breaker.allows():
            raise CacheAway("the cache is not asked")
        try:
            async with asyncio.timeout(left):
                rows = await self._evaluated(script, calls)
        except (RedisError, OSError, TimeoutError, EOFError) as error:
            if self.breaker.failed():
                _log.warning("the cache is away, and is left alone for a while: %r", error)
            raise CacheAway(f"the cache does not answer: {type(error).__name__}") from error
        except asyncio.CancelledError:
            self.breaker.left()
            raise
        self.breaker.succeeded()
        return rows

    async def _evaluated(
        self, script: _Script, calls: Sequence[tuple[EntryKey, tuple[object, ...]]]
    ) -> list[Any]:
        if len(calls) == 1:
            key, words = calls[0]
            try:
                return [await self._client.execute_command("EVALSHA", script.sha, 1, self._key(key), *words)]
            except NoScriptError:
                return [await self._client.execute_command("EVAL", script.text, 1, self._key(key), *words)]
        for command, body in (("EVALSHA", script.sha), ("EVAL", script.text)):
            pipe = self._client.pipeline(transaction=False)
            for key, words in calls:
                pipe.execute_command(command, body, 1, self._key(key), *words)
            rows: list[Any] = await pipe.execute(raise_on_error=False)
            if command == "EVALSHA" and any(isinstance(row, NoScriptError) for row in rows):
                continue
            for row in rows:
                if isinstance(row, Exception):
                    raise row
            return rows
        raise CacheAway("the script cannot be loaded")

    def _key(self, key: EntryKey) -> str:
        return f"{self._config.prefix}:{key.namespace}:{key.dataset}:{key.key}"


def _entry(row: Any) -> CachedEntry:
    status, value, content_type, version, left, granted, retry = row
    return CachedEntry(
        found=Found(_text(status)),
        value=value if isinstance(value, bytes) else str(value).encode(),
        content_type=_text(content_type),
        version=int(_text(version)),
        fresh_left_ms=int(left),
        fill=bool(granted),
        retry_ms=int(retry),
    )


def _padded(number: int) -> str:
    return f"{number:020d}"


def _version(value: ReferenceValue) -> tuple[int, str]:
    return int(value.source), _padded(value.version if value.source is VersionSource.CALLER else 0)


def _spans(value: ReferenceValue) -> tuple[int, int]:
    return value.fresh_ms, value.stale_ms


def _content(value: ReferenceValue) -> tuple[int, bytes, str]:
    return int(value.negative), value.value, value.content_type


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)
