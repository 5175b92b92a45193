"""A committer over a real etcd, below a prefix of the test's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.committer import (
    CommitHooks,
    Committer,
    CommitterConfig,
    EpochFence,
    GuardedOp,
    TxnClient,
)

TIMEOUT = 5.0


@dataclass
class Site:
    """A committer, the client below it, and a direct client to look at what is stored."""

    committer: Committer
    direct: EtcdClient
    prefix: bytes
    own_revisions: list[int] = field(default_factory=list)
    epoch: bytes = b"1"

    def key(self, name: str) -> bytes:
        return self.prefix + name.encode()

    def create(self, name: str, *, value: bytes = b"v", lease: int = 0, lasts: float = 5.0) -> GuardedOp:
        """Put a key that must not exist yet; a loser is told its value."""
        key = self.key(name)
        return GuardedOp(
            lanes=(key,),
            compares=(wire.create_eq(key, 0),),
            thens=(wire.put(key, value, lease),),
            elses=(wire.get(key),),
            deadline=time.monotonic() + lasts,
        )

    async def stored(self) -> dict[bytes, bytes]:
        """All keys of the test, without the prefix; the epoch aside."""
        end = self.prefix[:-1] + bytes((self.prefix[-1] + 1,))
        reply = await self.direct.range(self.prefix, end, timeout=TIMEOUT)
        kept = {kv.key.removeprefix(self.prefix): kv.value for kv in reply.kvs}
        kept.pop(b"epoch", None)
        return kept


SiteFactory = Callable[..., AbstractAsyncContextManager[Site]]


@asynccontextmanager
async def open_site(
    server: EtcdProcess,
    prefix: bytes,
    *,
    config: CommitterConfig | None = None,
    endpoint: str = "",
    wrap: Callable[[EtcdClient], TxnClient] = lambda client: client,
) -> AsyncIterator[Site]:
    """Run a committer against ``server`` (through ``endpoint`` if given); closed at the end."""
    direct = EtcdClient(EtcdConfig(endpoints=server.endpoints))
    client = EtcdClient(EtcdConfig(endpoints=(endpoint,) if endpoint else server.endpoints))
    async with direct, client:
        await direct.put(prefix + b"epoch", b"1", timeout=TIMEOUT)

        async def read_epoch() -> None:
            reply = await direct.range(prefix + b"epoch", timeout=TIMEOUT)
            site.epoch = reply.kvs[0].value

        own: list[int] = []
        committer = Committer(
            wrap(client),
            EpochFence(guard=lambda: wire.value_eq(prefix + b"epoch", site.epoch), refresh=read_epoch),
            config,
            hooks=CommitHooks(own_revision=own.append),
        )
        site = Site(committer, direct, prefix, own)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(committer.run())
            await asyncio.sleep(0)
            yield site
            await committer.close()


@pytest.fixture
def site_factory(etcd_server: EtcdProcess, etcd_prefix: bytes) -> SiteFactory:
    def make(**options: object) -> AbstractAsyncContextManager[Site]:
        return open_site(etcd_server, etcd_prefix, **options)  # type: ignore[arg-type]

    return make
