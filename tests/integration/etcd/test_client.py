"""The client against a real etcd: outcomes, failover, TLS, login, and the pin of the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme

from coordinator.embedded.etcd_process import EtcdOptions, EtcdProcess, EtcdTlsFiles
from coordinator.errors import (
    ClusterChanged,
    Compacted,
    DuplicateKey,
    EtcdUnavailable,
    FutureRevision,
    InvalidRequest,
    LeaseExists,
    LeaseNotFound,
    OutcomeUnknown,
    RequestTooLarge,
    StorageFull,
)
from coordinator.etcd.channels import ChannelConfig, EtcdTls
from coordinator.etcd.client import EtcdClient, EtcdConfig
from leasekeeper.internal.etcd.v1.kv_pb2 import (
    Compare,
    PutResponse,
    RangeResponse,
    ResponseHeader,
    TxnRequest,
)
from tests.support.fake_etcd import FakeEtcd
from tests.support.polling import eventually
from tests.support.services import EtcdClusterFactory, EtcdFactory
from tests.support.tcp_proxy import ProxyMode, TcpProxy

RANGE = "/etcdserverpb.KV/Range"
PUT = "/etcdserverpb.KV/Put"


@pytest.fixture
async def client(etcd_server: EtcdProcess) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(EtcdConfig(endpoints=etcd_server.endpoints)) as made:
        yield made


async def test_put_and_range_round_trip(client: EtcdClient, etcd_prefix: bytes) -> None:
    written = await client.put(etcd_prefix + b"a", b"1", timeout=5)
    read = await client.range(etcd_prefix, etcd_prefix + b"\xff", timeout=5)
    assert [(kv.key, kv.value) for kv in read.kvs] == [(etcd_prefix + b"a", b"1")]
    assert read.kvs[0].mod_revision == written.header.revision
    assert client.high_water >= written.header.revision
    assert client.raft_term > 0


async def test_a_guarded_txn_wins_once(client: EtcdClient, etcd_prefix: bytes) -> None:
    request = TxnRequest()
    compare = request.compare.add(key=etcd_prefix + b"claim", target=Compare.CREATE, create_revision=0)
    assert compare.result == Compare.EQUAL
    request.success.add().request_put.key = etcd_prefix + b"claim"
    request.failure.add().request_range.key = etcd_prefix + b"claim"
    first = await client.txn(request, timeout=5)
    second = await client.txn_bytes(request.SerializeToString(), timeout=5)
    assert (first.succeeded, second.succeeded) == (True, False)
    assert second.responses[0].response_range.kvs[0].create_revision == first.header.revision


async def test_real_refusals_mean_that_nothing_was_written(client: EtcdClient, etcd_prefix: bytes) -> None:
    before = (await client.range(etcd_prefix, timeout=5)).header.revision
    twice = TxnRequest()
    for _ in range(2):
        twice.success.add().request_put.key = etcd_prefix + b"k"
    with pytest.raises(DuplicateKey):
        await client.txn(twice, timeout=5)
    many = TxnRequest()
    for number in range(129):
        many.success.add().request_put.key = etcd_prefix + b"%d" % number
    with pytest.raises(RequestTooLarge):
        await client.txn(many, timeout=5)
    with pytest.raises(RequestTooLarge):
        await client.put(etcd_prefix + b"k", b"x" * (1_600 * 1024), timeout=5)
    with pytest.raises(LeaseNotFound):
        await client.put(etcd_prefix + b"k", b"", lease=987_654_321, timeout=5)
    with pytest.raises(InvalidRequest):
        await client.put(b"", b"", timeout=5)
    lease = (await client.lease_grant(60, timeout=5)).id
    with pytest.raises(LeaseExists):
        await client.lease_grant(60, lease, timeout=5)
    await client.lease_revoke(lease, timeout=5)
    with pytest.raises(LeaseNotFound):
        await client.lease_revoke(lease, timeout=5)
    assert (await client.lease_time_to_live(lease, timeout=5)).ttl == -1
    assert (await client.range(etcd_prefix, timeout=5)).header.revision == before


async def test_lost_and_future_history_are_told(client: EtcdClient, etcd_prefix: bytes) -> None:
    first = (await client.put(etcd_prefix + b"k", b"1", timeout=5)).header.revision
    head = (await client.put(etcd_prefix + b"k", b"2", timeout=5)).header.revision
    await client.compact(head, timeout=5)
    with pytest.raises(Compacted):
        await client.range(etcd_prefix + b"k", revision=first, timeout=5)
    with pytest.raises(FutureRevision):
        await client.range(etcd_prefix + b"k", revision=head + 1_000_000, timeout=5)


async def test_nospace_is_an_unknown_outcome(etcd_factory: EtcdFactory, etcd_prefix: bytes) -> None:
    server = await asyncio.to_thread(etcd_factory, EtcdOptions(quota_bytes=1 << 20))
    async with EtcdClient(EtcdConfig(endpoints=server.endpoints)) as client:

        async def fill() -> None:
            for number in range(1_000):  # the size is only known after the backend's commit, every 100 ms
                await client.put(etcd_prefix + b"%d" % number, b"x" * 200_000, timeout=5)

        with pytest.raises(StorageFull):
            await fill()
        assert [alarm.alarm for alarm in (await client.alarms(timeout=5)).alarms]
        assert (await client.range(etcd_prefix, timeout=5)).header.revision > 0


async def test_a_write_without_an_answer_is_unknown_and_sent_once(
    etcd_server: EtcdProcess, etcd_prefix: bytes
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        EtcdClient(EtcdConfig(endpoints=[proxy.endpoint])) as client,
    ):
        version = (await client.put(etcd_prefix, b"1", timeout=5)).header.revision
        proxy.set_mode(ProxyMode.HALF_DROP)
        with pytest.raises(OutcomeUnknown):
            await client.put(etcd_prefix, b"2", timeout=0.3)
        proxy.set_mode(ProxyMode.PASS)
        found = (await client.range(etcd_prefix, timeout=5)).kvs[0]
        assert (found.value, found.version) == (b"2", 2)
        assert found.mod_revision > version


async def test_when_nobody_can_be_reached_a_write_is_certainly_not_applied() -> None:
    async with EtcdClient(EtcdConfig(endpoints=["127.0.0.1:1", "127.0.0.1:2"])) as client:
        started = time.monotonic()
        with pytest.raises(EtcdUnavailable):
            await client.put(b"k", b"v", timeout=0.3)
        assert time.monotonic() - started < 1.0


async def test_a_read_moves_on_from_a_member_that_hangs_or_fails(
    etcd_server: EtcdProcess, etcd_prefix: bytes
) -> None:
    async with FakeEtcd() as hanging, FakeEtcd() as failing:
        hanging.hang(RANGE)
        failing.refuse(RANGE, grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
        endpoints = [hanging.endpoint, failing.endpoint, etcd_server.endpoint]
        async with EtcdClient(EtcdConfig(endpoints=endpoints, read_attempt_seconds=0.3)) as client:
            started = time.monotonic()
            await client.range(etcd_prefix, timeout=3)
            assert time.monotonic() - started < 2
            assert client.ring.current.endpoint == etcd_server.endpoint
            assert (hanging.calls, failing.calls) == ([RANGE], [RANGE])


async def test_after_an_unknown_write_the_next_call_goes_elsewhere(
    etcd_server: EtcdProcess, etcd_prefix: bytes
) -> None:
    async with FakeEtcd() as hanging:
        hanging.hang(PUT)
        async with EtcdClient(EtcdConfig(endpoints=[hanging.endpoint, etcd_server.endpoint])) as client:
            with pytest.raises(OutcomeUnknown):
                await client.put(etcd_prefix, b"", timeout=0.2)
            await client.put(etcd_prefix, b"", timeout=5)
            assert hanging.calls == [PUT]


async def test_a_call_cancelled_by_its_caller_stays_cancelled(client: EtcdClient) -> None:
    async with FakeEtcd() as hanging:
        hanging.hang(PUT)
        async with EtcdClient(EtcdConfig(endpoints=[hanging.endpoint])) as made:
            call = asyncio.create_task(made.put(b"k", b"", timeout=5))
            await eventually(lambda: hanging.calls)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call


async def test_closing_the_client_under_a_write_is_an_unknown_outcome() -> None:
    async with FakeEtcd() as hanging:
        hanging.hang(PUT)
        made = EtcdClient(EtcdConfig(endpoints=[hanging.endpoint]))
        call = asyncio.create_task(made.put(b"k", b"", timeout=5))
        await eventually(lambda: hanging.calls)
        await made.close()
        with pytest.raises(OutcomeUnknown):
            await call
        with pytest.raises(EtcdUnavailable):
            await made.put(b"k", b"", timeout=5)


async def test_another_cluster_at_the_same_address_is_refused(etcd_prefix: bytes) -> None:
    cluster_id = 7

    async def answer(request: bytes, context: object) -> bytes:
        return RangeResponse(header=ResponseHeader(cluster_id=cluster_id, revision=5)).SerializeToString()

    async with FakeEtcd() as fake, EtcdClient(EtcdConfig(endpoints=[fake.endpoint])) as client:
        fake.unary[RANGE] = answer
        await client.range(b"k", timeout=5)
        cluster_id = 8
        for _ in range(2):
            with pytest.raises(ClusterChanged):
                await client.range(b"k", timeout=5)
        client.pin.accept(8, 0)
        await client.range(b"k", timeout=5)


async def test_a_fall_of_the_revision_is_reported_but_not_by_replies_that_overtake(
    etcd_prefix: bytes,
) -> None:
    revision = 100
    falls: list[tuple[int, int]] = []
    slow = asyncio.Event()

    async def answer(request: bytes, context: object) -> bytes:
        return RangeResponse(header=ResponseHeader(cluster_id=7, revision=revision)).SerializeToString()

    async def late(request: bytes, context: object) -> bytes:
        seen = revision
        await slow.wait()
        return PutResponse(header=ResponseHeader(cluster_id=7, revision=seen)).SerializeToString()

    async with FakeEtcd() as fake:
        fake.unary[RANGE] = answer
        fake.unary[PUT] = late
        config = EtcdConfig(endpoints=[fake.endpoint])
        async with EtcdClient(config, on_regression=lambda seen, got: falls.append((seen, got))) as client:
            await client.range(b"k", timeout=5)
            overtaken = asyncio.create_task(client.put(b"k", b"", timeout=5))
            await eventually(lambda: PUT in fake.calls)
            revision = 101
            await client.range(b"k", timeout=5)
            slow.set()
            await overtaken
            assert falls == []
            revision = 40
            await client.range(b"k", timeout=5)
            assert falls == [(101, 40)]
            assert client.high_water == 101


async def test_an_answer_to_a_call_of_the_old_history_says_nothing_of_the_one_that_was_accepted(
    etcd_prefix: bytes,
) -> None:
    revision = 100
    falls: list[tuple[int, int]] = []
    slow = asyncio.Event()

    async def answer(request: bytes, context: object) -> bytes:
        return RangeResponse(header=ResponseHeader(cluster_id=7, revision=revision)).SerializeToString()

    async def late(request: bytes, context: object) -> bytes:
        await slow.wait()
        return PutResponse(header=ResponseHeader(cluster_id=7, revision=answered)).SerializeToString()

    for overtaken_by in (41, 100):
        answered = overtaken_by
        slow.clear()
        falls.clear()
        revision = 100
        async with FakeEtcd() as fake:
            fake.unary[RANGE] = answer
            fake.unary[PUT] = late
            config = EtcdConfig(endpoints=[fake.endpoint])
            async with EtcdClient(
                config, on_regression=lambda seen, got: falls.append((seen, got))
            ) as client:
                await client.range(b"k", timeout=5)
                under_way = asyncio.create_task(client.put(b"k", b"", timeout=5))
                await eventually(lambda: PUT in fake.calls)
                revision = 40
                await client.range(b"k", timeout=5)
                assert falls == [(100, 40)]
                client.pin.accept(7, 40)
                slow.set()
                await under_way
                revision = 42
                await client.range(b"k", timeout=5)
                assert (falls, client.high_water) == ([(100, 40)], 42)


async def test_cluster_fails_over_within_three_seconds(
    etcd_cluster_factory: EtcdClusterFactory, etcd_prefix: bytes
) -> None:
    cluster = await asyncio.to_thread(etcd_cluster_factory)
    async with EtcdClient(EtcdConfig(endpoints=cluster.endpoints)) as client:
        await client.put(etcd_prefix, b"1", timeout=5)
        first = client.ring.current
        by_endpoint = {member.endpoint: member for member in cluster.members}

        by_endpoint[first.endpoint].pause()
        started = time.monotonic()
        await client.range(etcd_prefix, timeout=5)
        assert time.monotonic() - started < 4.5  # up to 1.5 s for the silent member and an election
        assert client.ring.current is not first
        by_endpoint[first.endpoint].resume()

        second = client.ring.current
        await asyncio.to_thread(by_endpoint[second.endpoint].kill)
        started = time.monotonic()
        await client.range(etcd_prefix, timeout=6)
        assert time.monotonic() - started < 4.5
        assert client.ring.current is not second
        written = False
        deadline = time.monotonic() + 5
        while not written and time.monotonic() < deadline:
            try:
                await client.put(etcd_prefix, b"2", timeout=2)
                written = True
            except OutcomeUnknown:
                pass  # an election is under way
        assert written


async def test_member_without_quorum_answers_no_linearizable_read(
    etcd_cluster_factory: EtcdClusterFactory, etcd_prefix: bytes
) -> None:
    cluster = await asyncio.to_thread(etcd_cluster_factory)
    async with EtcdClient(EtcdConfig(endpoints=[cluster.endpoints[0]])) as client:
        await client.put(etcd_prefix, b"1", timeout=5)
        for member in cluster.members[1:]:
            member.pause()
        with pytest.raises(EtcdUnavailable):
            await client.range(etcd_prefix, timeout=1)
        stale = await client.range(etcd_prefix, serializable=True, timeout=1)
        assert stale.kvs[0].value == b"1"


async def test_tls_with_client_certificates(
    etcd_factory: EtcdFactory, tmp_path: Path, etcd_prefix: bytes
) -> None:
    authority = trustme.CA()
    server_cert = authority.issue_cert("127.0.0.1", "etcd.internal")
    client_cert = authority.issue_cert("leasekeeper")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server_cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    for blob in server_cert.cert_chain_pems:
        blob.write_to_path(tmp_path / "cert.pem", append=True)
    files = EtcdTlsFiles(cert=tmp_path / "cert.pem", key=tmp_path / "key.pem", client_ca=tmp_path / "ca.pem")
    server = await asyncio.to_thread(etcd_factory, EtcdOptions(tls=files))
    tls = EtcdTls(
        ca=authority.cert_pem.bytes(),
        certificate=b"".join(blob.bytes() for blob in client_cert.cert_chain_pems),
        key=client_cert.private_key_pem.bytes(),
        server_name="etcd.internal",
    )
    endpoints = [f"https://{server.endpoint}"]
    async with EtcdClient(EtcdConfig(endpoints=endpoints, channel=ChannelConfig(tls=tls))) as client:
        await client.put(etcd_prefix, b"1", timeout=5)
    anonymous = EtcdTls(ca=authority.cert_pem.bytes())
    async with EtcdClient(EtcdConfig(endpoints=endpoints, channel=ChannelConfig(tls=anonymous))) as client:
        with pytest.raises(EtcdUnavailable):
            await client.range(etcd_prefix, timeout=0.5)


async def test_status_of_each_member(client: EtcdClient, etcd_server: EtcdProcess) -> None:
    status = await client.status(etcd_server.endpoint, timeout=5)
    assert status.version.startswith("3.")
    assert status.db_size >= status.db_size_in_use > 0
    assert status.leader
    with pytest.raises(KeyError):
        await client.status("127.0.0.1:1", timeout=5)
    members = (await client.member_list(timeout=5)).members
    assert [list(member.client_urls) for member in members] == [[f"http://{etcd_server.endpoint}"]]
    await client.defragment(etcd_server.endpoint, timeout=10)
