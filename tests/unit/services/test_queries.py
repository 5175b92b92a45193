"""Reading jobs: everything of one, and pages of many."""

from __future__ import annotations

import pytest

from coordinator.core.commands import Complete
from coordinator.core.job import JobState, Progress
from coordinator.errors import Reason, RequestError
from coordinator.services.api import JobFilter, Settle
from coordinator.services.queries import Queries, QueriesConfig
from tests.support.builders import a_job, store_job
from tests.unit.services.conftest import World


@pytest.fixture
def queries(world: World) -> Queries:
    return Queries(world.store, world.holders)


async def pages(world: World, queries: Queries, filter: JobFilter, size: int) -> list[list[str]]:
    """Ids page by page to the end."""
    found, cursor = [], ""
    for _ in range(1_000):
        listing = await queries.list("default", filter, size, cursor, world.deadline)
        found.append([stored.job.job_id for stored in listing.jobs])
        cursor = listing.cursor
        if not cursor:
            return found
    raise AssertionError("the listing does not end")


async def test_a_running_job_tells_token_progress_and_last_beat(world: World, queries: Queries) -> None:
    claimed = await world.running()
    world.holders.told["default", "j1"] = Progress(ratio=0.25)
    world.holders.beats["default", "j1"] = 123
    view = await queries.get("default", "j1", world.deadline)
    assert view.token == claimed.token
    assert view.claim == claimed.claim
    assert view.spec is not None
    assert view.spec.payload == b"{}"
    assert (view.progress, view.last_beat_ms) == (Progress(ratio=0.25), 123)


async def test_progress_of_a_job_that_nobody_here_beats_for_comes_from_its_checkpoint(
    world: World, queries: Queries
) -> None:
    claimed = await world.running()
    saved = Progress(ratio=0.5, note="saved")
    await world.settlement.checkpoint("default", "j1", claimed.token, 1, b"", saved, world.deadline)
    assert (await queries.get("default", "j1", world.deadline)).progress == saved


@pytest.mark.parametrize("size", [10, 5_000])
async def test_a_finished_job_tells_its_result_wherever_it_lies(
    world: World, queries: Queries, size: int
) -> None:
    claimed = await world.running()
    done = Settle("j1", Complete(token=claimed.token, digest=b"", result=b"r" * size))
    await world.settlement.settle("default", [done], world.deadline)
    view = await queries.get("default", "j1", world.deadline)
    assert view.result == b"r" * size
    assert view.spec is None
    assert view.token == claimed.token


async def test_an_unknown_job_is_not_found(world: World, queries: Queries) -> None:
    with pytest.raises(RequestError) as caught:
        await queries.get("default", "nobody", world.deadline)
    assert caught.value.reason is Reason.JOB_NOT_FOUND


async def test_pages_show_every_matching_job_once(world: World, queries: Queries) -> None:
    for n in range(120):
        await store_job(world.store, a_job(f"j{n:03}", queue="odd" if n % 2 else "even"))
    await store_job(world.store, a_job("elsewhere", namespace="other"))
    for size in (1, 7, 50, 1_000):
        found = await pages(world, queries, JobFilter(queue="odd"), size)
        assert all(len(page) <= size for page in found)
        flat = [job_id for page in found for job_id in page]
        assert sorted(flat) == [f"j{n:03}" for n in range(120) if n % 2]
        assert len(set(flat)) == len(flat)


async def test_a_rare_match_costs_a_bounded_look_and_an_empty_page_with_a_cursor(world: World) -> None:
    for n in range(300):
        await store_job(world.store, a_job(f"j{n:03}", labels={"n": str(n)}))
    queries = Queries(world.store, world.holders, QueriesConfig(max_examined=100))
    found = await pages(world, queries, JobFilter(labels={"n": "299"}), 10)
    assert found[0] == []
    assert found[-1] == ["j299"]
    assert len(found) >= 3


async def test_jobs_named_in_the_filter_are_read_not_searched_for(world: World, queries: Queries) -> None:
    for name in ("a", "b", "c"):
        await store_job(world.store, a_job(name))
    wanted = JobFilter(job_ids=frozenset({"a", "c", "nobody"}), states=frozenset({JobState.PENDING}))
    assert await pages(world, queries, wanted, 10) == [["a", "c"]]


@pytest.mark.parametrize("cursor", ["x", "x.y", "."])
async def test_a_cursor_of_another_query_is_refused(world: World, queries: Queries, cursor: str) -> None:
    with pytest.raises(RequestError) as caught:
        await queries.list("default", JobFilter(), 10, cursor, world.deadline)
    assert caught.value.reason is Reason.VALIDATION_FAILED
    assert [field.field for field in caught.value.fields] == ["page_token"]
