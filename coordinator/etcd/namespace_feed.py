"""The watch of one namespace: decode what etcd tells and hand it to the index."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from coordinator.errors import CodecError, KeyFormatError
from coordinator.etcd.change_feed import ChangeEvent, ChangeFeed, FeedConfig, WatchRange
from coordinator.etcd.circuit_store import decode_circuit
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_session
from coordinator.etcd.lock_codec import entry_of
from coordinator.etcd.namespace_keys import NamespaceKeys
from coordinator.etcd.own_revisions import OwnRevisions
from coordinator.etcd.queue_store import decode_queue
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.txn import TxnCodec
from coordinator.ports import (
    Changes,
    CircuitChanges,
    Clock,
    LockChanges,
    QueueChanges,
    StoredCircuit,
    StoredQueue,
)
from leasekeeper.internal.etcd.v1.watch_pb2 import Event

__all__ = ["KINDS", "NamespaceFeed"]

KINDS: Final = ("ready", "claim", "session", "cancel", "circuit", "lock", "queue")
"""What is watched of each namespace."""

_LOOK_SECONDS: Final = 0.002
_HOLD_SECONDS: Final = 0.01
"""How long a change waits at most for our own answer to say that it is ours; looked at every 2 ms. The watch
often is the faster one by less than a millisecond, a busy loop reads our answer later still, and decoding our
own echo would cost a tenth of all CPU."""

_ECHOED: Final = frozenset({"ready", "claim"})
"""Kinds whose own changes the index already has from the commit itself."""


class NamespaceFeed:
    """Implements ``FeedHandler`` for one namespace.

    Args:
        client: the etcd client.
        keys: the namespace.
        changes: whom to tell.
        codec: decodes.
        own: revisions whose ``ready`` and ``claim`` changes are passed over.
        set_aside: told of undecodable records.
        clock: time.
        config: times of the watch.
        fraction: uniform in [0, 1), for jitter.
        kinds: which of ``KINDS`` are watched.
        circuits: told of circuits; None: they are not watched.
        locks: told of named locks; None: they are not watched.
        queues: told of settings and pauses of queues; None: they are not watched.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: NamespaceKeys,
        changes: Changes,
        *,
        codec: TxnCodec,
        own: OwnRevisions,
        set_aside: SetAside,
        clock: Clock,
        config: FeedConfig,
        fraction: Callable[[], float],
        kinds: Collection[str] = KINDS,
        circuits: CircuitChanges | None = None,
        locks: LockChanges | None = None,
        queues: QueueChanges | None = None,
    ) -> None:
        self._keys = keys
        self._changes = changes
        self._circuits = circuits
        self._locks = locks
        self._queues = queues
        self._codec = codec
        self._own = own
        self._set_aside = set_aside
        self.ready = asyncio.Event()
        self._held: deque[tuple[str, int, Sequence[ChangeEvent], float]] = deque()
        self._release_timer: asyncio.TimerHandle | None = None
        self._failure: asyncio.Future[None] | None = None
        spans = (
            keys.all_ready(),
            keys.all_claims(),
            keys.all_sessions(),
            keys.all_cancels(),
            keys.all_circuits(),
            keys.all_locks(),
            keys.all_queues(),
        )
        told = {"circuit": circuits is not None, "lock": locks is not None, "queue": queues is not None}
        ranges = [
            WatchRange(kind, span.start, span.end)
            for kind, span in zip(KINDS, spans, strict=True)
            if kind in kinds and told.get(kind, True)
        ]
        self._feed = ChangeFeed(client, ranges, self, config, clock, fraction=fraction)
        self._deliver: dict[str, Callable[[ChangeEvent], None]] = {
            "ready": self._ready_event,
            "claim": self._claim_event,
            "session": self._session_event,
            "cancel": self._cancel_event,
            "circuit": self._circuit_event,
            "lock": self._lock_event,
            "queue": self._queue_event,
        }

    @property
    def namespace(self) -> str:
        """What is watched."""
        return self._keys.namespace

    @property
    def feed(self) -> ChangeFeed:
        """The watch underneath."""
        return self._feed

    async def run(self) -> None:
        """Watch until cancelled."""
        self._failure = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._feed.run(), name=f"watch-{self.namespace}")
                await self._failure
        finally:
            self._drop_held()
            self._failure.cancel()

    async def relist(self, revision: int) -> None:
        """See ``FeedHandler.relist``."""
        self._drop_held()  # the list is newer
        if self._circuits is not None:
            await self._circuits.relist(self.namespace, revision)
        if self._locks is not None:
            await self._locks.relist(self.namespace, revision)
        if self._queues is not None:
            await self._queues.relist(self.namespace, revision)
        await self._changes.relist(self.namespace, revision)
        self.ready.set()

    def changes(self, range_name: str, revision: int, events: Sequence[ChangeEvent]) -> None:
        """See ``FeedHandler.changes``. Everything behind a held change is held too, so the order stays."""
        if self._held or (range_name in _ECHOED and self._own.may_become_own(revision)):
            loop = asyncio.get_running_loop()
            self._held.append((range_name, revision, events, loop.time() + _HOLD_SECONDS))
            if self._release_timer is None:
                self._release_timer = loop.call_later(_LOOK_SECONDS, self._release)
        else:
            self._take(range_name, revision, events)

    def _release(self) -> None:
        self._release_timer = None
        loop = asyncio.get_running_loop()
        now, held = loop.time(), self._held
        try:
            while held:
                range_name, revision, events, until = held[0]
                if now < until and self._own.may_become_own(revision):
                    self._release_timer = loop.call_later(_LOOK_SECONDS, self._release)
                    return
                held.popleft()
                self._take(range_name, revision, events)
        except Exception as error:  # noqa: BLE001 - handed to ``run``, which raises it
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)

    def _drop_held(self) -> None:
        self._held.clear()
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None

    def _take(self, range_name: str, revision: int, events: Sequence[ChangeEvent]) -> None:
        if range_name not in _ECHOED or not self._own.is_own(revision):
            deliver = self._deliver[range_name]
            for event in events:
                try:
                    deliver(event)
                except (CodecError, KeyFormatError) as error:
                    self._set_aside.add(range_name, event.kv.key, error)
        if range_name == "lock" and self._locks is not None:
            self._locks.locks_passed(self.namespace, revision)
        self._changes.passed(self.namespace, range_name, revision)

    def freshness(self, fresh: bool) -> None:
        """See ``FeedHandler.freshness``."""
        self._changes.freshness(self.namespace, fresh)

    def _ready_event(self, event: ChangeEvent) -> None:
        kv = event.kv
        key = self._keys.parse_ready(kv.key)
        if event.type == Event.DELETE:
            self._changes.ready_deleted(
                self.namespace, key.queue, key.type, key.rank, key.job_id, kv.mod_revision
            )
            return
        stored = self._codec.stored_of(self.namespace, key.job_id, kv)
        assert stored is not None
        job = stored.job
        if (job.terms.queue, job.terms.type, job.rank) != (key.queue, key.type, key.rank):
            raise CodecError("the record belongs under another ready key")
        self._changes.ready_put(self.namespace, stored, created=kv.create_revision == kv.mod_revision)

    def _claim_event(self, event: ChangeEvent) -> None:
        kv = event.kv
        job_id = self._keys.parse_claim(kv.key)
        if event.type == Event.DELETE:
            self._changes.claim_deleted(self.namespace, job_id, kv.mod_revision)
            return
        claim = self._codec.claim_of(kv)
        assert claim is not None
        self._changes.claim_put(self.namespace, job_id, claim, kv.mod_revision)

    def _session_event(self, event: ChangeEvent) -> None:
        kv = event.kv
        session_id = self._keys.parse_session(kv.key)
        if event.type == Event.DELETE:
            self._changes.session_deleted(self.namespace, session_id, kv.mod_revision)
            return
        session = decode_session(self.namespace, session_id, kv.value, kv.create_revision)
        self._changes.session_put(session, kv.mod_revision)

    def _cancel_event(self, event: ChangeEvent) -> None:
        if event.type == Event.PUT:
            job_id = self._keys.parse_cancel(event.kv.key)
            self._changes.cancel_put(self.namespace, job_id, event.kv.mod_revision)

    def _circuit_event(self, event: ChangeEvent) -> None:
        assert self._circuits is not None, "else it is not watched"
        kv = event.kv
        queue, type_ = self._keys.parse_circuit(kv.key)
        stored = StoredCircuit()
        if event.type == Event.PUT:
            try:
                stored = StoredCircuit(decode_circuit(kv.value), kv.mod_revision)
            except CodecError as error:
                self._set_aside.add("circuit", kv.key, error)
                stored = StoredCircuit(revision=kv.mod_revision)
        self._circuits.circuit_changed(self.namespace, queue, type_, stored, kv.mod_revision)

    def _queue_event(self, event: ChangeEvent) -> None:
        assert self._queues is not None, "else it is not watched"
        kv = event.kv
        queue = self._keys.parse_queue(kv.key)
        stored = StoredQueue()
        if event.type == Event.PUT:
            try:
                stored = StoredQueue(decode_queue(kv.value), kv.mod_revision)
            except CodecError as error:
                self._set_aside.add("queue", kv.key, error)
                stored = StoredQueue(revision=kv.mod_revision)
        self._queues.queue_changed(self.namespace, queue, stored, kv.mod_revision)

    def _lock_event(self, event: ChangeEvent) -> None:
        assert self._locks is not None, "else it is not watched"
        kv = event.kv
        name, waiter = self._keys.parse_lock(kv.key)
        if event.type == Event.PUT:
            entry = self._locks.own_put(self.namespace, name, waiter, kv.mod_revision)
            self._locks.lock_put(self.namespace, entry or entry_of(self._keys, kv, self._set_aside))
            return
        self._locks.lock_deleted(self.namespace, name, waiter, kv.mod_revision)
