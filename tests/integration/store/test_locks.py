"""Named locks on real etcd: who may put an entry, what a loser is told, and what the watch brings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from coordinator.core.lock_order import LockEntry, LockMode, line_of, session_waiter
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import OutcomeUnknown
from coordinator.etcd import wire
from coordinator.etcd.store import EtcdStore
from coordinator.ports import LockCommit, LockDeletion
from tests.integration.store.conftest import Harness, HarnessFactory
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy


@dataclass
class Heard:
    """``ports.LockChanges`` that keeps what it is told."""

    entries: dict[tuple[str, str], LockEntry] = field(default_factory=dict)
    passed: int = 0
    relists: int = 0

    async def relist(self, namespace: str, revision: int) -> None:
        self.relists += 1

    def own_put(self, namespace: str, name: str, waiter: str, revision: int) -> LockEntry | None:
        return None

    def lock_put(self, namespace: str, entry: LockEntry) -> None:
        self.entries[entry.name, entry.waiter] = entry

    def lock_deleted(self, namespace: str, name: str, waiter: str, revision: int) -> None:
        self.entries.pop((name, waiter), None)

    def locks_passed(self, namespace: str, revision: int) -> None:
        self.passed = revision


class Hand:
    """A session that takes locks."""

    def __init__(self, harness: Harness, session: str) -> None:
        self.store: EtcdStore = harness.store
        self.namespace = harness.namespace
        self.session = session
        self._harness = harness

    def entry(self, name: str, request: str = "r", **more: object) -> LockEntry:
        values: dict[str, object] = {"mode": LockMode.EXCLUSIVE, "nonce": b"n", **more}
        waiter = session_waiter(self.session, request.encode())
        return LockEntry(name=name, waiter=waiter, session=self.session, **values)  # type: ignore[arg-type]

    async def put(
        self, *names: str, after: int | None = 0, request: str = "r", **more: object
    ) -> tuple[LockCommit, list[LockEntry]]:
        asked = [self.entry(name, request, **more) for name in names]
        commit = await self.store.locks.acquire(
            self.namespace, asked, after=after, deadline=self._harness.deadline()
        )
        put = [replace(one, revision=commit.revision, version=commit.revision) for one in asked]
        return commit, put

    async def delete(self, entries: Sequence[LockEntry], *, untouched: bool = False) -> list[LockDeletion]:
        results = await self.store.locks.delete(
            self.namespace, entries, untouched=untouched, deadline=self._harness.deadline()
        )
        assert all(isinstance(one, LockDeletion) for one in results), results
        return [one for one in results if isinstance(one, LockDeletion)]

    async def line(self, name: str) -> list[LockEntry]:
        read = await self.store.locks.read(self.namespace, [name], deadline=self._harness.deadline())
        return sorted(read.entries[name], key=lambda one: one.revision)


@pytest.fixture
async def hands(harness: Harness) -> tuple[Hand, Hand]:
    sessions = [await harness.open_session(), await harness.open_session()]
    return Hand(harness, sessions[0].session_id), Hand(harness, sessions[1].session_id)


async def test_a_free_lock_is_taken_in_one_round_and_its_token_is_the_txn_s_revision(
    hands: tuple[Hand, Hand],
) -> None:
    a, _ = hands
    commit, _ = await a.put("item/42", value=b"who", permits=1)
    assert commit.won
    [stands] = await a.line("item/42")
    assert (stands.revision, stands.version, stands.session, stands.value) == (
        commit.revision,
        commit.revision,
        a.session,
        b"who",
    )


async def test_a_lock_with_an_entry_is_not_taken(hands: tuple[Hand, Hand]) -> None:
    a, b = hands
    first, _ = await a.put("l")
    lost, _ = await b.put("l")
    assert not lost.won
    assert not lost.session_gone
    assert [one.session for one in await a.line("l")] == [a.session]
    assert lost.revision >= first.revision


async def test_of_several_names_all_are_put_or_none(hands: tuple[Hand, Hand]) -> None:
    a, b = hands
    await a.put("y")
    lost, _ = await b.put("x", "y")
    assert not lost.won
    assert await b.line("x") == []
    won, _ = await b.put("x", "z", request="2")
    assert won.won
    assert [one.revision for name in ("x", "z") for one in await b.line(name)] == [won.revision] * 2


async def test_what_was_added_since_the_read_refuses_and_what_went_does_not(hands: tuple[Hand, Hand]) -> None:
    a, b = hands
    one, entries = await a.put("l", mode=LockMode.SHARED)
    two, more = await a.put("l", mode=LockMode.SHARED, after=one.revision, request="2")
    assert two.won
    stale, _ = await b.put("l", mode=LockMode.SHARED, after=one.revision)
    assert not stale.won
    await a.delete(more)
    fresh, _ = await b.put("l", mode=LockMode.SHARED, after=two.revision)
    assert fresh.won
    assert entries[0].revision == one.revision


async def test_those_who_wait_are_put_whatever_stands_in_the_order_in_which_they_came(
    hands: tuple[Hand, Hand],
) -> None:
    a, b = hands
    await a.put("l")
    waits = await asyncio.gather(*(b.put("l", after=None, request=f"w{n}") for n in range(8)))
    assert all(commit.won for commit, _ in waits)
    revisions = [commit.revision for commit, _ in waits]
    assert len(set(revisions)) == 8, "one addition to a name in a Txn"
    line = line_of(await a.line("l"))
    assert [one.session for one in line.owners] == [a.session]
    assert [one.revision for one in line.waiters] == sorted(revisions)


async def test_of_many_at_once_one_owns(hands: tuple[Hand, Hand]) -> None:
    a, b = hands
    tries = await asyncio.gather(
        *((a, b)[n % 2].put("l", request=f"t{n}") for n in range(20)),
    )
    assert sum(commit.won for commit, _ in tries) == 1
    assert len(await a.line("l")) == 1


async def test_a_session_that_has_ended_puts_nothing(harness: Harness, hands: tuple[Hand, Hand]) -> None:
    a, b = hands
    await harness.sessions.close(harness.namespace, a.session, deadline=harness.deadline())
    for after in (0, None):
        lost, _ = await a.put("l", after=after)
        assert not lost.won
        assert lost.session_gone
    assert (await b.put("l"))[0].won, "and refuses nobody else in the same Txn"


async def test_a_session_s_end_gives_back_all_its_entries(harness: Harness, hands: tuple[Hand, Hand]) -> None:
    a, b = hands
    await a.put("x", "y")
    await b.put("x", after=None)
    assert {one.name for one in await _of_session(harness, a)} == {"x", "y"}
    await harness.sessions.close(harness.namespace, a.session, deadline=harness.deadline())
    assert [one.session for one in line_of(await b.line("x")).owners] == [b.session]
    assert await b.line("y") == []
    assert await _of_session(harness, a) == []


async def _of_session(harness: Harness, hand: Hand) -> list[LockEntry]:
    return await harness.store.locks.of_session(harness.namespace, hand.session, deadline=harness.deadline())


async def test_a_deletion_names_the_entry_and_no_later_one_under_the_same_key(
    hands: tuple[Hand, Hand],
) -> None:
    a, _ = hands
    _, first = await a.put("l")
    assert [one.deleted for one in await a.delete(first)] == [True]
    second, _ = await a.put("l")
    [late] = await a.delete(first)
    assert (late.deleted, late.session_open) == (False, True)
    assert [one.revision for one in await a.line("l")] == [second.revision]


async def test_an_adopted_entry_keeps_its_token_and_its_lease_and_is_not_cleaned_up(
    harness: Harness, hands: tuple[Hand, Hand]
) -> None:
    a, b = hands
    commit, put = await a.put("l")
    version = await harness.store.locks.adopt(harness.namespace, put, deadline=harness.deadline())
    assert version > commit.revision
    assert [one.deleted for one in await a.delete(put, untouched=True)] == [False]
    [stands] = await a.line("l")
    assert (stands.revision, stands.version) == (commit.revision, version)
    again = await harness.store.locks.adopt(harness.namespace, put, deadline=harness.deadline())
    assert again == 0, "somebody else has adopted it since"
    await harness.sessions.close(harness.namespace, a.session, deadline=harness.deadline())
    assert await b.line("l") == []


async def test_an_entry_that_cannot_be_decoded_blocks_as_an_exclusive_one(
    harness: Harness, hands: tuple[Hand, Hand]
) -> None:
    a, _ = hands
    keys = harness.store.space.namespace(harness.namespace)
    bad = wire.put(keys.lock("l", "odd"), b"\xff\xff", int(a.session, 16))
    await harness.store.client.txn_bytes(wire.txn((), (bad,), ()), timeout=5)
    lost, _ = await a.put("l", mode=LockMode.SHARED)
    assert not lost.won
    [stands] = await a.line("l")
    assert (stands.mode, stands.session) == (LockMode.EXCLUSIVE, "")
    assert harness.store.set_aside.counts["lock"] >= 1


async def test_the_watch_tells_of_entries_and_their_end(make_harness: HarnessFactory) -> None:
    heard = Heard()
    async with make_harness(locks=heard) as harness:
        await harness.store.namespaces.ensure(harness.namespace, deadline=harness.deadline())
        session = await harness.open_session()
        a = Hand(harness, session.session_id)
        commit, put = await a.put("x", "y/ü")
        await eventually(lambda: heard.passed >= commit.revision)
        assert {name for name, _ in heard.entries} == {"x", "y/ü"}
        assert {one.revision for one in heard.entries.values()} == {commit.revision}
        [gone] = await a.delete(put[:1])
        await eventually(lambda: heard.passed >= gone.revision)
        assert {name for name, _ in heard.entries} == {"y/ü"}
        await harness.sessions.close(harness.namespace, a.session, deadline=harness.deadline())
        await eventually(lambda: not heard.entries)
    assert heard.relists == 1


async def test_all_entries_are_listed(harness: Harness, hands: tuple[Hand, Hand]) -> None:
    a, b = hands
    await a.put("x", "y")
    commit, _ = await b.put("x", after=None)
    revision, entries = await harness.store.locks.list_entries(harness.namespace, deadline=harness.deadline())
    assert revision >= commit.revision
    assert sorted((one.name, one.session) for one in entries) == sorted(
        [("x", a.session), ("x", b.session), ("y", a.session)]
    )


async def test_an_entry_whose_reply_was_lost_is_found_by_its_own_key(
    etcd_server: EtcdProcess, make_harness: HarnessFactory
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        make_harness(proxy.endpoint, txn_timeout=0.2) as harness,
        make_harness() as other,
    ):
        a = Hand(harness, (await harness.open_session(ttl_ms=20_000)).session_id)
        seen = Hand(other, a.session)
        for after in (0, None):
            name = f"l{after}"
            proxy.set_mode(ProxyMode.HALF_DROP)
            pending = asyncio.ensure_future(a.put(name, after=after))
            [stands] = await eventually(lambda name=name: seen.line(name))  # type: ignore[misc]
            proxy.set_mode(ProxyMode.PASS)
            commit, _ = await pending
            assert not commit.won
            assert await seen.line(name) == [stands]
            assert stands.nonce == b"n"


async def test_a_deletion_whose_reply_was_lost_is_told_as_sent_before(
    etcd_server: EtcdProcess, make_harness: HarnessFactory
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        make_harness(proxy.endpoint, txn_timeout=0.2) as harness,
        make_harness() as other,
    ):
        a = Hand(harness, (await harness.open_session(ttl_ms=20_000)).session_id)
        seen = Hand(other, a.session)
        _, put = await a.put("l")
        proxy.set_mode(ProxyMode.HALF_DROP)
        pending = asyncio.ensure_future(a.delete(put))

        async def gone() -> bool:
            return await seen.line("l") == []

        await eventually(gone)
        proxy.set_mode(ProxyMode.PASS)
        [result] = await pending
        assert (result.deleted, result.resent, result.session_open) == (False, True, True)


async def test_no_answer_at_all_is_an_unknown_outcome(
    etcd_server: EtcdProcess, make_harness: HarnessFactory
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        make_harness(proxy.endpoint, txn_timeout=0.2) as harness,
    ):
        a = Hand(harness, (await harness.open_session(ttl_ms=20_000)).session_id)
        proxy.set_mode(ProxyMode.HALF_DROP)
        with pytest.raises(OutcomeUnknown):
            await harness.store.locks.acquire(
                harness.namespace, [a.entry("l")], after=0, deadline=harness.deadline(0.5)
            )
        proxy.set_mode(ProxyMode.PASS)
        assert len(await a.line("l")) == 1
