"""Waiting for a job and following jobs: nothing is missed, nobody is kept after the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.core.commands import Complete
from coordinator.core.job import JobState
from coordinator.errors import Compacted, EtcdUnavailable, Reason, RequestError
from coordinator.ports import StateSink
from coordinator.services.api import JobFilter, JobView, Settle, WatchedJob
from coordinator.services.job_changes import JobChanges
from coordinator.services.queries import Queries
from coordinator.services.subscription import Subscription, SubscriptionConfig
from tests.support.builders import a_job, store_job
from tests.unit.services.conftest import World


@pytest.fixture
async def subscription(world: World) -> AsyncIterator[Subscription]:
    made = Subscription(world.store, Queries(world.store, world.holders), world.clock)
    yield made
    await made.close()


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def start_wait(
    world: World, subscription: Subscription, job_id: str = "j1"
) -> asyncio.Task[tuple[JobView, bool]]:
    return asyncio.create_task(subscription.wait("default", job_id, 20.0, world.deadline + 60))


async def complete(world: World, job_id: str, token: int, result: bytes = b"r") -> None:
    item = Settle(job_id, Complete(token=token, digest=b"", result=result))
    await world.settlement.settle("default", [item], world.deadline)


async def test_a_wait_ends_when_the_job_does_and_brings_its_result(
    world: World, subscription: Subscription
) -> None:
    claimed = await world.running()
    waiting = start_wait(world, subscription)
    await turns()
    assert not waiting.done()
    await complete(world, "j1", claimed.token, b"x" * 2_000)
    view, finished = await waiting
    assert finished
    assert view.result == b"x" * 2_000


async def test_a_wait_for_a_job_that_has_ended_answers_at_once(
    world: World, subscription: Subscription
) -> None:
    claimed = await world.running()
    await complete(world, "j1", claimed.token)
    view, finished = await start_wait(world, subscription)
    assert finished
    assert view.stored.job.state is JobState.SUCCEEDED


async def test_a_wait_that_runs_out_answers_the_job_as_it_then_stands(
    world: World, subscription: Subscription
) -> None:
    await store_job(world.store, a_job())
    waiting = start_wait(world, subscription)
    await turns()
    await JobChanges(world.store, world.holders, world.clock).update(
        "default", "j1", "", 1, None, None, world.deadline
    )
    await world.clock.advance(20.1)
    view, finished = await waiting
    assert not finished
    assert view.stored.job.terms.priority == 1


async def test_a_change_between_subscribing_and_reading_is_not_missed(
    world: World, subscription: Subscription
) -> None:
    claimed = await world.running()
    read = world.store.read

    async def slow_read(*args: object, **kwargs: object) -> object:
        snapshot = await read(*args, **kwargs)  # type: ignore[arg-type]
        world.store.read = read  # type: ignore[method-assign]
        await complete(world, "j1", claimed.token)
        return snapshot

    world.store.read = slow_read  # type: ignore[method-assign,assignment]
    view, finished = await start_wait(world, subscription)
    assert finished
    assert view.stored.job.state is JobState.SUCCEEDED


async def test_waiting_for_nobody_or_for_a_job_that_is_deleted_is_not_found(
    world: World, subscription: Subscription
) -> None:
    with pytest.raises(RequestError) as caught:
        await start_wait(world, subscription, "nobody")
    assert caught.value.reason is Reason.JOB_NOT_FOUND
    await store_job(world.store, a_job())
    waiting = start_wait(world, subscription)
    await turns()
    world.etcd.write((), world.etcd.keys_of("default", "j1"))
    with pytest.raises(RequestError) as caught:
        await waiting
    assert caught.value.reason is Reason.JOB_NOT_FOUND


async def test_many_waiters_share_one_watch_that_ends_a_little_after_the_last(
    world: World, subscription: Subscription
) -> None:
    claims = {f"j{n}": await world.running(f"j{n}") for n in range(20)}
    waiting = [start_wait(world, subscription, job_id) for job_id in claims for _ in range(3)]
    await turns()
    assert world.store.watching == 1
    for job_id, claimed in claims.items():
        await complete(world, job_id, claimed.token)
    assert all(finished for _, finished in await asyncio.gather(*waiting))
    await world.clock.advance(4)
    assert world.store.watching == 1
    await world.clock.advance(2)
    assert world.store.watching == 0
    assert not subscription._feeds


async def test_all_waits_and_streams_end_at_drain(world: World, subscription: Subscription) -> None:
    await store_job(world.store, a_job())
    waiting = start_wait(world, subscription)
    stream = subscription.watch("default", JobFilter(), 0)
    await anext(stream)
    await turns()
    subscription.drain()
    view, finished = await waiting
    assert not finished
    assert view.stored.job.state is JobState.PENDING
    with pytest.raises(RequestError) as caught:
        await anext(stream)
    assert caught.value.reason is Reason.DRAINING
    with pytest.raises(RequestError) as caught:
        await start_wait(world, subscription)
    assert caught.value.reason is Reason.DRAINING


async def test_a_stream_tells_its_start_and_then_every_matching_change(
    world: World, subscription: Subscription
) -> None:
    stream = subscription.watch("default", JobFilter(queue="q"), 0)
    first = await anext(stream)
    assert first == WatchedJob(world.etcd.revision)
    await store_job(world.store, a_job("other", queue="else"))
    stored = await store_job(world.store, a_job())
    assert await anext(stream) == WatchedJob(stored.revision, "j1", stored)
    world.etcd.write((), world.etcd.keys_of("default", "j1"))
    deleted = await anext(stream)
    assert (deleted.job_id, deleted.stored) == ("j1", None)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_stream_resumes_after_the_revision_it_is_given(
    world: World, subscription: Subscription
) -> None:
    first = await store_job(world.store, a_job("a"))
    second = await store_job(world.store, a_job("b"))
    stream = subscription.watch("default", JobFilter(), first.revision)
    assert await anext(stream) == WatchedJob(first.revision)
    assert await anext(stream) == WatchedJob(second.revision, "b", second)
    third = await store_job(world.store, a_job("c"))
    assert await anext(stream) == WatchedJob(third.revision, "c", third)
    await stream.aclose()  # type: ignore[attr-defined]
    assert world.store.watching == 0


async def test_a_revision_that_is_gone_is_told_as_that(world: World, subscription: Subscription) -> None:
    await store_job(world.store, a_job())
    world.etcd.compacted = world.etcd.revision
    with pytest.raises(RequestError) as caught:
        await anext(subscription.watch("default", JobFilter(), 1))
    assert caught.value.reason is Reason.REVISION_COMPACTED


async def test_a_slow_reader_gets_what_was_kept_and_where_to_resume(world: World) -> None:
    config = SubscriptionConfig(buffer=3)
    subscription = Subscription(world.store, Queries(world.store, world.holders), world.clock, config)
    stream = subscription.watch("default", JobFilter(), 0)
    await anext(stream)
    stored = [await store_job(world.store, a_job(f"j{n}")) for n in range(5)]
    kept = [await anext(stream) for _ in range(3)]
    assert [message.stored for message in kept] == stored[:3]
    with pytest.raises(RequestError) as caught:
        await anext(stream)
    assert caught.value.reason is Reason.TOO_MANY_REQUESTS
    assert caught.value.metadata["resume_revision"] == str(stored[2].revision)
    await subscription.close()


async def test_there_is_a_bound_on_waiters_streams_and_resumed_streams(world: World) -> None:
    config = SubscriptionConfig(max_waiters=1, max_streams=2, max_resumed=1)
    subscription = Subscription(world.store, Queries(world.store, world.holders), world.clock, config)
    await store_job(world.store, a_job())
    waiting = start_wait(world, subscription)
    await turns()
    streams = [subscription.watch("default", JobFilter(), 1)]
    await anext(streams[0])
    for refused in (
        start_wait(world, subscription),
        anext(subscription.watch("default", JobFilter(), 1)),
    ):
        with pytest.raises(RequestError) as caught:
            await refused
        assert caught.value.reason is Reason.TOO_MANY_REQUESTS
    await subscription.close()
    assert not (await waiting)[1]
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_a_watch_that_missed_changes_makes_waiters_read_again_and_ends_streams(world: World) -> None:
    """The shared watch falls behind a compaction while the job ends unseen."""
    watch = world.store.watch_states
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def breaking(namespace: str, *, after_revision: int, sink: StateSink, stop: object = None) -> None:
        sink.started(world.etcd.revision)
        world.store.watch_states = watch  # type: ignore[method-assign]
        await broken
        raise Compacted("planned", 99)

    world.store.watch_states = breaking  # type: ignore[method-assign]
    subscription = Subscription(world.store, Queries(world.store, world.holders), world.clock)
    claimed = await world.running()
    waiting = start_wait(world, subscription)
    stream = subscription.watch("default", JobFilter(), 0)
    await anext(stream)
    await turns()
    await complete(world, "j1", claimed.token)
    assert not waiting.done()
    broken.set_result(None)
    assert (await waiting)[1]
    with pytest.raises(RequestError) as caught:
        await anext(stream)
    assert caught.value.reason is Reason.REVISION_COMPACTED
    await subscription.close()


async def test_an_outage_of_the_watch_is_survived_without_a_gap(world: World) -> None:
    watch = world.store.watch_states
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def breaking(namespace: str, *, after_revision: int, sink: StateSink, stop: object = None) -> None:
        sink.started(world.etcd.revision)
        world.store.watch_states = watch  # type: ignore[method-assign]
        await broken
        raise EtcdUnavailable("planned")

    world.store.watch_states = breaking  # type: ignore[method-assign]
    subscription = Subscription(world.store, Queries(world.store, world.holders), world.clock)
    stream = subscription.watch("default", JobFilter(), 0)
    await anext(stream)
    broken.set_result(None)
    stored = await store_job(world.store, a_job())
    await world.clock.advance(0.3)
    assert (await anext(stream)).stored == stored
    await stream.aclose()  # type: ignore[attr-defined]
    await subscription.close()
