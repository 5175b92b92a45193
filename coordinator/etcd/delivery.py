"""Send one group until each of its operations has an answer.

What etcd did with a try decides what follows:

* answered: every operation won or lost alone;
* refused, nothing written: overload is waited out; else the group is halved until the culprit stands alone,
  and only the culprit hears of it (or is built again, when the cause is a dead retention lease);
* unknown: the same guarded operations are sent again until their deadlines;
* the epoch compare failed: nothing was applied; the epoch is read again, once, and the group sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.errors import (
    DeadlinePassed,
    EpochChanged,
    EtcdUnavailable,
    LeaseNotFound,
    NotApplied,
    OutcomeUnknown,
    PermissionDenied,
    RequestTooLarge,
    StorageError,
    StorageFull,
    TooManyRequests,
)
from coordinator.etcd import wire
from coordinator.etcd.batching import Group, ReadyQueue
from coordinator.etcd.commit_config import (
    CommitHooks,
    CommitterConfig,
    CommitterStats,
    EpochFence,
    MonotonicClock,
    TxnClient,
)
from coordinator.etcd.guarded_op import Entry

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import ResponseOp, TxnResponse

__all__ = ["Delivery", "DeliveryOwner"]

_log = logging.getLogger(__name__)

_MAX_REBUILDS = 3  # each names a fresh retention lease; three dead ones in a row are no accident
_DEAD_LEASES_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryOwner:
    """What a delivery tells its committer.

    Attributes:
        finished: entries have their answers; their lanes are free.
        pausing: +1 when a group begins to wait before it is sent again, -1 when it ends.
        fault: a callback raised; told after the fact, other operations are not affected.
    """

    finished: Callable[[Sequence[Entry]], None]
    pausing: Callable[[int], None]
    fault: Callable[[Exception], None]


class Delivery:
    """Sends groups for one committer; holds no task of its own."""

    def __init__(
        self,
        client: TxnClient,
        fence: EpochFence,
        config: CommitterConfig,
        *,
        hooks: CommitHooks,
        clock: MonotonicClock,
        owner: DeliveryOwner,
        ready: ReadyQueue,
        stats: CommitterStats,
    ) -> None:
        self._client = client
        self._fence = fence
        self._config = config
        self._hooks = hooks
        self._clock = clock
        self._owner = owner
        self._ready = ready
        self._stats = stats
        self._dead_leases: dict[int, None] = {}  # retention leases that etcd called dead, oldest first

    async def deliver(self, group: Group) -> None:
        """Send ``group``, and what is left of it, until nothing is.

        Ends: each round makes the group smaller or waits, and entries past their deadline drop out.
        """
        left = [group]
        while left:
            left.extend(await self._attempt(left.pop()))

    async def _attempt(self, group: Group) -> tuple[Group, ...]:
        """One try. Returns what has to be sent (again), the last first."""
        now = self._clock.monotonic()
        entries = [entry for entry in group.entries if self._sendable(entry, now)]
        if not entries:
            return ()
        group.entries = entries
        request = wire.txn((self._fence.guard(),), [entry.nested for entry in entries], ())
        timeout = min(self._config.txn_timeout, max([entry.deadline for entry in entries]) - now)
        self._stats.txns += 1
        self._stats.group_sizes[len(entries)] += 1
        for entry in entries:
            entry.flying = True
        try:
            response = await self._client.txn_bytes(request, timeout=timeout)
        except (NotApplied, EtcdUnavailable) as error:
            for entry in entries:
                entry.flying = False
            return await self._refused(group, error)
        except StorageError as error:
            return await self._unknown(group, error)
        # Not caught: a bug or cancellation. ``flying`` stays set, so the committer answers "unknown".
        if response.succeeded and len(response.responses) != len(entries):
            _log.error("etcd answered %d of %d operations", len(response.responses), len(entries))
            return await self._unknown(group, OutcomeUnknown("etcd's answer does not fit the request"))
        for entry in entries:
            entry.flying = False
        if not response.succeeded:
            return await self._epoch_mismatch(group)
        self._ready.accepted(len(entries))
        if self._hooks.group_done is not None:
            self._call(self._hooks.group_done, len(entries), self._clock.monotonic() - now)
        self._complete(entries, response)
        return ()

    def _sendable(self, entry: Entry, now: float) -> bool:
        if entry.deadline <= now:
            self._stats.expired += entry.expire("the deadline passed")
        elif entry.future.done() and not entry.unknown:
            pass  # its caller went away before anything was sent
        elif self._dead_leases and entry.retention in self._dead_leases and not self._rebuild(entry):
            entry.refuse(LeaseNotFound("the retention lease is gone"))
        else:
            return True
        self._owner.finished((entry,))
        return False

    def _complete(self, entries: list[Entry], response: TxnResponse) -> None:
        revision = response.header.revision
        replies = [reply.response_txn for reply in response.responses]
        results = [
            (entry, reply.succeeded, reply.responses) for entry, reply in zip(entries, replies, strict=True)
        ]
        self._stats.ops += len(entries)
        self._stats.conflicts += sum([not won for _, won, _ in results])
        if self._hooks.own_revision is not None and any(won and any(map(_wrote, r)) for _, won, r in results):
            self._call(self._hooks.own_revision, revision)
        for entry, won, responses in results:
            if won:
                # A fault in one must not cost the other operations of the Txn their answers.
                try:
                    entry.applied(revision, responses)
                except Exception as error:  # noqa: BLE001 - handed to the owner, which raises it
                    self._faulted(error)
        for entry, won, responses in results:
            if not entry.future.done():
                entry.future.set_result(entry.answer(won, revision, responses))
        self._owner.finished(entries)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001 - handed to the owner, which raises it
            self._faulted(error)

    def _faulted(self, error: Exception) -> None:
        _log.error("a callback of the committer failed", exc_info=error)
        self._owner.fault(error)

    async def _refused(self, group: Group, error: StorageError) -> tuple[Group, ...]:
        """Nothing was written by this try."""
        self._stats.refused += 1
        entries = group.entries
        if isinstance(error, (TooManyRequests, EtcdUnavailable, DeadlinePassed)):
            # DeadlinePassed: this Txn's own timeout, of which connecting or a login left nothing.
            for entry in entries:
                if not entry.unknown:
                    entry.last_error = error
            await self._pause(group)
            return (group,)
        if isinstance(error, PermissionDenied):
            # It is about our user, not about one operation: no halving, with a failing login for each half.
            return self._refuse_all(group, error)
        if len(entries) > 1:
            if isinstance(error, RequestTooLarge):
                self._ready.refused_as_too_large(len(entries))
            first, second = group.halves()
            return (second, first)
        entry = entries[0]
        if isinstance(error, LeaseNotFound):
            if entry.retention:
                # Others that name it are built again before they are sent: no more bisecting for this lease.
                self._dead_leases[entry.retention] = None
                if len(self._dead_leases) > _DEAD_LEASES_KEPT:
                    del self._dead_leases[next(iter(self._dead_leases))]
            if self._rebuild(entry):
                return (group,)
        return self._refuse_all(group, error)

    def _refuse_all(self, group: Group, error: StorageError) -> tuple[Group, ...]:
        for entry in group.entries:
            entry.refuse(error)
        self._owner.finished(group.entries)
        return ()

    async def _unknown(self, group: Group, error: StorageError) -> tuple[Group, ...]:
        """The try may or may not have been applied: mark, wait, send the same again."""
        self._stats.unknown += 1
        self._stats.resent_ops += len(group.entries)
        for entry in group.entries:
            entry.flying = False
            entry.unknown = True
            entry.last_error = error
        await self._pause(group)
        if isinstance(error, StorageFull):
            # A full store still deletes: releases must not share the fate of the puts beside them.
            return tuple(part for part in group.by_need_of_space() if part.entries)
        return (group,)

    async def _epoch_mismatch(self, group: Group) -> tuple[Group, ...]:
        """The top-level compare failed: nothing of this try was applied."""
        self._stats.epoch_mismatches += 1
        if not group.epoch_read_again:
            group.epoch_read_again = True
            try:
                await self._fence.refresh()
            except StorageError:
                _log.warning("the epoch changed and could not be read again", exc_info=True)
            else:
                return (group,)
        return self._refuse_all(
            group, EpochChanged("the epoch in etcd is not the one that this coordinator works under")
        )

    async def _pause(self, group: Group) -> None:
        config = self._config
        pause = min(config.backoff_max, config.backoff_first * 2.0 ** min(group.failures, 16))
        group.failures += 1
        self._owner.pausing(1)
        try:
            await self._clock.sleep(pause * (0.5 + config.jitter()))
        finally:
            self._owner.pausing(-1)

    def _rebuild(self, entry: Entry) -> bool:
        """Give ``entry`` the same operation under a live retention lease; False if that cannot be had."""
        if entry.rebuilds >= _MAX_REBUILDS:
            return False
        entry.rebuilds += 1
        try:
            if not entry.rebuild():
                return False
            entry.check_size(self._config.limits)
        except Exception as error:  # noqa: BLE001 - handed to the owner, which raises it
            _log.exception("an operation could not be built again for another retention lease")
            self._owner.fault(error)
            return False
        self._stats.rebuilt += 1
        return True


def _wrote(response: ResponseOp) -> bool:
    # A delete of nothing makes no revision: then the header's revision is somebody else's.
    if response.HasField("response_put"):
        return True
    return response.HasField("response_delete_range") and response.response_delete_range.deleted > 0
