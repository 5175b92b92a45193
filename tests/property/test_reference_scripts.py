"""Readers, writers, evictions and late repeats in any order: nobody gets less than was known to be there.

The oracle is not the cache's own bookkeeping: each value says which change of the source it is, and the play
keeps the largest change that a reader got or a writer was told is applied.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field

import pytest

from coordinator.cache import redis_cache, redis_scripts
from coordinator.cache.breaker import Breaker
from coordinator.cache.redis_cache import RedisCache, RedisCacheConfig
from coordinator.cache.redis_connect import RedisClient, connect
from coordinator.embedded.valkey_process import ValkeyProcess
from coordinator.ports.references import EntryKey, Fill, FillWish, Found, ReferenceValue, VersionSource
from tests.support.clock import SteppingClock

_KEY = EntryKey("play", "rates", "eur")
_FRESH_MS = 60_000

_STEPS = (
    *("get",) * 5,
    *("load",) * 3,
    *("fill",) * 3,
    *("change",) * 2,
    "plant",
    *("put",) * 2,
    *("apply",) * 4,
    "sweep",
    *("invalidate",) * 2,
    "evict",
    "end value",
    "end token",
    "hear",
)
_PLAYS = 150
_LENGTH = 120


@dataclass
class Record:
    """What lies in the outbox: a put (with the mark that its writer saw) or an invalidation."""

    revision: int
    change: int
    mark: str
    put: bool


@dataclass
class Play:
    """One key, its source, three readers and three writers."""

    cache: RedisCache
    client: RedisClient
    source: VersionSource
    lagging: bool
    change: int = 1
    revision: int = 1
    known: int = 1
    epoch: int = 1
    floor: int = 0
    granted: dict[int, str] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    marks: dict[int, str] = field(default_factory=dict)
    outbox: list[Record] = field(default_factory=list)
    tokens: int = 0

    @property
    def raw(self) -> str:
        return self.cache._key(_KEY)

    def value(self, change: int) -> ReferenceValue:
        return ReferenceValue(
            value=str(change).encode(),
            source=self.source,
            version=change,
            fresh_ms=_FRESH_MS,
            stale_ms=_FRESH_MS,
        )

    def seen(self, change: int, revision: int) -> None:
        self.floor = max(self.floor, change if self.source is VersionSource.CALLER else revision)

    async def step(self, what: str, who: int) -> None:
        await getattr(self, f"do_{what.replace(' ', '_')}")(who)

    async def do_get(self, who: int) -> None:
        self.tokens += 1
        token = f"t{self.tokens}"
        if not self.lagging:
            self.known = self.revision
        wish = FillWish(token=token, good_ms=60_000, known_revision=self.known, early_ms=_FRESH_MS)
        [entry] = await self.cache.get([_KEY], wish, epoch=self.epoch, deadline=1e9)
        if entry.fill:
            self.granted[who] = token
            self.loaded.pop(who, None)
        if entry.found is not Found.MISS:
            got = int(entry.value) if self.source is VersionSource.CALLER else entry.version
            assert got >= self.floor, f"got {got} after {self.floor}"
            self.floor = got

    async def do_load(self, who: int) -> None:
        if who in self.granted:
            self.loaded[who] = self.change

    async def do_fill(self, who: int) -> None:
        if who in self.loaded:
            fill = Fill(token=self.granted[who], value=self.value(self.loaded[who]))
            await self.cache.fill(_KEY, fill, epoch=self.epoch, deadline=1e9)

    async def do_change(self, who: int) -> None:
        self.change += 1
        if self.source is VersionSource.CALLER and self.lagging:
            # Writers commit in any order. An eviction forgets versions: then only the order of a lock helps.
            self.held[who] = self.change

    async def do_plant(self, who: int) -> None:
        mark = f"m{self.revision}.{who}.{self.tokens}"
        self.marks[who] = await self.cache.plant(_KEY, mark, epoch=self.epoch, keep_ms=60_000, deadline=1e9)

    async def do_put(self, who: int) -> None:
        self.revision += 1
        change = self.held.pop(who, self.change)
        self.outbox.append(Record(self.revision, change, self.marks.pop(who, ""), put=True))

    async def do_invalidate(self, who: int) -> None:
        self.revision += 1
        self.held.clear()
        self.outbox.append(Record(self.revision, self.change, "", put=False))

    async def do_apply(self, who: int) -> None:
        if self.outbox:
            await self.applied(self.outbox[-1 - who % len(self.outbox)], by_writer=True)

    async def do_sweep(self, who: int) -> None:
        if self.outbox:
            await self.applied(self.outbox[who % len(self.outbox)], by_writer=False)

    async def applied(self, record: Record, *, by_writer: bool) -> None:
        if record.put:
            await self.cache.put(
                _KEY,
                self.value(record.change),
                mark=record.mark if by_writer else "",
                revision=record.revision,
                epoch=self.epoch,
                deadline=1e9,
            )
        else:
            await self.cache.invalidate(
                _KEY, revision=record.revision, keep_ms=60_000, epoch=self.epoch, deadline=1e9
            )
        self.seen(record.change, record.revision)

    async def do_evict(self, who: int) -> None:
        if not self.lagging:
            await self.client.execute_command("DEL", self.raw)

    async def do_end_value(self, who: int) -> None:
        if await self.client.execute_command("HEXISTS", self.raw, "d"):
            await self.client.execute_command("HSET", self.raw, "d", "0", "x", "0")

    async def do_end_token(self, who: int) -> None:
        if await self.client.execute_command("HEXISTS", self.raw, "u"):
            await self.client.execute_command("HSET", self.raw, "u", "0")

    async def do_bump(self, who: int) -> None:
        if not self.lagging:
            self.epoch += 1

    async def do_hear(self, who: int) -> None:
        self.known = self.revision


async def play(server: ValkeyProcess, source: VersionSource, *, lagging: bool, plays: int = _PLAYS) -> None:
    """That many stories, each from a seed that is its number."""
    client = connect(f"redis://127.0.0.1:{server.port}", connections=2, call_s=5.0)
    run = os.urandom(4).hex()
    try:
        for seed in range(plays):
            clock = SteppingClock()
            choice = random.Random(seed)
            cache = RedisCache(
                client,
                clock,
                lambda choice=choice: f"{choice.getrandbits(64):x}",  # type: ignore[misc]
                RedisCacheConfig(prefix=f"play-{run}-{seed}", call_s=5.0),
                Breaker(clock.monotonic),
            )
            story = Play(cache, client, source, lagging)
            for at in range(_LENGTH):
                what, who = choice.choice(_STEPS), choice.randrange(3)
                # Rare: it makes all that was before irrelevant.
                what = "bump" if choice.random() < 0.01 else what
                try:
                    await story.step(what, who)
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}, step {at} ({what}): {error}") from error
    finally:
        await client.aclose()


@pytest.mark.parametrize("source", list(VersionSource))
@pytest.mark.parametrize("lagging", [False, True])
def test_no_reader_gets_less_than_was_known_to_be_there(
    valkey_server: ValkeyProcess, source: VersionSource, lagging: bool
) -> None:
    asyncio.run(play(valkey_server, source, lagging=lagging))


BUGS = {
    "a fill needs no token": (
        "FILL",
        ("if behind or f[11] ~= token or tonumber(f[13]) <= now then", "if behind then"),
        ("local known = f[12]", "local known = f[12] or zero"),
    ),
    "an invalidation leaves the token": ("INVALIDATE", ("'d', 'r', 't', 'k', 'u')", "'d', 'r')")),
    "a put whose life has gone stores": ("PUT", ("if mark == '' or f[2] ~= mark then", "if false then")),
    "an old put comes back": ("PUT", ("if f[14] and revision <= f[14] then", "if false then")),
    "a put replaces a later version": ("PUT", ("if f[6] == source and version < f[7] then", "if false then")),
}


@pytest.fixture(params=list(BUGS))
def bug(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    script, *changes = BUGS[request.param]
    text = getattr(redis_scripts, script)
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    monkeypatch.setattr(redis_cache.scripts, script, text)
    return str(request.param)


def test_a_seeded_bug_is_caught(valkey_server: ValkeyProcess, bug: str) -> None:
    lagging = bug == "a put replaces a later version"
    with pytest.raises(AssertionError, match="seed"):
        asyncio.run(play(valkey_server, VersionSource.CALLER, lagging=lagging, plays=4 * _PLAYS))
