"""Sessions on a real etcd: opening repeats, confirming is linearizable, ending takes the claims along."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core.fencing import make_token
from coordinator.errors import Reason, RequestError
from tests.integration.store.conftest import Harness
from tests.support.polling import eventually


async def test_a_session_is_opened_on_the_lease_of_its_name(harness: Harness) -> None:
    session = await harness.open_session(ttl_ms=4_300)
    assert session.ttl_ms == 5_000
    assert session.epoch == harness.store.present.epoch
    answer = await harness.store.client.lease_time_to_live(int(session.session_id, 16), keys=True, timeout=5)
    assert answer.granted_ttl == 5
    assert list(answer.keys) == [harness.store.space.namespace(harness.namespace).session(session.session_id)]
    found = await harness.store.sessions.read(
        harness.namespace, session.session_id, deadline=harness.deadline()
    )
    assert found == session
    assert await harness.store.sessions.list_sessions(harness.namespace, deadline=harness.deadline()) == [
        session
    ]


async def test_opening_again_answers_the_session_that_is_there(harness: Harness) -> None:
    asked = harness.new_session()
    first = await harness.store.sessions.open(asked, deadline=harness.deadline())
    again = await harness.store.sessions.open(asked, deadline=harness.deadline())
    assert again == first


async def test_the_same_id_with_other_content_is_refused(harness: Harness) -> None:
    first = await harness.open_session()
    other = harness.new_session(digest=b"other", session_id=first.session_id)
    with pytest.raises(RequestError) as refused:
        await harness.store.sessions.open(other, deadline=harness.deadline())
    assert refused.value.reason is Reason.REQUEST_ID_REUSED
    assert (
        await harness.store.sessions.read(harness.namespace, first.session_id, deadline=harness.deadline())
        == first
    )


async def test_a_lease_without_witness_is_taken_over_by_its_own_session(harness: Harness) -> None:
    asked = harness.new_session()
    await harness.store.client.lease_grant(5, int(asked.session_id, 16), timeout=5)
    opened = await harness.store.sessions.open(asked, deadline=harness.deadline())
    assert opened.session_id == asked.session_id
    assert opened.revision


async def test_keepalive_tells_ttl_and_term_and_then_loss(harness: Harness) -> None:
    session = await harness.open_session()
    kept = await harness.store.sessions.keep_alive(session.session_id, deadline=harness.deadline())
    assert kept.ttl_ms == 5_000
    confirmed = await harness.store.sessions.confirm(
        harness.namespace, session.session_id, (), deadline=harness.deadline()
    )
    assert confirmed.raft_term == kept.raft_term
    await harness.store.sessions.close(harness.namespace, session.session_id, deadline=harness.deadline())
    gone = await harness.store.sessions.keep_alive(session.session_id, deadline=harness.deadline())
    assert gone.ttl_ms == 0
    await harness.store.sessions.close(harness.namespace, session.session_id, deadline=harness.deadline())


async def test_confirm_shows_claims_cancels_and_position(harness: Harness) -> None:
    stored, token = await harness.claimed("j1")
    assert harness.session is not None
    ids = ["j1", *(f"other{number}" for number in range(150))]
    confirmed = await harness.store.sessions.confirm(
        harness.namespace, harness.session.session_id, ids, deadline=harness.deadline()
    )
    assert confirmed.session == harness.session
    assert {job_id: claim.token for job_id, claim in confirmed.claims.items()} == {"j1": token}
    assert confirmed.cancelled == frozenset()
    assert confirmed.position >= make_token(harness.store.present.epoch, stored.revision)
    assert confirmed.raft_term


async def test_many_confirms_travel_in_few_reads(harness: Harness) -> None:
    session = await harness.open_session()
    before = harness.store.reader.reads
    answers = await asyncio.gather(
        *(
            harness.store.sessions.confirm(
                harness.namespace, session.session_id, ("a", "b"), deadline=harness.deadline()
            )
            for _ in range(60)
        )
    )
    assert all(answer.session == session for answer in answers)
    assert harness.store.reader.reads - before <= 4


async def test_closing_a_session_ends_its_claims_in_the_same_revision(harness: Harness) -> None:
    await harness.store.namespaces.ensure(harness.namespace, deadline=harness.deadline())
    await eventually(lambda: harness.told.fresh.get(harness.namespace))
    _, token = await harness.claimed("j1")
    assert harness.session is not None
    session_id = harness.session.session_id
    held = await harness.store.sessions.claims_of(harness.namespace, session_id, deadline=harness.deadline())
    assert [(job_id, claim.token) for job_id, claim in held] == [("j1", token)]
    await harness.store.sessions.close(harness.namespace, session_id, deadline=harness.deadline())
    found = await harness.store.jobs.read(harness.namespace, "j1", deadline=harness.deadline())
    assert found.claim is None
    assert (
        await harness.store.sessions.claims_of(harness.namespace, session_id, deadline=harness.deadline())
        == []
    )

    def ends() -> dict[object, object]:
        return {event[0]: event[-1] for event in harness.told.events if str(event[0]).endswith("_deleted")}

    await eventually(lambda: {"claim_deleted", "session_deleted"} <= set(ends()))
    assert ends()["claim_deleted"] == ends()["session_deleted"]


async def test_a_claim_for_an_ended_session_is_lost_and_poisons_nobody(harness: Harness) -> None:
    alive = await harness.open_session()
    ended = await harness.store.sessions.open(harness.new_session(), deadline=harness.deadline())
    await harness.store.sessions.close(harness.namespace, ended.session_id, deadline=harness.deadline())
    stored = [await harness.submitted(f"j{number}") for number in range(6)]
    under_way = [
        harness.claim(each, session_id=(alive if number % 2 else ended).session_id)
        for number, each in enumerate(stored)
    ]
    commits = [await pending for pending in under_way]
    assert [commit.won for commit in commits] == [False, True] * 3
    assert [commit.session_gone for commit in commits] == [True, False] * 3


async def test_lost_claims_leave_no_leases(harness: Harness) -> None:
    """Case 005."""
    stored = await harness.submitted("j1")
    await harness.open_session()
    before = {lease.id for lease in (await harness.store.client.leases(timeout=5)).leases}
    under_way = [harness.claim(stored, nonce=b"%d" % number) for number in range(500)]
    assert sum([(await pending).won for pending in under_way]) == 1
    after = {lease.id for lease in (await harness.store.client.leases(timeout=5)).leases}
    assert len(after - before) <= 2  # those of other tests' coordinators


async def test_closing_ends_no_lease_but_a_session_of_that_namespace(harness: Harness) -> None:
    """A session id is a lease id; whoever names another's ends nothing by it."""
    session = await harness.open_session()
    await harness.claimed("j1")
    sessions, client = harness.store.sessions, harness.store.client
    await sessions.close("other", session.session_id, deadline=harness.deadline())
    assert await sessions.read(harness.namespace, session.session_id, deadline=harness.deadline())
    bucket = await client.lease_grant(60, timeout=5)
    await client.put(harness.store.space.bucket(1, bucket.id), b"", lease=bucket.id, timeout=5)
    await sessions.close(harness.namespace, f"{bucket.id:016x}", deadline=harness.deadline())
    assert (await client.lease_time_to_live(bucket.id, timeout=5)).ttl > 0
    await sessions.close(harness.namespace, session.session_id, deadline=harness.deadline())
    assert (await client.lease_time_to_live(int(session.session_id, 16), timeout=5)).ttl < 0
    await client.lease_revoke(bucket.id, timeout=5)


async def test_a_session_that_was_shut_before_is_still_closed(harness: Harness) -> None:
    session = await harness.open_session()
    sessions, client = harness.store.sessions, harness.store.client
    await harness.claimed("j1")
    await sessions.shut(harness.namespace, session.session_id, deadline=harness.deadline())
    await sessions.close(harness.namespace, session.session_id, deadline=harness.deadline())
    assert (await client.lease_time_to_live(int(session.session_id, 16), timeout=5)).ttl < 0
