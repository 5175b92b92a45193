"""What a beat's answer is worth, and what the end of a session does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.core.effects import Slot, Where
from coordinator.core.job import Claim, JobState
from coordinator.core.notice import NoticeKind
from coordinator.core.retry import RetryPolicy
from coordinator.errors import EtcdUnavailable, OutcomeUnknown, Reason, RequestError
from coordinator.ports import KeptAlive, Operation
from coordinator.services.api import Authority, Beat, ClaimedJob, HeldClaim, NewSession, Verdict
from coordinator.services.sessions import interval_ms, margin_ms
from tests.support.builders import FAR
from tests.support.memory_etcd import Fault
from tests.unit.services.workbench import NS, Coordinator, S, bench_with


def beat(number: int, *claimed: ClaimedJob, sent_ms: int = 0, token: int = 0) -> Beat:
    claims = [
        HeldClaim(job_id=c.stored.job.job_id, token=token or c.claim.token, sequence=1) for c in claimed
    ]
    return Beat(session_id=S, number=number, sent_ms=sent_ms, claims=claims)


async def with_claims(*names: str) -> tuple[Coordinator, Sequence[ClaimedJob]]:
    c = await bench_with()
    await c.submit(*names)
    return c, await c.claim(n=len(names))


async def test_a_confirmed_beat_says_how_long_it_is_safe_and_from_which_revision() -> None:
    c, claimed = await with_claims("a", "b")
    reply = await c.sessions.beat(NS, beat(1, *claimed), FAR)
    assert reply.authority is Authority.CONFIRMED
    assert reply.verdicts == (Verdict.HELD, Verdict.HELD)
    assert reply.safe_ms == 8_000
    assert reply.position >= max(one.claim.token for one in claimed)


@pytest.mark.parametrize(
    ("ttl_ms", "interval", "margin"), [(2_000, 666, 1_000), (10_000, 3_333, 2_000), (60_000, 5_000, 12_000)]
)
def test_interval_and_margin_follow_the_granted_ttl(ttl_ms: int, interval: int, margin: int) -> None:
    assert (interval_ms(ttl_ms), margin_ms(ttl_ms)) == (interval, margin)


async def test_a_claim_key_deleted_by_hand_is_lost_and_is_not_made_again() -> None:
    """Fault case 022."""
    c, claimed = await with_claims("a")
    c.etcd.write((), [Where(Slot.CLAIM, NS, "a")])
    before = c.etcd.revision
    reply = await c.sessions.beat(NS, beat(1, *claimed), FAR)
    assert reply.verdicts == (Verdict.LOST,)
    assert c.etcd.revision == before


async def test_a_beat_renews_no_lease_but_that_of_a_session_of_its_namespace() -> None:
    c = await bench_with()
    with pytest.raises(RequestError) as refusal:
        await c.sessions.beat("other", beat(1), FAR)
    assert refusal.value.reason is Reason.SESSION_NOT_FOUND
    assert c.session_store.kept_alive == 0


async def test_an_older_token_of_a_held_job_is_lost() -> None:
    c, claimed = await with_claims("a")
    reply = await c.sessions.beat(NS, beat(1, *claimed, token=claimed[0].claim.token - 1), FAR)
    assert reply.verdicts == (Verdict.LOST,)


async def test_a_revoked_lease_ends_the_session_for_its_worker() -> None:
    """Fault case 023: the keepalive answers TTL 0, which is no error in etcd."""
    c, claimed = await with_claims("a")
    await c.session_store.close(NS, S, deadline=FAR)
    with pytest.raises(RequestError) as refusal:
        await c.sessions.beat(NS, beat(1, *claimed), FAR)
    assert refusal.value.reason is Reason.SESSION_NOT_FOUND
    assert [s.job_id for s in c.suspects] == ["a"]


@pytest.mark.parametrize("error", [OutcomeUnknown("no answer"), EtcdUnavailable("down")])
async def test_etcd_out_of_reach_is_unknown_and_gives_no_safe_time(error: Exception) -> None:
    c, claimed = await with_claims("a")
    c.etcd.read_error = error
    reply = await c.sessions.beat(NS, beat(1, *claimed), FAR)
    assert reply.authority is Authority.UNKNOWN
    assert (reply.verdicts, reply.safe_ms, reply.position) == ((), 0, 0)


async def test_a_keepalive_of_another_raft_term_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    c, claimed = await with_claims("a")

    async def old_leader(session_id: str, *, deadline: float) -> KeptAlive:
        return KeptAlive(10_000, 1)

    monkeypatch.setattr(c.session_store, "keep_alive", old_leader)
    reply = await c.sessions.beat(NS, beat(1, *claimed), FAR)
    assert reply.authority is Authority.UNKNOWN


async def test_a_claim_that_no_beat_mentions_goes_back_after_a_ttl_uncharged() -> None:
    """Fault case 001: the reply was lost and nobody works the job."""
    c, _ = await with_claims("a")
    for n in range(4):
        await c.sessions.beat(NS, beat(n, sent_ms=n * 4_000), FAR)
        await c.clock.advance(4)
        await c.session_store.keep_alive(S, deadline=FAR)
    counts = await c.take_away.run_once()
    assert counts.taken == 1
    stored = c.etcd.stored(NS, "a")
    assert stored is not None
    assert stored.job.state is JobState.SCHEDULED
    assert stored.job.hold_ms == 10_000, "its holder, if there is one, hears of it first"
    assert (stored.job.failures, stored.job.lease_losses, stored.job.uncharged) == (0, 0, 1)
    [notice] = c.notices.notices
    assert (notice.kind, notice.job_id, notice.session_id) == (NoticeKind.TAKEN_AWAY, "a", S)
    assert (notice.state_before, notice.state_after) == (JobState.RUNNING, JobState.SCHEDULED)
    assert (notice.token, notice.facts) == (stored.job.attempts[-1].token, {"why": "undelivered"})


async def test_a_handler_that_stands_still_is_told_then_taken_away_and_then_its_job_is_dead() -> None:
    c = await bench_with()
    await c.submit("a", heartbeat_timeout_ms=5_000, retry=RetryPolicy(max_retries=0))
    claimed = await c.claim()
    for n in range(6):
        await c.sessions.beat(NS, beat(n, *claimed, sent_ms=n * 1_000), FAR)
        await c.clock.advance(1)
    await c.take_away.run_once()

    hung, taken, dead = c.notices.notices
    assert [hung.kind, taken.kind, dead.kind] == [NoticeKind.HUNG, NoticeKind.TAKEN_AWAY, NoticeKind.DEAD]
    assert {one.token for one in c.notices.notices} == {claimed[0].claim.token}
    assert taken.facts == {"why": "timed_out"}
    assert (dead.state_before, dead.state_after) == (JobState.RUNNING, JobState.DEAD)


async def test_closing_a_session_gives_its_jobs_back_at_once_and_uncharged() -> None:
    c, _ = await with_claims("a", "b")
    assert await c.sessions.close(NS, S, FAR) == 2
    for name in ("a", "b"):
        stored = c.etcd.stored(NS, name)
        assert stored is not None
        assert stored.job.state is JobState.PENDING
        assert (stored.job.lease_losses, stored.job.uncharged) == (0, 1)
    assert await c.session_store.read(NS, S, deadline=FAR) is None
    assert c.suspects == []
    assert await c.sessions.close(NS, S, FAR) == 0, "repeating it is no error"


async def test_closing_releases_also_what_changes_at_that_moment_or_is_refused_once() -> None:
    c, _ = await with_claims("a", "b")

    def cancel_first(operation: Operation) -> None:
        c.etcd.interfere.clear()
        record = c.etcd.stored(NS, "a")
        assert record is not None
        state = Where(Slot.STATE, NS, "a")
        cancelled = replace(record.job, cancel_requested=True)
        c.etcd.write([(state, cancelled, None), (Where(Slot.CANCEL, NS, "a"), "who", None)])

    c.etcd.interfere.append(cancel_first)
    c.etcd.faults.extend([None, Fault.REFUSED])
    assert await c.sessions.close(NS, S, FAR) == 2
    ended, waiting = c.etcd.stored(NS, "a"), c.etcd.stored(NS, "b")
    assert ended is not None
    assert waiting is not None
    assert (ended.job.state, waiting.job.state) == (JobState.CANCELLED, JobState.PENDING)
    assert (ended.job.lease_losses, waiting.job.lease_losses) == (0, 0)


async def test_a_session_whose_jobs_cannot_be_released_keeps_its_lease() -> None:
    """Revoked, they would be charged as losses, though their worker said goodbye."""
    c, _ = await with_claims("a")
    c.etcd.faults.extend([Fault.REFUSED] * 3)
    with pytest.raises(RequestError) as refusal:
        await c.sessions.close(NS, S, FAR)
    assert refusal.value.reason is Reason.TOO_MANY_REQUESTS
    assert c.etcd.claim(NS, "a") is not None
    assert await c.sessions.close(NS, S, FAR) == 1
    stored = c.etcd.stored(NS, "a")
    assert stored is not None
    assert (stored.job.state, stored.job.lease_losses) == (JobState.PENDING, 0)


async def test_a_poll_of_a_session_that_is_being_closed_wins_nothing_that_would_end_with_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault case 003: the claim comes between the look at what the session holds and the end of its lease."""
    c, _ = await with_claims("a")
    await c.submit("b")
    listed = c.session_store.claims_of
    refusals: list[Reason] = []

    async def overtaken(namespace: str, session_id: str, *, deadline: float) -> Sequence[tuple[str, Claim]]:
        found = await listed(namespace, session_id, deadline=deadline)
        with pytest.raises(RequestError) as refusal:
            await c.claim(n=1)
        refusals.append(refusal.value.reason)
        return found

    monkeypatch.setattr(c.session_store, "claims_of", overtaken)
    assert await c.sessions.close(NS, S, FAR) == 1
    assert refusals == [Reason.SESSION_NOT_FOUND]
    for name, uncharged in (("a", 1), ("b", 0)):
        stored = c.etcd.stored(NS, name)
        assert stored is not None
        assert stored.job.state is JobState.PENDING
        assert (stored.job.lease_losses, stored.job.uncharged) == (0, uncharged)


def new(request_id: str, identity: str = "w1") -> NewSession:
    return NewSession(request_id=request_id, identity=identity, sdk="t", labels={}, ttl_ms=5_000)


async def test_opening_again_with_the_same_request_answers_the_same_session() -> None:
    c = await bench_with()
    first = await c.sessions.open(NS, new("r1"), FAR)
    again = await c.sessions.open(NS, new("r1"), FAR)
    other = await c.sessions.open(NS, new("r2"), FAR)
    assert first.session_id == again.session_id != other.session_id
    assert (first.ttl_ms, first.interval_ms, first.safe_ms) == (5_000, 1_666, 4_000)


async def test_a_request_id_with_other_content_is_refused() -> None:
    c = await bench_with()
    await c.sessions.open(NS, new("r1"), FAR)
    with pytest.raises(RequestError) as refusal:
        await c.sessions.open(NS, new("r1", identity="w2"), FAR)
    assert refusal.value.reason is Reason.REQUEST_ID_REUSED
