"""A drain on real etcd: on the session's own lease, or not at all."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from coordinator.app.machine import SystemClock
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import OutcomeUnknown
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.store import EtcdStore, StoreConfig, StoreListeners
from coordinator.ports import Session
from leasekeeper.internal.etcd.v1.kv_pb2 import TxnResponse
from tests.integration.store.conftest import MachineEntropy, Told

NS = "default"


@pytest.fixture
async def store(etcd_server: EtcdProcess) -> AsyncIterator[EtcdStore]:
    config = StoreConfig(
        etcd=EtcdConfig(endpoints=(etcd_server.endpoint,)),
        coordinator_id=uuid.uuid4().hex,
        root=f"/s-{uuid.uuid4().hex[:12]}",
    )
    told = Told()
    listeners = StoreListeners(changes=told, commits=told)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            EtcdStore(config, listeners, clock=SystemClock(), entropy=MachineEntropy())
        )
        await store.namespaces.ensure(NS, deadline=by())
        yield store


def by() -> float:
    return SystemClock().monotonic() + 5


async def opened(store: EtcdStore) -> Session:
    session_id = f"{uuid.uuid4().int >> 66 | 1 << 60:016x}"
    session = Session(
        namespace=NS, session_id=session_id, identity="w", sdk="t", labels={}, opened_ms=1, ttl_ms=60_000
    )
    return await store.sessions.open(session, deadline=by())


async def test_a_drain_stays_on_the_lease_of_the_session_and_keeps_all_else(store: EtcdStore) -> None:
    session = await opened(store)
    before = await store.session_admin.read(NS, session.session_id, deadline=by())
    assert before is not None
    assert before.session == session
    asked = replace(session, command=1, terminate_ms=77)
    won, stands = await store.session_admin.swap(before, asked, deadline=by())
    assert won
    assert await store.session_admin.read(NS, session.session_id, deadline=by()) == stands
    assert await store.sessions.read(NS, session.session_id, deadline=by()) == asked
    answer = await store.client.lease_time_to_live(int(session.session_id, 16), keys=True, timeout=5)
    assert list(answer.keys) == [store.space.namespace(NS).session(session.session_id)]

    late = await store.session_admin.swap(before, session, deadline=by())
    assert late == (False, stands)


async def test_a_session_that_ends_before_the_swap_stays_ended(store: EtcdStore) -> None:
    session = await opened(store)
    before = await store.session_admin.read(NS, session.session_id, deadline=by())
    assert before is not None
    await store.sessions.close(NS, session.session_id, deadline=by())
    swapped = await store.session_admin.swap(before, replace(session, command=1), deadline=by())
    assert swapped == (False, None)
    assert await store.session_admin.read(NS, session.session_id, deadline=by()) is None


async def test_a_drain_whose_answer_was_lost_finds_itself(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await opened(store)
    before = await store.session_admin.read(NS, session.session_id, deadline=by())
    assert before is not None
    send, lost = EtcdClient.txn_bytes, [True]
    key = store.space.namespace(NS).session(session.session_id)

    async def sometimes(client: EtcdClient, request: bytes, *, timeout: float) -> TxnResponse:
        reply = await send(client, request, timeout=timeout)
        if client is store.client and key in request and lost:
            lost.pop()
            raise OutcomeUnknown("its answer was lost")
        return reply

    monkeypatch.setattr(EtcdClient, "txn_bytes", sometimes)
    won, stands = await store.session_admin.swap(before, replace(session, command=2), deadline=by())
    assert not lost
    assert won
    assert stands is not None
    assert stands.session.command == 2
