"""List and watch: tell a handler of every change in some ranges, for ever, through every fault of the stream.

The handler lists at some revision, the feed watches from the next one on. A stream that breaks is resumed
after the last delivered revision. A stream that was compacted, cancelled, ended politely or went quiet,
another cluster and a history that went back call for a new list. What is delivered: all changes of a
range, in order, a whole revision at a time, at least once. Not guaranteed: order between ranges, and that
each intermediate state is seen over a new list.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.errors import ClusterChanged, StorageError
from coordinator.etcd.channels import Purpose
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.log_budget import LogBudget
from coordinator.etcd.watch import (
    ChangeEvent,
    End,
    EndKind,
    FragmentJoiner,
    WatchRange,
    WatchStream,
    split_revisions,
)
from coordinator.etcd.watch_barrier import WatchBarrier
from leasekeeper.internal.etcd.v1.watch_pb2 import WatchResponse

__all__ = ["ChangeEvent", "ChangeFeed", "FeedClock", "FeedConfig", "FeedHandler", "WatchRange"]

_log = logging.getLogger(__name__)


class FeedClock(Protocol):
    """The part of the process's clock that a feed needs."""

    def monotonic(self) -> float:
        """Seconds, never falling."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class FeedHandler(Protocol):
    """What is told. Errors other than StorageError from any of these end the feed."""

    async def relist(self, revision: int) -> None:
        """Forget everything and list again, at *revision* or later; changes after *revision* follow.

        Changes that the list already showed may come again: compare mod revisions. May raise StorageError:
        it is called again later.
        """

    def changes(self, range_name: str, revision: int, events: Sequence[ChangeEvent]) -> None:
        """Take all changes that one revision made in one range."""

    def freshness(self, fresh: bool) -> None:
        """Take note that the watch is known to be alive, or is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig:
    """Times in seconds.

    Args:
        probe_after: silence after which the server is asked for a sign of life.
        probe_timeout: time for that sign; then the stream counts as quiet and is replaced.
        tick: how often silence is looked at.
        settle: how long a resumed watch must live to count as caught up (etcd syncs old watchers every 100
        ms).
        call_timeout: deadline of each unary call and of opening a stream.
        backoff_first: pause after the first failure in a row; doubles each time.
        backoff_max: longest pause.
        stable_after: a stream that lived this long ends a row of failures.
        log_lines_per_minute: what is more is counted, and told with the next line.
    """

    probe_after: float = 2.0
    probe_timeout: float = 3.0
    tick: float = 0.5
    settle: float = 0.3
    call_timeout: float = 3.0
    backoff_first: float = 0.1
    backoff_max: float = 3.0
    stable_after: float = 5.0
    log_lines_per_minute: int = 10


class ChangeFeed:
    """One watch stream over several ranges, with the lists that it needs.

    Args:
        client: the etcd client.
        ranges: what to watch; names must differ.
        handler: see `FeedHandler`.
        config: see `FeedConfig`.
        clock: see `FeedClock`.
        fraction: uniform in [0, 1), for jitter.
    """

    def __init__(
        self,
        client: EtcdClient,
        ranges: Sequence[WatchRange],
        handler: FeedHandler,
        config: FeedConfig,
        clock: FeedClock,
        *,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        if not ranges or len({each.name for each in ranges}) != len(ranges):
            raise ValueError("a feed needs ranges with different names")
        self._client = client
        self._ranges = list(ranges)
        self._handler = handler
        self._config = config
        self._clock = clock
        self._fraction = fraction
        self._log = LogBudget(_log, config.log_lines_per_minute, clock.monotonic)
        self.barrier = WatchBarrier()
        self.last_proof = -float("inf")
        self.relists = 0
        self.reconnects = 0
        self._fresh = False
        self._must_list = True
        self._cluster_id = 0
        self._failures = 0
        self._stream: WatchStream | None = None
        self._created: set[int] = set()

    @property
    def fresh(self) -> bool:
        """Whether the watch is known to be alive and caught up."""
        return self._fresh

    def passed(self, range_name: str) -> int:
        """Revision up to which the range has been delivered; 0 before the first list, lower after a
        restore."""
        return self.barrier.passed(range_name)

    async def wait_revision(self, range_name: str, revision: int, timeout: float) -> None:
        """See `WatchBarrier.wait_revision`."""
        await self.barrier.wait_revision(range_name, revision, timeout=timeout)

    async def add_ranges(self, ranges: Iterable[WatchRange], revision: int) -> None:
        """Watch more ranges, which the caller has listed at *revision* or later. A later relist includes
        them."""
        known = {each.name for each in self._ranges}
        added = [each for each in ranges if each.name not in known]
        first = len(self._ranges)
        self._ranges.extend(added)
        for each in added:
            self.barrier.advance(each.name, revision)
        stream = self._stream
        if stream is not None:
            for index, each in enumerate(added, start=first):
                await stream.create(index + 1, each, revision)

    async def run(self) -> None:
        """Feed the handler until cancelled."""
        while True:
            started = self._clock.monotonic()
            try:
                end = await self._life()
            except ClusterChanged as error:
                end = End(EndKind.ANOTHER_CLUSTER, str(error))
            except StorageError as error:
                # A list that failed must be made again; a stream that could not be opened need not.
                end = End(EndKind.BROKEN, str(error))
            finally:
                self._set_fresh(False)
            if end.kind is not EndKind.BROKEN:
                self._must_list = True
            if self._clock.monotonic() - started >= self._config.stable_after:
                self._failures = 0
            self._failures += 1
            self.reconnects += 1
            pause = min(
                self._config.backoff_max, self._config.backoff_first * 2 ** min(self._failures - 1, 16)
            )
            pause *= 0.5 + self._fraction() / 2
            self._log.warning(
                "watch lost (%s: %s), %s in %.1f s",
                end.kind.value,
                end.detail,
                "listing again" if self._must_list else "resuming",
                pause,
            )
            await self._clock.sleep(pause)

    async def _life(self) -> End:
        """One stream from the revision check to its end."""
        config = self._config
        head = await self._client.range(self._ranges[0].start, count_only=True, timeout=config.call_timeout)
        revision = head.header.revision
        went_back = revision < max(self.passed(each.name) for each in self._ranges)
        if went_back:
            self._log.warning("etcd's history went back to revision %d", revision)
        listed = self._must_list or went_back or self._client.cluster_id != self._cluster_id
        if listed:
            self._must_list = True
            self.relists += 1
            await self._handler.relist(revision)
            for each in self._ranges:
                self.barrier.reset(each.name, revision)
            self._must_list = False
            self._cluster_id = self._client.cluster_id
        loop = asyncio.get_running_loop()
        member = await self._client.ring.connected(Purpose.WATCH, deadline=loop.time() + config.call_timeout)
        login = await self._client.login.metadata(member, timeout=config.call_timeout)
        stream = WatchStream(member, login)
        reader = loop.create_task(self._read(stream, settle=0.0 if listed else config.settle))
        try:
            self._created.clear()
            self.last_proof = self._clock.monotonic()
            async with asyncio.timeout(config.call_timeout):
                for index, each in enumerate(self._ranges):
                    # From the last delivered revision, not the next: etcd leaves probes unanswered while a
                    # watch starts above the store's revision (seen with 3.6.16). `_deliver` drops what
                    # comes twice.
                    await stream.create(index + 1, each, self.passed(each.name))
                self._stream = stream
            end = await self._guard(stream, reader)
        except TimeoutError:
            end = End(EndKind.BROKEN, f"{member.endpoint} took no watch request")
        finally:
            self._stream = None
            stream.cancel()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        if end.kind in (EndKind.BROKEN, EndKind.QUIET):
            self._client.ring.failed(member, Purpose.WATCH, hung=end.kind is EndKind.QUIET)
        elif end.kind is EndKind.CANCELLED:
            self._client.login.discard(login)
        return end

    async def _guard(self, stream: WatchStream, reader: asyncio.Task[End]) -> End:
        """Wait for the reader's end, and make sure that silence is not mistaken for calm."""
        config = self._config
        probed_at: float | None = None
        ticks = 0
        while True:
            await asyncio.wait((reader,), timeout=config.tick)
            if reader.done():
                return reader.result()
            now = self._clock.monotonic()
            if probed_at is not None and self.last_proof >= probed_at:
                probed_at = None
            if probed_at is None:
                if now - self.last_proof >= config.probe_after:
                    probed_at, ticks = now, 0
                    try:
                        async with asyncio.timeout(config.probe_timeout):
                            await stream.probe()
                    except TimeoutError:
                        return End(EndKind.QUIET, f"{stream.member.endpoint} took no probe")
                continue
            # Ticks are counted too: a process that was itself frozen must first read what has arrived.
            ticks += 1
            if ticks >= 2 and now - probed_at >= config.probe_timeout:
                silent = now - self.last_proof
                return End(EndKind.QUIET, f"{stream.member.endpoint} has been silent for {silent:.1f} s")

    async def _read(self, stream: WatchStream, settle: float) -> End:
        joiner = FragmentJoiner()
        settling: asyncio.TimerHandle | None = None
        try:
            while True:
                response = await stream.read()
                if isinstance(response, End):
                    return response
                self.last_proof = self._clock.monotonic()
                if response.header.cluster_id != self._cluster_id:
                    return End(EndKind.ANOTHER_CLUSTER, f"cluster {response.header.cluster_id:x} answers")
                if response.created:
                    self._created.add(response.watch_id)
                    if len(self._created) == len(self._ranges) and not self._fresh:
                        if settling is not None:
                            settling.cancel()
                        loop = asyncio.get_running_loop()
                        settling = loop.call_later(settle, self._set_fresh, True)
                elif 0 < response.watch_id <= len(self._ranges):
                    self._deliver(response, joiner)
        finally:
            if settling is not None:
                settling.cancel()

    def _deliver(self, response: WatchResponse, joiner: FragmentJoiner) -> None:
        name = self._ranges[response.watch_id - 1].name
        events = joiner.add(response)
        if events is None:
            return
        if not events:
            # etcd's own progress notice, unlike an answer to a probe, never overtakes events.
            self.barrier.advance(name, response.header.revision)
            return
        passed = self.barrier.passed(name)
        for revision, changed in split_revisions(events):
            if revision <= passed:
                continue
            self._handler.changes(name, revision, changed)
            self.barrier.advance(name, revision)

    def _set_fresh(self, fresh: bool) -> None:
        if fresh is not self._fresh:
            self._fresh = fresh
            if fresh:
                self._log.info("watch is fresh, %d ranges", len(self._ranges))
            self._handler.freshness(fresh)
