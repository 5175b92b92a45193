"""The recipes of docs/locks.md with locks of a coordinator on etcd, SQLite, Valkey, and an HTTP server with
conditional writes: a holder that has lost its lock, and does not know, writes nothing."""

from __future__ import annotations

import asyncio
import importlib.util
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
import redis

from coordinator.embedded.valkey_process import ValkeyProcess
from tests.integration.sdk.conftest import ROOT
from tests.support.object_store import ObjectStore
from worker_sdk import LockClient, LockMode


def recipe(name: str) -> ModuleType:
    """A file of examples/locks."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "locks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def tokens(endpoint: str) -> AsyncIterator[tuple[int, int]]:
    """Tokens of a holder whose session ended while it stood still, and of the one that owns the lock now."""
    stalled, second = LockClient(endpoint), LockClient(endpoint)
    block = stalled.lock("item/42")
    first = await block.__aenter__()
    await stalled.close()
    async with second, second.lock("item/42") as lock:
        yield first.token, lock.token


async def test_without_a_checked_token_the_stalled_holder_overwrites_the_work_of_the_next(
    tokens: tuple[int, int],
) -> None:
    stalled, owner = tokens
    store: dict[str, int] = {}
    for writer in (owner, stalled):
        store["item/42"] = writer
    assert store["item/42"] == stalled


async def test_fenced_sql(tokens: tuple[int, int]) -> None:
    stalled, owner = tokens
    module = recipe("fenced_sql")
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(module.SCHEMA)
        assert module.write_item(database, "42", "before", stalled)
        assert module.write_item(database, "42", "new", owner)
        assert not module.write_item(database, "42", "late", stalled)
        assert module.write_item(database, "42", "newer", owner)
        assert list(database.execute("SELECT value, token FROM items")) == [("newer", owner)]


async def test_fenced_redis(tokens: tuple[int, int], tmp_path: Path) -> None:
    stalled, owner = tokens
    module = recipe("fenced_redis")

    def work() -> None:
        with ValkeyProcess(tmp_path) as valkey, redis.Redis.from_url(valkey.url) as client:
            assert module.write_key(client, "42", "before", stalled)
            assert module.write_key(client, "42", "new", owner)
            assert not module.write_key(client, "42", "late", stalled)
            # The next two differ by less than a Lua number can tell.
            assert module.write_key(client, "big", "new", 2**62 + 1)
            assert not module.write_key(client, "big", "late", 2**62)
            assert client.hget("42", "value") == b"new"
            assert client.hget("big", "value") == b"new"

    await asyncio.to_thread(work)


async def test_fenced_object(tokens: tuple[int, int]) -> None:
    stalled, owner = tokens
    module = recipe("fenced_object")

    def work() -> None:
        with ObjectStore() as store:
            assert module.write_object(store.host, "/42", b"before", stalled)
            assert module.write_object(store.host, "/42", b"new", owner)
            assert not module.write_object(store.host, "/42", b"late", stalled)
            assert store.objects["/42"][0] == b"new"

    await asyncio.to_thread(work)


async def test_a_fenced_object_that_changes_between_look_and_write_is_looked_at_again(
    tokens: tuple[int, int],
) -> None:
    stalled, owner = tokens
    module = recipe("fenced_object")

    def work() -> None:
        with ObjectStore() as store:

            def overtake() -> None:
                store.before_put = lambda: None
                store.objects["/42"] = (b"new", {module.TOKEN: str(owner)})

            store.before_put = overtake
            assert not module.write_object(store.host, "/42", b"late", stalled)
            assert store.objects["/42"][0] == b"new"

    await asyncio.to_thread(work)


async def test_largest_seen_would_refuse_a_shared_owner_that_check_token_lets_pass(endpoint: str) -> None:
    async with (
        LockClient(endpoint) as one,
        LockClient(endpoint) as two,
        one.lock("s", mode=LockMode.SHARED) as first,
        two.lock("s", mode=LockMode.SHARED) as second,
    ):
        largest_seen = second.token
        assert first.token < largest_seen
        assert await two.check_token("s", first.token)
        assert await two.check_token("s", second.token)
    async with LockClient(endpoint) as asker:
        assert not await asker.check_token("s", first.token)
