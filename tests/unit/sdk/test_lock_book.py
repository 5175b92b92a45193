"""When a process may believe that it owns a lock: the safe deadline, by beats that could know of it."""

from __future__ import annotations

import pytest

from worker_sdk._lock_book import LockBook, LockHold, LockPhase
from worker_sdk._work import BeatAnswer, BeatLock, Command, LockVerdictOn, Verdict

SAFE = 8.0


def opened(revision: int = 10, sent: float = 0.0) -> tuple[LockBook, int]:
    """A book with an open session."""
    book = LockBook()
    return book, book.opened(sent=sent, safe_duration=SAFE, revision=revision)


def asked(book: LockBook, *names: str, request_id: str = "r") -> LockHold:
    """Locks that are being asked for."""
    hold = book.ask(book.generation, request_id, names)
    assert hold is not None
    return hold


def beat(
    book: LockBook, *, sent: float, revision: int, verdicts: dict[str, tuple[int, Verdict]]
) -> list[BeatLock]:
    """A confirmed beat; answers what it listed."""
    listed = book.snapshot(0)
    answer = BeatAnswer(
        confirmed=True,
        verdicts=(),
        safe_duration=SAFE,
        revision=revision,
        command=Command.NONE,
        locks=tuple(LockVerdictOn(line.name, *verdicts[line.name]) for _, line in listed),
    )
    book.confirm(book.generation, [one for one, _ in listed], answer, sent=sent)
    return [line for _, line in listed]


def test_a_lock_takes_the_deadline_of_the_last_beat_below_its_token() -> None:
    book, _ = opened(revision=10)
    beat(book, sent=3.0, revision=20, verdicts={})
    beat(book, sent=6.0, revision=40, verdicts={})
    hold = asked(book, "a")
    assert book.owned(hold, {"a": 30}, now=6.5)
    assert hold.deadline == 3.0 + SAFE


def test_a_later_beat_that_did_not_list_it_covers_nothing() -> None:
    book, _ = opened(revision=50)
    hold = asked(book, "a")
    assert not book.owned(hold, {"a": 30}, now=1.0)
    assert hold.phase is LockPhase.UNCOVERED
    assert not hold.decided.is_set()
    assert book.lost_now(hold, 1.0)


def test_a_beat_that_lists_it_covers_it() -> None:
    book, _ = opened(revision=50)
    hold = asked(book, "a")
    book.owned(hold, {"a": 30}, now=1.0)
    assert beat(book, sent=2.0, revision=60, verdicts={"a": (30, Verdict.HELD)}) == [BeatLock("a", 30, "r")]
    assert hold.phase is LockPhase.HELD
    assert hold.decided.is_set()
    assert hold.deadline == 2.0 + SAFE


def test_beats_that_listed_the_wait_count_once_it_owns() -> None:
    """A wait may outlast every deadline that was known when its entry was put."""
    book, _ = opened(revision=10)
    hold = asked(book, "a")
    for sent in (10.0, 20.0, 30.0):
        assert beat(book, sent=sent, revision=60, verdicts={"a": (30, Verdict.HELD)})[0].fencing_token == 0
    assert book.owned(hold, {"a": 30}, now=31.0)
    assert hold.deadline == 30.0 + SAFE


def test_beats_that_showed_another_entry_of_the_wait_do_not_count() -> None:
    book, _ = opened(revision=10)
    hold = asked(book, "a")
    beat(book, sent=30.0, revision=60, verdicts={"a": (30, Verdict.HELD)})
    assert not book.owned(hold, {"a": 55}, now=31.0)


def test_several_names_are_as_safe_as_the_least_safe_of_them() -> None:
    book, _ = opened(revision=10)
    hold = asked(book, "a", "b")
    book.owned(hold, {"a": 30, "b": 30}, now=1.0)
    beat(book, sent=4.0, revision=60, verdicts={"a": (30, Verdict.HELD), "b": (0, Verdict.UNSPECIFIED)})
    assert hold.deadline == SAFE
    beat(book, sent=5.0, revision=70, verdicts={"a": (30, Verdict.HELD), "b": (30, Verdict.HELD)})
    assert hold.deadline == 5.0 + SAFE


def test_a_wait_without_entry_is_not_lost() -> None:
    book, _ = opened()
    hold = asked(book, "a")
    beat(book, sent=1.0, revision=20, verdicts={"a": (0, Verdict.LOST)})
    assert hold.phase is LockPhase.ASKED
    assert book.owned(hold, {"a": 30}, now=2.0)


@pytest.mark.parametrize("name", ["a", "b"])
def test_one_lost_name_loses_all(name: str) -> None:
    book, _ = opened()
    hold = asked(book, "a", "b")
    book.owned(hold, {"a": 30, "b": 30}, now=1.0)
    verdicts = {"a": (30, Verdict.HELD), "b": (30, Verdict.HELD), name: (30, Verdict.LOST)}
    beat(book, sent=1.0, revision=40, verdicts=verdicts)
    assert hold.lost.is_set()
    assert not book.releasing(hold)


def test_past_its_deadline_a_lock_is_lost_by_the_clock_alone() -> None:
    book, _ = opened()
    hold = asked(book, "a")
    book.owned(hold, {"a": 30}, now=1.0)
    assert book.next_deadline(1.0) == SAFE
    assert not book.lost_now(hold, SAFE - 0.01)
    assert book.lost_now(hold, SAFE)
    book.expire(SAFE)
    assert hold.lost.is_set()


def test_a_lock_that_is_lost_is_listed_no_more() -> None:
    book, _ = opened()
    hold = asked(book, "a")
    book.owned(hold, {"a": 30}, now=1.0)
    book.expire(SAFE)
    assert book.snapshot(0) == []


def test_a_lock_stays_listed_until_its_release_is_answered() -> None:
    book, _ = opened()
    hold = asked(book, "a")
    book.owned(hold, {"a": 30}, now=1.0)
    assert book.releasing(hold)
    beat(book, sent=1.0, revision=40, verdicts={"a": (30, Verdict.LOST)})
    assert not hold.lost.is_set()
    assert len(book.snapshot(0)) == 1
    book.forget(hold)
    assert book.snapshot(0) == []


def test_the_end_of_the_session_loses_everything_and_nothing_is_owned_after_it() -> None:
    book, generation = opened()
    held, waiting = asked(book, "a", request_id="1"), asked(book, "b", request_id="2")
    book.owned(held, {"a": 30}, now=1.0)
    book.lose_all()
    assert held.lost.is_set()
    assert waiting.lost.is_set()
    assert not book.owned(waiting, {"b": 31}, now=1.0)
    assert book.ask(generation, "3", ("c",)) is None
