"""Watch the records of a namespace from a revision on, over broken streams, without ever listing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.errors import CodecError, Compacted, KeyFormatError, StorageError
from coordinator.etcd.channels import Purpose
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.namespace_keys import NamespaceKeys
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.txn import TxnCodec
from coordinator.etcd.watch import End, EndKind, FragmentJoiner, WatchRange, WatchStream
from coordinator.ports import Clock, StateSink
from leasekeeper.internal.etcd.v1.watch_pb2 import Event

__all__ = ["StateWatchConfig", "watch_states"]

_WATCH_ID: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWatchConfig:
    """Times in seconds.

    Attributes:
        call_timeout: deadline of opening a stream.
        probe_after: silence after which the server is asked for a sign of life.
        probe_timeout: time for that sign; then the stream is replaced.
        pause_first: pause after a stream that delivered nothing; doubles each time.
        pause_max: longest pause.
    """

    call_timeout: float = 3.0
    probe_after: float = 5.0
    probe_timeout: float = 3.0
    pause_first: float = 0.05
    pause_max: float = 2.0


class _Follower:
    """One caller's watch: where it stands, and whom it feeds."""

    def __init__(
        self,
        client: EtcdClient,
        keys: NamespaceKeys,
        sink: StateSink,
        codec: TxnCodec,
        set_aside: SetAside,
        config: StateWatchConfig,
    ) -> None:
        self._client = client
        self._keys = keys
        self._sink = sink
        self._codec = codec
        self._set_aside = set_aside
        self._config = config
        self.passed = 0
        self.started = False

    async def life(self) -> End:
        """One stream to its end."""
        config = self._config
        loop = asyncio.get_running_loop()
        member = await self._client.ring.connected(Purpose.WATCH, deadline=loop.time() + config.call_timeout)
        login = await self._client.login.metadata(member, timeout=config.call_timeout)
        stream = WatchStream(member, login)
        span = self._keys.all_states()
        try:
            async with asyncio.timeout(config.call_timeout):
                watched = WatchRange("state", span.start, span.end)
                # From the revision that was delivered last, and not one later: a watch that starts above the
                # store's revision leaves probes unanswered on etcd 3.6, so a calm store would look dead.
                await stream.create(_WATCH_ID, watched, self.passed)
            end = await self._read(stream)
        except TimeoutError:
            end = End(EndKind.QUIET, f"{member.endpoint} took no watch request")
        finally:
            stream.cancel()
        if end.kind in (EndKind.BROKEN, EndKind.QUIET):
            self._client.ring.failed(member, Purpose.WATCH, hung=end.kind is EndKind.QUIET)
        elif end.kind is EndKind.CANCELLED:
            self._client.login.discard(login)
        return end

    async def _read(self, stream: WatchStream) -> End:
        config = self._config
        joiner = FragmentJoiner()
        probed = False
        reading = asyncio.ensure_future(stream.read())
        try:
            while True:
                wait = config.probe_timeout if probed else config.probe_after
                await asyncio.wait((reading,), timeout=wait)
                if not reading.done():
                    if probed:
                        return End(EndKind.QUIET, f"{stream.member.endpoint} is silent")
                    probed = True
                    async with asyncio.timeout(config.probe_timeout):
                        await stream.probe()
                    continue
                response = reading.result()
                if isinstance(response, End):
                    return response
                probed = False
                if response.header.cluster_id != self._client.cluster_id:
                    return End(EndKind.ANOTHER_CLUSTER, "another cluster answers")
                if response.created:
                    if not self.started:
                        self.started = True
                        self._sink.started(self.passed)
                elif response.watch_id == _WATCH_ID:
                    events = joiner.add(response)
                    if events is not None:
                        self._deliver(events)
                reading = asyncio.ensure_future(stream.read())
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            kv = event.kv
            if kv.mod_revision <= self.passed:
                continue  # delivered before
            try:
                job_id = self._keys.parse_state(kv.key)
                stored = None
                if event.type == Event.PUT:
                    stored = self._codec.stored_of(self._keys.namespace, job_id, kv)
            except (CodecError, KeyFormatError) as error:
                self._set_aside.add("state", kv.key, error)
            else:
                self._sink.changed(kv.mod_revision, job_id, stored)
        if events:
            self.passed = max(self.passed, events[-1].kv.mod_revision)


async def watch_states(
    client: EtcdClient,
    keys: NamespaceKeys,
    *,
    after_revision: int,
    sink: StateSink,
    stop: Awaitable[None] | None,
    codec: TxnCodec,
    set_aside: SetAside,
    clock: Clock,
    config: StateWatchConfig | None = None,
) -> None:
    """Feed ``sink`` with each change once, in order, until ``stop`` ends or the caller is cancelled.

    Args:
        client: the etcd client.
        keys: the namespace.
        after_revision: changes after it are delivered; 0: those from now on.
        sink: fed synchronously.
        stop: ends the watch.
        codec: decodes.
        set_aside: told of undecodable records, which the sink does not see.
        clock: sleeps between streams.
        config: see ``StateWatchConfig``.

    Raises:
        Compacted: history from there on is gone, is another cluster's, or has not been reached.
    """
    config = config or StateWatchConfig()
    follower = _Follower(client, keys, sink, codec, set_aside, config)
    following = asyncio.ensure_future(_follow(client, keys, follower, after_revision, clock, config))
    stopping = asyncio.ensure_future(_until(stop)) if stop is not None else None
    try:
        await asyncio.wait(
            (following, stopping) if stopping is not None else (following,),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if following.done():
            following.result()
    finally:
        following.cancel()
        if stopping is not None:
            stopping.cancel()
        await asyncio.gather(
            following, *((stopping,) if stopping is not None else ()), return_exceptions=True
        )


async def _until(stop: Awaitable[None]) -> None:
    # A future may have other waiters: it is not ours to cancel.
    await (asyncio.shield(stop) if isinstance(stop, asyncio.Future) else stop)


async def _follow(
    client: EtcdClient,
    keys: NamespaceKeys,
    follower: _Follower,
    after_revision: int,
    clock: Clock,
    config: StateWatchConfig,
) -> None:
    follower.passed = after_revision
    pause = config.pause_first
    while True:  # until cancelled; every round waits for a stream or a pause
        stood_at = follower.passed
        try:
            head = await client.range(keys.all_states().start, count_only=True, timeout=config.call_timeout)
            if not follower.passed:
                follower.passed = stood_at = head.header.revision
            elif head.header.revision < follower.passed:
                # etcd would wait in silence for a future that is another one.
                raise Compacted(f"etcd's history ends before revision {follower.passed}: it went back")
            end = await follower.life()
        except Compacted:
            raise
        except StorageError as error:
            end = End(EndKind.BROKEN, str(error))
        if end.kind in (EndKind.COMPACTED, EndKind.ANOTHER_CLUSTER):
            raise Compacted(f"changes after revision {follower.passed} are gone: {end.detail}")
        pause = config.pause_first if follower.passed > stood_at else min(config.pause_max, 2 * pause)
        await clock.sleep(pause)
