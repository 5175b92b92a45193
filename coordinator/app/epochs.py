"""Reading and raising the epoch from outside a coordinator: etcd alone is needed."""

from __future__ import annotations

from coordinator.app.machine import SystemClock
from coordinator.app.store_settings import etcd_config
from coordinator.config import Settings
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_epoch
from coordinator.etcd.epoch_bump import EpochBump, bump_epoch
from coordinator.etcd.keys import KeySpace

__all__ = ["bump", "show"]


async def show(settings: Settings, *, timeout: float) -> int:
    """The epoch, 0 if there is none yet.

    Raises:
        StorageError: etcd does not answer within ``timeout`` seconds.
        CodecError: the epoch is unreadable.
    """
    async with EtcdClient(etcd_config(settings.etcd)) as client:
        reply = await client.range(KeySpace(settings.etcd.root).epoch, timeout=timeout)
    return decode_epoch(reply.kvs[0].value) if reply.kvs else 0


async def bump(settings: Settings, *, at_least: int, timeout: float) -> EpochBump:
    """Raise the epoch and end every session of an older one; see ``bump_epoch``.

    Raises:
        StorageError: it is not done, run it again.
        CodecError: the epoch is unreadable.
    """
    clock = SystemClock()
    async with EtcdClient(etcd_config(settings.etcd)) as client:
        space = KeySpace(settings.etcd.root)
        deadline = clock.monotonic() + timeout
        return await bump_epoch(client, space, clock=clock, deadline=deadline, at_least=at_least)
