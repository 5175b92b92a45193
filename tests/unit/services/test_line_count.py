"""A line's length is right whatever was told before, while and after it was counted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.services.index import IndexConfig
from coordinator.services.line_count import LineCount
from tests.support.builders import FAR, a_job, claim_operation, store_job
from tests.unit.services.workbench import NS, Coordinator, bench_with

PAIR = (NS, "q", "t")


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from([1, 1, -1]), max_size=40), st.data())
def test_each_change_counts_once_wherever_the_count_falls_between(
    changes: list[int], data: st.DataObject
) -> None:
    """The store counts at one revision; the count arrives later, and the watch is behind or ahead of it."""
    steps = st.integers(0, len(changes))
    asked, as_of, answered = sorted((data.draw(steps), data.draw(steps), data.draw(steps)))
    told_again_from = data.draw(st.integers(0, asked))
    line = LineCount()
    line.begin()
    for at, change in enumerate(changes[asked:answered], start=asked + 1):
        line.changed(change, at)
    line.counted(sum(changes[:as_of]), as_of)
    for at in range(told_again_from + 1, as_of + 1):
        line.changed(changes[at - 1], at)
    for at, change in enumerate(changes[answered:], start=answered + 1):
        line.changed(change, at)
    assert int(line) == max(0, sum(changes))


def listens_to(c: Coordinator, *, watch: bool | None = None) -> None:
    """To the watch alone, to own commits alone, or to nothing: each change is told once, as by the feed."""
    c.etcd.listeners[:] = [c.index] if watch else []
    c.etcd.observers[:] = [c.index] if watch is False else []


async def test_the_index_knows_how_many_wait_also_beyond_its_windows() -> None:
    c = await bench_with(index_config=IndexConfig(window_capacity=10, largest_window=10))
    stored = await c.submit(*(f"j{n:02}" for n in range(30)))
    await c.index.relist(NS, c.etcd.revision)
    listens_to(c, watch=False)
    await c.claim(n=5)
    await store_job(c.jobs, a_job("late", counter=99))
    listens_to(c, watch=True)  # another coordinator claims
    await c.jobs.commit(claim_operation(stored[20], now_ms=c.clock.now_ms()))
    window = c.index.window(PAIR)
    assert window is not None
    waiting, _ = await c.jobs.count_ready(*PAIR, deadline=FAR)
    assert int(window.line) == waiting == 25


async def test_a_deletion_that_overtakes_the_news_of_the_job_is_counted_with_it() -> None:
    """A claim by id of a job that another coordinator submitted."""
    c = await bench_with()
    listens_to(c, watch=False)
    await c.submit("a")
    window = c.index.window(PAIR)
    assert window is not None
    listens_to(c)
    [stored] = await c.submit("b")
    listens_to(c, watch=False)
    await c.jobs.commit(claim_operation(stored, now_ms=c.clock.now_ms()))
    assert int(window.line) == 0
    c.index.ready_put(NS, stored, created=True)
    assert int(window.line) == 1


async def test_what_the_comparison_finds_is_counted_again() -> None:
    c = await bench_with()
    listens_to(c, watch=False)
    await c.submit("a")
    listens_to(c)
    await c.submit("b")
    c.index.passed(NS, "ready", c.etcd.revision + 1)
    assert await c.index.compare_once() == 1
    window = c.index.window(PAIR)
    assert window is not None
    assert int(window.line) == 2
