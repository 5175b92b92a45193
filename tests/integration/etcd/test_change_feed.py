"""The feed's picture of etcd becomes right again after every way in which a watch can end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from coordinator.app.machine import SystemClock
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.change_feed import ChangeEvent, ChangeFeed, FeedConfig, WatchRange
from coordinator.etcd.client import EtcdClient, EtcdConfig
from leasekeeper.internal.etcd.v1.kv_pb2 import RangeResponse, ResponseHeader, TxnRequest
from leasekeeper.internal.etcd.v1.watch_pb2 import Event, WatchRequest, WatchResponse
from tests.support.fake_etcd import FakeEtcd
from tests.support.polling import eventually
from tests.support.services import EtcdClusterFactory, EtcdFactory
from tests.support.tcp_proxy import ProxyMode, TcpProxy

WATCH = "/etcdserverpb.Watch/Watch"
RANGE = "/etcdserverpb.KV/Range"
QUICK = FeedConfig(probe_after=0.3, probe_timeout=0.4, tick=0.1, call_timeout=1.0, backoff_max=1.0)


class Picture:
    """What a handler believes about a prefix: key to (value, mod revision)."""

    def __init__(self, client: EtcdClient, prefix: bytes) -> None:
        self.client = client
        self.prefix = prefix
        self.keys: dict[bytes, tuple[bytes, int]] = {}
        self.deliveries: list[tuple[str, int, int]] = []
        self.freshness_changes: list[bool] = []
        self.relists = 0

    async def relist(self, revision: int) -> None:
        self.relists += 1
        found = await self.client.range(self.prefix, self.prefix + b"\xff", timeout=2)
        self.keys = {kv.key: (kv.value, kv.mod_revision) for kv in found.kvs}

    def changes(self, range_name: str, revision: int, events: Sequence[ChangeEvent]) -> None:
        self.deliveries.append((range_name, revision, len(events)))
        for event in events:
            known = self.keys.get(event.kv.key)
            if known is not None and known[1] > revision:
                continue
            if event.type == Event.PUT:
                self.keys[event.kv.key] = (event.kv.value, revision)
            else:
                self.keys.pop(event.kv.key, None)

    def freshness(self, fresh: bool) -> None:
        self.freshness_changes.append(fresh)


@contextlib.asynccontextmanager
async def running(
    client: EtcdClient, picture: Picture, config: FeedConfig = QUICK, *ranges: WatchRange
) -> AsyncIterator[ChangeFeed]:
    chosen = ranges or (WatchRange("all", picture.prefix, picture.prefix + b"\xff"),)
    feed = ChangeFeed(client, chosen, picture, config, SystemClock())
    task = asyncio.create_task(feed.run())
    try:
        await eventually(lambda: feed.fresh or task.done(), what="fresh")
        yield feed
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert picture.freshness_changes[-1:] != [True]


async def truth(client: EtcdClient, prefix: bytes) -> dict[bytes, tuple[bytes, int]]:
    found = await client.range(prefix, prefix + b"\xff", timeout=5)
    return {kv.key: (kv.value, kv.mod_revision) for kv in found.kvs}


@pytest.fixture
async def client(etcd_server: EtcdProcess) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(EtcdConfig(endpoints=etcd_server.endpoints)) as made:
        yield made


async def test_a_revision_arrives_whole_and_per_range(client: EtcdClient, etcd_prefix: bytes) -> None:
    ranges = [
        WatchRange("a", etcd_prefix + b"a", etcd_prefix + b"b"),
        WatchRange("b", etcd_prefix + b"b", etcd_prefix + b"c"),
    ]
    picture = Picture(client, etcd_prefix)
    await client.put(etcd_prefix + b"a0", b"before", timeout=5)
    async with running(client, picture, QUICK, *ranges) as feed:
        txn = TxnRequest()
        for name in (b"a1", b"a2", b"b1"):
            txn.success.add().request_put.key = etcd_prefix + name
        revision = (await client.txn(txn, timeout=5)).header.revision
        await feed.wait_revision("a", revision, 5)
        await feed.wait_revision("b", revision, 5)
        assert sorted(picture.deliveries) == [("a", revision, 2), ("b", revision, 1)]
        deleted = (await client.delete_range(etcd_prefix + b"a0", timeout=5)).header.revision
        await feed.wait_revision("a", deleted, 5)
        assert picture.keys == await truth(client, etcd_prefix)
        await feed.add_ranges([WatchRange("c", etcd_prefix + b"c", etcd_prefix + b"d")], deleted)
        third = (await client.put(etcd_prefix + b"c1", b"", timeout=5)).header.revision
        await feed.wait_revision("c", third, 5)
        assert ("c", third, 1) in picture.deliveries
        assert feed.passed("a") == deleted
    assert (picture.relists, picture.freshness_changes) == (1, [True, False])


async def test_a_calm_stream_is_not_mistaken_for_a_dead_one(client: EtcdClient, etcd_prefix: bytes) -> None:
    picture = Picture(client, etcd_prefix)
    async with running(client, picture) as feed:
        first = feed.last_proof
        await eventually(lambda: feed.last_proof > first + 1.2, what="several probes answered")
        assert (feed.reconnects, picture.relists) == (0, 1)


async def test_a_broken_stream_resumes_without_a_new_list_and_misses_nothing(
    etcd_server: EtcdProcess, client: EtcdClient, etcd_prefix: bytes
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        EtcdClient(EtcdConfig(endpoints=[proxy.endpoint])) as watched,
    ):
        picture = Picture(watched, etcd_prefix)
        async with running(watched, picture) as feed:
            await client.put(etcd_prefix + b"1", b"", timeout=5)
            for number in range(20):
                if number % 5 == 2:
                    proxy.close_connections()
                await client.put(etcd_prefix + b"k%d" % number, b"v", timeout=5)
            head = (await client.put(etcd_prefix + b"end", b"", timeout=5)).header.revision
            await feed.wait_revision("all", head, 10)
            assert picture.keys == await truth(client, etcd_prefix)
            assert picture.relists == 1
            assert feed.reconnects >= 1
            revisions = [revision for _, revision, _ in picture.deliveries]
            assert revisions == sorted(set(revisions))
            await eventually(lambda: feed.fresh)


async def test_large_catch_up_in_fragments_keeps_revisions_whole(
    etcd_server: EtcdProcess, client: EtcdClient, etcd_prefix: bytes
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        EtcdClient(EtcdConfig(endpoints=[proxy.endpoint])) as watched,
    ):
        picture = Picture(watched, etcd_prefix)
        async with running(watched, picture) as feed:
            proxy.set_mode(ProxyMode.RESET)
            await eventually(lambda: not feed.fresh)
            expected = []
            for number in range(6):
                txn = TxnRequest()
                for part in range(4):
                    put = txn.success.add().request_put
                    put.key, put.value = etcd_prefix + b"%d-%d" % (number, part), b"x" * 300_000
                revision = (await client.txn(txn, timeout=10)).header.revision
                expected.append(("all", revision, 4))
            proxy.set_mode(ProxyMode.PASS)
            await feed.wait_revision("all", revision, 15)
            assert picture.deliveries == expected
            assert picture.relists == 1


async def test_resume_from_a_compacted_revision_lists_again(
    etcd_server: EtcdProcess, client: EtcdClient, etcd_prefix: bytes
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        EtcdClient(EtcdConfig(endpoints=[proxy.endpoint])) as watched,
    ):
        await client.put(etcd_prefix + b"gone", b"", timeout=5)
        picture = Picture(watched, etcd_prefix)
        async with running(watched, picture) as feed:
            proxy.set_mode(ProxyMode.RESET)
            await eventually(lambda: not feed.fresh)
            for number in range(100):
                await client.put(etcd_prefix + b"%d" % (number % 30), b"%d" % number, timeout=5)
            deleted = await client.delete_range(etcd_prefix + b"gone", timeout=5)
            await client.compact(deleted.header.revision, timeout=5)
            proxy.set_mode(ProxyMode.PASS)
            expected = await truth(client, etcd_prefix)
            await eventually(lambda: picture.keys == expected and feed.fresh, timeout=5)
            assert picture.relists == 2


async def test_a_silent_path_is_left_within_ten_seconds(etcd_server: EtcdProcess, etcd_prefix: bytes) -> None:
    """With the default times: probe after 2 s, 3 s for the answer."""
    async with TcpProxy(etcd_server.endpoint) as proxy:
        config = EtcdConfig(endpoints=[proxy.endpoint, etcd_server.endpoint])
        async with (
            EtcdClient(config) as watched,
            EtcdClient(EtcdConfig(endpoints=etcd_server.endpoints)) as direct,
        ):
            picture = Picture(watched, etcd_prefix)
            async with running(watched, picture, FeedConfig()) as feed:
                proxy.set_mode(ProxyMode.DROP)
                started = time.monotonic()
                revision = (await direct.put(etcd_prefix + b"k", b"", timeout=5)).header.revision
                await eventually(lambda: not feed.fresh, timeout=10, interval=0.05)
                await eventually(
                    lambda: feed.fresh and feed.passed("all") >= revision, timeout=10, interval=0.05
                )
                assert time.monotonic() - started < 10
                assert picture.keys == await truth(direct, etcd_prefix)


async def test_a_frozen_member_is_left_for_another(
    etcd_cluster_factory: EtcdClusterFactory, etcd_prefix: bytes
) -> None:
    cluster = await asyncio.to_thread(etcd_cluster_factory)
    by_endpoint = {member.endpoint: member for member in cluster.members}
    async with EtcdClient(EtcdConfig(endpoints=cluster.endpoints)) as client:
        picture = Picture(client, etcd_prefix)
        async with running(client, picture) as feed:
            frozen = by_endpoint[client.ring.current.endpoint]
            frozen.pause()
            await eventually(lambda: not feed.fresh, timeout=10)
            await eventually(lambda: feed.fresh, timeout=10)
            others = [member.endpoint for member in cluster.members if member is not frozen]
            async with EtcdClient(EtcdConfig(endpoints=others)) as direct:
                revision = (await direct.put(etcd_prefix + b"k", b"", timeout=5)).header.revision
            await feed.wait_revision("all", revision, 5)
            frozen.resume()


async def fake_head(request: bytes, context: object) -> bytes:
    return RangeResponse(header=ResponseHeader(cluster_id=7, revision=100)).SerializeToString()


def watch_reply(**fields: object) -> bytes:
    reply = WatchResponse(header=ResponseHeader(cluster_id=7, revision=100), **fields)  # type: ignore[arg-type]
    return reply.SerializeToString()


@pytest.mark.parametrize("ending", ["polite", "cancelled", "compacted", "another cluster"])
async def test_every_ending_of_a_stream_counts_as_loss(ending: str) -> None:
    """Also those that are no errors: list and watch stand again within 2 s."""
    lives = 0

    async def watch(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        nonlocal lives
        lives += 1
        life = lives
        async for raw in requests:
            request = WatchRequest.FromString(raw)
            if request.WhichOneof("request_union") == "create_request":
                yield watch_reply(watch_id=1, created=True)
                if life > 1:
                    continue
                if ending == "polite":
                    return
                if ending == "cancelled":
                    yield watch_reply(
                        watch_id=1, canceled=True, cancel_reason="etcdserver: permission denied"
                    )
                elif ending == "compacted":
                    yield watch_reply(watch_id=1, canceled=True, compact_revision=200)
                else:
                    yield WatchResponse(header=ResponseHeader(cluster_id=8), watch_id=1).SerializeToString()
            else:
                yield watch_reply(watch_id=-1)

    async with FakeEtcd() as fake, EtcdClient(EtcdConfig(endpoints=[fake.endpoint])) as client:
        fake.unary[RANGE] = fake_head
        fake.streams[WATCH] = watch
        picture = Picture(client, b"k")
        async with running(client, picture) as feed:
            await eventually(lambda: picture.relists == 2 and feed.fresh, timeout=2)
        assert picture.freshness_changes in ([True, False, True, False], [True, False])


async def test_a_history_that_went_back_is_listed_again(
    etcd_factory: EtcdFactory, etcd_prefix: bytes
) -> None:
    """As after a restore in place: same address, same cluster id, lower revision."""
    server = await asyncio.to_thread(etcd_factory)
    falls: list[tuple[int, int]] = []
    config = EtcdConfig(endpoints=server.endpoints)
    async with EtcdClient(config, on_regression=lambda seen, got: falls.append((seen, got))) as client:
        for number in range(50):
            await client.put(etcd_prefix + b"%d" % number, b"old", timeout=5)
        cluster_id = client.cluster_id
        picture = Picture(client, etcd_prefix)
        async with running(client, picture) as feed:
            assert len(picture.keys) == 50
            await asyncio.to_thread(server.kill)
            shutil.rmtree(server.data_dir)
            await asyncio.to_thread(server.restart)
            async with EtcdClient(EtcdConfig(endpoints=server.endpoints)) as other:
                await other.put(etcd_prefix + b"new", b"", timeout=5)
                assert other.cluster_id == cluster_id
                expected = await truth(other, etcd_prefix)
                await eventually(lambda: picture.keys == expected and feed.fresh, timeout=5)
                revision = (await other.put(etcd_prefix + b"newer", b"", timeout=5)).header.revision
                await feed.wait_revision("all", revision, 5)
            assert revision < 50
            assert falls
            assert feed.passed("all") < 50


async def test_an_outage_costs_little_cpu_and_few_log_lines(
    etcd_factory: EtcdFactory, etcd_prefix: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = await asyncio.to_thread(etcd_factory)
    async with EtcdClient(EtcdConfig(endpoints=server.endpoints)) as client:
        picture = Picture(client, etcd_prefix)
        async with running(client, picture) as feed:
            caplog.set_level(logging.INFO, logger="coordinator.etcd.change_feed")
            caplog.clear()
            await asyncio.to_thread(server.kill)
            await eventually(lambda: not feed.fresh)
            cpu, started, tasks = time.process_time(), time.monotonic(), len(asyncio.all_tasks())
            await eventually(lambda: time.monotonic() - started > 3, timeout=5, interval=0.2)
            assert time.process_time() - cpu < 0.3 * (time.monotonic() - started)
            assert len(asyncio.all_tasks()) <= tasks + 2
            await asyncio.to_thread(server.restart)
            await eventually(lambda: feed.fresh, timeout=5)
            lines = [record for record in caplog.records if record.name == "coordinator.etcd.change_feed"]
            assert 1 <= len(lines) <= 10
            revision = (await client.put(etcd_prefix + b"k", b"", timeout=5)).header.revision
            await feed.wait_revision("all", revision, 5)


async def test_a_list_that_fails_is_made_again() -> None:
    attempts = 0

    async def head(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        nonlocal attempts
        attempts += 1
        if attempts in (2, 3):  # the first relist asks with the second call
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
        return await fake_head(request, context)

    async def watch(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield watch_reply(watch_id=1, created=True)

    async with FakeEtcd() as fake, EtcdClient(EtcdConfig(endpoints=[fake.endpoint])) as client:
        fake.unary[RANGE] = head
        fake.streams[WATCH] = watch
        picture = Picture(client, b"k")
        async with running(client, picture):
            assert picture.relists >= 2
            assert attempts >= 4


async def test_a_quiet_store_compacted_at_its_head_can_be_watched(
    etcd_factory: EtcdFactory, etcd_prefix: bytes
) -> None:
    server = await asyncio.to_thread(etcd_factory)
    async with EtcdClient(EtcdConfig(endpoints=server.endpoints)) as client:
        head = (await client.put(etcd_prefix + b"k", b"", timeout=5)).header.revision
        await client.compact(head, physical=True, timeout=5)
        picture = Picture(client, etcd_prefix)
        async with running(client, picture) as feed:
            first = feed.last_proof
            await eventually(lambda: feed.last_proof > first + 0.4, what="a probe answered")
            assert (feed.reconnects, picture.relists) == (0, 1)
