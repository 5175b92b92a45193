"""What every ``JobStore`` and ``SessionStore`` does, whichever it is."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core import commands as c
from coordinator.core.fencing import split_token
from coordinator.core.invariants import check_job
from coordinator.core.job import Claim, Job, JobState
from coordinator.core.rank import Rank
from coordinator.errors import NotApplied, Reason, RequestError
from coordinator.ports import Checkpoint, Due, Snapshot, Spec, Stored
from tests.conformance.actor import Actor
from tests.support.polling import eventually

LAST = Rank(10**14 - 1, 0)


async def snapshot(actor: Actor, job_id: str = "j1", **parts: bool) -> Snapshot:
    return await actor.jobs.read(actor.namespace, job_id, deadline=actor.deadline(), **parts)


async def ready(actor: Actor) -> list[str]:
    page = await actor.jobs.list_ready(
        actor.namespace, "q", "t", after=None, until=LAST, limit=100, deadline=actor.deadline()
    )
    return [stored.job.job_id for stored in page.jobs]


async def end_session(actor: Actor) -> None:
    assert actor.session is not None
    await actor.sessions.close(actor.namespace, actor.session.session_id, deadline=actor.deadline())
    actor.session = None


# --- submit ---------------------------------------------------------------------------------------


async def test_submit_creates_record_spec_and_place_in_line(actor: Actor) -> None:
    commit = await actor.submit("j1", b"p")
    assert commit.won
    found = await snapshot(actor, spec=True, checkpoint=True)
    assert found.stored == commit.stored == Stored(commit.stored.job, commit.revision)  # type: ignore[union-attr]
    assert found.spec is not None
    assert found.spec.payload == b"p"
    assert (found.claim, found.checkpoint) == (None, None)
    assert await ready(actor) == ["j1"]


async def test_submit_again_loses_against_what_stands(actor: Actor) -> None:
    first = await actor.submitted("j1", unique_key="u")
    again = await actor.submit("j1", unique_key="u")
    assert (again.won, again.stored) == (False, first)
    taken = await actor.submit("j2", unique_key="u")
    assert (taken.won, taken.stored, taken.unique_owner) == (False, None, "j1")
    assert (await actor.submit("j3", unique_key="v")).won


async def test_a_scheduled_job_is_due_and_not_in_line(actor: Actor) -> None:
    at = actor.clock.now_ms() + 60_000
    assert (await actor.submit_later("j1", at)).won
    assert await ready(actor) == []
    due = await actor.jobs.list_due(actor.namespace, until_ms=at, limit=10, deadline=actor.deadline())
    assert [(each.job_id, each.ms, each.hold_ms) for each in due] == [("j1", at, 0)]
    early = await actor.jobs.list_due(actor.namespace, until_ms=at - 1, limit=10, deadline=actor.deadline())
    assert early == []


# --- claim ----------------------------------------------------------------------------------------


async def test_claim_takes_the_job_out_of_line_and_brings_its_spec(actor: Actor) -> None:
    stored = await actor.submitted("j1")
    session = await actor.open_session()
    commit = await actor.claim(stored)
    assert commit.won
    assert split_token(commit.token).revision == commit.revision
    assert commit.claim is not None
    assert (commit.claim.token, commit.claim.session) == (commit.token, session.session_id)
    assert commit.spec is not None
    assert commit.spec.payload == b"payload"
    found = await snapshot(actor)
    assert found.stored == commit.stored
    assert found.claim == commit.claim
    assert await ready(actor) == []


async def test_of_many_claims_one_wins_and_the_others_see_it(actor: Actor) -> None:
    stored = await actor.submitted("j1")
    await actor.open_session()
    pending = [actor.claim(stored, nonce=bytes([number])) for number in range(8)]
    commits = [await each for each in pending]
    assert [commit.won for commit in commits] == [True] + [False] * 7
    for lost in commits[1:]:
        assert lost.claim == commits[0].claim
        assert lost.stored == commits[0].stored
        assert not lost.session_gone


async def test_an_ended_session_claims_nothing(actor: Actor) -> None:
    stored = await actor.submitted("j1")
    gone = (await actor.open_session()).session_id
    await end_session(actor)
    lost = await actor.claim(stored, session_id=gone)
    assert (lost.won, lost.session_gone, lost.claim) == (False, True, None)
    assert lost.stored == stored


async def test_a_claim_decided_on_an_old_record_is_lost(actor: Actor) -> None:
    stored = await actor.submitted("j1")
    await actor.open_session()
    changed = await actor.jobs.commit(actor.operation(stored, c.Update(priority=1)))
    assert changed.won
    lost = await actor.claim(stored)
    assert (lost.won, lost.claim, lost.stored) == (False, None, changed.stored)


# --- settle ---------------------------------------------------------------------------------------


async def test_complete_ends_it(actor: Actor) -> None:
    stored, token = await actor.claimed("j1", unique_key="u")
    done = await actor.complete(stored, token, result=b"r")
    assert done.won
    assert done.stored is not None
    assert done.stored.job.state is JobState.SUCCEEDED
    found = await snapshot(actor, spec=True)
    assert (found.stored, found.claim, found.spec) == (done.stored, None, None)
    assert (await actor.submit("j2", unique_key="u")).won


async def test_a_settlement_is_fenced_by_its_token(actor: Actor) -> None:
    stored, token = await actor.claimed("j1")
    lost = await actor.complete(stored, token - 1)
    assert not lost.won
    assert lost.claim is not None
    assert lost.claim.token == token
    assert lost.stored == stored
    assert (await actor.complete(stored, token)).won
    again = await actor.complete(stored, token)
    assert (again.won, again.claim) == (False, None)
    assert again.stored is not None
    assert again.stored.job.attempt_with(token) is not None


async def test_a_failed_job_waits_and_comes_back(actor: Actor) -> None:
    stored, token = await actor.claimed("j1")
    held = Claim(session="", attempt=1, nonce=b"", start_ms=0, token=token)
    failed = await actor.jobs.commit(
        actor.operation(
            stored, c.Fail(token=token, digest=b"f", retry_delay_ms=10_000), held=held, token=token
        )
    )
    assert failed.stored is not None
    assert failed.stored.job.state is JobState.SCHEDULED
    due = await actor.jobs.list_due(
        actor.namespace, until_ms=failed.stored.job.ready_ms, limit=1, deadline=actor.deadline()
    )
    assert [each.job_id for each in due] == ["j1"]
    assert (await snapshot(actor)).claim is None


async def test_a_large_result_is_read_on_request(actor: Actor) -> None:
    stored, token = await actor.claimed("j1")
    assert (await actor.complete(stored, token, result=b"r" * 4_000)).won
    assert (await snapshot(actor, result=True)).result == b"r" * 4_000


async def test_a_deleted_job_leaves_nothing_and_its_tokens_are_never_reused(actor: Actor) -> None:
    tokens = []
    for _ in range(3):
        stored, token = await actor.claimed("j1")
        tokens.append(token)
        done = await actor.complete(stored, token, result=b"r" * 4_000)
        assert done.stored is not None
        gone = await actor.jobs.commit(actor.operation(done.stored, c.Delete()))
        assert (gone.won, gone.stored) == (True, None)
        found = await snapshot(actor, spec=True, checkpoint=True)
        assert (found.stored, found.claim, found.spec, found.checkpoint) == (None, None, None, None)
    assert tokens == sorted(set(tokens))


# --- loss -----------------------------------------------------------------------------------------


async def test_a_held_job_is_not_lost(actor: Actor) -> None:
    stored, token = await actor.claimed("j1")
    refused = await actor.jobs.commit(actor.operation(stored, c.Lose(token=token)))
    assert not refused.won
    assert refused.claim is not None
    await end_session(actor)
    assert (await snapshot(actor)).claim is None
    lost = await actor.jobs.commit(actor.operation(stored, c.Lose(token=token)))
    assert lost.won
    assert await ready(actor) == ["j1"]
    assert not (await actor.complete(stored, token)).won


async def test_of_two_recoverers_one_wins(actor: Actor) -> None:
    stored, token = await actor.claimed("j1")
    await end_session(actor)
    pending = [actor.jobs.commit(actor.operation(stored, c.Lose(token=token))) for _ in range(2)]
    assert [(await each).won for each in pending] == [True, False]
    found = await snapshot(actor)
    assert found.stored is not None
    assert found.stored.job.lease_losses == 1


async def test_a_whole_life_keeps_the_invariants(actor: Actor) -> None:
    job: Job | None = None

    async def check() -> None:
        nonlocal job
        found = await snapshot(actor)
        assert found.stored is not None
        job = found.stored.job
        assert check_job(job, found.claim) == []

    stored, token = await actor.claimed("j1", unique_key="u")
    await check()
    asked = await actor.jobs.commit(actor.operation(stored, c.Cancel(reason="no")))
    await check()
    assert asked.stored is not None
    held = Claim(session="", attempt=1, nonce=b"", start_ms=0, token=token)
    await actor.jobs.commit(
        actor.operation(asked.stored, c.Release(token=token, digest=b"r"), held=held, token=token)
    )
    await check()
    assert job is not None
    assert job.state is JobState.CANCELLED


# --- beside transitions ---------------------------------------------------------------------------


async def test_checkpoints_are_the_holders_and_the_later_stays(actor: Actor) -> None:
    stored, token = await actor.claimed("j1")

    async def save(sequence: int, by: int = token, data: bytes = b"") -> bool:
        what = Checkpoint(attempt=1, sequence=sequence, data=data or b"%d" % sequence)
        return await actor.jobs.save_checkpoint(actor.namespace, "j1", by, what, deadline=actor.deadline())

    assert await save(2)
    assert await save(3)
    assert not await save(1)
    assert await save(3, data=b"again")
    found = await snapshot(actor, checkpoint=True)
    assert found.checkpoint is not None
    assert (found.checkpoint.sequence, found.checkpoint.data) == (3, b"again")
    with pytest.raises(RequestError) as stale:
        await save(4, by=token - 1)
    assert stale.value.reason is Reason.CLAIM_LOST
    assert (await actor.complete(stored, token)).won
    with pytest.raises(RequestError) as late:
        await save(4)
    assert late.value.reason is Reason.CLAIM_LOST
    assert (await snapshot(actor, checkpoint=True)).checkpoint is None


async def test_a_checkpoint_of_an_unknown_job_is_refused(actor: Actor) -> None:
    with pytest.raises(RequestError) as unknown:
        await actor.jobs.save_checkpoint(
            actor.namespace,
            "nobody",
            (1 << 44) + 5,
            Checkpoint(attempt=1, sequence=1, data=b""),
            deadline=actor.deadline(),
        )
    assert unknown.value.reason is Reason.JOB_NOT_FOUND


async def test_a_stray_due_key_is_deleted_only_as_read(actor: Actor) -> None:
    at = actor.clock.now_ms() + 1_000
    assert (await actor.submit_later("j1", at)).won
    (due,) = await actor.jobs.list_due(actor.namespace, until_ms=at, limit=1, deadline=actor.deadline())
    older = Due(due.job_id, due.ms, due.hold_ms, due.revision - 1)
    assert not await actor.jobs.delete_stray(actor.namespace, older, deadline=actor.deadline())
    assert await actor.jobs.delete_stray(actor.namespace, due, deadline=actor.deadline())
    assert not await actor.jobs.delete_stray(actor.namespace, due, deadline=actor.deadline())


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_a_listing_shows_every_job_once(actor: Actor, limit: int) -> None:
    ids = {f"j/{number}" for number in range(12)}
    for job_id in ids:
        await actor.submitted(job_id)
    found: list[str] = []
    cursor = ""
    for _ in range(300):
        page = await actor.jobs.list_jobs(
            actor.namespace, cursor=cursor, limit=limit, deadline=actor.deadline()
        )
        assert len(page.jobs) <= limit
        found += [stored.job.job_id for stored in page.jobs]
        cursor = page.cursor
        if not cursor:
            break
    assert sorted(found) == sorted(ids)


async def test_reads_of_many_keep_their_order(actor: Actor) -> None:
    ids = [f"j{number}" for number in range(150)]
    for pending in [actor.submit(job_id) for job_id in ids[::2]]:
        assert (await pending).won
    found = await actor.jobs.read_many(actor.namespace, ids, deadline=actor.deadline())
    assert [each.stored.job.job_id if each.stored else None for each in found] == [
        job_id if number % 2 == 0 else None for number, job_id in enumerate(ids)
    ]


async def test_the_line_is_in_order_of_rank_and_counted(actor: Actor) -> None:
    now = actor.clock.now_ms()
    for counter, job_id in enumerate(("c", "a", "b")):
        assert (await actor.submit(job_id, submit_ms=now, counter=counter, due_ms=now)).won
    assert await ready(actor) == ["c", "a", "b"]
    first = await actor.jobs.list_ready(
        actor.namespace, "q", "t", after=None, until=LAST, limit=1, deadline=actor.deadline()
    )
    assert not first.complete
    rest = await actor.jobs.list_ready(
        actor.namespace,
        "q",
        "t",
        after=first.jobs[-1].job.rank,
        until=LAST,
        limit=10,
        deadline=actor.deadline(),
    )
    assert [stored.job.job_id for stored in rest.jobs] == ["a", "b"]
    assert rest.complete
    for type_, number in (("t", 3), ("other", 0)):
        counted, as_of = await actor.jobs.count_ready(actor.namespace, "q", type_, deadline=actor.deadline())
        assert (counted, as_of >= rest.jobs[-1].revision) == (number, True)


async def test_types_and_claims_are_listed(actor: Actor) -> None:
    for _ in range(2):
        await actor.jobs.register_type(actor.namespace, "q", "t", deadline=actor.deadline())
    assert await actor.jobs.list_types(actor.namespace, deadline=actor.deadline()) == [("q", "t")]
    _, token = await actor.claimed("j1")
    claims = await actor.jobs.list_claims(actor.namespace, deadline=actor.deadline())
    assert [(job_id, claim.token) for job_id, claim in claims] == [("j1", token)]


async def test_what_comes_after_its_deadline_is_not_applied(actor: Actor) -> None:
    operation = actor.operation(
        None,
        c.Submit(namespace=actor.namespace, job_id="j1", terms=actor.terms()),
        spec=Spec(payload=b""),
        seconds=-1,
    )
    with pytest.raises(NotApplied):
        await actor.jobs.commit(operation)
    assert (await snapshot(actor)).stored is None


class Sink:
    def __init__(self) -> None:
        self.began = -1
        self.heard: list[tuple[int, str, JobState | None]] = []

    def started(self, revision: int) -> None:
        self.began = revision

    def changed(self, revision: int, job_id: str, stored: Stored | None) -> None:
        self.heard.append((revision, job_id, stored.job.state if stored else None))


async def test_changes_are_heard_from_a_revision_on(actor: Actor) -> None:
    first = await actor.submitted("j1")
    second = await actor.submitted("j2")
    sink = Sink()
    stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(
        actor.jobs.watch_states(actor.namespace, after_revision=first.revision, sink=sink, stop=stop)
    )
    await eventually(lambda: sink.heard)
    gone = await actor.jobs.commit(actor.operation(first, c.Cancel()))
    assert gone.stored is not None
    deleted = await actor.jobs.commit(actor.operation(gone.stored, c.Delete()))
    await eventually(lambda: len(sink.heard) == 3)
    stop.set_result(None)
    await watching
    assert sink.began == first.revision
    assert sink.heard == [
        (second.revision, "j2", JobState.PENDING),
        (gone.revision, "j1", JobState.CANCELLED),
        (deleted.revision, "j1", None),
    ]


# --- sessions -------------------------------------------------------------------------------------


async def test_a_session_is_opened_once_per_request(actor: Actor) -> None:
    asked = actor.new_session()
    first = await actor.sessions.open(asked, deadline=actor.deadline())
    assert first.revision
    assert await actor.sessions.open(asked, deadline=actor.deadline()) == first
    other = actor.new_session(digest=b"other", session_id=asked.session_id)
    with pytest.raises(RequestError) as refused:
        await actor.sessions.open(other, deadline=actor.deadline())
    assert refused.value.reason is Reason.REQUEST_ID_REUSED
    found = await actor.sessions.read(actor.namespace, asked.session_id, deadline=actor.deadline())
    assert found == first
    assert await actor.sessions.list_sessions(actor.namespace, deadline=actor.deadline()) == [first]


async def test_a_beat_confirms_what_is_held(actor: Actor) -> None:
    stored, token = await actor.claimed("j1")
    assert actor.session is not None
    session_id = actor.session.session_id
    asked = await actor.jobs.commit(actor.operation(stored, c.Cancel(reason="no")))
    assert asked.won
    kept = await actor.sessions.keep_alive(session_id, deadline=actor.deadline())
    assert kept.ttl_ms == actor.session.ttl_ms
    confirmed = await actor.sessions.confirm(
        actor.namespace, session_id, ["j1", "j2"], deadline=actor.deadline()
    )
    assert confirmed.session == actor.session
    assert {job_id: claim.token for job_id, claim in confirmed.claims.items()} == {"j1": token}
    assert confirmed.cancelled == {"j1"}
    assert confirmed.position > token
    assert confirmed.raft_term == kept.raft_term
    held = await actor.sessions.claims_of(actor.namespace, session_id, deadline=actor.deadline())
    assert [(job_id, claim.token) for job_id, claim in held] == [("j1", token)]


async def test_an_ended_session_holds_nothing(actor: Actor) -> None:
    await actor.claimed("j1")
    assert actor.session is not None
    session_id = actor.session.session_id
    for _ in range(2):
        await actor.sessions.close(actor.namespace, session_id, deadline=actor.deadline())
    assert (await actor.sessions.keep_alive(session_id, deadline=actor.deadline())).ttl_ms == 0
    confirmed = await actor.sessions.confirm(actor.namespace, session_id, ["j1"], deadline=actor.deadline())
    assert (confirmed.session, confirmed.claims) == (None, {})
    assert await actor.sessions.read(actor.namespace, session_id, deadline=actor.deadline()) is None
    assert await actor.sessions.claims_of(actor.namespace, session_id, deadline=actor.deadline()) == []
    assert await actor.sessions.list_sessions(actor.namespace, deadline=actor.deadline()) == []
