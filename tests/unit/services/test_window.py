"""A window holds the first jobs of a queue, in order, and knows how far it knows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.rank import Rank
from coordinator.ports import ReadyPage, Stored
from coordinator.services.window import Entry, Window
from tests.support.builders import NOW_MS, a_job


def entry(name: str, ms: int, revision: int = 5, counter: int = 0) -> Entry:
    return Entry(Stored(replace(a_job(name), rank=Rank(ms, counter)), revision), None, 0.0)


def names(window: Window, limit: int = 100) -> list[str]:
    return [e.stored.job.job_id for e in window.peek(limit)]


def test_jobs_come_in_rank_order_whatever_the_order_of_arrival() -> None:
    window = Window(10, complete=True)
    for name, ms in (("c", 30), ("a", 10), ("b", 20)):
        assert window.put(entry(name, ms), created=True)
    assert names(window) == ["a", "b", "c"]
    assert int(window.line) == 3


def test_a_full_window_keeps_the_first_and_remembers_how_far_it_knows() -> None:
    window = Window(3, complete=True)
    for ms in (50, 40, 30, 20, 10):
        window.put(entry(f"j{ms}", ms), created=True)
    assert names(window) == ["j10", "j20", "j30"]
    assert int(window.line) == 5
    assert window.horizon == Rank(30, 0)
    assert not window.put(entry("late", 45), created=True), "beyond the horizon it is left to the store"
    assert window.put(entry("early", 5), created=True)


def test_a_job_that_is_proposed_is_proposed_to_nobody_else() -> None:
    window = Window(10, complete=True)
    window.put(entry("a", 10), created=True)
    (proposed,) = window.peek(5)
    window.take(proposed)
    assert names(window) == []
    assert window.give_back(proposed)
    assert names(window) == ["a"]


def test_a_proposed_job_that_was_deleted_does_not_come_back() -> None:
    window = Window(10, complete=True)
    window.put(entry("a", 10), created=True)
    (proposed,) = window.peek(5)
    window.take(proposed)
    window.delete(Rank(10, 0), "a", revision=6)
    assert not window.give_back(proposed)
    assert names(window) == []
    assert int(window.line) == 0


def test_a_renewed_record_replaces_the_outdated_proposal() -> None:
    window = Window(10, complete=True)
    window.put(entry("a", 10, revision=5), created=True)
    (proposed,) = window.peek(5)
    window.take(proposed)
    assert window.put(entry("a", 10, revision=8), created=False)
    assert [e.stored.revision for e in window.peek(5)] == [8]
    assert not window.give_back(proposed)
    assert int(window.line) == 1


def test_an_older_deletion_leaves_a_newer_entry() -> None:
    window = Window(10, complete=True)
    window.put(entry("a", 10, revision=9), created=True)
    assert not window.delete(Rank(10, 0), "a", revision=7)
    assert names(window) == ["a"]


def test_refills_reach_every_job_in_order_with_ranges_that_end_tightly() -> None:
    store = [entry(f"j{i:05}", NOW_MS - 500_000 + i * 7).stored for i in range(5_000)]
    window = Window(100, complete=False)
    taken: list[str] = []
    asked = 0
    for _ in range(2_000):
        if window.wants_refill:
            until = window.next_until(NOW_MS)
            after = window.horizon or Rank(0, 0)
            there = [s for s in store if after < s.job.rank <= until]
            page = tuple(there[:100])
            last = page[-1].job.rank if len(there) > 100 else None
            window.refill(ReadyPage(page, last is None, last), until, NOW_MS, 0.0)
            asked += 1
        for one in window.peek(10):
            window.take(one)
            window.drop(one)
            taken.append(one.stored.job.job_id)
        if window.horizon is None and not len(window):
            break
    assert taken == [s.job.job_id for s in store]
    assert asked < 400


def test_a_page_of_which_nothing_can_be_decoded_is_passed() -> None:
    window = Window(100, complete=False)
    assert window.refill(ReadyPage((), False, Rank(NOW_MS, 7)), Rank(NOW_MS, 99), NOW_MS, 0.0) == []
    assert window.horizon == Rank(NOW_MS, 7)
    assert window.refill(ReadyPage((), False, None), Rank(NOW_MS, 99), NOW_MS, 0.0) == []
    assert window.horizon == Rank(NOW_MS, 7), "not even a key: look again"


def test_a_refill_misses_no_job_that_came_while_it_listed() -> None:
    window = Window(10, complete=False)
    until = window.begin_refill(NOW_MS)
    inside, gone, beyond = (entry(n, until.ms - d) for n, d in (("inside", 5), ("gone", 6), ("beyond", -5)))
    for one in (inside, gone, beyond):
        assert not window.put(one, created=True)
    window.delete(gone.stored.job.rank, "gone", 6)
    new = window.refill(ReadyPage((entry("listed", until.ms - 9).stored,), True, None), until, NOW_MS, 0.0)
    assert [s.job.job_id for s in new] == ["listed", "inside"]
    assert names(window) == ["listed", "inside"]
    assert window.horizon == until


def test_a_refill_of_a_window_that_overflowed_meanwhile_is_void() -> None:
    window = Window(2, complete=False)
    window.horizon = Rank(NOW_MS, 0)
    until = window.begin_refill(NOW_MS)
    for n in range(3):
        window.put(entry(f"j{n}", NOW_MS - 10 + n), created=True)
    assert window.refill(ReadyPage((), True, None), until, NOW_MS, 0.0) == []
    assert window.horizon == Rank(NOW_MS - 9, 0), "the one pushed out is asked for again"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "delete", "take", "back", "drop"]), st.integers(0, 30)),
        max_size=120,
    )
)
def test_a_complete_window_that_never_overflows_is_a_sorted_set(steps: list[tuple[str, int]]) -> None:
    window = Window(1_000, complete=True)
    there: dict[int, int] = {}
    proposed: dict[int, Entry] = {}
    for revision, (what, ms) in enumerate(steps, start=10):
        if what == "put":
            window.put(entry(f"j{ms}", ms, revision), created=ms not in there)
            there[ms] = revision
            proposed.pop(ms, None)
        elif what == "delete" and ms in there:
            window.delete(Rank(ms, 0), f"j{ms}", revision)
            del there[ms]
            proposed.pop(ms, None)
        elif what == "take" and ms in there and ms not in proposed:
            found = next(e for e in window.peek(1_000) if e.stored.job.rank.ms == ms)
            window.take(found)
            proposed[ms] = found
        elif what == "back" and ms in proposed:
            assert window.give_back(proposed.pop(ms))
        elif what == "drop" and ms in proposed:
            window.drop(proposed.pop(ms))
            del there[ms]
            window.line.changed(-1, revision)  # its deletion, which will be reported
        assert names(window, 1_000) == [f"j{m}" for m in sorted(there) if m not in proposed]
        assert int(window.line) == len(there)


def test_a_comparison_tells_what_is_missing_and_what_is_a_ghost() -> None:
    window = Window(10, complete=True)
    window.put(entry("kept", 10), created=True)
    window.put(entry("ghost", 20), created=True)
    lost = entry("lost", 15).stored
    young = entry("young", 16, revision=90).stored
    missing, ghosts = window.compare(
        (window.peek(1)[0].stored, lost, young), settled_revision=50, until=Rank(NOW_MS, 0)
    )
    assert missing == [lost]
    assert [g.stored.job.job_id for g in ghosts] == ["ghost"]
