"""Everything that talks to etcd keeps working when etcd asks for a login."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Sequence

import grpc
import pytest

from coordinator.app.machine import SystemClock
from coordinator.embedded.etcd_process import EtcdOptions, EtcdProcess
from coordinator.errors import EtcdUnavailable, PermissionDenied
from coordinator.etcd.auth import Credentials
from coordinator.etcd.change_feed import ChangeEvent, ChangeFeed, FeedConfig, WatchRange
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.lease_keeper import LeaseKeeper
from leasekeeper.internal.etcd.v1.auth_pb2 import AuthenticateResponse
from tests.support.fake_etcd import FakeEtcd
from tests.support.polling import eventually
from tests.support.services import EtcdFactory

LOGIN = "/etcdserverpb.Auth/Authenticate"
CREDENTIALS = Credentials(user="root", password="secret")


def etcdctl(server: EtcdProcess, *words: str) -> None:
    subprocess.run(
        [str(server.binary.with_name("etcdctl")), f"--endpoints={server.endpoint}", *words],
        check=True,
        capture_output=True,
        timeout=20,
        env={"ETCDCTL_API": "3"},
    )


@pytest.fixture
async def guarded(etcd_factory: EtcdFactory) -> EtcdProcess:
    server = await asyncio.to_thread(etcd_factory, EtcdOptions(extra_flags=("--auth-token-ttl=1",)))
    for words in (
        ("user", "add", "root:secret"),
        ("user", "grant-role", "root", "root"),
        ("user", "add", "limited:pw"),
        ("role", "add", "limited"),
        ("role", "grant-permission", "limited", "--prefix=true", "readwrite", "/mine/"),
        ("user", "grant-role", "limited", "limited"),
        ("auth", "enable"),
    ):
        await asyncio.to_thread(etcdctl, server, *words)
    return server


class Ignore:
    def __init__(self) -> None:
        self.seen = 0

    async def relist(self, revision: int) -> None: ...

    def changes(self, range_name: str, revision: int, events: Sequence[ChangeEvent]) -> None:
        self.seen += len(events)

    def freshness(self, fresh: bool) -> None: ...


async def test_feed_and_renewals_carry_the_login_and_outlive_its_token(guarded: EtcdProcess) -> None:
    limited = Credentials(user="limited", password="pw")
    async with (
        EtcdClient(EtcdConfig(endpoints=guarded.endpoints, credentials=CREDENTIALS)) as root,
        EtcdClient(EtcdConfig(endpoints=guarded.endpoints, credentials=limited)) as client,
    ):
        handler = Ignore()
        keeper = LeaseKeeper(client)
        feed = ChangeFeed(
            client, [WatchRange("mine", b"/mine/", b"/mine0")], handler, FeedConfig(), SystemClock()
        )
        task = asyncio.create_task(feed.run())
        await eventually(lambda: feed.fresh)
        lease = (await client.lease_grant(60, timeout=5)).id
        assert (await keeper.keep_alive(lease, timeout=5)).ttl == 60
        await root.put(b"/mine/1", b"", timeout=5)
        await eventually(lambda: handler.seen == 1)
        with pytest.raises(PermissionDenied):
            await client.put(b"/theirs/1", b"", timeout=5)
        started = asyncio.get_running_loop().time()
        await eventually(lambda: asyncio.get_running_loop().time() > started + 2.2, interval=0.1)
        assert (await keeper.keep_alive(lease, timeout=5)).ttl == 60
        await client.put(b"/mine/2", b"", lease=lease, timeout=5)
        await eventually(lambda: handler.seen == 2)
        assert client.login.logins == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await keeper.close()


async def test_a_token_is_replaced_before_it_runs_out(guarded: EtcdProcess) -> None:
    now = 1000.0
    credentials = Credentials(user="root", password="secret", refresh_seconds=240)
    config = EtcdConfig(endpoints=guarded.endpoints, credentials=credentials)
    async with EtcdClient(config, monotonic=lambda: now) as client:
        await client.put(b"k", b"", timeout=5)
        now += 239
        await client.put(b"k", b"", timeout=5)
        assert client.login.logins == 1
        now += 2
        await client.put(b"k", b"", timeout=5)
        assert client.login.logins == 2


async def test_a_member_that_gives_no_login_is_left_for_the_next(guarded: EtcdProcess) -> None:
    async with FakeEtcd() as silent:
        silent.hang(LOGIN)
        config = EtcdConfig(endpoints=[silent.endpoint, guarded.endpoint], credentials=CREDENTIALS)
        async with EtcdClient(config) as client:
            with pytest.raises(EtcdUnavailable):  # certain: the write itself was never sent
                await client.put(b"k", b"", timeout=0.3)
            await client.put(b"k", b"", timeout=5)
            assert silent.calls == [LOGIN]


async def test_a_token_that_is_refused_for_ever_is_an_error_after_few_tries() -> None:
    async def log_in(request: bytes, context: object) -> bytes:
        return AuthenticateResponse(token="t").SerializeToString()

    async with FakeEtcd() as fake:
        fake.unary[LOGIN] = log_in
        fake.refuse("/etcdserverpb.KV/Put", grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token")
        config = EtcdConfig(endpoints=[fake.endpoint], credentials=CREDENTIALS)
        async with EtcdClient(config) as client:
            with pytest.raises(PermissionDenied):
                await client.put(b"k", b"", timeout=5)
            assert fake.calls.count("/etcdserverpb.KV/Put") == 3


async def test_login_is_renewed_when_the_token_runs_out(guarded: EtcdProcess, etcd_prefix: bytes) -> None:
    server = guarded
    credentials = Credentials(user="root", password="secret")
    assert "secret" not in repr(credentials)
    async with EtcdClient(EtcdConfig(endpoints=server.endpoints, credentials=credentials)) as client:
        await asyncio.gather(*(client.put(etcd_prefix + b"%d" % i, b"", timeout=5) for i in range(20)))
        assert client.login.logins == 1  # single flight
        # A token that is not used for its ttl is forgotten by etcd; keep quiet until then.
        deadline = time.monotonic() + 6
        while client.login.logins == 1 and time.monotonic() < deadline:
            for _ in range(8):
                await asyncio.sleep(0.3)
            await asyncio.gather(*(client.put(etcd_prefix, b"", timeout=5) for _ in range(20)))
        assert client.login.logins == 2
    wrong = Credentials(user="root", password="wrong")
    async with EtcdClient(EtcdConfig(endpoints=server.endpoints, credentials=wrong)) as client:
        with pytest.raises(PermissionDenied):
            await client.put(etcd_prefix, b"", timeout=5)
    async with EtcdClient(EtcdConfig(endpoints=server.endpoints)) as client:
        with pytest.raises(PermissionDenied):
            await client.put(etcd_prefix, b"", timeout=5)
