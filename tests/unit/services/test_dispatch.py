"""The index proposes, the Txn decides; what is committed and cannot be delivered goes back."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core.effects import Slot, Where
from coordinator.core.invariants import check_job
from coordinator.core.job import Claim, JobState
from coordinator.errors import Reason, RequestError
from coordinator.services.dispatch import DispatchConfig
from coordinator.services.index import IndexConfig
from tests.support.builders import FAR, NOW_MS, a_claim, a_job, a_session, open_session, store_job
from tests.support.memory_etcd import Fault
from tests.unit.services.workbench import NS, S, bench_with, ids, polling


async def test_jobs_are_claimed_in_order_and_each_once() -> None:
    c = await bench_with()
    await c.submit("a", "b", "c")
    assert ids(await c.claim(n=2)) == ["a", "b"]
    assert ids(await c.claim(n=2, request="r2")) == ["c"]
    assert await c.claim(n=2, request="r3") == []


async def test_the_reply_carries_token_attempt_and_payload() -> None:
    c = await bench_with()
    await c.submit("a")
    (claimed,) = await c.claim()
    assert claimed.claim.token == c.etcd.position()
    assert claimed.stored.job.attempt == 1
    assert claimed.spec.payload == b"{}"


async def test_a_new_job_goes_straight_to_the_first_that_waits() -> None:
    c = await bench_with()
    async with polling(c, request="r1") as first, polling(c, request="r2") as second:
        await c.submit("a")
        assert ids(await asyncio.wait_for(first, 1)) == ["a"]
        assert not second.done()
        await c.submit("b")
        assert ids(await asyncio.wait_for(second, 1)) == ["b"]


async def test_two_that_wait_get_one_job_each() -> None:
    c = await bench_with()
    async with polling(c, request="r1") as first, polling(c, request="r2") as second:
        await c.submit("a", "b")
        assert sorted([*ids(await asyncio.wait_for(first, 1)), *ids(await asyncio.wait_for(second, 1))]) == [
            "a",
            "b",
        ]


async def test_a_poll_of_a_client_that_is_gone_is_handed_nothing() -> None:
    """Fault case 002 (a)."""
    c = await bench_with()
    async with polling(c, request="r1") as gone, polling(c, request="r2") as alive:
        gone.cancel()
        await asyncio.sleep(0)
        await c.submit("a")
        assert ids(await asyncio.wait_for(alive, 1)) == ["a"]
    assert c.dispatch.waiting == 0


async def test_a_claim_committed_for_a_caller_that_is_gone_goes_back_uncharged() -> None:
    """Fault case 003: the poll is cancelled just as a job is dispatched."""
    c = await bench_with()
    async with polling(c) as gone:
        c.etcd.hold()
        await_submit = asyncio.ensure_future(c.submit("a"))
        c.etcd.go()
        await await_submit
        c.etcd.hold()
        for _ in range(10):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        c.etcd.go()
    assert await c.abandoned.run_once() == 1
    stored = c.etcd.stored(NS, "a")
    assert stored is not None
    assert stored.job.state is JobState.PENDING
    assert (stored.job.failures, stored.job.lease_losses, stored.job.uncharged) == (0, 0, 1)
    assert ids(await c.claim(request="r2")) == ["a"]


async def test_a_lost_reply_is_answered_again_by_the_same_request() -> None:
    """Fault case 001."""
    c = await bench_with()
    await c.submit("a", "b")
    first = await c.claim(n=2)
    again = await c.claim(n=2, repeat=True)
    assert [(j.stored.job.job_id, j.claim.token) for j in again] == [
        (j.stored.job.job_id, j.claim.token) for j in first
    ]


async def test_a_repeat_whose_first_call_claimed_nothing_claims_if_it_may_wait() -> None:
    c = await bench_with()
    await c.submit("a")
    assert ids(await c.claim(repeat=True)) == [], "who may not wait only asks what that call claimed"
    assert ids(await c.claim(repeat=True, wait_ms=1)) == ["a"]


async def test_our_own_first_try_is_recognised_after_an_unknown_outcome() -> None:
    """Fault case 006: never two tokens for one claim, never a self-lockout."""
    c = await bench_with()
    await c.submit("a")
    c.etcd.faults.append(Fault.RESENT)
    (claimed,) = await c.claim()
    held = c.etcd.claim(NS, "a")
    assert held is not None
    assert claimed.claim.token == held.token


async def test_an_unknown_outcome_is_reported_as_unknown() -> None:
    c = await bench_with()
    await c.submit("a")
    c.etcd.faults.append(Fault.LOST_REQUEST)
    with pytest.raises(RequestError) as refusal:
        await c.claim()
    assert refusal.value.reason is Reason.OUTCOME_UNKNOWN
    assert ids(await c.claim(request="r2")) == ["a"], "it is still proposed to others"


async def test_a_refused_commit_leaves_the_job_for_others() -> None:
    c = await bench_with()
    await c.submit("a")
    c.etcd.faults.append(Fault.REFUSED)
    with pytest.raises(RequestError) as refusal:
        await c.claim()
    assert refusal.value.reason is Reason.TOO_MANY_REQUESTS
    assert ids(await c.claim(request="r2")) == ["a"]


async def test_an_ended_session_claims_nothing() -> None:
    c = await bench_with()
    await c.submit("a")
    await c.session_store.close(NS, S, deadline=FAR)
    with pytest.raises(RequestError) as refusal:
        await c.claim()
    assert refusal.value.reason is Reason.SESSION_NOT_FOUND
    await open_session(c.session_store, a_session("00000000000000b2"))
    assert ids(await c.claim(session="00000000000000b2")) == ["a"]


async def test_an_unknown_session_may_not_wait() -> None:
    c = await bench_with()
    with pytest.raises(RequestError) as refusal:
        await c.claim(session="00000000000000ff", wait_ms=10_000)
    assert refusal.value.reason is Reason.SESSION_NOT_FOUND


async def test_a_session_holds_no_more_keys_than_one_lease_should() -> None:
    c = await bench_with(config=DispatchConfig(session_keys=2))
    await c.submit("a", "b", "c")
    assert len(await c.claim(n=3)) == 2
    with pytest.raises(RequestError) as refusal:
        await c.claim(request="r2")
    assert refusal.value.reason is Reason.SESSION_FULL


async def test_a_reply_stays_within_its_bytes() -> None:
    """Fault case 090: nothing is claimed that cannot be carried."""
    c = await bench_with(config=DispatchConfig(reply_bytes=3_000))
    await c.submit("a", "b", "c", payload_size=1_000)
    assert len(await c.claim(n=3)) == 1
    assert len(await c.claim(n=3, request="r2")) == 1


async def test_a_job_whose_time_in_the_queue_is_over_is_not_claimed() -> None:
    c = await bench_with()
    await c.submit("a", queue_timeout_ms=1_000)
    await c.clock.advance((NOW_MS - c.clock.now_ms()) / 1000 + 2 if c.clock.now_ms() < NOW_MS + 1_000 else 0)
    assert await c.claim() == []
    assert c.expired == [(NS, "a")]


async def test_drain_answers_who_waits_and_refuses_who_comes() -> None:
    c = await bench_with()
    async with polling(c) as waiting:
        c.dispatch.drain()
        assert await asyncio.wait_for(waiting, 1) == []
    with pytest.raises(RequestError) as refusal:
        await c.claim(request="r2")
    assert refusal.value.reason is Reason.DRAINING


async def test_a_backlog_larger_than_the_window_is_served_whole_and_in_order() -> None:
    c = await bench_with(index_config=IndexConfig(window_capacity=10, spare_places=0))
    names = [f"j{i:03}" for i in range(57)]
    await c.submit(*names)
    served: list[str] = []
    for n in range(40):
        await c.index.refill_once()
        served += ids(await c.claim(n=3, request=f"r{n}"))
    assert served == names


async def test_while_there_are_few_windows_they_keep_more_of_what_was_stored_here() -> None:
    """A job that a window drops costs a second read of its record and of its payload."""
    c = await bench_with(
        index_config=IndexConfig(window_capacity=2, largest_window=6, spare_places=8, compare_interval=1e9)
    )
    await c.submit(*[f"j{i}" for i in range(9)])
    first = c.index.window((NS, "q", "t"))
    assert first is not None
    assert len(first) == 6
    for number in range(4):
        await store_job(c.jobs, a_job(f"other{number}", type=f"t{number}"))
    assert {window.capacity for window in c.index.windows().values()} == {2}


async def test_a_fresh_coordinator_finds_the_backlog() -> None:
    first = await bench_with()
    await first.submit("a", "b", "c")
    second = await bench_with(first.etcd, own_id="c2")
    assert ids(await second.claim(n=3)) == ["a", "b", "c"]


async def test_two_coordinators_never_claim_one_job_twice_and_both_serve_all() -> None:
    """Neither starves: what another prefers is taken a little later (fault case 083)."""
    first = await bench_with(members=["c1", "c2"])
    second = await bench_with(first.etcd, own_id="c2", members=["c1", "c2"])
    names = [f"j{i}" for i in range(20)]
    await first.submit(*names)
    await first.clock.advance(1)
    mine, theirs = await asyncio.gather(first.claim(n=20), second.claim(n=20, request="r2"))
    assert sorted(ids(mine) + ids(theirs)) == sorted(names)
    rest = await second.claim(n=20, request="r3")
    assert rest == []


async def test_a_job_that_another_coordinator_prefers_is_stolen_when_nobody_takes_it() -> None:
    first = await bench_with(members=["c1", "c2"])
    foreign = next(n for n in "abcdef" if not first.arrivals.is_ours(n))
    async with polling(first) as waiting:
        await first.submit(foreign)
        await first.clock.advance(1)
        assert ids(await asyncio.wait_for(waiting, 2)) == [foreign]


async def test_a_poll_that_comes_just_after_a_job_that_another_coordinator_prefers_gets_it_too() -> None:
    """Fault case 083: the job came while nobody waited, so its arrival woke nobody."""
    first = await bench_with(members=["c1", "c2"])
    foreign = next(n for n in "abcdef" if not first.arrivals.is_ours(n))
    await first.submit(foreign)
    async with polling(first) as waiting:
        await first.clock.advance(1)
        assert ids(await asyncio.wait_for(waiting, 2)) == [foreign]


async def test_claim_by_id_takes_that_job() -> None:
    c = await bench_with()
    await c.submit("a", "b")
    assert ids([await c.claim_one("b")]) == ["b"]
    assert ids(await c.claim(n=5, request="r2")) == ["a"]


async def test_claim_by_id_of_a_held_job_names_its_holder() -> None:
    c = await bench_with()
    await c.submit("a")
    (claimed,) = await c.claim()
    with pytest.raises(RequestError) as refusal:
        await c.claim_one("a", request="r2")
    assert refusal.value.reason is Reason.CLAIM_HELD
    assert refusal.value.metadata["holder"] == S
    assert refusal.value.metadata["token"] == str(claimed.claim.token)
    assert refusal.value.retry_after_ms


async def test_claim_by_id_can_wait_until_the_holder_lets_go() -> None:
    c = await bench_with()
    await c.submit("a")
    (claimed,) = await c.claim()
    waiting = asyncio.ensure_future(c.claim_one("a", wait_ms=10_000, request="r2"))
    for _ in range(20):
        await asyncio.sleep(0)
    c.abandoned.release(claimed.stored, claimed.claim)
    await c.abandoned.run_once()
    won = await asyncio.wait_for(waiting, 2)
    assert won.claim.token > claimed.claim.token


@pytest.mark.parametrize(
    ("job_id", "reason"), [("none", Reason.JOB_NOT_FOUND), ("later", Reason.NOT_CLAIMABLE)]
)
async def test_claim_by_id_says_why_not(job_id: str, reason: Reason) -> None:
    c = await bench_with()
    await store_job(c.jobs, a_job("later", run_at_ms=NOW_MS + 60_000))
    with pytest.raises(RequestError) as refusal:
        await c.claim_one(job_id)
    assert refusal.value.reason is reason


async def test_a_claim_key_is_never_overwritten() -> None:
    """A claim key left by hand: the job is not handed out beside it."""
    c = await bench_with()
    await c.submit("a")
    c.etcd.write([(Where(Slot.CLAIM, NS, "a"), _by_hand(), None)])
    assert await c.claim() == []
    assert c.dispatch.conflicts == 1


def _by_hand() -> Claim:
    return a_claim(a_job("a"), "00000000000000b2", nonce=b"by hand")


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_claim_handed_out_to_a_repeat_is_not_given_back_behind_its_back(by_id: bool) -> None:
    """P8: the first call is gone, its coordinator is about to give the claim back, and the repeat gets it.

    Given back at once, it would run elsewhere while its holder has a whole TTL of trust in it.
    """
    c = await bench_with()
    await c.submit("a")
    c.etcd.hold()
    first = asyncio.ensure_future(c.claim_one("a") if by_id else c.claim())
    for _ in range(10):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    c.etcd.go()
    for _ in range(10):
        await asyncio.sleep(0)
    again = [await c.claim_one("a")] if by_id else await c.claim(repeat=True)
    assert ids(again) == ["a"]
    assert await c.abandoned.run_once() == 0
    stored, held = c.etcd.stored(NS, "a"), c.etcd.claim(NS, "a")
    assert stored is not None
    assert held is not None
    assert stored.job.state is JobState.RUNNING
    assert held.token == again[0].claim.token
    assert stored.job.attempts[-1].token == held.token, "should the claim be lost, the record tells its token"
    assert not check_job(stored.job, held)


async def test_a_repeat_is_not_handed_a_claim_that_was_given_back() -> None:
    c = await bench_with()
    await c.submit("a")
    await c.claim()
    stored, held = c.etcd.stored(NS, "a"), c.etcd.claim(NS, "a")
    assert stored is not None
    assert held is not None
    c.abandoned.release(stored, held)
    c.etcd.hold()
    giving_back = asyncio.ensure_future(c.abandoned.run_once())
    await asyncio.sleep(0)
    repeat = asyncio.ensure_future(c.claim(repeat=True))
    for _ in range(10):
        await asyncio.sleep(0)
    c.etcd.go()
    assert await giving_back == 1
    assert await repeat == []


async def test_specs_are_kept_however_many_jobs_have_passed() -> None:
    """Entries leave a window in many ways: claimed, pushed out by better ones, cancelled, listed anew."""
    c = await bench_with(index_config=IndexConfig(window_capacity=4, spare_places=0, kept_spec_bytes=20))
    asked: list[bool] = []
    c.etcd.interfere.append(lambda op: asked.append(op.want_spec) if op.claim is not None else None)
    await c.jobs.register_type(NS, "q", "t", deadline=FAR)
    for place in range(40):  # each better than those before, two bytes of payload each
        await store_job(c.jobs, a_job(f"j{place}", counter=100 - place))
    while await c.claim(n=4, request="r"):
        await c.index.refill_once()
    await c.clock.advance(2.0)
    asked.clear()
    await store_job(c.jobs, a_job("last", counter=200))
    assert ids(await c.claim(request="r-last")) == ["last"]
    assert asked == [False]
