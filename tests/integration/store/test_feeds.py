"""What coordinators hear of each other: namespaces, jobs, claims, sessions, cancels, records."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core import commands as c
from coordinator.core.job import JobState
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import Compacted, KeyFormatError, Reason, RequestError
from coordinator.etcd.namespaces import NamespacesConfig
from coordinator.ports import Stored
from tests.integration.store.conftest import Harness, HarnessFactory
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy


async def listening(harness: Harness) -> None:
    await harness.store.namespaces.ensure(harness.namespace, deadline=harness.deadline())
    await eventually(lambda: harness.told.fresh.get(harness.namespace), what="a fresh watch")


def kinds(harness: Harness) -> list[object]:
    return [event[0] for event in harness.told.events]


async def test_another_coordinator_hears_of_a_whole_life(make_harness: HarnessFactory) -> None:
    async with make_harness() as acting, make_harness() as hearing:
        await listening(hearing)
        stored, token = await acting.claimed("j1")
        asked = await acting.store.jobs.commit(acting.operation(stored, c.Cancel(reason="no")))
        assert asked.stored is not None
        assert (await acting.complete(asked.stored, token)).won
        # Each range has a watch of its own, and no watch waits for another.
        await eventually(
            lambda: {"claim_deleted", "cancel_put", "session_put", "ready_deleted"} <= set(kinds(hearing))
        )
        told = hearing.told.events
        assert {kind for kind in kinds(hearing) if "ready" in str(kind)} == {"ready_put", "ready_deleted"}
        assert ("claim_put", "j1", token, stored.revision) in told
        assert ("ready_deleted", "j1", stored.revision) in told
        assert hearing.told.passed_to["claim"] > stored.revision


async def test_who_only_repairs_hears_of_claims_and_sessions_and_not_of_what_waits(
    make_harness: HarnessFactory,
) -> None:
    async with make_harness() as acting, make_harness(dispatches=False) as hearing:
        await listening(hearing)
        stored, token = await acting.claimed("j1")
        assert (await acting.complete(stored, token)).won
        await eventually(lambda: {"claim_put", "claim_deleted", "session_put"} <= set(kinds(hearing)))
        assert [] == [kind for kind in kinds(hearing) if "ready" in str(kind)]
        assert "ready" not in hearing.told.passed_to


async def test_own_changes_of_jobs_and_claims_are_passed_over_undecoded(harness: Harness) -> None:
    await listening(harness)
    stored, token = await harness.claimed("j1")
    done = await harness.complete(stored, token)
    assert done.won
    await eventually(lambda: harness.told.passed_to.get("claim", 0) >= done.revision)
    heard = [kind for kind in kinds(harness) if kind in ("claim_put", "claim_deleted", "ready_deleted")]
    # An echo that overtakes our own answer is decoded; what is known to be ours is not.
    assert len(heard) < 3
    assert [commit.revision for _, commit in harness.told.applied_commits][-1] == done.revision


async def test_changes_of_others_are_heard_in_order_amid_own_work(make_harness: HarnessFactory) -> None:
    async with make_harness() as acting, make_harness() as hearing:
        await listening(hearing)
        own = [hearing.submit(f"own{number}") for number in range(200)]
        for number in range(20):
            stored, token = await acting.claimed(f"j{number}")
            assert (await acting.complete(stored, token)).won
        for pending in own:
            assert (await pending).won

        def ended() -> list[object]:
            return [event[1] for event in hearing.told.events if event[0] == "claim_deleted"]

        await eventually(lambda: len(ended()) == 20)
        assert ended() == [f"j{number}" for number in range(20)]
        for kind in ("claim_", "ready_"):
            revisions = [
                e[-1] for e in hearing.told.events if str(e[0]).startswith(kind) and e[-1] is not True
            ]
            assert revisions == sorted(revisions)  # type: ignore[type-var]


async def test_a_listener_that_fails_ends_the_store_loudly(make_harness: HarnessFactory) -> None:
    class Broken(Exception):
        pass

    def broken(*_: object, **__: object) -> None:
        raise Broken

    async def life() -> None:
        async with make_harness() as harness:
            await listening(harness)
            harness.told.claim_put = broken  # type: ignore[method-assign]
            key = harness.store.space.namespace(harness.namespace).claim("j")
            await harness.store.client.put(key, b"\x08\x01", timeout=5)
            assert harness.store._owned is not None
            await asyncio.wait((harness.store._owned,), timeout=5)

    with pytest.raises(ExceptionGroup) as raised:
        await life()
    assert raised.group_contains(Broken)


async def test_a_namespace_is_followed_by_every_coordinator(make_harness: HarnessFactory) -> None:
    async with make_harness() as acting, make_harness() as hearing:
        await acting.store.namespaces.ensure(acting.namespace, deadline=acting.deadline())
        await eventually(lambda: acting.namespace in hearing.store.namespaces.namespaces())
        async with make_harness() as later:
            await eventually(lambda: acting.namespace in later.store.namespaces.namespaces())


async def test_there_is_a_limit_to_namespaces(harness: Harness) -> None:
    harness.store.namespaces._config = NamespacesConfig(limit=2)
    for name in ("one", "two"):
        await harness.store.namespaces.ensure(name, deadline=harness.deadline())
    with pytest.raises(RequestError) as refused:
        await harness.store.namespaces.ensure("three", deadline=harness.deadline())
    assert refused.value.reason is Reason.RATE_LIMITED
    await harness.store.namespaces.ensure("one", deadline=harness.deadline())
    with pytest.raises(KeyFormatError):
        harness.store.space.namespace("../q")


async def test_an_undecodable_change_is_set_aside_and_the_rest_is_heard(harness: Harness) -> None:
    await listening(harness)
    keys = harness.store.space.namespace(harness.namespace)
    await harness.store.client.put(keys.claim("broken"), b"\xff", timeout=5)
    await harness.store.client.put(keys.all_claims().start + b"%zz", b"", timeout=5)
    await harness.store.client.delete_range(keys.claim("broken"), timeout=5)
    await eventually(lambda: "claim_deleted" in kinds(harness))
    assert harness.store.set_aside.counts["claim"] == 2


class Sink:
    def __init__(self) -> None:
        self.began = 0
        self.heard: list[tuple[int, str, JobState | None]] = []

    def started(self, revision: int) -> None:
        self.began = revision

    def changed(self, revision: int, job_id: str, stored: Stored | None) -> None:
        self.heard.append((revision, job_id, stored.job.state if stored else None))


async def test_records_are_watched_from_any_revision_on(harness: Harness) -> None:
    first = await harness.submitted("j1")
    second = await harness.submitted("j2")
    sink = Sink()
    stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(
        harness.store.jobs.watch_states(
            harness.namespace, after_revision=first.revision, sink=sink, stop=stop
        )
    )
    await eventually(lambda: sink.heard)
    assert sink.began == first.revision
    assert sink.heard == [(second.revision, "j2", JobState.PENDING)]
    gone = await harness.store.jobs.commit(harness.operation(first, c.Cancel()))
    assert gone.stored is not None
    await harness.store.jobs.commit(harness.operation(gone.stored, c.Delete()))
    await eventually(lambda: len(sink.heard) == 3)
    assert [heard[1:] for heard in sink.heard[1:]] == [("j1", JobState.CANCELLED), ("j1", None)]
    stop.set_result(None)
    await watching


async def test_compacted_records_cannot_be_watched(harness: Harness) -> None:
    first = await harness.submitted("j1")
    await harness.submitted("j2")
    last = await harness.submitted("j3")
    await harness.store.client.compact(last.revision, timeout=5)
    with pytest.raises(Compacted):
        async with asyncio.timeout(5):
            await harness.store.jobs.watch_states(
                harness.namespace, after_revision=first.revision, sink=Sink()
            )


async def test_a_revision_that_was_not_reached_cannot_be_watched_from(harness: Harness) -> None:
    first = await harness.submitted("j1")
    with pytest.raises(Compacted):
        async with asyncio.timeout(5):
            await harness.store.jobs.watch_states(
                harness.namespace, after_revision=first.revision + 10**6, sink=Sink()
            )


async def test_records_are_watched_over_a_broken_stream_without_a_gap(
    etcd_server: EtcdProcess, make_harness: HarnessFactory
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        make_harness(proxy.endpoint) as hearing,
        make_harness() as acting,
    ):
        sink = Sink()
        watching = asyncio.create_task(
            hearing.store.jobs.watch_states(hearing.namespace, after_revision=0, sink=sink)
        )
        await eventually(lambda: sink.began)
        await acting.submitted("j1")
        await eventually(lambda: len(sink.heard) == 1)
        proxy.set_mode(ProxyMode.RESET)
        await acting.submitted("j2")
        proxy.set_mode(ProxyMode.PASS)
        await acting.submitted("j3")
        await eventually(lambda: len(sink.heard) == 3, timeout=15)
        assert [job_id for _, job_id, _ in sink.heard] == ["j1", "j2", "j3"]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
