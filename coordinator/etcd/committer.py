"""Group commit: fold the concurrent guarded operations of many callers into few etcd Txns.

Rules (``docs/adr/0004-group-commit.md``; each was probed on a real etcd):

* What arrived while the last Txn was under way goes next. One Txn always, further ones only while a full
  group waits.
* Operations on one lane, and operations that add to one lock name, are never under way together (``lanes``).
* Groups keep etcd's count rule and our size bounds (``batching``).
* Refusals, unknown outcomes and a changed epoch are dealt with until each operation's deadline
  (``delivery``).

One task per Txn and none per operation. ``run()`` owns every task. It ends only after ``close()``, on
cancellation, or because a callback or the committer itself raised; every caller has had an answer then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from coordinator.errors import DeadlinePassed, NotApplied, RequestTooLarge, StorageError, TooManyRequests
from coordinator.etcd.batching import Group, ReadyQueue
from coordinator.etcd.commit_config import (
    CommitHooks,
    CommitterConfig,
    CommitterStats,
    EpochFence,
    MonotonicClock,
    SystemClock,
    TxnClient,
)
from coordinator.etcd.deadlines import DeadlineWheel
from coordinator.etcd.delivery import Delivery, DeliveryOwner
from coordinator.etcd.guarded_op import Entry, GroupLimits, GuardedOp, OpEntry, OpResult, Responses
from coordinator.etcd.lanes import LaneTable

__all__ = [
    "CommitHooks",
    "Committer",
    "CommitterConfig",
    "CommitterStats",
    "Entry",
    "EpochFence",
    "GroupLimits",
    "GuardedOp",
    "OpResult",
    "Responses",
    "TxnClient",
]


class Committer:
    """Commits guarded operations in groups. One event loop owns it.

    Args:
        client: sends one Txn, once.
        fence: the epoch compare.
        config: sizes and times.
        hooks: whom to tell of own revisions and of groups.
        clock: the time that deadlines are measured in.
    """

    def __init__(
        self,
        client: TxnClient,
        fence: EpochFence,
        config: CommitterConfig | None = None,
        *,
        hooks: CommitHooks | None = None,
        clock: MonotonicClock | None = None,
    ) -> None:
        self._config = config or CommitterConfig()
        self._clock: MonotonicClock = clock or SystemClock()
        limits = self._config.limits
        self.stats = CommitterStats([0] * (limits.max_ops + 1))
        self._lanes: LaneTable[Entry] = LaneTable()
        self._ready = ReadyQueue(limits)
        self._wheel = DeadlineWheel(self._config.deadline_tick)
        self._delivery = Delivery(
            client,
            fence,
            self._config,
            hooks=hooks or CommitHooks(),
            clock=self._clock,
            owner=DeliveryOwner(finished=self._finished, pausing=self._pausing, fault=self._faulted),
            ready=self._ready,
            stats=self.stats,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outstanding = 0
        self._in_flight = 0
        self._paused = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._pump_scheduled = False
        self._closing = False
        self._fault: Exception | None = None
        self._work = asyncio.Event()  # something is outstanding
        self._idle = asyncio.Event()  # nothing is
        self._idle.set()
        self._stop = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def outstanding(self) -> int:
        """Operations taken and not yet finished."""
        return self._outstanding

    def enqueue(self, op: GuardedOp) -> asyncio.Future[OpResult]:
        """Take ``op``; the future tells what became of it.

        Cancelling the future before the operation was sent drops it; later that has no effect on the
        operation. The future's errors: ``NotApplied`` (``RequestTooLarge``; ``TooManyRequests``, also when
        our own queue is full; ``LeaseNotFound``; ``EpochChanged``; ``DeadlinePassed``; ...) and
        ``EtcdUnavailable``: certain, nothing was written. ``OutcomeUnknown`` (``StorageFull``): the deadline
        passed and nobody knows.

        Raises:
            ValueError: the operation has no guard, so it could not be sent again.
        """
        if not op.compares:
            raise ValueError("a group-committed operation needs a compare")
        entry = OpEntry(op)
        self.take(entry)
        return entry.future

    def take(self, entry: Entry) -> None:
        """Take an operation of any kind; its ``future``, made here, tells what became of it.

        As for ``enqueue``. Its guard **must** fail once it was applied.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        future = entry.future = self._loop.create_future()
        if self._closing:
            future.set_exception(NotApplied("the committer is closed"))
        elif self._outstanding >= self._config.max_queued:
            future.set_exception(TooManyRequests(f"{self._outstanding} operations wait for etcd"))
        elif entry.deadline <= self._clock.monotonic():
            future.set_exception(DeadlinePassed("the deadline passed before anything was sent"))
        else:
            try:
                entry.check_size(self._config.limits)
            except RequestTooLarge as error:
                future.set_exception(error)
                return
            self._wheel.add(entry)
            if not self._outstanding:
                self._idle.clear()
                self._work.set()
            self._outstanding += 1
            if self._lanes.enter(entry):
                self._ready.push(entry)
                if not self._pump_scheduled:
                    self._schedule_pump()

    async def commit(self, op: GuardedOp) -> OpResult:
        """``enqueue`` and wait. Raises what the future raises."""
        return await self.enqueue(op)

    async def commit_all(self, ops: Iterable[GuardedOp]) -> list[OpResult | StorageError]:
        """Commit many operations of one caller; an operation's error stands in its place.

        Cancelled, it drops what was not sent yet. No task per operation.
        """
        futures = [self.enqueue(op) for op in ops]
        results: list[OpResult | StorageError] = []
        try:
            for future in futures:
                try:
                    results.append(await future)
                except StorageError as error:
                    results.append(error)
        finally:
            for future in futures[len(results) :]:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # seen; the caller is gone
        return results

    async def run(self) -> None:
        """Send until ``close``; the caller's task group owns this. Once only.

        Raises:
            Exception: what a callback raised. All results were delivered first.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    sweeper = tasks.create_task(self._sweep(), name="committer-deadlines")
                    self._schedule_pump()
                    await self._stop.wait()
                    give_up = tasks.create_task(self._give_up(), name="committer-drain")
                    await self._idle.wait()
                    give_up.cancel()
                    sweeper.cancel()
                finally:
                    self._tasks = None
        finally:
            self._closing = True
            for entry in self._wheel.clear():
                self.stats.expired += entry.expire("the committer stopped")
            self._stopped.set()
        if self._fault is not None:
            raise self._fault

    async def close(self) -> None:
        """Refuse new operations, finish those taken, stop; returns once ``run`` has ended.

        What is not finished after ``drain_timeout`` is answered as if its deadline had passed.
        """
        self._closing = True
        self._stop.set()
        if self._tasks is not None:
            await self._stopped.wait()

    # --- background -------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:  # cancelled by run()
            await self._work.wait()
            await self._clock.sleep(self._config.deadline_tick)
            for entry in self._wheel.due(self._clock.monotonic()):
                self.stats.expired += entry.expire("the deadline passed")

    async def _give_up(self) -> None:
        await self._clock.sleep(self._config.drain_timeout)
        for entry in self._wheel.clear():
            entry.deadline = float("-inf")  # not sent again
            self.stats.expired += entry.expire("the committer stopped")

    def _schedule_pump(self) -> None:
        # Not at once: what else the callbacks of this loop round enqueue belongs to the same group.
        if not self._pump_scheduled and self._tasks is not None:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        while self._ready and self._tasks is not None and self._may_send():
            self._in_flight += 1
            self._tasks.create_task(self._send(Group(entries=self._ready.take())))

    def _may_send(self) -> bool:
        # A group that waits before its next try uses no Txn: it must not hold up others, yet it counts
        # against the maximum, or an outage would pile up groups without end.
        if self._in_flight >= self._config.max_in_flight:
            return False
        return self._in_flight == self._paused or self._ready.full_group_waits()

    async def _send(self, group: Group) -> None:
        try:
            await self._delivery.deliver(group)
        except BaseException:
            self._tasks = None  # the task group goes down with this task; start nothing more
            raise
        finally:
            self._in_flight -= 1
            self._schedule_pump()

    # --- told by the delivery ---------------------------------------------------------------------

    def _finished(self, entries: Sequence[Entry]) -> None:
        leave = self._lanes.leave
        forget = self._wheel.remove
        for entry in entries:
            forget(entry)
            entry.release()
            for freed in leave(entry):
                self._ready.push(freed)
        self._outstanding -= len(entries)
        if not self._outstanding:
            self._work.clear()
            self._idle.set()

    def _pausing(self, change: int) -> None:
        self._paused += change
        if change > 0:
            self._schedule_pump()

    def _faulted(self, error: Exception) -> None:
        self._fault = self._fault or error
        self._closing = True
        self._stop.set()
