"""Renewals: TTL 0 is a loss, silence is unknown, and one stuck lease holds up nobody for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import ClusterChanged, OutcomeUnknown
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.lease_keeper import LeaseKeeper, LeaseKeeperConfig
from leasekeeper.internal.etcd.v1.kv_pb2 import ResponseHeader
from leasekeeper.internal.etcd.v1.lease_pb2 import LeaseKeepAliveRequest, LeaseKeepAliveResponse
from tests.support.fake_etcd import FakeEtcd
from tests.support.services import EtcdClusterFactory
from tests.support.tcp_proxy import ProxyMode, TcpProxy

KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
STUCK = 4  # the fake never answers this lease, and serves its stream in order as etcd does


@pytest.fixture
async def client(etcd_server: EtcdProcess) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(EtcdConfig(endpoints=etcd_server.endpoints)) as made:
        yield made


@pytest.fixture
async def keeper(client: EtcdClient) -> AsyncIterator[LeaseKeeper]:
    made = LeaseKeeper(client)
    yield made
    await made.close()


async def stuck_stream(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
    async for raw in requests:
        lease_id = LeaseKeepAliveRequest.FromString(raw).id
        if lease_id == STUCK:
            await asyncio.Event().wait()
        reply = LeaseKeepAliveResponse(header=ResponseHeader(revision=9, raft_term=3), id=lease_id, ttl=10)
        yield reply.SerializeToString()


async def test_renewal_restores_the_ttl_and_tells_term_and_send_time(
    client: EtcdClient, keeper: LeaseKeeper
) -> None:
    lease = await client.lease_grant(60, timeout=5)
    before = time.monotonic()
    answer = await keeper.keep_alive(lease.id, timeout=5)
    assert answer.ttl == 60
    assert before <= answer.sent_at <= time.monotonic()
    assert answer.raft_term == client.raft_term
    assert answer.revision > 0


async def test_a_lease_that_is_gone_answers_ttl_zero_and_no_error(
    client: EtcdClient, keeper: LeaseKeeper
) -> None:
    lease = await client.lease_grant(60, timeout=5)
    await client.lease_revoke(lease.id, timeout=5)
    assert (await keeper.keep_alive(lease.id, timeout=5)).ttl == 0
    assert (await keeper.keep_alive(123_456, timeout=5)).ttl == 0


async def test_many_leases_share_a_few_streams(client: EtcdClient, keeper: LeaseKeeper) -> None:
    leases = await asyncio.gather(*(client.lease_grant(30, timeout=10) for _ in range(100)))
    answers = await asyncio.gather(*(keeper.keep_alive(lease.id, timeout=5) for lease in leases * 2))
    assert {answer.ttl for answer in answers} == {30}
    assert sum(stream is not None for stream in keeper._slots) <= 4


async def test_a_renewal_is_never_answered_by_one_that_was_sent_before_it_was_asked(
    client: EtcdClient, keeper: LeaseKeeper
) -> None:
    lease = await client.lease_grant(60, timeout=5)

    async def ask() -> tuple[float, float]:
        asked = time.monotonic()
        return asked, (await keeper.keep_alive(lease.id, timeout=5)).sent_at

    tasks = []
    for _ in range(50):
        tasks.append(asyncio.create_task(ask()))
        await asyncio.sleep(0)
    for asked, sent_at in await asyncio.gather(*tasks):
        assert sent_at >= asked


async def test_silence_is_unknown_within_the_deadline(etcd_server: EtcdProcess) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        EtcdClient(EtcdConfig(endpoints=[proxy.endpoint])) as client,
    ):
        keeper = LeaseKeeper(client)
        lease = await client.lease_grant(60, timeout=5)
        assert (await keeper.keep_alive(lease.id, timeout=5)).ttl == 60
        proxy.set_mode(ProxyMode.HALF_DROP)
        started = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            await keeper.keep_alive(lease.id, timeout=0.4)
        assert time.monotonic() - started < 0.8
        proxy.set_mode(ProxyMode.PASS)
        assert (await keeper.keep_alive(lease.id, timeout=5)).ttl == 60
        await keeper.close()
        with pytest.raises(OutcomeUnknown):
            await keeper.keep_alive(lease.id, timeout=0.2)


async def test_a_silent_member_is_left_for_the_next_within_the_call(etcd_server: EtcdProcess) -> None:
    async with TcpProxy(etcd_server.endpoint) as proxy:
        config = EtcdConfig(endpoints=[proxy.endpoint, etcd_server.endpoint])
        async with EtcdClient(config) as client:
            keeper = LeaseKeeper(client, LeaseKeeperConfig(stall=0.3))
            lease = await client.lease_grant(60, timeout=5)
            await keeper.keep_alive(lease.id, timeout=5)
            proxy.set_mode(ProxyMode.DROP)
            started = time.monotonic()
            assert (await keeper.keep_alive(lease.id, timeout=3)).ttl == 60
            assert time.monotonic() - started < 1.5
            await keeper.close()


async def test_a_stuck_lease_holds_up_others_only_for_the_stall_time() -> None:
    async with FakeEtcd() as fake, EtcdClient(EtcdConfig(endpoints=[fake.endpoint])) as client:
        fake.streams[KEEP_ALIVE] = stuck_stream
        keeper = LeaseKeeper(client, LeaseKeeperConfig(streams=1, stall=0.3))
        stuck = asyncio.create_task(keeper.keep_alive(STUCK, timeout=2))
        await asyncio.sleep(0)
        started = time.monotonic()
        answers = await asyncio.gather(*(keeper.keep_alive(lease, timeout=2) for lease in range(10, 20)))
        assert time.monotonic() - started < 1.0
        assert {answer.ttl for answer in answers} == {10}
        # The next time it is kept apart from the start: nobody waits for it at all.
        again = asyncio.create_task(keeper.keep_alive(STUCK, timeout=0.5))
        await asyncio.sleep(0)
        started = time.monotonic()
        await keeper.keep_alive(11, timeout=2)
        assert time.monotonic() - started < 0.25
        for task in (stuck, again):
            with pytest.raises(OutcomeUnknown):
                await task
        await keeper.close()


async def test_no_answer_from_anybody_is_unknown_never_a_loss() -> None:
    async with EtcdClient(EtcdConfig(endpoints=["127.0.0.1:1"])) as client:
        keeper = LeaseKeeper(client, LeaseKeeperConfig(connect=0.1))
        with pytest.raises(OutcomeUnknown):
            await keeper.keep_alive(5, timeout=0.3)
        await keeper.close()


async def test_renewals_survive_a_frozen_and_a_killed_member(
    etcd_cluster_factory: EtcdClusterFactory,
) -> None:
    cluster = await asyncio.to_thread(etcd_cluster_factory)
    by_endpoint = {member.endpoint: member for member in cluster.members}
    async with EtcdClient(EtcdConfig(endpoints=cluster.endpoints)) as client:
        keeper = LeaseKeeper(client)
        lease = await client.lease_grant(10, timeout=5)
        assert (await keeper.keep_alive(lease.id, timeout=5)).ttl == 10
        frozen = by_endpoint[client.ring.current.endpoint]
        frozen.pause()
        started = time.monotonic()
        assert (await keeper.keep_alive(lease.id, timeout=8)).ttl == 10
        assert time.monotonic() - started < 5  # half the TTL
        frozen.resume()
        await asyncio.to_thread(by_endpoint[client.ring.current.endpoint].kill)
        started = time.monotonic()
        assert (await keeper.keep_alive(lease.id, timeout=8)).ttl == 10
        assert time.monotonic() - started < 5
        await keeper.close()


async def test_ttl_zero_of_another_cluster_is_no_loss() -> None:
    async def stream(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for raw in requests:
            lease_id = LeaseKeepAliveRequest.FromString(raw).id
            yield LeaseKeepAliveResponse(
                header=ResponseHeader(cluster_id=lease_id), id=lease_id, ttl=0
            ).SerializeToString()

    async with FakeEtcd() as fake, EtcdClient(EtcdConfig(endpoints=[fake.endpoint])) as client:
        fake.streams[KEEP_ALIVE] = stream
        keeper = LeaseKeeper(client)
        assert (await keeper.keep_alive(7, timeout=2)).ttl == 0
        with pytest.raises(ClusterChanged):
            await keeper.keep_alive(8, timeout=2)
        await keeper.close()
