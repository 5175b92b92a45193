"""Releasing, checking, revoking, listing and observing locks, over a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from coordinator.core.fencing import make_token
from coordinator.core.lock_order import LockEntry, LockMode, job_waiter
from coordinator.core.notice import NoticeKind
from coordinator.errors import EtcdUnavailable, OutcomeUnknown, Reason, RequestError
from coordinator.services.lock_values import HeldName, LockView
from tests.support.builders import FAR
from tests.support.clock import SteppingClock
from tests.support.lock_bench import NS, LockCoordinator, settle
from tests.support.memory_locks import MemoryLocks

A, B = "00000000000000a1", "00000000000000b2"


@pytest.fixture
def store() -> MemoryLocks:
    made = MemoryLocks()
    made.sessions |= {A, B}
    return made


@pytest.fixture
async def one(store: MemoryLocks) -> AsyncIterator[LockCoordinator]:
    coordinator = LockCoordinator(store, SteppingClock())
    await coordinator.start()
    yield coordinator
    await coordinator.stop()


async def refused(awaitable: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await awaitable  # type: ignore[misc]
    return caught.value


async def test_an_old_token_releases_nothing_and_is_told_the_present_one(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    [old] = await one.take("l", session=A)
    await one.give(old)
    [new] = await one.take("l", session=A, request="2")
    error = await refused(one.give(old))
    assert error.reason is Reason.LOCK_LOST
    token = one.locks.token_of
    assert error.metadata == {"name": "l", "held": str(token(old)), "current": str(token(new))}
    assert len(store.line("l")) == 1


async def test_another_session_cannot_release(one: LockCoordinator, store: MemoryLocks) -> None:
    [entry] = await one.take("l", session=A)
    held = [HeldName("l", one.locks.token_of(entry))]
    for repeat in (False, True):
        with pytest.raises(RequestError) as caught:
            await one.locks.release(NS, B, held, repeat=repeat, deadline=FAR)
        assert caught.value.reason is Reason.LOCK_LOST
    assert len(store.line("l")) == 1


async def test_one_lost_lock_does_not_keep_the_others(one: LockCoordinator, store: MemoryLocks) -> None:
    x, y = await one.take("x", "y", session=A)
    await one.give(x)
    assert (await refused(one.give(x, y))).metadata["name"] == "x"
    assert store.entries == {}


async def test_a_repeat_is_no_error_while_the_session_is_open(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    [entry] = await one.take("l", session=A)
    assert await one.give(entry) == 1
    assert await one.give(entry, repeat=True) == 0
    store.end(A)
    assert (await refused(one.give(entry, repeat=True))).reason is Reason.LOCK_LOST


async def test_an_unknown_release_is_told_as_such_and_its_repeat_is_fine(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    [entry] = await one.take("l", session=A)
    store.failures.append(OutcomeUnknown("lost"))
    assert (await refused(one.give(entry))).reason is Reason.OUTCOME_UNKNOWN
    assert await one.give(entry, repeat=True) == 0
    [entry] = await one.take("m", session=A)
    store.failures.append(EtcdUnavailable("away"))
    assert (await refused(one.give(entry))).reason is Reason.ETCD_UNAVAILABLE
    assert len(store.line("m")) == 1


async def test_what_a_claim_holds_is_not_released_by_its_session(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    entry = LockEntry(name="l", waiter=job_waiter("j"), session=A, mode=LockMode.EXCLUSIVE, job_id="j")
    commit = await store.acquire(NS, [entry], after=0, deadline=FAR)
    held = [HeldName("l", make_token(1, commit.revision))]
    assert (
        await refused(one.locks.release(NS, A, held, repeat=False, deadline=FAR))
    ).reason is Reason.LOCK_LOST
    assert len(store.line("l")) == 1


async def test_tokens_of_another_epoch_or_of_the_future_change_nothing(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    [entry] = await one.take("l", session=A)
    old = HeldName("l", make_token(0, entry.revision))
    assert (
        await refused(one.locks.release(NS, A, [old], repeat=False, deadline=FAR))
    ).reason is Reason.LOCK_LOST
    future = HeldName("l", make_token(1, store.revision + 7))
    error = await refused(one.locks.release(NS, A, [future], repeat=False, deadline=FAR))
    assert (error.reason, error.metadata["name"]) == (Reason.EPOCH_REGRESSED, "l")
    assert len(one.notices.of(NoticeKind.EPOCH)) == 1
    one.present.regressed = True
    assert (await refused(one.give(entry))).reason is Reason.EPOCH_REGRESSED
    assert len(store.line("l")) == 1


async def test_a_clean_release_empties_the_callers_bucket(one: LockCoordinator) -> None:
    [entry] = await one.take("l", session=A)
    await refused(one.take("l", session=B))
    await one.give(entry)
    assert isinstance(one.clock, SteppingClock)
    await one.clock.advance(0.06)
    [entry] = await one.take("l", session=B)
    await one.give(entry)
    assert len(one.contention) == 1, "A's failed try of the last second alone counts"


async def test_check_knows_owners_and_no_waiters(one: LockCoordinator, store: MemoryLocks) -> None:
    [first] = await one.take("l", session=A, mode=LockMode.SHARED)
    [second] = await one.take("l", session=B, mode=LockMode.SHARED)
    waiting = asyncio.ensure_future(one.take("l", session=B, request="w", wait_ms=1000))
    await settle()
    tokens = [one.locks.token_of(entry) for entry in store.line("l")]
    answers = [await one.locks.check(NS, "l", token, FAR) for token in tokens]
    assert answers == [(True, tokens[1]), (True, tokens[1]), (False, tokens[1])]
    assert await one.locks.check(NS, "other", tokens[0], FAR) == (False, 0)
    assert [first.revision, second.revision] == [entry.revision for entry in store.line("l")][:2]
    waiting.cancel()


async def test_revoking_an_owner_lets_the_next_in(one: LockCoordinator, store: MemoryLocks) -> None:
    [held] = await one.take("l", session=A)
    waiting = asyncio.ensure_future(one.take("l", session=B, wait_ms=1000))
    await settle()
    token = one.locks.token_of(held)
    revoked = await one.locks.revoke(NS, "l", token, reason="stuck", deadline=FAR)
    assert revoked.session == A
    assert (await waiting)[0].session == B
    assert (
        await refused(one.locks.revoke(NS, "l", token, reason="", deadline=FAR))
    ).reason is Reason.LOCK_LOST


async def test_lists_go_by_name_in_pages(one: LockCoordinator) -> None:
    names = ["a", "b/1", "b/2", "z", "ä"]
    for name in names:
        await one.take(name, session=A, request=name)
    listed, cursor = [], ""
    for _ in range(5):
        page = await one.locks.list_locks(NS, 2, cursor, FAR)
        listed += [view.name for view in page.locks]
        cursor = page.cursor
        if not cursor:
            break
    assert listed == names
    error = await refused(one.locks.list_locks(NS, 2, "odd", FAR))
    assert (error.reason, error.fields[0].field) == (Reason.VALIDATION_FAILED, "page_token")


async def test_observers_see_the_owners_and_each_change(one: LockCoordinator) -> None:
    seen: list[list[bytes]] = []

    async def follow() -> None:
        async with aclosing(one.locks.observe(NS, "l")) as views:
            async for view in views:
                assert isinstance(view, LockView)
                seen.append([entry.value for entry in view.owners])

    following = asyncio.ensure_future(follow())
    await settle()
    [led] = await one.take("l", session=A, value=b"a")
    await settle()
    second = asyncio.ensure_future(one.take("l", session=B, value=b"b", wait_ms=1000))
    await settle()
    await one.give(led)
    await settle()
    assert seen == [[], [b"a"], [b"b"]], "a new waiter is no change of owners"
    assert second.done()
    one.locks.drain()
    one.lines.wake_all()
    with pytest.raises(RequestError) as caught:
        await following
    assert caught.value.reason is Reason.DRAINING


async def test_a_raised_epoch_ends_the_observers(one: LockCoordinator) -> None:
    views = one.locks.observe(NS, "l")
    await anext(views)
    one.present.epoch += 1
    await one.take("l", session=A)
    with pytest.raises(RequestError) as caught:
        await anext(views)
    assert caught.value.reason is Reason.NOT_READY
