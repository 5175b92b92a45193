"""Entries of the reference cache on a real server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from coordinator.cache.breaker import Breaker
from coordinator.cache.redis_cache import RedisCache, RedisCacheConfig
from coordinator.cache.redis_connect import connect
from coordinator.embedded.valkey_process import ValkeyOptions, ValkeyProcess
from coordinator.errors import CacheAway
from coordinator.ports.references import (
    Applied,
    CachedEntry,
    EntryKey,
    Fill,
    FillWish,
    Found,
    ReferenceValue,
    VersionSource,
)
from tests.support.clock import SteppingClock
from tests.support.services import ValkeyFactory

_EVER = 1e9
_KEEP_MS = 60_000


def key(name: str = "eur") -> EntryKey:
    return EntryKey("default", "rates", name)


def value(version: int, *, text: str = "", fresh_ms: int = 60_000, stale_ms: int = 0) -> ReferenceValue:
    return ReferenceValue(
        value=(text or f"v{version}").encode(),
        content_type="text/plain",
        source=VersionSource.CALLER,
        version=version,
        fresh_ms=fresh_ms,
        stale_ms=stale_ms,
    )


class Cached:
    """A cache of this test alone."""

    def __init__(self, server: ValkeyProcess, *, call_s: float = 5.0) -> None:
        self.client = connect(f"redis://127.0.0.1:{server.port}", connections=8, call_s=call_s)
        self.clock = SteppingClock()
        self.breaker = Breaker(self.clock.monotonic)
        config = RedisCacheConfig(prefix=f"t{os.urandom(6).hex()}", call_s=call_s, keep_ms=_KEEP_MS)
        self.cache = RedisCache(self.client, self.clock, lambda: os.urandom(8).hex(), config, self.breaker)
        self.tokens = 0

    async def get(self, at: EntryKey | None = None, *, known: int = 1, epoch: int = 1) -> CachedEntry:
        self.tokens += 1
        wish = FillWish(token=f"t{self.tokens}", good_ms=30_000, known_revision=known)
        [entry] = await self.cache.get([at or key()], wish, epoch=epoch, deadline=_EVER)
        return entry

    async def fill(self, filled: ReferenceValue, *, token: str = "", epoch: int = 1) -> Applied:
        fill = Fill(token=token or f"t{self.tokens}", value=filled)
        return (await self.cache.fill(key(), fill, epoch=epoch, deadline=_EVER)).applied

    async def put(self, put: ReferenceValue, *, revision: int, mark: str | None = None) -> Applied:
        if mark is None:
            mark = await self.cache.plant(
                key(), os.urandom(4).hex(), epoch=1, keep_ms=_KEEP_MS, deadline=_EVER
            )
        answer = await self.cache.put(key(), put, mark=mark, revision=revision, epoch=1, deadline=_EVER)
        return answer.applied

    async def invalidate(self, revision: int, *, epoch: int = 1) -> Applied:
        return await self.cache.invalidate(
            key(), revision=revision, keep_ms=_KEEP_MS, epoch=epoch, deadline=_EVER
        )


@pytest.fixture
async def cached(valkey_server: ValkeyProcess) -> AsyncIterator[Cached]:
    one = Cached(valkey_server)
    yield one
    await one.client.aclose()


async def test_a_miss_asks_one_caller_to_load_and_the_others_to_wait(cached: Cached) -> None:
    first, second = await cached.get(), await cached.get()
    assert (first.found, first.fill) == (Found.MISS, True)
    assert (second.found, second.fill) == (Found.MISS, False)
    assert 0 < second.retry_ms <= 30_000
    assert await cached.fill(value(7), token="t1") is Applied.STORED
    third = await cached.get()
    assert (third.found, third.value, third.content_type, third.version) == (
        Found.FRESH,
        b"v7",
        "text/plain",
        7,
    )
    assert 0 < third.fresh_left_ms <= 60_000
    assert not third.fill


async def test_a_fill_after_an_invalidation_is_refused(cached: Cached) -> None:
    await cached.get()
    assert await cached.invalidate(5) is Applied.STORED
    assert await cached.fill(value(1)) is Applied.DROPPED
    assert (await cached.get(known=5)).fill


async def test_a_fill_whose_token_was_evicted_is_refused(cached: Cached) -> None:
    await cached.get()
    await cached.client.execute_command("DEL", cached.cache._key(key()))
    assert await cached.fill(value(1)) is Applied.DROPPED


async def test_a_lagging_source_brings_no_older_version_back(cached: Cached) -> None:
    assert await cached.put(value(2), revision=3) is Applied.STORED
    await cached.client.execute_command("HSET", cached.cache._key(key()), "x", "0", "d", "0")
    assert (await cached.get(known=3)).fill
    assert await cached.fill(value(1)) is Applied.SUPERSEDED
    assert (await cached.get(known=3)).fill, "the refused one's token is given back"


async def test_versions_beyond_two_to_the_53_are_told_apart(cached: Cached) -> None:
    assert await cached.put(value(2**53 + 1), revision=3) is Applied.STORED
    assert await cached.put(value(2**53), revision=4) is Applied.SUPERSEDED
    assert (await cached.get()).version == 2**53 + 1


async def test_a_put_applied_again_after_an_invalidation_stays_away(cached: Cached) -> None:
    mark = await cached.cache.plant(key(), "m", epoch=1, keep_ms=_KEEP_MS, deadline=_EVER)
    assert await cached.put(value(2), revision=3, mark=mark) is Applied.STORED
    assert await cached.put(value(2), revision=3, mark=mark) is Applied.SUPERSEDED
    assert await cached.invalidate(4) is Applied.STORED
    assert await cached.put(value(2), revision=3, mark=mark) is Applied.SUPERSEDED
    assert (await cached.get(known=4)).found is Found.MISS


async def test_a_put_whose_entry_was_evicted_since_is_an_invalidation(cached: Cached) -> None:
    mark = await cached.cache.plant(key(), "m", epoch=1, keep_ms=_KEEP_MS, deadline=_EVER)
    await cached.client.execute_command("DEL", cached.cache._key(key()))
    assert await cached.put(value(2), revision=3, mark=mark) is Applied.DROPPED
    assert (await cached.get(known=3)).found is Found.MISS


async def test_an_entry_of_another_epoch_is_a_miss(cached: Cached) -> None:
    await cached.get()
    assert await cached.fill(value(2)) is Applied.STORED
    assert (await cached.get(epoch=2)).found is Found.MISS
    behind = await cached.get(epoch=1)
    assert (behind.found, behind.fill) == (Found.MISS, False)
    assert await cached.invalidate(9, epoch=1) is Applied.DROPPED


async def test_stale_is_served_while_one_caller_refreshes(cached: Cached) -> None:
    await cached.get()
    assert await cached.fill(value(2, stale_ms=60_000)) is Applied.STORED
    await cached.client.execute_command("HSET", cached.cache._key(key()), "x", "1")
    first, second = await cached.get(), await cached.get()
    assert (first.found, first.value, first.fill) == (Found.STALE, b"v2", True)
    assert (second.found, second.fill) == (Found.STALE, False)


async def test_an_absence_is_kept_and_a_known_version_outlives_it(cached: Cached) -> None:
    await cached.put(value(5), revision=2)
    await cached.invalidate(3)
    await cached.get(known=3)
    absent = ReferenceValue(source=VersionSource.CALLER, version=0, fresh_ms=1_000, negative=True)
    assert await cached.fill(absent) is Applied.STORED
    assert (await cached.get(known=3)).found is Found.NEGATIVE
    assert await cached.put(value(4), revision=4) is Applied.SUPERSEDED


async def test_an_abandoned_fill_is_the_next_caller_s(cached: Cached) -> None:
    await cached.get()
    await cached.cache.abandon(key(), "t1", epoch=1, deadline=_EVER)
    assert (await cached.get()).fill


async def test_every_key_has_a_time_to_live(cached: Cached) -> None:
    await cached.get(key("a"))
    await cached.put(value(1), revision=2)
    await cached.cache.invalidate(key("c"), revision=2, keep_ms=_KEEP_MS, epoch=1, deadline=_EVER)
    for at in (key("a"), key(), key("c")):
        assert await cached.client.execute_command("PTTL", cached.cache._key(at)) > 0


async def test_many_entries_come_in_the_order_of_their_keys(cached: Cached) -> None:
    await cached.put(value(3), revision=2)
    keys = [key(f"k{number}") for number in range(150)]
    keys[120] = key()
    wish = FillWish(token="many", good_ms=1_000, known_revision=1)
    entries = await cached.cache.get(keys, wish, epoch=1, deadline=_EVER)
    assert [at for at, entry in enumerate(entries) if entry.found is Found.FRESH] == [120]
    assert sum(entry.fill for entry in entries) == 149


async def test_a_server_that_is_away_costs_a_deadline_then_nothing(valkey_factory: ValkeyFactory) -> None:
    server = valkey_factory()
    one = Cached(server, call_s=0.05)
    try:
        await one.get()
        server.pause()
        for _ in range(3):
            with pytest.raises(CacheAway):
                await one.get()
        assert one.breaker.open
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(100):
            with pytest.raises(CacheAway):
                await one.get()
        assert loop.time() - began < 1, "an open breaker asks nobody"
        server.resume()
        await one.clock.advance(10)
        assert (await one.get(key("later"))).fill
        assert not one.breaker.open
    finally:
        await one.client.aclose()


async def test_a_cancelled_call_leaves_no_reply_to_the_next(cached: Cached) -> None:
    await cached.put(value(1), revision=2)
    for _ in range(50):
        call = asyncio.ensure_future(cached.get(key("other")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await cached.get()).value == b"v1"


async def test_a_full_server_refuses_writes_and_nobody_breaks(valkey_factory: ValkeyFactory) -> None:
    server = valkey_factory(ValkeyOptions(max_memory_bytes=2_000_000))
    one = Cached(server)
    try:
        big = value(1, text="x" * 100_000)

        async def written_until_it_is_full() -> None:
            for number in range(200):
                at = key(f"k{number}")
                mark = await one.cache.plant(at, "m", epoch=1, keep_ms=_KEEP_MS, deadline=_EVER)
                await one.cache.put(at, big, mark=mark, revision=2, epoch=1, deadline=_EVER)

        with pytest.raises(CacheAway):
            await written_until_it_is_full()
    finally:
        await one.client.aclose()
