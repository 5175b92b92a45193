"""Queues on real etcd: one swap wins, an unknown one finds itself, all others hear of it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from coordinator.app.machine import SystemClock
from coordinator.core.queue_settings import QueueSettings, QueueState
from coordinator.core.retry import RetryPolicy
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import EpochChanged, OutcomeUnknown
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.epoch_bump import bump_epoch
from coordinator.etcd.store import EtcdStore, StoreConfig, StoreListeners
from coordinator.ports import QueueSwap, StoredQueue
from leasekeeper.internal.etcd.v1.kv_pb2 import TxnResponse
from tests.integration.store.conftest import MachineEntropy, Told
from tests.support.polling import eventually

STATE = QueueState(
    settings=QueueSettings(
        target_wait_ms=(1, 2, 3, 4, 5),
        retry=RetryPolicy(max_retries=0, non_retryable_types=("bad",)),
        queue_timeout_ms=1,
        run_timeout_ms=2,
        total_timeout_ms=3,
        heartbeat_timeout_ms=1,
    ),
    paused=True,
    pause_reason="stocktaking",
    pause_ms=1_700_000_000_000,
    request_digest=b"digest",
)
ABSENT = StoredQueue()


@dataclass
class Heard:
    """``ports.QueueChanges`` that keeps what it is told."""

    relists: int = 0
    changes: list[tuple[str, StoredQueue, int]] = field(default_factory=list)

    async def relist(self, namespace: str, revision: int) -> None:
        self.relists += 1

    def queue_changed(self, namespace: str, queue: str, stored: StoredQueue, revision: int) -> None:
        self.changes.append((queue, stored, revision))


@dataclass
class Side:
    store: EtcdStore
    heard: Heard
    namespace: str

    @property
    def deadline(self) -> float:
        return SystemClock().monotonic() + 5

    @property
    def key(self) -> bytes:
        return self.store.space.namespace(self.namespace).queue("q")

    async def swap(self, before: StoredQueue, after: QueueState) -> QueueSwap:
        return await self.store.queues.swap(
            self.namespace, "q", before=before, after=after, deadline=self.deadline
        )


Opener = Callable[[], Awaitable[Side]]


@pytest.fixture
async def opener(etcd_server: EtcdProcess) -> AsyncIterator[Opener]:
    """Coordinators' stores on one root."""
    root, namespace = f"/q-{uuid.uuid4().hex[:12]}", "default"
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> Side:
            heard, told = Heard(), Told()
            config = StoreConfig(
                etcd=EtcdConfig(endpoints=(etcd_server.endpoint,)),
                coordinator_id=uuid.uuid4().hex,
                root=root,
            )
            listeners = StoreListeners(changes=told, commits=told, queues=heard)
            store = await stack.enter_async_context(
                EtcdStore(config, listeners, clock=SystemClock(), entropy=MachineEntropy())
            )
            await store.namespaces.ensure(namespace, deadline=SystemClock().monotonic() + 5)
            return Side(store, heard, namespace)

        yield start


async def test_a_queue_is_read_listed_and_told_as_it_was_written(opener: Opener) -> None:
    one, other = await opener(), await opener()
    assert await one.store.queues.read("default", "q", deadline=one.deadline) == ABSENT
    swap = await one.swap(ABSENT, STATE)
    assert swap.won
    assert swap.stored.state == STATE
    assert await other.store.queues.read("default", "q", deadline=one.deadline) == swap.stored
    assert await other.store.queues.list_queues("default", deadline=one.deadline) == [("q", swap.stored)]
    await eventually(lambda: other.heard.changes == [("q", swap.stored, swap.revision)])


async def test_of_two_swaps_one_wins_and_the_other_is_told_what_stands(opener: Opener) -> None:
    side = await opener()
    first = await side.swap(ABSENT, STATE)
    second = await side.swap(ABSENT, replace(STATE, pause_reason="another"))
    assert (first.won, second.won) == (True, False)
    assert second.stored == first.stored


async def test_a_swap_whose_answer_was_lost_finds_itself(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = await opener()
    send, lost = EtcdClient.txn_bytes, [True]

    async def sometimes(client: EtcdClient, request: bytes, *, timeout: float) -> TxnResponse:
        reply = await send(client, request, timeout=timeout)
        if client is side.store.client and side.key in request and lost:
            lost.pop()
            raise OutcomeUnknown("its answer was lost")
        return reply

    monkeypatch.setattr(EtcdClient, "txn_bytes", sometimes)
    swap = await side.swap(ABSENT, STATE)
    assert not lost
    assert swap.won
    assert swap.stored.state == STATE


async def test_an_undecodable_record_counts_as_the_default_and_is_written_over(opener: Opener) -> None:
    side = await opener()
    await side.store.client.put(side.key, b"\xff\xff", timeout=5)
    found = await side.store.queues.read("default", "q", deadline=side.deadline)
    assert found.state == QueueState()
    assert found.revision > 0
    assert (await side.swap(found, STATE)).won


async def test_nothing_is_swapped_under_an_older_epoch(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = await opener()
    guard = side.store.present.guard()
    await bump_epoch(side.store.client, side.store.space, clock=SystemClock(), deadline=side.deadline)
    monkeypatch.setattr(side.store.present, "guard", lambda: guard)
    with pytest.raises(EpochChanged):
        await side.swap(ABSENT, STATE)
