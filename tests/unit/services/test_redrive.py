"""RedriveJobs: what matches, a page at a time, no faster than asked, and nothing twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.core.commands import Fail
from coordinator.core.job import JobState
from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.ports import JobPage
from coordinator.services.api import Redriven, RedriveQuery, Settle
from coordinator.services.redrive import Redrive, RedriveConfig
from coordinator.services.retrying import Retrying
from tests.support.builders import a_job, claim_job, store_job
from tests.support.memory_etcd import Fault
from tests.unit.services.conftest import World
from tests.unit.services.test_retrying import dies

S = JobState


@pytest.fixture
def redrive(world: World) -> Redrive:
    return redrive_of(world)


def redrive_of(world: World, **config: Any) -> Redrive:
    retrying = Retrying(world.store, world.holders, world.gauge, world.clock)
    return Redrive(world.store, retrying, world.gauge, world.clock, RedriveConfig(**config))


def query(**fields: Any) -> RedriveQuery:
    return RedriveQuery(**{"states": frozenset(), "max_jobs": 100, "jobs_per_second": 1_000, **fields})


async def call(world: World, redrive: Redrive, *, seconds: float = 30.0, **fields: Any) -> Redriven:
    """One call; the clock is stepped as far as it sleeps."""
    deadline = world.clock.monotonic() + seconds
    task = asyncio.ensure_future(redrive.redrive("default", query(**fields), deadline))
    while not task.done():
        for _ in range(20):
            await asyncio.sleep(0)
        if not task.done():
            await world.clock.advance(0.01)
    return await task


async def refused(awaitable: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await awaitable
    return caught.value


async def dead(world: World, *job_ids: str, **terms: Any) -> None:
    for job_id in job_ids:
        await dies(world, job_id, **terms)


def states(world: World, *job_ids: str) -> list[S]:
    return [world.stored(job_id).job.state for job_id in job_ids]


async def test_all_that_failed_wait_again_and_the_rest_is_left_alone(world: World, redrive: Redrive) -> None:
    await dead(world, "a", "b")
    await store_job(world.store, a_job("c"))
    waiting = world.stored("c")

    done = await call(world, redrive)

    assert (done.job_ids, done.failures, done.cursor, done.examined) == (("a", "b"), (), "", 3)
    assert states(world, "a", "b") == [S.PENDING, S.PENDING]
    assert world.stored("c") == waiting


async def test_only_what_matches_is_retried(world: World, redrive: Redrive) -> None:
    await dead(world, "plain")
    await dead(world, "labelled", labels={"team": "a", "x": "y"})
    await dead(world, "queued", queue="other")
    await dead(world, "typed", type="other")
    await dead(world, "broken", failure="Broken")
    await world.clock.advance(60)
    noon = world.clock.now_ms()
    await dead(world, "late", labels={"team": "a"})

    async def matching(**fields: Any) -> list[str]:
        return list((await call(world, redrive, validate_only=True, **fields)).job_ids)

    assert await matching(labels={"team": "a"}) == ["labelled", "late"]
    assert await matching(labels={"team": "a", "x": "y"}) == ["labelled"]
    assert await matching(queue="other") == ["queued"]
    assert await matching(type="other") == ["typed"]
    assert await matching(failure_type="Broken") == ["broken"]
    assert await matching(settled_before_ms=noon, labels={"team": "a"}) == ["labelled"]
    assert await matching(states=frozenset({S.QUARANTINED})) == []
    assert len(await matching(states=frozenset({S.DEAD}))) == 6


async def test_a_dry_run_changes_nothing(world: World, redrive: Redrive) -> None:
    await dead(world, "a")
    before, commits = world.stored("a"), world.etcd.commits
    world.gauge.accepts_submissions = False

    assert (await call(world, redrive, validate_only=True)).job_ids == ("a",)
    assert (world.stored("a"), world.etcd.commits) == (before, commits)


@pytest.mark.parametrize("dry", [True, False])
async def test_pages_follow_each_other_to_the_end(world: World, dry: bool) -> None:
    names = [f"job-{n:02d}" for n in range(23)]
    await dead(world, *names)
    redrive = redrive_of(world, page=8)
    found: list[str] = []
    cursor, calls = "", 0

    while calls == 0 or cursor:
        done = await call(world, redrive, max_jobs=5, validate_only=dry, cursor=cursor)
        assert len(done.job_ids) <= 5
        found += done.job_ids
        cursor, calls = done.cursor, calls + 1

    assert found == names
    assert calls <= 7


async def test_jobs_are_retried_no_faster_than_asked(world: World, redrive: Redrive) -> None:
    await dead(world, *(f"job-{n:02d}" for n in range(21)))
    began = world.clock.monotonic()

    done = await call(world, redrive, jobs_per_second=10)

    assert len(done.job_ids) == 21
    assert 2.0 <= world.clock.monotonic() - began <= 2.5


async def test_a_call_ends_before_its_deadline_and_the_next_goes_on(world: World, redrive: Redrive) -> None:
    names = [f"job-{n:02d}" for n in range(12)]
    await dead(world, *names)
    deadline = world.clock.monotonic() + 5

    first = await call(world, redrive, seconds=5, jobs_per_second=1)

    assert world.clock.monotonic() < deadline
    assert 3 <= len(first.job_ids) <= 5
    assert first.cursor
    rest = await call(world, redrive, cursor=first.cursor)
    assert (*first.job_ids, *rest.job_ids) == tuple(names)
    assert rest.cursor == ""


async def test_a_token_of_another_query_is_refused(world: World, redrive: Redrive) -> None:
    await dead(world, "a", "b")
    token = (await call(world, redrive, max_jobs=1, validate_only=True)).cursor

    for wrong, fields in ((token, {"queue": "q"}), ("nonsense", {}), (token[:-2] + ".", {"type": "t"})):
        error = await refused(redrive.redrive("default", query(cursor=wrong, **fields), world.deadline))
        assert error.reason is Reason.VALIDATION_FAILED
        assert [violation.field for violation in error.fields] == ["page_token"]
    assert (await refused(redrive.redrive("other", query(cursor=token), world.deadline))).fields
    assert (await call(world, redrive, cursor=token)).job_ids == ("b",)


async def test_a_job_that_cannot_be_retried_fails_alone(world: World, redrive: Redrive) -> None:
    await dead(world, "a", unique_key="k")
    await dead(world, "b")
    await store_job(world.store, a_job("owner", unique_key="k"))

    done = await call(world, redrive)

    assert done.job_ids == ("b",)
    [(job_id, error)] = done.failures
    assert (job_id, error.reason, error.metadata["job_id"]) == ("a", Reason.DUPLICATE_JOB, "owner")
    assert states(world, "a", "b") == [S.DEAD, S.PENDING]


async def test_an_unknown_outcome_is_told_of_its_job_and_a_repeat_finds_it_done(
    world: World, redrive: Redrive
) -> None:
    await dead(world, "a", "b")
    world.etcd.faults.append(Fault.LOST_REPLY)

    done = await call(world, redrive, request_id="r")

    assert done.job_ids == ("b",)
    assert [(job_id, error.reason) for job_id, error in done.failures] == [("a", Reason.OUTCOME_UNKNOWN)]
    again = await call(world, redrive, request_id="r")
    assert (again.job_ids, again.failures) == ((), ())
    assert states(world, "a", "b") == [S.PENDING, S.PENDING]


async def test_a_repeat_revives_nothing_that_died_again(world: World, redrive: Redrive) -> None:
    await dead(world, "a")
    await call(world, redrive, request_id="r")
    claimed = await claim_job(world.store, world.stored("a"))
    command = Fail(token=claimed.token, digest=b"", no_retry=True)
    await world.settlement.settle("default", [Settle("a", command)], world.deadline)

    assert (await call(world, redrive, request_id="r")).job_ids == ()
    assert (await call(world, redrive, request_id="another")).job_ids == ("a",)


async def test_a_full_store_takes_no_more_and_says_where_to_go_on(world: World, redrive: Redrive) -> None:
    await dead(world, *(f"job-{n:02d}" for n in range(9)))
    world.gauge.accepts_submissions = False
    assert (await refused(redrive.redrive("default", query(), world.deadline))).reason is Reason.STORAGE_FULL
    world.gauge.accepts_submissions = True

    def fills(operation: object) -> None:
        world.gauge.accepts_submissions = False

    world.etcd.interfere.append(fills)
    part = await call(world, redrive, jobs_per_second=20)

    assert len(part.job_ids) == 2
    assert part.cursor
    world.etcd.interfere.clear()
    world.gauge.accepts_submissions = True
    assert len((await call(world, redrive, cursor=part.cursor)).job_ids) == 7


async def test_what_was_done_before_an_error_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await dead(world, "a", "b", "c")
    redrive = redrive_of(world, page=2)
    listed = world.store.list_jobs
    pages: list[str] = []

    async def once(*args: Any, **named: Any) -> JobPage:
        pages.append(named["cursor"])
        if len(pages) > 1:
            raise EtcdUnavailable("planned by the test")
        return await listed(*args, **named)

    monkeypatch.setattr(world.store, "list_jobs", once)
    part = await call(world, redrive)
    assert part.job_ids == ("a", "b")
    assert (
        await refused(redrive.redrive("default", query(), world.deadline))
    ).reason is Reason.ETCD_UNAVAILABLE
    monkeypatch.undo()

    assert (await call(world, redrive, cursor=part.cursor)).job_ids == ("c",)


async def test_a_call_examines_no_more_than_its_bound(world: World) -> None:
    for n in range(30):
        await store_job(world.store, a_job(f"job-{n:02d}"))
    await dead(world, "z")
    redrive = redrive_of(world, page=5, max_examined=20)

    first = await call(world, redrive)

    assert (first.job_ids, first.examined) == ((), 20)
    assert (await call(world, redrive, cursor=first.cursor)).job_ids == ("z",)
