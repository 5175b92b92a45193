"""Streams of workers: credits, the outbox, who is told to stop, and what goes back when a stream ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import Reason, RequestError
from coordinator.services.api import ClaimedJob, ClaimQuery
from coordinator.services.work_credit import LARGEST_BYTES, LARGEST_JOBS, Credit
from coordinator.services.work_outbox import Answer, Outbox, StopAsked
from coordinator.services.work_stream import LaneOpening, WorkOpening, WorkStream, WorkStreamConfig
from coordinator.services.work_streams import WorkStreams
from tests.support.fake_ports import StillFeeds
from tests.support.polling import eventually
from tests.unit.services.workbench import NS, Coordinator, S, bench_with, ids

WAYS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 300), st.integers(0, 5_000)),
        st.tuples(st.just("reserve"), st.integers(1, 100), st.integers(1, 3_000)),
        st.tuples(st.just("spend"), st.integers(0, 100), st.integers(0, 400)),
    ),
    max_size=60,
)


@given(WAYS)
def test_what_is_taken_never_exceeds_what_was_given(ways: list[tuple[str, int, int]]) -> None:
    credit = Credit("c")
    given_jobs = taken = given_bytes = 0
    open_calls: list[tuple[int, int]] = []
    sent: list[tuple[int, int]] = []
    for way, one, two in ways:
        if way == "add":
            try:
                credit.add(one, two)
            except RequestError:
                continue
            given_jobs += one
            given_bytes += two or one * (1 << 20)
        elif way == "reserve":
            reserved = credit.reserve(one, two)
            if reserved[0]:
                open_calls.append(reserved)
        elif open_calls:
            reserved = open_calls.pop(0)
            jobs = min(one, reserved[0])
            # As dispatch takes: whole jobs while they fit, and the first whatever it has.
            size = 0
            count = 0
            while count < jobs and (count == 0 or size + two <= reserved[1]):
                size += two
                count += 1
            credit.spend(reserved, count, size)
            taken += count
            sent.append((count, size))
        promised = sum(jobs for jobs, _ in open_calls)
        assert taken + promised <= given_jobs
        assert given_jobs - taken - promised == credit.jobs
    # A call may exceed its bytes by its first job alone.
    assert sum(size for _, size in sent) <= given_bytes + 400 * len(sent)


@pytest.mark.parametrize(("jobs", "size"), [(-1, 0), (0, -1), (LARGEST_JOBS + 1, 0), (1, LARGEST_BYTES + 1)])
def test_a_credit_that_is_too_large_or_negative_is_refused_and_changes_nothing(jobs: int, size: int) -> None:
    credit = Credit("lanes[0].credit")
    with pytest.raises(RequestError) as refusal:
        credit.add(jobs, size)

    assert (Reason.VALIDATION_FAILED, 0, 0) == (refusal.value.reason, credit.jobs, credit.bytes)


def test_credit_that_calls_have_reserved_counts_as_outstanding() -> None:
    credit = Credit("c")
    credit.add(LARGEST_JOBS, 0)
    credit.reserve(100, 1 << 20)
    with pytest.raises(RequestError):
        credit.add(1, 1)


def test_a_lane_without_bytes_takes_nothing_until_more_comes() -> None:
    credit = Credit("c")
    credit.add(5, 100)
    reserved = credit.reserve(5, 1_000)
    credit.spend(reserved, 1, 300)

    assert (0, 0) == credit.reserve(5, 1_000)
    credit.add(0, 250)
    assert (4, 50) == credit.reserve(5, 1_000)


async def claimed(coordinator: Coordinator, *names: str) -> list[ClaimedJob]:
    await coordinator.submit(*names)
    return await coordinator.claim(n=len(names))


async def test_the_outbox_sends_claims_before_their_stops_and_each_stop_once() -> None:
    coordinator = await bench_with()
    jobs = await claimed(coordinator, "a", "b")
    outbox = Outbox()
    outbox.put_stop(StopAsked("a", 1))
    outbox.put_stop(StopAsked("a", 1))
    assert outbox.put_claims(jobs)
    outbox.put_answer("said")

    assert [jobs, Answer("said"), [StopAsked("a", 1)]] == [await outbox.take() for _ in range(3)]


async def test_an_outbox_that_has_ended_writes_answers_and_no_claims() -> None:
    coordinator = await bench_with()
    jobs = await claimed(coordinator, "a")
    outbox = Outbox()
    outbox.put_claims(jobs)
    outbox.put_answer("said")
    outbox.end(ValueError("why"))

    assert Answer("said") == await outbox.take()
    with pytest.raises(ValueError, match="why"):
        await outbox.take()
    assert not outbox.put_claims(jobs)
    assert jobs == outbox.withdraw()


def streams_of(coordinator: Coordinator, claims: Any = None, **config: Any) -> WorkStreams:
    return WorkStreams(
        claims or coordinator.dispatch,
        coordinator.session_store,
        StillFeeds(),
        coordinator.holders,
        coordinator.abandoned,
        coordinator.clock,
        WorkStreamConfig(**config),
        fresh=coordinator.index.ready,
    )


def opening(*, jobs: int = 10, size: int = 0, request: str = "s1", lanes: int = 1) -> WorkOpening:
    lane = LaneOpening(queues=(("q", "t"),), jobs=jobs, bytes=size)
    return WorkOpening(session_id=S, request_id=request, lanes=(lane,) * lanes)


async def next_claims(stream: WorkStream) -> list[str]:
    async with asyncio.timeout(2):
        outgoing = await stream.outbox.take()
    assert isinstance(outgoing, list)
    return ids([one for one in outgoing if isinstance(one, ClaimedJob)])


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_stream_stands_in_line_and_gets_the_job_that_arrives() -> None:
    coordinator = await bench_with()
    streams = streams_of(coordinator)
    async with streams.open(NS, opening()) as stream:
        await settled()
        assert 1 == coordinator.dispatch.waiting
        await coordinator.submit("a")
        assert ["a"] == await next_claims(stream)
    assert (0, 0) == (coordinator.dispatch.waiting, streams.open_streams)


async def test_claims_that_no_writer_took_go_back_and_what_it_took_does_not() -> None:
    coordinator = await bench_with()
    async with streams_of(coordinator).open(NS, opening(jobs=1)) as stream:
        await coordinator.submit("a")
        assert ["a"] == await next_claims(stream)
        stream.add_credit(0, 5, 0)
        await coordinator.submit("b")
        await settled()
        assert 1 == stream.outbox.waiting_claims
    await coordinator.abandoned.run_once()

    assert (1, "RUNNING", "PENDING") == (
        coordinator.abandoned.released,
        state(coordinator, "a"),
        state(coordinator, "b"),
    )


def state(coordinator: Coordinator, job_id: str) -> str:
    stored = coordinator.etcd.stored(NS, job_id)
    assert stored is not None
    return stored.job.state.name


async def test_lanes_stop_claiming_while_the_writer_is_behind() -> None:
    coordinator = await bench_with()
    async with streams_of(coordinator, batch=5, unwritten=9, loops=1).open(NS, opening(jobs=100)) as stream:
        await coordinator.submit(*(f"j{n:02}" for n in range(40)))
        await settled()
        behind = stream.outbox.waiting_claims
        await next_claims(stream)
        await settled()
        again = stream.outbox.waiting_claims

    assert 9 < behind <= 9 + 5
    assert 9 < again <= 9 + 5


async def test_a_newer_stream_ends_the_older_and_gets_what_arrives() -> None:
    coordinator = await bench_with()
    streams = streams_of(coordinator)
    async with (
        streams.open(NS, opening()) as older,
        streams.open(NS, opening(request="s2")) as newer,
    ):
        with pytest.raises(RequestError, match="newer stream"):
            await older.outbox.take()
        await coordinator.submit("a")
        assert ["a"] == await next_claims(newer)


async def test_a_stop_goes_to_the_stream_of_the_claims_session() -> None:
    coordinator = await bench_with()
    streams = streams_of(coordinator)
    async with streams.open(NS, opening()) as stream:
        await coordinator.submit("a")
        await next_claims(stream)
        claim = coordinator.holders.claim(NS, "a")
        assert claim is not None
        streams.stop_asked(NS, "a")

        assert [StopAsked("a", claim.token)] == await stream.outbox.take()


async def test_a_stop_that_overtakes_its_claim_is_sent_right_after_it() -> None:
    coordinator = await bench_with()
    streams = streams_of(coordinator)
    async with streams.open(NS, opening()) as stream:
        streams.stop_asked(NS, "a")
        await coordinator.submit("a")

        assert ["a"] == await next_claims(stream)
        stops = await stream.outbox.take()
    assert isinstance(stops, list)
    assert ["a"] == [stop.job_id for stop in stops if isinstance(stop, StopAsked)]


async def test_streams_end_at_a_drain_and_none_is_opened_any_more() -> None:
    coordinator = await bench_with()
    streams = streams_of(coordinator)
    async with streams.open(NS, opening()) as stream:
        streams.drain()
        with pytest.raises(RequestError) as ended:
            await stream.outbox.take()
    with pytest.raises(RequestError) as refused:
        async with streams.open(NS, opening()):
            pass

    assert (Reason.DRAINING, Reason.DRAINING) == (ended.value.reason, refused.value.reason)


async def test_what_is_being_claimed_at_a_drain_is_delivered_before_the_end() -> None:
    """A claim cut off between its commit and the stream would cost its job an attempt."""
    coordinator = await bench_with()
    streams = streams_of(coordinator)
    await coordinator.submit("a", "b")
    coordinator.etcd.hold()
    async with streams.open(NS, opening()) as stream:
        await eventually(lambda: bool(coordinator.etcd._queue), what="the claim is on its way to the store")
        coordinator.dispatch.drain()
        streams.drain()
        coordinator.etcd.go()
        claimed = await next_claims(stream)
        with pytest.raises(RequestError) as ended:
            await stream.outbox.take()

    assert ["a", "b"] == claimed
    assert Reason.DRAINING is ended.value.reason


async def test_there_are_no_more_streams_than_the_bound() -> None:
    coordinator = await bench_with()
    streams = streams_of(coordinator, max_streams=1)
    async with streams.open(NS, opening()):
        with pytest.raises(RequestError) as refused:
            async with streams.open(NS, opening(request="s2")):
                pass

    assert Reason.TOO_MANY_REQUESTS is refused.value.reason


async def test_streams_of_a_namespace_whose_watch_is_dead_end_after_some_looks_and_not_before() -> None:
    coordinator = await bench_with()
    streams = streams_of(coordinator)
    coordinator.index.freshness(NS, True)
    async with streams.open(NS, opening()) as stream:
        coordinator.index.freshness(NS, False)
        streams.look_once()
        streams.look_once()
        assert not stream.outbox.ended
        streams.look_once()
        with pytest.raises(RequestError) as ended:
            await stream.outbox.take()

    assert Reason.ETCD_UNAVAILABLE is ended.value.reason


class Failing:
    """Fails as it is told, then claims nothing; remembers what it was asked."""

    def __init__(self, *reasons: Reason) -> None:
        self.reasons = list(reasons)
        self.asked: list[ClaimQuery] = []

    async def claim_jobs(self, namespace: str, query: ClaimQuery, deadline: float) -> list[ClaimedJob]:
        self.asked.append(query)
        if self.reasons:
            raise RequestError(self.reasons.pop(0), "as told")
        if not query.repeat:
            await asyncio.Event().wait()
        return []


async def test_a_claim_of_unknown_outcome_is_repeated_as_a_repeat_of_the_same_request() -> None:
    coordinator = await bench_with()
    claims = Failing(Reason.OUTCOME_UNKNOWN, Reason.ETCD_UNAVAILABLE)
    async with streams_of(coordinator, claims, pause_s=0.001).open(NS, opening()):
        for _ in range(100):
            await coordinator.clock.advance(0.01)
            if len(claims.asked) == 4:
                break

    assert [False, True, True, False] == [query.repeat for query in claims.asked]
    first, *again, later = [query.request_id for query in claims.asked]
    assert [first, first] == again
    assert first != later


async def test_a_lane_that_began_without_credit_gets_its_claim_loops_with_it() -> None:
    coordinator = await bench_with()
    claims = Failing()
    async with streams_of(coordinator, claims, loops=3, jobs_per_loop=50).open(NS, opening(jobs=0)) as stream:
        await settled()
        assert [] == claims.asked
        stream.add_credit(0, 400, 0)
        await settled()

    assert [100, 100, 100] == [query.max_jobs for query in claims.asked]


@pytest.mark.parametrize("reason", [Reason.SESSION_NOT_FOUND, Reason.SESSION_FULL, Reason.EPOCH_REGRESSED])
async def test_what_no_other_try_mends_ends_the_stream_with_its_reason(reason: Reason) -> None:
    coordinator = await bench_with()
    async with streams_of(coordinator, Failing(reason)).open(NS, opening()) as stream:
        with pytest.raises(RequestError) as ended:
            await stream.outbox.take()

    assert reason is ended.value.reason
