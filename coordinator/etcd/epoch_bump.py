"""Raise the epoch after a restore: ``leasekeeper epoch bump``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from coordinator.core.fencing import MAX_EPOCH
from coordinator.errors import CodecError, KeyFormatError, LeaseNotFound, OutcomeUnknown
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_epoch, decode_session, encode_epoch
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.paging import pages
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.time_left import write_timeout
from coordinator.ports import Clock

__all__ = ["EpochBump", "bump_epoch"]

_log = logging.getLogger(__name__)

_ROUNDS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBump:
    """What was done: the epoch before (0: none was there) and after, sessions ended and namespaces looked
    at.
    """

    before: int
    after: int
    revoked: int
    namespaces: int


async def bump_epoch(
    client: EtcdClient, space: KeySpace, *, clock: Clock, deadline: float, at_least: int = 0
) -> EpochBump:
    """Raise the epoch first, then revoke every session lease of an older one.

    From the first step on no Txn of a coordinator that has not read the new epoch succeeds, and every older
    token is stale. Claims, locks and witnesses go with the leases. Repeatable: a second run raises the epoch
    once more and ends what is left.

    Args:
        client: the etcd client.
        space: the keys.
        clock: the time that ``deadline`` is measured in.
        deadline: for all of it.
        at_least: lowest epoch to end at, if an operator knows of a higher one than etcd does now.

    Raises:
        StorageError: it is not done; run it again.
        CodecError: the epoch in etcd is unreadable.
    """
    before, after = await _raise(client, space, clock, deadline, at_least)
    _log.warning("the epoch is now %d, was %d", after, before)
    set_aside = SetAside()
    revoked = namespaces = 0
    async for entry in pages(client, space.all_registered(), clock=clock, deadline=deadline):
        try:
            keys = space.namespace(space.parse_registered(entry.key))
        except KeyFormatError as error:
            set_aside.add("namespace", entry.key, error)
            continue
        namespaces += 1
        async for kv in pages(client, keys.all_sessions(), clock=clock, deadline=deadline):
            try:
                session_id = keys.parse_session(kv.key)
                old = decode_session(keys.namespace, session_id, kv.value, 0).epoch < after
            except (CodecError, KeyFormatError) as error:
                set_aside.add("session", kv.key, error)
                old = True  # what cannot be read cannot be of the new epoch
            if old and kv.lease:
                revoked += await _revoke(client, kv.lease, clock, deadline)
    return EpochBump(before=before, after=after, revoked=revoked, namespaces=namespaces)


async def _raise(
    client: EtcdClient, space: KeySpace, clock: Clock, deadline: float, at_least: int
) -> tuple[int, int]:
    unknown: OutcomeUnknown | None = None
    for _ in range(_ROUNDS):
        reply = await client.range(space.epoch, timeout=write_timeout(clock, deadline))
        kv = reply.kvs[0] if reply.kvs else None
        before = decode_epoch(kv.value) if kv is not None else 0
        after = max(before + 1, at_least)
        if after > MAX_EPOCH:
            raise ValueError(f"epoch {after} does not fit into a token")
        same = wire.mod_eq(space.epoch, kv.mod_revision) if kv is not None else wire.create_eq(space.epoch, 0)
        try:
            done = await client.txn_bytes(
                wire.txn((same,), (wire.put(space.epoch, encode_epoch(after)),), ()),
                timeout=write_timeout(clock, deadline),
            )
        except OutcomeUnknown as error:
            unknown = error  # raised perhaps, and then once more: no harm
            continue
        if done.succeeded:
            return before, after
    raise unknown or OutcomeUnknown("others raised the epoch at the same time, again and again")


async def _revoke(client: EtcdClient, lease: int, clock: Clock, deadline: float) -> int:
    for _ in range(_ROUNDS):
        try:
            await client.lease_revoke(lease, timeout=write_timeout(clock, deadline))
            return 1
        except LeaseNotFound:
            return 0
        except OutcomeUnknown:
            continue
    raise OutcomeUnknown(f"lease {lease:016x} could not be revoked")
