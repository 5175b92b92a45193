"""AcquireLock over a store in memory: who owns, who waits, and what is left of those who give up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.core.lock_order import MAX_WAITERS, LockEntry, LockMode
from coordinator.errors import EtcdUnavailable, OutcomeUnknown, Reason, RequestError
from coordinator.services.lock_lines import Standing
from tests.support.clock import SteppingClock
from tests.support.lock_bench import NS, LockCoordinator, settle
from tests.support.memory_locks import MemoryLocks

A, B, C = "00000000000000a1", "00000000000000b2", "00000000000000c3"


@pytest.fixture
def store() -> MemoryLocks:
    made = MemoryLocks()
    made.sessions |= {A, B, C}
    return made


@pytest.fixture
async def one(store: MemoryLocks) -> AsyncIterator[LockCoordinator]:
    coordinator = LockCoordinator(store, SteppingClock())
    await coordinator.start()
    yield coordinator
    await coordinator.stop()


def waiting(
    coordinator: LockCoordinator, *names: str, session: str, **more: object
) -> asyncio.Task[list[LockEntry]]:
    return asyncio.ensure_future(
        coordinator.take(*names, session=session, wait_ms=20_000, **more)  # type: ignore[arg-type]
    )


async def refused(awaitable: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await awaitable  # type: ignore[misc]
    return caught.value


async def test_a_free_lock_costs_one_commit_and_no_read(one: LockCoordinator, store: MemoryLocks) -> None:
    [entry] = await one.take("l", session=A, value=b"me")
    assert (store.commits, store.reads) == (1, 0)
    assert [(e.session, e.revision, e.value) for e in store.line("l")] == [(A, entry.revision, b"me")]
    assert await one.give(entry) == 1
    assert (store.commits, store.reads) == (2, 0)
    assert store.line("l") == []


async def test_a_held_lock_is_refused_with_holder_and_token_and_nothing_is_left(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    [held] = await one.take("l", session=A)
    error = await refused(one.take("l", session=B))
    assert error.reason is Reason.LOCK_HELD
    assert error.metadata == {"name": "l", "holder": A, "token": str(one.locks.token_of(held))}
    assert error.retry_after_ms
    assert len(store.line("l")) == 1


async def test_a_failed_try_is_told_to_come_later_and_then_not_looked_at(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    [entry] = await one.take("l", session=A)
    delay = (await refused(one.take("l", session=B))).retry_after_ms
    assert delay == 50
    before = (store.commits, store.reads)
    assert (await refused(one.take("l", session=B))).reason is Reason.RELOCK_THROTTLED
    assert (store.commits, store.reads) == before
    await one.give(entry)
    assert isinstance(one.clock, SteppingClock)
    await one.clock.advance(0.051)
    assert await one.take("l", session=B)


async def test_readers_share_and_a_burst_of_them_is_no_contention(one: LockCoordinator) -> None:
    tries = [one.take("l", session=A, request=f"r{n}", mode=LockMode.SHARED) for n in range(20)]
    assert len(await asyncio.gather(*tries)) == 20


async def test_a_semaphore_has_as_many_owners_as_permits(one: LockCoordinator) -> None:
    sem = {"mode": LockMode.SEMAPHORE, "permits": 2}
    first = await one.take("l", session=A, **sem)  # type: ignore[arg-type]
    await one.take("l", session=B, **sem)  # type: ignore[arg-type]
    assert (await refused(one.take("l", session=C, **sem))).reason is Reason.LOCK_HELD  # type: ignore[arg-type]
    third = waiting(one, "l", session=C, request="w", **sem)
    await settle()
    await one.give(*first)
    assert await third


async def test_semaphores_that_disagree_are_told_both_sizes(one: LockCoordinator, store: MemoryLocks) -> None:
    await one.take("l", session=A, mode=LockMode.SEMAPHORE, permits=2)
    for wait_ms in (0, 1000):
        error = await refused(one.take("l", session=B, mode=LockMode.SEMAPHORE, permits=3, wait_ms=wait_ms))
        assert error.reason is Reason.PERMITS_MISMATCH
        assert error.metadata == {"name": "l", "asked": "3", "current": "2"}
    assert len(store.line("l")) == 1


async def test_a_disagreement_that_came_in_between_is_taken_out_of_the_line(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    other = LockCoordinator(store, SteppingClock())
    watch = await other.start()
    watch.held = True
    await one.take("l", session=A)
    # Seen by `other` as held by A alone; B's semaphore of 2 is on its way to its watch.
    watch.deliver(1)
    sem = waiting(one, "l", session=B, mode=LockMode.SEMAPHORE, permits=2)
    await settle()
    odd = waiting(other, "l", session=C, mode=LockMode.SEMAPHORE, permits=3)
    await settle()
    assert len(store.line("l")) == 3
    watch.release()
    await settle()
    assert (await refused(odd)).reason is Reason.PERMITS_MISMATCH
    assert [e.session for e in store.line("l")] == [A, B]
    sem.cancel()
    await other.stop()


async def test_several_names_are_had_all_or_none(one: LockCoordinator, store: MemoryLocks) -> None:
    await one.take("y", session=A)
    error = await refused(one.take("x", "y", "z", session=B))
    assert error.metadata["name"] == "y"
    assert store.line("x") == []
    assert [e.name for e in await one.take("z", "x", session=B, request="2")] == ["z", "x"]


async def test_one_release_wakes_the_first_in_line_alone(one: LockCoordinator, store: MemoryLocks) -> None:
    [held] = await one.take("l", session=A)
    second = waiting(one, "l", session=B)
    await settle()
    third = waiting(one, "l", session=C)
    await settle()
    assert not second.done()
    await one.give(held)
    await settle()
    [now] = await second
    assert not third.done()
    assert now.revision < store.line("l")[1].revision
    await one.give(now)
    assert (await third)[0].session == C


async def test_callers_of_several_names_in_opposite_order_do_not_deadlock(one: LockCoordinator) -> None:
    tasks = [
        waiting(one, *names, session=session, request=str(n))
        for n, (session, names) in enumerate([(A, ("x", "y")), (B, ("y", "x")), (C, ("x", "y"))] * 5)
    ]
    served = 0
    for _ in range(100):
        await settle()
        for task in [t for t in tasks if t.done()]:
            tasks.remove(task)
            await one.give(*task.result())
            served += 1
    assert (served, tasks) == (15, [])


async def test_a_wait_in_vain_leaves_nothing_behind_and_is_not_charged(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    assert isinstance(one.clock, SteppingClock)
    await one.take("l", session=A)
    task = waiting(one, "l", session=B)
    await settle()
    assert len(store.line("l")) == 2
    await one.clock.advance(20.1)
    error = await refused(task)
    assert (error.reason, error.metadata["holder"]) == (Reason.LOCK_HELD, A)
    assert [e.session for e in store.line("l")] == [A]
    assert (await refused(one.take("l", session=B, request="t"))).reason is Reason.LOCK_HELD


async def test_a_caller_that_goes_away_leaves_nothing_behind(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    await one.take("l", session=A)
    task = waiting(one, "l", session=B)
    await settle()
    task.cancel()
    await settle()
    assert [e.session for e in store.line("l")] == [A]


async def test_a_caller_that_goes_away_during_its_commit_leaves_nothing_behind(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    store.gate.clear()
    for wait_ms in (0, 1000):
        task = asyncio.ensure_future(one.take(f"l{wait_ms}", session=A, wait_ms=wait_ms))
        await settle()
        task.cancel()
    store.gate.set()
    await settle()
    assert store.entries == {}
    assert one.cleanup.removed == 2


async def test_a_repeat_finds_its_entry_and_the_first_call_s_clean_up_leaves_it_alone(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    other = LockCoordinator(store, SteppingClock())
    await other.start()
    [held] = await one.take("l", session=A)
    first = waiting(one, "l", session=B, request="w")
    await settle()
    again = waiting(other, "l", session=B, request="w", repeats=1)
    await settle()
    [_, stands] = store.line("l")
    assert stands.version > stands.revision
    first.cancel()
    await settle()
    assert len(store.line("l")) == 2, "adopted"
    await one.give(held)
    await settle()
    assert [e.revision for e in await again] == [stands.revision]
    await other.stop()


async def test_a_first_send_that_comes_late_leaves_the_repeat_s_entry_alone(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    other = LockCoordinator(store, SteppingClock())
    await other.start()
    [held] = await one.take("l", session=A)
    again = waiting(other, "l", session=B, request="w", repeats=1)
    await settle()
    late = waiting(one, "l", session=B, request="w")
    await settle()
    [_, stands] = store.line("l")
    assert (stands.version, stands.repeats) == (stands.revision, 1), "not adopted"
    late.cancel()
    await settle()
    await one.give(held)
    assert [e.revision for e in await again] == [stands.revision]
    await other.stop()


async def test_a_twin_of_the_same_number_takes_nothing_out_of_the_line_nor_from_its_holder(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    other = LockCoordinator(store, SteppingClock())
    await other.start()
    [held] = await one.take("l", session=A)
    first = waiting(one, "l", session=B, request="w", repeats=1)
    await settle()
    for _ in range(2):
        twin = waiting(other, "l", session=B, request="w", repeats=1)
        await settle()
        twin.cancel()
        await settle()
    assert len(store.line("l")) == 2
    await one.give(held)
    [mine] = await first
    for steps in range(12):
        twin = waiting(other, "l", session=B, request="w", repeats=1)
        await settle(steps)
        twin.cancel()
        await settle()
    assert [e.revision for e in store.line("l")] == [mine.revision]
    await other.stop()


async def test_a_twin_whose_entry_went_with_the_other_one_is_told_to_repeat(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    other = LockCoordinator(store, SteppingClock())
    await other.start()
    await one.take("l", session=A)
    first = waiting(one, "l", session=B, request="w")
    await settle()
    twin = waiting(other, "l", session=B, request="w")
    await settle()
    first.cancel()
    await settle()
    assert (await refused(twin)).reason is Reason.OUTCOME_UNKNOWN
    assert len(store.line("l")) == 1
    again = waiting(other, "l", session=B, request="w", repeats=1)
    await settle()
    assert len(store.line("l")) == 2
    again.cancel()
    await settle()
    await other.stop()


@pytest.mark.parametrize("waits", [0, 20_000], ids=["at once", "in line"])
async def test_a_call_that_is_cancelled_at_any_step_leaves_nothing_behind_at_once(
    waits: int, one: LockCoordinator, store: MemoryLocks
) -> None:
    answered = 0
    for steps in range(40):
        name = f"l{steps}"
        held = await one.take(name, session=A) if waits else []
        call = asyncio.ensure_future(one.take(name, session=B, wait_ms=waits))
        await settle(steps % 20)
        if held:
            giving = asyncio.ensure_future(one.give(*held))
            await settle(steps // 4)
            call.cancel()
            await giving
        call.cancel()
        await settle()
        if call.cancelled():
            assert store.line(name) == [], steps
        else:
            answered += 1
            await one.give(*call.result())
    assert 0 < answered < 40


async def test_an_owner_s_repeat_gets_the_same_token(one: LockCoordinator, store: MemoryLocks) -> None:
    [first] = await one.take("l", session=A)
    [again] = await one.take("l", session=A)
    assert first.revision == again.revision
    assert await one.give(again) == 1


async def test_other_content_under_the_same_request_id_is_refused(one: LockCoordinator) -> None:
    await one.take("l", session=A)
    assert (await refused(one.take("l", session=A, value=b"x"))).reason is Reason.REQUEST_ID_REUSED


async def test_an_unknown_outcome_is_told_as_such_and_its_repeat_finds_the_lock(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    store.failures.append(OutcomeUnknown("lost"))
    assert (await refused(one.take("l", session=A))).reason is Reason.OUTCOME_UNKNOWN
    [stands] = store.line("l")
    assert [e.revision for e in await one.take("l", session=A)] == [stands.revision]


async def test_a_store_in_trouble_is_told_and_changes_nothing(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    store.failures.append(EtcdUnavailable("away"))
    assert (await refused(one.take("l", session=A))).reason is Reason.ETCD_UNAVAILABLE
    assert store.entries == {}


async def test_a_session_that_has_ended_gets_nothing(one: LockCoordinator, store: MemoryLocks) -> None:
    store.sessions.discard(B)
    assert (await refused(one.take("l", session=B))).reason is Reason.SESSION_NOT_FOUND
    await one.take("l", session=A)
    task = waiting(one, "l", session=C)
    await settle()
    store.end(C)
    assert (await refused(task)).reason is Reason.SESSION_NOT_FOUND


async def test_a_dead_waiter_never_owns_and_the_next_does(one: LockCoordinator, store: MemoryLocks) -> None:
    [held] = await one.take("l", session=A)
    dead = waiting(one, "l", session=B)
    await settle()
    alive = waiting(one, "l", session=C)
    await settle()
    store.end(B)
    await one.give(held)
    assert (await alive)[0].session == C
    assert (await refused(dead)).reason is Reason.SESSION_NOT_FOUND


async def test_a_revoked_place_is_told_as_lost(one: LockCoordinator, store: MemoryLocks) -> None:
    await one.take("l", session=A)
    task = waiting(one, "l", session=B)
    await settle()
    [_, stands] = store.line("l")
    await one.locks.revoke(NS, "l", one.locks.token_of(stands), reason="", deadline=1e9)
    assert (await refused(task)).reason is Reason.LOCK_LOST


async def test_ownership_waits_for_the_watch_to_have_come_to_the_entry(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    other = LockCoordinator(store, SteppingClock())
    watch = await other.start()
    [held] = await one.take("l", session=A)
    first = waiting(one, "l", session=B)
    await settle()
    watch.held = True
    # `other` does not know of B's entry yet when it puts C's own, and then A's goes.
    second = waiting(other, "l", session=C)
    await settle()
    store.watches[0].held = True
    await one.give(held)
    watch.pending, late = watch.pending[-1:], watch.pending[:-1]
    await settle()
    assert not second.done()
    watch.pending = late + watch.pending
    watch.release()
    store.watches[0].release()
    await settle()
    assert first.done()
    assert not second.done()
    second.cancel()
    await other.stop()


async def test_what_the_watch_tells_after_a_look_is_known_to_be_the_past(one: LockCoordinator) -> None:
    def entry(waiter: str, revision: int) -> LockEntry:
        exclusive = LockMode.EXCLUSIVE
        return LockEntry(
            name="l", waiter=waiter, session=A, mode=exclusive, revision=revision, version=revision
        )

    early, gone, new = entry("a", 15), entry("b", 18), entry("c", 27)
    one.lines.lock_put(NS, early)
    one.lines.locks_passed(NS, 17)
    one.lines.looked(NS, "l", [], 25)
    one.lines.lock_put(NS, gone)
    one.lines.locks_passed(NS, 20)
    assert one.lines.standing(NS, gone) is Standing.GONE, "not an owner, though the first one is forgotten"
    one.lines.lock_deleted(NS, "l", "b", 23)
    one.lines.lock_put(NS, new)
    one.lines.locks_passed(NS, 27)
    assert one.lines.standing(NS, new) is Standing.OWNS


async def test_a_silent_watch_is_made_up_for_by_looks(one: LockCoordinator, store: MemoryLocks) -> None:
    [held] = await one.take("l", session=A)
    task = waiting(one, "l", session=B)
    await settle()
    store.watches[0].held = True
    await store.delete(NS, [held], deadline=1e9)
    await settle()
    assert not task.done()
    assert await one.lines.run_once() == 1
    assert await task


async def test_no_more_than_a_thousand_wait(one: LockCoordinator, store: MemoryLocks) -> None:
    await one.take("l", session=A)
    await asyncio.gather(
        *(
            store.acquire(
                NS,
                [LockEntry(name="l", waiter=f"w{n}", session=C, mode=LockMode.EXCLUSIVE)],
                after=None,
                deadline=0,
            )
            for n in range(MAX_WAITERS - 1)
        )
    )
    last = waiting(one, "l", session=B, request="last")
    await settle()
    assert not last.done()
    assert (await refused(waiting(one, "l", session=B, request="more"))).reason is Reason.TOO_MANY_REQUESTS
    # Two coordinators, each of which saw one place left: the later entry is surplus, and goes.
    late = LockEntry(name="l", waiter="late", session=C, mode=LockMode.EXCLUSIVE)
    put = await store.acquire(NS, [late], after=None, deadline=0)
    assert put.won
    stands = store.entries["l", "late"]
    assert one.lines.standing(NS, stands) is Standing.SURPLUS
    last.cancel()


async def test_claims_and_locks_share_the_session_s_limit(one: LockCoordinator, store: MemoryLocks) -> None:
    for n in range(500):
        await one.take(f"l{n}", session=A, request=f"r{n}")
    assert (await refused(one.take("more", session=A))).reason is Reason.SESSION_FULL
    assert await one.take("l7", session=A, request="r7"), "a repeat needs no room"


async def test_a_drain_answers_those_who_wait_and_keeps_their_places(
    one: LockCoordinator, store: MemoryLocks
) -> None:
    other = LockCoordinator(store, SteppingClock())
    await other.start()
    [held] = await one.take("l", session=A)
    task = waiting(one, "l", session=B, request="w")
    await settle()
    one.acquisition.drain()
    assert (await refused(task)).reason is Reason.DRAINING
    assert (await refused(one.take("m", session=B))).reason is Reason.DRAINING
    later = waiting(other, "l", session=C)
    await settle()
    again = waiting(other, "l", session=B, request="w")
    await settle()
    await other.give(held)
    assert (await again)[0].session == B
    assert not later.done()
    later.cancel()
    await other.stop()
