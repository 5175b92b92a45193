"""Listings and point reads on a real etcd."""

from __future__ import annotations

import pytest

from coordinator.core import commands as c
from coordinator.core.job import JobState
from coordinator.core.rank import Rank
from coordinator.errors import CodecError, FieldViolation, RequestError
from coordinator.ports import Due
from tests.integration.store.conftest import Harness

MANY = 300


async def all_pages(harness: Harness, limit: int, states: frozenset[JobState] | None = None) -> list[str]:
    found: list[str] = []
    cursor = ""
    for _ in range(2000):
        page = await harness.store.jobs.list_jobs(
            harness.namespace, cursor=cursor, limit=limit, deadline=harness.deadline(), states=states
        )
        assert len(page.jobs) <= limit
        found += [stored.job.job_id for stored in page.jobs]
        cursor = page.cursor
        if not cursor:
            return found
    raise AssertionError("the listing never ends")


async def submit_many(harness: Harness, ids: list[str]) -> None:
    for pending in [harness.submit(job_id) for job_id in ids]:
        assert (await pending).won


@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
async def test_a_listing_shows_every_job_once(harness: Harness, limit: int) -> None:
    ids = [f"job/{number}" for number in range(MANY if limit > 1 else 40)]
    await submit_many(harness, ids)
    found = await all_pages(harness, limit)
    assert len(found) == len(ids)
    assert set(found) == set(ids)


async def test_a_listing_of_nothing_ends_at_once(harness: Harness) -> None:
    page = await harness.store.jobs.list_jobs(
        harness.namespace, cursor="", limit=10, deadline=harness.deadline()
    )
    assert page.jobs == ()
    assert page.cursor == ""


async def test_a_listing_filters_by_state(harness: Harness) -> None:
    await submit_many(harness, ["a", "b"])
    await harness.claimed("r")
    assert await all_pages(harness, 10, frozenset({JobState.RUNNING})) == ["r"]


@pytest.mark.parametrize("cursor", ["x", "!!!", "MTow", "Mjo2MTo", "é", "A" * 2000])
async def test_a_cursor_that_is_not_ours_is_refused(harness: Harness, cursor: str) -> None:
    with pytest.raises(RequestError) as refused:
        await harness.store.jobs.list_jobs(
            harness.namespace, cursor=cursor, limit=10, deadline=harness.deadline()
        )
    assert refused.value.fields == (FieldViolation("page_token", "malformed"),)


async def test_an_undecodable_record_is_left_out_and_counted(harness: Harness) -> None:
    await submit_many(harness, ["a", "b"])
    keys = harness.store.space.namespace(harness.namespace)
    await harness.store.client.put(keys.state("broken"), b"\xff", timeout=5)
    assert set(await all_pages(harness, 1)) == {"a", "b"}
    assert harness.store.set_aside.counts["state"] >= 1
    with pytest.raises(CodecError):
        await harness.store.jobs.read(harness.namespace, "broken", deadline=harness.deadline())
    snapshots = await harness.store.jobs.read_many(
        harness.namespace, ["a", "broken", "b"], deadline=harness.deadline()
    )
    assert [each.stored is not None for each in snapshots] == [True, False, True]


async def test_ready_pages_never_cut_a_rank(harness: Harness) -> None:
    now = harness.clock.now_ms()
    for number in range(5):  # one submit time and counter: one rank
        assert (await harness.submit(f"tie{number}", submit_ms=now, counter=5, due_ms=now)).won
    assert (await harness.submit("later", submit_ms=now, counter=6, due_ms=now)).won
    until = Rank(10**14 - 1, 0)
    page = await harness.store.jobs.list_ready(
        harness.namespace, "q", "t", after=None, until=until, limit=2, deadline=harness.deadline()
    )
    assert [stored.job.job_id for stored in page.jobs] == [f"tie{number}" for number in range(5)]
    assert not page.complete
    rest = await harness.store.jobs.list_ready(
        harness.namespace,
        "q",
        "t",
        after=page.jobs[-1].job.rank,
        until=until,
        limit=2,
        deadline=harness.deadline(),
    )
    assert [stored.job.job_id for stored in rest.jobs] == ["later"]
    assert rest.complete
    count, _ = await harness.store.jobs.count_ready(harness.namespace, "q", "t", deadline=harness.deadline())
    assert count == 6


async def test_undecodable_jobs_hold_up_none_that_wait_behind_them(harness: Harness) -> None:
    """As after a step back to an older version: a page's worth of records that only the newer one reads."""
    now = harness.clock.now_ms()
    keys = harness.store.space.namespace(harness.namespace)
    for number in range(3):
        await harness.store.client.put(
            keys.ready("q", "t", Rank(now, number), f"new{number}"), b"\xff", timeout=5
        )
        await harness.store.client.put(keys.due(now, f"new{number}"), b"\xff", timeout=5)
    assert (await harness.submit("later", submit_ms=now, counter=6, due_ms=now)).won
    page = await harness.store.jobs.list_ready(
        harness.namespace,
        "q",
        "t",
        after=None,
        until=Rank(10**14 - 1, 0),
        limit=2,
        deadline=harness.deadline(),
    )
    assert (page.jobs, page.complete, page.last) == ((), False, Rank(now, 1))
    due = await harness.store.jobs.list_due(
        harness.namespace, until_ms=now, limit=2, deadline=harness.deadline()
    )
    assert [each.job_id for each in due] == ["new0", "new1"], "a short page would look like the last"


async def test_due_keys_come_in_order_and_strays_can_be_deleted(harness: Harness) -> None:
    now = harness.clock.now_ms()
    for job_id, at in (("b", now + 2_000), ("a", now + 1_000), ("later", now + 60_000)):
        assert (await harness.submit_later(job_id, at)).won
    jobs = harness.store.jobs
    due = await jobs.list_due(harness.namespace, until_ms=now + 5_000, limit=10, deadline=harness.deadline())
    assert [(each.job_id, each.ms) for each in due] == [("a", now + 1_000), ("b", now + 2_000)]
    changed = Due(due[0].job_id, due[0].ms, 0, due[0].revision - 1)
    assert not await jobs.delete_stray(harness.namespace, changed, deadline=harness.deadline())
    assert await jobs.delete_stray(harness.namespace, due[0], deadline=harness.deadline())
    left = await jobs.list_due(harness.namespace, until_ms=now + 5_000, limit=10, deadline=harness.deadline())
    assert [each.job_id for each in left] == ["b"]


async def test_types_are_registered_once_and_listed(harness: Harness) -> None:
    jobs = harness.store.jobs
    for _ in range(2):
        await jobs.register_type(harness.namespace, "q", "t", deadline=harness.deadline())
        await jobs.register_type(harness.namespace, "q.a", "t", deadline=harness.deadline())
    found = await jobs.list_types(harness.namespace, deadline=harness.deadline())
    assert sorted(found) == [("q", "t"), ("q.a", "t")]


async def test_claims_are_listed_with_their_tokens(harness: Harness) -> None:
    _, first = await harness.claimed("j1")
    _, second = await harness.claimed("j/2")
    claims = await harness.store.jobs.list_claims(harness.namespace, deadline=harness.deadline())
    assert {job_id: claim.token for job_id, claim in claims} == {"j1": first, "j/2": second}


async def test_a_large_result_has_a_key_of_its_own(harness: Harness) -> None:
    stored, token = await harness.claimed("j1")
    done = await harness.complete(stored, token, result=b"r" * 5_000)
    assert done.stored is not None
    assert done.stored.job.result == b""
    found = await harness.store.jobs.read(harness.namespace, "j1", deadline=harness.deadline(), result=True)
    assert found.result == b"r" * 5_000
    deleted = await harness.store.jobs.commit(harness.operation(done.stored, c.Delete()))
    assert deleted.won
    assert deleted.stored is None
    keys = harness.store.space.namespace(harness.namespace)
    assert not {keys.state("j1"), keys.result("j1")} & set(await harness.keys())
