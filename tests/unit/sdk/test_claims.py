"""What the book of claims says about who may go on working."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker_sdk._claims import BeatEffects, ClaimBook, HeldClaim
from worker_sdk._machine import ClaimPhase
from worker_sdk._work import BeatAnswer, ClaimedJob, Command, StopReason, Verdict, VerdictOn

SAFE = 8.0


def job(job_id: str = "j", token: int = 200) -> ClaimedJob:
    return ClaimedJob(job_id, token, "q", "t", 1, b"", "", {}, b"", None, None, None, None, 3, 0, 5)


def opened(*, sent: float = 0.0, revision: int = 100) -> tuple[ClaimBook, int]:
    book = ClaimBook()
    return book, book.opened(sent=sent, safe_duration=SAFE, revision=revision)


def beat(
    book: ClaimBook,
    generation: int,
    *,
    sent: float,
    revision: int,
    verdict: Verdict = Verdict.HELD,
    listed: list[HeldClaim] | None = None,
) -> BeatEffects:
    claims = [claim for claim, _ in book.snapshot(0)] if listed is None else listed
    answer = BeatAnswer(
        confirmed=True,
        verdicts=tuple(VerdictOn(c.job.job_id, c.job.fencing_token, verdict) for c in claims),
        safe_duration=SAFE,
        revision=revision,
        command=Command.NONE,
    )
    return book.confirm(generation, claims, answer, sent=sent)


def test_a_fresh_claim_is_covered_by_the_beat_before_it() -> None:
    book, generation = opened()
    [claim] = book.admit(generation, [job()], now=1.0)
    assert claim.phase is ClaimPhase.RUNNING
    assert claim.deadline == SAFE


def test_a_claim_that_came_late_starts_only_after_a_beat_that_lists_it() -> None:
    book, generation = opened()
    # A beat after the claim, before its reply arrived: it could not list it.
    beat(book, generation, sent=9.0, revision=300)
    [claim] = book.admit(generation, [job(token=200)], now=10.0)
    assert claim.phase is ClaimPhase.WAITING
    effects = beat(book, generation, sent=11.0, revision=301)
    assert effects.startable == [claim]
    assert claim.phase is ClaimPhase.RUNNING
    assert claim.deadline == 11.0 + SAFE


def test_a_claim_that_came_late_and_was_taken_away_never_starts() -> None:
    book, generation = opened()
    beat(book, generation, sent=9.0, revision=300)
    [claim] = book.admit(generation, [job(token=200)], now=10.0)
    effects = beat(book, generation, sent=11.0, revision=301, verdict=Verdict.LOST)
    assert effects.startable == []
    assert effects.lost == [claim]


def test_only_beats_that_listed_a_claim_extend_it() -> None:
    book, generation = opened()
    [claim] = book.admit(generation, [job()], now=1.0)
    beat(book, generation, sent=3.0, revision=300, listed=[])
    assert claim.deadline == SAFE
    beat(book, generation, sent=4.0, revision=301)
    assert claim.deadline == 4.0 + SAFE


def test_a_running_claim_is_lost_at_its_deadline_and_stays_lost() -> None:
    book, generation = opened()
    [claim] = book.admit(generation, [job()], now=1.0)
    assert book.expire(7.9) == []
    assert book.lost_now(claim, SAFE)
    assert book.expire(SAFE) == [claim]
    assert book.expire(9.0) == []
    effects = beat(book, generation, sent=9.0, revision=301)
    assert not effects
    assert claim.phase is ClaimPhase.LOST
    assert not claim.given_away


def test_a_settling_claim_is_listed_until_it_is_forgotten_and_not_lost_by_a_verdict() -> None:
    book, generation = opened()
    [claim] = book.admit(generation, [job()], now=1.0)
    assert book.ended(claim) is False
    assert [line.job_id for _, line in book.snapshot(0)] == ["j"]
    assert not beat(book, generation, sent=3.0, revision=301, verdict=Verdict.LOST)
    book.forget([claim])
    assert book.snapshot(0) == []


def test_the_end_of_a_session_loses_everything_and_admits_nothing_more() -> None:
    book, generation = opened()
    [claim] = book.admit(generation, [job()], now=1.0)
    assert book.lose_all() == [claim]
    assert book.admit(generation, [job("k", 201)], now=1.0) == []
    assert len(book) == 0
    later = book.opened(sent=2.0, safe_duration=SAFE, revision=400)
    assert later != generation
    assert len(book.admit(later, [job("k", 401)], now=3.0)) == 1


def test_an_answer_for_an_earlier_session_changes_nothing() -> None:
    book, generation = opened()
    book.lose_all()
    later = book.opened(sent=2.0, safe_duration=SAFE, revision=400)
    book.admit(later, [job(token=401)], now=3.0)
    assert not beat(book, generation, sent=3.0, revision=500, verdict=Verdict.LOST)


def test_a_repeated_call_does_not_enter_a_claim_twice() -> None:
    book, generation = opened()
    assert len(book.admit(generation, [job()], now=1.0)) == 1
    assert book.admit(generation, [job()], now=1.0) == []


def test_the_first_reason_to_stop_stands_except_that_a_loss_goes_over_all() -> None:
    claim = HeldClaim(job(), 1.0, ClaimPhase.RUNNING)
    assert claim.tell(StopReason.CANCELLED)
    assert not claim.tell(StopReason.SHUTDOWN)
    assert claim.stop_reason is StopReason.CANCELLED
    assert not claim.lost.is_set()
    assert claim.tell(StopReason.LOST)
    assert not claim.tell(StopReason.CANCELLED)
    assert claim.lost.is_set()


def test_the_turning_loop_is_a_sign_of_life_for_handlers_on_it_alone() -> None:
    book, generation = opened()
    _, in_thread = book.admit(generation, [job("a", 200), job("b", 200)], now=1.0)
    in_thread.on_loop = False
    in_thread.advances = 2
    lines = {line.job_id: line.sequence for _, line in book.snapshot(7)}
    assert lines == {"a": 7, "b": 2}


class _Coordinator:
    """The other side of the rule: one session, one lease, one job that may be taken away and claimed anew."""

    def __init__(self) -> None:
        self.revision = 100
        self.owner_token = 0

    def claim(self) -> int:
        self.revision += 1
        self.owner_token = self.revision
        return self.owner_token

    def take_away(self) -> None:
        self.revision += 1
        self.owner_token = 0


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("claim"), st.floats(0, 6)),
            st.tuples(st.just("deliver"), st.floats(0, 6)),
            st.tuples(st.just("beat"), st.floats(0, 6)),
            st.tuples(st.just("take"), st.floats(0, 6)),
        ),
        max_size=30,
    )
)
def test_a_claim_that_was_taken_away_before_its_deadline_began_is_never_extended(
    steps: list[tuple[str, float]],
) -> None:
    """A claim runs past its first deadline only on beats at which the coordinator itself saw it held."""
    book, generation = opened()
    coordinator, now = _Coordinator(), 0.0
    undelivered: list[int] = []
    taken_at: dict[int, float] = {}
    for what, gap in steps:
        now += gap
        if what == "claim" and coordinator.owner_token == 0:
            undelivered.append(coordinator.claim())
        elif what == "take" and coordinator.owner_token:
            taken_at[coordinator.owner_token] = now
            coordinator.take_away()
        elif what == "deliver" and undelivered:
            book.admit(generation, [job("j", undelivered.pop(0))], now)
        elif what == "beat":
            claims = [claim for claim, _ in book.snapshot(0)]
            answer = BeatAnswer(
                confirmed=True,
                verdicts=tuple(
                    VerdictOn(
                        "j",
                        c.job.fencing_token,
                        Verdict.HELD if c.job.fencing_token == coordinator.owner_token else Verdict.LOST,
                    )
                    for c in claims
                ),
                safe_duration=SAFE,
                revision=coordinator.revision,
                command=Command.NONE,
            )
            book.confirm(generation, claims, answer, sent=now)
        book.expire(now)
        for claim, _ in book.snapshot(0):
            token = claim.job.fencing_token
            if claim.phase is ClaimPhase.RUNNING and token in taken_at:
                # It may not have heard yet, but its belief ends within one TTL of the taking.
                assert claim.deadline <= taken_at[token] + SAFE
