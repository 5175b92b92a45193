"""Compare-and-swap of one record, as a Txn of its own: for records that change rarely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from coordinator.errors import EpochChanged, OutcomeUnknown
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.present import EtcdPresent
from coordinator.etcd.time_left import write_timeout
from coordinator.etcd.txn import one
from coordinator.ports import Clock

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["SwapReply", "swap_record"]

_TRIES: Final = 3
"""Sends of one swap at most; from the second on its own first try may stand there already."""


class SwapReply(NamedTuple):
    """What became of a swap. ``doubtful``: it did not win, but an earlier send of it may have.

    ``stands``: of a swap that did not win, the record as of ``revision``.
    """

    won: bool
    revision: int
    stands: KeyValue | None = None
    doubtful: bool = False


async def swap_record(
    client: EtcdClient,
    present: EtcdPresent,
    clock: Clock,
    key: bytes,
    write: bytes,
    *,
    version: int,
    deadline: float,
    also: Sequence[bytes] = (),
) -> SwapReply:
    """Carry out ``write`` if the record at ``key`` has the mod revision ``version`` (0: is absent).

    Args:
        client: the etcd client.
        present: the epoch that the Txn compares.
        clock: deadlines.
        key: of the record.
        write: an encoded put or deletion of it.
        version: its mod revision as read.
        deadline: of the whole.
        also: further compares.

    Raises:
        EpochChanged: the record is as it was read; the epoch is not.
        OutcomeUnknown: no send was answered.
        StorageError: nothing was written.
    """
    unknown: OutcomeUnknown | None = None
    for _ in range(_TRIES):
        compares = (present.guard(), wire.mod_eq(key, version), *also)
        request = wire.txn(compares, (write,), (wire.get(key),))
        try:
            reply = await client.txn_bytes(request, timeout=write_timeout(clock, deadline))
        except OutcomeUnknown as error:
            unknown = error
            continue
        revision = reply.header.revision
        if reply.succeeded:
            return SwapReply(True, revision)
        stands = one(reply.responses[0])
        if (stands.mod_revision if stands is not None else 0) == version:
            raise EpochChanged("the epoch was raised; the swap was made under an older one")
        return SwapReply(False, revision, stands, unknown is not None)
    raise unknown or OutcomeUnknown("the swap was not answered")
