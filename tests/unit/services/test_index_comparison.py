"""The index is compared with the store from time to time: what it lost comes back, nothing twice."""

from __future__ import annotations

import pytest

from coordinator.ports import ReadyPage
from coordinator.services.index import IndexConfig
from tests.support.builders import a_job, store_job
from tests.unit.services.workbench import NS, bench_with, ids


async def test_the_comparison_finds_a_job_that_the_index_lost() -> None:
    """A lost entry raises no error anywhere: the job just waits."""
    c = await bench_with()
    await c.submit("a", "b")
    window = c.index.window((NS, "q", "t"))
    assert window is not None
    lost = window.peek(1)[0]
    window.take(lost)
    window.drop(lost)
    c.index.passed(NS, "ready", c.etcd.revision + 1)
    assert await c.index.compare_once() == 1
    assert ids(await c.claim(n=2)) == ["a", "b"]
    assert await c.index.compare_once() == 0


@pytest.mark.parametrize("kept", [0, 1])
async def test_the_comparison_looks_behind_the_last_job_of_a_complete_window(kept: int) -> None:
    """The event of the newest job was lost, and perhaps the window is empty but for it."""
    c = await bench_with()
    await c.submit("a", "b")
    window = c.index.window((NS, "q", "t"))
    assert window is not None
    for lost in window.peek(2)[kept:]:
        window.take(lost)
        window.drop(lost)
    c.index.passed(NS, "ready", c.etcd.revision + 1)

    assert await c.index.compare_once() == 2 - kept

    assert ids(await c.claim(n=2)) == ["a", "b"]


async def test_a_lost_event_that_no_other_follows_is_found_by_the_second_comparison() -> None:
    """Until then it may be on its way."""
    c = await bench_with()
    await c.submit("a")
    window = c.index.window((NS, "q", "t"))
    assert window is not None
    [lost] = window.peek(1)
    window.take(lost)
    window.drop(lost)

    assert [await c.index.compare_once() for _ in range(3)] == [0, 1, 0]
    assert ids(await c.claim()) == ["a"]


async def test_the_comparison_learns_of_a_type_whose_first_event_was_lost() -> None:
    c = await bench_with()
    await c.submit("a")
    await c.jobs.register_type(NS, "q", "t", deadline=c.clock.monotonic() + 5)
    c.index._windows.clear()

    await c.index.compare_once()
    await c.index.refill_once()

    assert ids(await c.claim()) == ["a"]


async def test_the_comparison_drops_no_job_that_came_while_it_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list is older than what the watch has told by the time it is compared."""
    c = await bench_with()
    await c.submit("a", "z")
    listed = c.jobs.list_ready
    c.index.window((NS, "q", "t")).take(c.index.window((NS, "q", "t")).peek(2)[1])  # type: ignore[union-attr]

    async def overtaken(*args: object, **kwargs: object) -> ReadyPage:
        page = await listed(*args, **kwargs)  # type: ignore[arg-type]
        await store_job(c.jobs, a_job("b", counter=0))
        await store_job(c.jobs, a_job("y", counter=9))
        window = c.index.window((NS, "q", "t"))
        assert window is not None
        window.give_back(next(iter(window._taken.values())))
        c.index.passed(NS, "ready", c.etcd.revision + 5)
        return page

    monkeypatch.setattr(c.jobs, "list_ready", overtaken)
    assert await c.index.compare_once() == 0
    monkeypatch.undo()
    assert sorted(ids(await c.claim(n=10))) == ["a", "b", "y", "z"]


async def test_the_comparison_brings_back_no_job_that_was_claimed_while_it_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = await bench_with()
    await c.submit("a", "b")
    listed = c.jobs.list_ready

    async def overtaken(*args: object, **kwargs: object) -> ReadyPage:
        page = await listed(*args, **kwargs)  # type: ignore[arg-type]
        assert ids(await c.claim(request="r-meanwhile")) == ["a"]
        return page

    monkeypatch.setattr(c.jobs, "list_ready", overtaken)
    assert await c.index.compare_once() == 0
    monkeypatch.undo()
    conflicts = c.dispatch.conflicts
    assert ids(await c.claim(n=10, request="r-later")) == ["b"]
    assert c.dispatch.conflicts == conflicts


async def test_a_job_that_comes_while_its_stretch_is_listed_is_handed_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list is older than the job, and after it the window believes to know that stretch."""
    c = await bench_with(index_config=IndexConfig(window_capacity=4, largest_window=4))
    await c.submit(*(f"j{n}" for n in range(9)))
    listed = c.jobs.list_ready

    async def overtaken(*args: object, **kwargs: object) -> ReadyPage:
        page = await listed(*args, **kwargs)  # type: ignore[arg-type]
        if page.complete and c.etcd.stored(NS, "late") is None:
            await store_job(c.jobs, a_job("late", counter=50))
        return page

    monkeypatch.setattr(c.jobs, "list_ready", overtaken)
    taken: list[str] = []
    for turn in range(20):
        taken += ids(await c.claim(n=4, request=f"r{turn}"))
        await c.index.refill_once()
    assert "late" in taken
    assert len(taken) == 10


async def test_what_was_known_of_a_history_that_is_gone_hides_no_job_of_the_restored_one() -> None:
    c = await bench_with()
    await c.submit("a", "b")
    kept, revision = dict(c.etcd.keys), c.etcd.revision
    for number in range(5):
        await c.submit(f"later{number}")
    assert "a" in ids(await c.claim(n=2, request="r-before"))
    c.index.passed(NS, "ready", c.etcd.revision)

    c.etcd.keys, c.etcd.revision = kept, revision
    await c.index.relist(NS, revision)
    window = c.index.window((NS, "q", "t"))
    assert window is not None
    assert [entry.stored.job.job_id for entry in window.peek(10)] == ["a", "b"]
    [lost] = window.peek(1)
    window.take(lost)
    window.drop(lost)
    assert await c.index.compare_once() + await c.index.compare_once() == 1
    assert sorted(ids(await c.claim(n=10, request="r-after"))) == ["a", "b"]
