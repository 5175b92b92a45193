"""Who is lost, who was settled, and what beats say about claims."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.fencing import make_token
from coordinator.core.job import Claim, Progress
from coordinator.core.notice import NoticeKind
from coordinator.ports import Stored
from coordinator.services.api import Beat, HeldClaim
from coordinator.services.holders import Holders, Suspect
from tests.support.builders import a_claim, a_job, a_session
from tests.support.fake_ports import RecordedNotices

NS, S = "default", "00000000000000a1"


def token(revision: int) -> int:
    return make_token(1, revision)


def claim_at(revision: int, **fields: int) -> Claim:
    return replace(a_claim(a_job()), token=token(revision), **fields)


@pytest.fixture
def suspects() -> list[Suspect]:
    return []


@pytest.fixture
def notices() -> RecordedNotices:
    return RecordedNotices()


@pytest.fixture
def holders(suspects: list[Suspect], notices: RecordedNotices) -> Holders:
    return Holders(suspects.append, notices=notices)


def beat(number: int, *claims: HeldClaim, sent_ms: int) -> Beat:
    return Beat(session_id=S, number=number, sent_ms=sent_ms, claims=claims)


def held(revision: int, sequence: int = 0, progress: Progress | None = None) -> HeldClaim:
    return HeldClaim(job_id="j1", token=token(revision), sequence=sequence, progress=progress)


@pytest.mark.parametrize("claim_first", [True, False])
def test_a_claim_that_ends_in_the_revision_of_its_session_is_lost(
    holders: Holders, suspects: list[Suspect], claim_first: bool
) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)
    steps = [lambda: holders.claim_deleted(NS, "j1", 20), lambda: holders.session_deleted(NS, S, 20)]
    for step in steps if claim_first else reversed(steps):
        step()
    assert suspects == [Suspect(NS, "j1", S, token(10))]


def test_a_claim_that_ends_alone_was_settled(holders: Holders, suspects: list[Suspect]) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)
    holders.claim_deleted(NS, "j1", 20)
    holders.session_deleted(NS, S, 21)
    assert suspects == []
    assert holders.held_by(NS, S) == 0


def test_a_claim_that_ends_after_its_session_was_closed_is_looked_at(
    holders: Holders, suspects: list[Suspect]
) -> None:
    holders.session_seen(a_session(S))
    holders.claimed(NS, "j1", claim_at(10), None)
    holders.session_deleted(NS, S, 20)
    holders.claim_deleted(NS, "j1", 25)
    assert suspects == [Suspect(NS, "j1", S, token(10))]


def test_a_claim_found_without_its_session_is_looked_at_when_it_ends(
    holders: Holders, suspects: list[Suspect]
) -> None:
    holders.reset(NS, [("j1", claim_at(10))], [])
    holders.claim_deleted(NS, "j1", 25)
    assert suspects == [Suspect(NS, "j1", S, token(10))]


def test_an_old_deletion_does_not_end_a_newer_claim(holders: Holders, suspects: list[Suspect]) -> None:
    holders.claimed(NS, "j1", claim_at(30), None)
    holders.claim_deleted(NS, "j1", 20)
    holders.session_deleted(NS, S, 20)
    assert holders.held_by(NS, S) == 1
    assert suspects == []


def test_claims_that_vanished_while_nobody_watched_are_suspects(
    holders: Holders, suspects: list[Suspect]
) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)
    holders.claimed(NS, "j2", claim_at(11), None)
    holders.reset(NS, [("j2", claim_at(11))], [a_session()])
    assert suspects == [Suspect(NS, "j1", S, token(10))]
    assert holders.held_by(NS, S) == 1
    assert holders.session(NS, S) is not None


def test_a_claim_left_out_for_a_ttl_on_both_clocks_is_undelivered(holders: Holders) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)
    spans = [(0.0, 0), (5.0, 5_000), (10.0, 10_000), (11.0, 11_000)]
    found = [
        holders.beaten(NS, beat(n, sent_ms=sent), ttl_ms=10_000, now=now, now_ms=0)
        for n, (now, sent) in enumerate(spans)
    ]
    assert [len(f) for f in found] == [0, 0, 1, 0], "reported once, and not before the span has passed"
    assert found[2][0].undelivered
    assert found[2][0].token == token(10)


@pytest.mark.parametrize(
    ("now", "sent_ms"),
    [(30.0, 100), (0.1, 30_000)],
    ids=["beats read late", "a worker's clock that runs ahead"],
)
def test_a_span_on_one_clock_only_takes_nothing_away(holders: Holders, now: float, sent_ms: int) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)
    assert holders.beaten(NS, beat(1, sent_ms=0), ttl_ms=10_000, now=0.0, now_ms=0) == []
    assert holders.beaten(NS, beat(2, sent_ms=sent_ms), ttl_ms=10_000, now=now, now_ms=0) == []


def test_being_listed_once_starts_the_span_anew(holders: Holders) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)
    holders.beaten(NS, beat(1, sent_ms=0), ttl_ms=10_000, now=0.0, now_ms=0)
    holders.beaten(NS, beat(2, held(10), sent_ms=9_000), ttl_ms=10_000, now=9.0, now_ms=77)
    assert holders.beaten(NS, beat(3, sent_ms=12_000), ttl_ms=10_000, now=12.0, now_ms=0) == []
    assert holders.last_beat_ms(NS, "j1") == 77


def test_an_older_token_does_not_count_as_listing_the_claim(holders: Holders) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)
    for now in (0.0, 5.0):
        assert (
            holders.beaten(NS, beat(1, held(9), sent_ms=int(now * 1000)), ttl_ms=10_000, now=now, now_ms=0)
            == []
        )
    assert holders.beaten(NS, beat(3, held(9), sent_ms=10_000), ttl_ms=10_000, now=10.0, now_ms=0)


def test_a_handler_that_does_not_move_is_taken_away_and_one_that_moves_is_not(holders: Holders) -> None:
    holders.claimed(NS, "j1", claim_at(10, heartbeat_timeout_ms=4_000), None)
    moving = [(0.0, 1), (3.0, 2), (6.0, 3)]
    for now, sequence in moving:
        sent = int(now * 1000)
        assert not holders.beaten(
            NS, beat(1, held(10, sequence), sent_ms=sent), ttl_ms=9_000, now=now, now_ms=0
        )
    late = holders.beaten(NS, beat(4, held(10, 3), sent_ms=10_000), ttl_ms=9_000, now=10.0, now_ms=0)
    assert [(o.undelivered, o.token) for o in late] == [(False, token(10))]


def test_without_a_heartbeat_timeout_a_still_handler_keeps_its_claim(holders: Holders) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)
    for now in range(0, 1_000, 3):
        late = holders.beaten(NS, beat(1, held(10), sent_ms=now * 1000), ttl_ms=9_000, now=now, now_ms=0)
        assert late == []


def test_progress_of_the_last_beat_is_remembered(holders: Holders) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)
    progress = Progress(ratio=0.5, note="half")
    holders.beaten(NS, beat(1, held(10, 1, progress), sent_ms=0), ttl_ms=9_000, now=0.0, now_ms=5)
    assert holders.progress(NS, "j1") == progress


def test_the_record_of_a_claim_that_has_ended_brings_it_back_for_nobody(holders: Holders) -> None:
    """The watch may tell of claim and end before our own commit is answered."""
    stored = Stored(a_job(), 10)
    holders.claimed(NS, "j1", claim_at(10), None)
    holders.claim_deleted(NS, "j1", 20)
    holders.recorded(NS, "j1", claim_at(10), stored)
    assert holders.running(NS, "j1") is None
    assert holders.held_by(NS, S) == 0
    holders.claimed(NS, "j1", claim_at(30), None)
    holders.recorded(NS, "j1", claim_at(30), stored)
    assert holders.running(NS, "j1") == (stored, claim_at(30))


def beat_on(holders: Holders, sequences: list[int], *, every_ms: int = 1_000) -> None:
    """Beats at a steady pace, on both clocks, with these sequences."""
    for number, sequence in enumerate(sequences):
        at = number * every_ms
        said = beat(number, held(10, sequence), sent_ms=at)
        holders.beaten(NS, said, ttl_ms=60_000, now=at / 1000, now_ms=at)


def test_a_handler_that_does_not_move_for_half_of_its_timeout_is_told_once(
    holders: Holders, notices: RecordedNotices
) -> None:
    holders.claimed(NS, "j1", claim_at(10, heartbeat_timeout_ms=10_000), None)

    beat_on(holders, [1, 2, *[2] * 4])
    assert notices.notices == []
    beat_on(holders, [3, *[3] * 20])

    [notice] = notices.of(NoticeKind.HUNG)
    assert (notice.namespace, notice.job_id, notice.session_id) == (NS, "j1", S)
    assert (notice.queue, notice.type, notice.token) == ("q", "t", token(10))
    assert "5000 ms" in notice.reason


def test_a_handler_that_keeps_moving_is_not_said_to_hang(holders: Holders, notices: RecordedNotices) -> None:
    holders.claimed(NS, "j1", claim_at(10, heartbeat_timeout_ms=10_000), None)

    beat_on(holders, [number // 4 for number in range(100)])

    assert notices.notices == []


def test_a_handler_without_a_heartbeat_timeout_is_never_said_to_hang(
    holders: Holders, notices: RecordedNotices
) -> None:
    holders.claimed(NS, "j1", claim_at(10), None)

    beat_on(holders, [1, 2, *[2] * 1_000])

    assert notices.notices == []


def test_where_a_threshold_is_set_only_a_handler_that_has_moved_hangs(suspects: list[Suspect]) -> None:
    for sequences, hung in (([0] * 50, 0), ([0, 1, *[1] * 50], 1)):
        notices = RecordedNotices()
        holders = Holders(suspects.append, notices=notices, hung_after_ms=20_000)
        holders.claimed(NS, "j1", claim_at(10), None)

        beat_on(holders, sequences)

        assert len(notices.of(NoticeKind.HUNG)) == hung


def test_beats_that_arrive_late_or_lie_about_time_make_nobody_hang(
    holders: Holders, notices: RecordedNotices
) -> None:
    holders.claimed(NS, "j1", claim_at(10, heartbeat_timeout_ms=10_000), None)

    for now, sent_ms in ((0.0, 0), (60.0, 1), (60.1, 2), (60.2, 4_000)):
        holders.beaten(NS, beat(1, held(10, 1), sent_ms=sent_ms), ttl_ms=60_000, now=now, now_ms=0)
    assert notices.notices == []


def test_locks_count_among_the_keys_of_a_session(holders: Holders) -> None:
    holders.claimed(NS, "j1", claim_at(5), None)
    holders.locks_held_by = lambda namespace, session_id: 7 if (namespace, session_id) == (NS, S) else 0

    assert holders.held_by(NS, S) == 8
    assert holders.held_by(NS, "00000000000000b2") == 0
