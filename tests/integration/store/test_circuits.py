"""Circuits on real etcd: one swap wins, an unknown one finds itself, all others hear of it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from coordinator.app.machine import SystemClock
from coordinator.core.circuit import CLOSED, Circuit, CircuitState, Probe
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import EpochChanged, OutcomeUnknown
from coordinator.etcd.circuit_store import EtcdCircuitStore
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.epoch_bump import bump_epoch
from coordinator.etcd.keys import NamespaceKeys
from coordinator.etcd.store import EtcdStore, StoreConfig, StoreListeners
from coordinator.ports import StoredCircuit
from leasekeeper.internal.etcd.v1.kv_pb2 import TxnResponse
from tests.integration.store.conftest import MachineEntropy, Told
from tests.support.polling import eventually

OPEN = Circuit(
    state=CircuitState.HALF_OPEN,
    since_ms=1_700_000_000_000,
    probe_ms=1_700_000_005_000,
    openings=3,
    probe=Probe(job_id="j/1", attempt=4, who="c1"),
    passed=2,
    reason="9 of 10 attempts failed",
    who="c2",
)
ABSENT = StoredCircuit()


@dataclass
class Heard:
    """``ports.CircuitChanges`` that keeps what it is told."""

    relists: int = 0
    changes: list[tuple[str, str, StoredCircuit, int]] = field(default_factory=list)

    async def relist(self, namespace: str, revision: int) -> None:
        self.relists += 1

    def circuit_changed(
        self, namespace: str, queue: str, type_: str, stored: StoredCircuit, revision: int
    ) -> None:
        self.changes.append((queue, type_, stored, revision))


@dataclass
class Side:
    store: EtcdStore
    heard: Heard
    namespace: str

    @property
    def circuits(self) -> EtcdCircuitStore:
        return self.store.circuits

    @property
    def keys(self) -> NamespaceKeys:
        return self.store.space.namespace(self.namespace)

    @property
    def deadline(self) -> float:
        return SystemClock().monotonic() + 5

    async def swap(self, before: StoredCircuit, after: Circuit) -> tuple[bool, StoredCircuit]:
        swap = await self.circuits.swap(
            self.namespace, "q", "t", before=before, after=after, deadline=self.deadline
        )
        assert swap.revision >= swap.stored.revision
        return swap.won, swap.stored

    async def read(self) -> StoredCircuit:
        return await self.circuits.read(self.namespace, "q", "t", deadline=self.deadline)


Start = Callable[[], "contextlib.AbstractAsyncContextManager[Side]"]


@pytest.fixture
def start(etcd_server: EtcdProcess, namespace: str) -> Start:
    root = f"/test-{uuid.uuid4().hex[:12]}"

    @contextlib.asynccontextmanager
    async def made() -> AsyncIterator[Side]:
        told, heard = Told(), Heard()
        config = StoreConfig(
            etcd=EtcdConfig(endpoints=(etcd_server.endpoint,)), coordinator_id=uuid.uuid4().hex[:8], root=root
        )
        listeners = StoreListeners(changes=told, commits=told, circuits=heard)
        async with EtcdStore(config, listeners, clock=SystemClock(), entropy=MachineEntropy()) as store:
            await store.namespaces.ensure(namespace, deadline=SystemClock().monotonic() + 10)
            yield Side(store, heard, namespace)

    return made


async def test_of_two_that_swap_one_wins_and_the_other_sees_what_stands(start: Start) -> None:
    async with start() as side:
        results = await asyncio.gather(
            *(side.swap(ABSENT, replace(OPEN, who=f"c{number}")) for number in range(8))
        )
        winners = [stored for won, stored in results if won]

        assert len(winners) == 1
        assert {stored for _, stored in results} == set(winners)
        assert await side.read() == winners[0]


async def test_a_circuit_comes_back_as_it_was_put_and_closing_leaves_no_record(start: Start) -> None:
    async with start() as side:
        _, first = await side.swap(ABSENT, OPEN)
        assert (await side.read()).circuit == OPEN
        listed = await side.circuits.list_circuits(side.namespace, deadline=side.deadline)
        assert listed == [("q", "t", first)]

        assert await side.swap(first, CLOSED) == (True, ABSENT)
        assert await side.read() == ABSENT
        assert await side.circuits.list_circuits(side.namespace, deadline=side.deadline) == []


async def test_a_swap_on_an_outdated_record_changes_nothing(start: Start) -> None:
    async with start() as side:
        _, first = await side.swap(ABSENT, OPEN)
        _, second = await side.swap(first, replace(OPEN, passed=3))

        assert await side.swap(first, CLOSED) == (False, second)
        assert await side.swap(ABSENT, OPEN) == (False, second)
        assert await side.read() == second


async def test_the_others_hear_of_a_swap_and_of_its_end(start: Start) -> None:
    async with start() as side, start() as other:
        _, first = await side.swap(ABSENT, OPEN)
        await side.swap(first, CLOSED)

        await eventually(lambda: len(other.heard.changes) == 2)
        (_, _, put, put_at), (_, _, gone, gone_at) = other.heard.changes
        assert (put, put_at) == (first, first.revision)
        assert gone == ABSENT
        assert gone_at > put_at


async def test_a_swap_whose_answer_is_lost_finds_itself(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as side:
        lose_answers(monkeypatch, 1)
        won, stored = await side.swap(ABSENT, OPEN)

        assert won
        assert (await side.read()) == stored


async def test_a_swap_whose_answers_are_all_lost_is_unknown(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as side:
        lose_answers(monkeypatch, 100)
        with pytest.raises(OutcomeUnknown):
            await side.swap(ABSENT, OPEN)
        monkeypatch.undo()

        assert (await side.read()).circuit == OPEN


async def test_nothing_is_swapped_under_an_older_epoch(start: Start) -> None:
    async with start() as side:
        guard = side.store.present.guard()
        await bump_epoch(side.store.client, side.store.space, clock=SystemClock(), deadline=side.deadline)
        side.store.present.guard = lambda: guard  # type: ignore[method-assign]
        with pytest.raises(EpochChanged):
            await side.swap(ABSENT, OPEN)

        assert await side.read() == ABSENT


async def test_a_record_that_cannot_be_decoded_counts_as_closed_and_can_be_replaced(start: Start) -> None:
    async with start() as side:
        key = side.keys.circuit("q", "t")
        await side.store.client.put(key, b"\xff", timeout=5)
        await eventually(lambda: len(side.heard.changes) == 1)
        stands = await side.read()

        assert (stands.circuit, side.heard.changes[0][2]) == (CLOSED, stands)
        assert stands.revision > 0
        assert side.store.set_aside.counts["circuit"] >= 2
        won, _ = await side.swap(stands, OPEN)
        assert won


def lose_answers(patch: pytest.MonkeyPatch, count: int) -> None:
    """The next ``count`` Txns are committed, and their answers are lost."""
    original, left = EtcdClient.txn_bytes, [count]

    async def txn_bytes(self: EtcdClient, request: bytes, *, timeout: float) -> TxnResponse:
        answer: Awaitable[TxnResponse] = original(self, request, timeout=timeout)
        reply = await answer
        if left[0] > 0:
            left[0] -= 1
            raise OutcomeUnknown("the answer was lost")
        return reply

    patch.setattr(EtcdClient, "txn_bytes", txn_bytes)
