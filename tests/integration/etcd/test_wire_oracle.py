"""What our wire layer writes is what an independent etcd client reads."""

from __future__ import annotations

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdClient, EtcdConfig
from leasekeeper.internal.etcd.v1.kv_pb2 import Compare, TxnRequest
from tests.support.etcd_oracle import keys_in_etcd, lease_in_etcd


async def test_an_independent_client_reads_the_same_records(
    etcd_server: EtcdProcess, etcd_prefix: bytes
) -> None:
    endpoint = etcd_server.endpoint
    async with EtcdClient(EtcdConfig(endpoints=[endpoint])) as client:
        lease = (await client.lease_grant(60, timeout=5)).id
        await client.put(etcd_prefix + b"plain", b"\x00\xff", timeout=5)
        leased = await client.put(etcd_prefix + b"leased", b"1", lease=lease, timeout=5)
        request = TxnRequest()
        request.compare.add(key=etcd_prefix + b"leased", target=Compare.LEASE, lease=lease)
        nested = request.success.add().request_txn
        nested.compare.add(
            key=etcd_prefix, range_end=etcd_prefix + b"\xff", target=Compare.MOD, result=Compare.LESS
        ).mod_revision = leased.header.revision + 1
        nested.success.add().request_put.key = etcd_prefix + b"nested"
        nested.success.add().request_delete_range.key = etcd_prefix + b"plain"
        done = await client.txn(request, timeout=5)
        assert done.succeeded
        assert done.responses[0].response_txn.succeeded

        keys = await keys_in_etcd(endpoint, etcd_prefix)
        assert set(keys) == {etcd_prefix + b"leased", etcd_prefix + b"nested"}
        found = keys[etcd_prefix + b"leased"]
        assert (found.value, found.lease, found.version) == (b"1", lease, 1)
        assert found.create_revision == found.mod_revision == leased.header.revision
        assert keys[etcd_prefix + b"nested"].create_revision == done.header.revision

        ttl, attached = await lease_in_etcd(endpoint, lease)
        assert 0 < ttl <= 60
        assert attached == {etcd_prefix + b"leased"}
        await client.lease_revoke(lease, timeout=5)
        assert set(await keys_in_etcd(endpoint, etcd_prefix)) == {etcd_prefix + b"nested"}
        assert (await lease_in_etcd(endpoint, lease))[0] == -1
