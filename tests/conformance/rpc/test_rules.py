"""What every coordinator does with jobs, sessions and claims, call by call."""

from __future__ import annotations

import asyncio
import time

from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.conformance.rpc.subject import Subject, Worker, span
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal

SCHEDULED, PENDING, RUNNING = t.JOB_STATE_SCHEDULED, t.JOB_STATE_PENDING, t.JOB_STATE_RUNNING
SUCCEEDED, DEAD, CANCELLED = t.JOB_STATE_SUCCEEDED, t.JOB_STATE_DEAD, t.JOB_STATE_CANCELLED
QUARANTINED = t.JOB_STATE_QUARANTINED
FAST = t.RetryPolicy(initial_delay=span(0.05), max_delay=span(0.05), jitter=0)


# --- submitting -----------------------------------------------------------------------------------


async def test_the_same_job_again_is_no_error_and_another_of_its_id_is(subject: Subject) -> None:
    first = await subject.submit(labels={"a": "1", "b": "2"})
    again = await subject.submit(labels={"b": "2", "a": "1"}, priority=3)
    other = await refusal(subject.submit(payload=b"other"))

    assert (first.created, again.created, again.etag) == (True, False, first.etag)
    assert (other.reason, other.metadata) == ("JOB_EXISTS", {"job_id": "j1", "state": "PENDING"})


async def test_a_made_id_is_the_same_for_every_repeat_and_fits_its_content(subject: Subject) -> None:
    def request(payload: bytes) -> j.SubmitJobRequest:
        return j.SubmitJobRequest(request_id="r", job=b.job_spec(job_id="", payload=payload))

    first = await subject.jobs.SubmitJob(request(b"p"), timeout=5)
    again = await subject.jobs.SubmitJob(request(b"p"), timeout=5)
    reused = await refusal(subject.jobs.SubmitJob(request(b"q"), timeout=5))

    assert (len(first.job_id), first.job_id, again.created) == (26, again.job_id, False)
    assert (reused.reason, reused.metadata) == ("REQUEST_ID_REUSED", {"job_id": first.job_id})


async def test_a_unique_key_has_one_job_until_that_ends(subject: Subject) -> None:
    await subject.submit("j1", unique_key="u")
    taken = await refusal(subject.submit("j2", unique_key="u"))
    elsewhere = await subject.submit("j3", unique_key="u", queue="other")
    await subject.jobs.CancelJob(j.CancelJobRequest(job_id="j1"), timeout=5)
    free = await subject.submit("j4", unique_key="u")

    facts = {"job_id": "j1", "unique_key": "u", "state": "PENDING", "same_content": "true"}
    assert (taken.reason, taken.metadata) == ("DUPLICATE_JOB", facts)
    assert elsewhere.created
    assert free.created


# --- claiming -------------------------------------------------------------------------------------


async def test_jobs_are_handed_out_by_priority_then_by_age(subject: Subject) -> None:
    for job_id, priority in (("low", 5), ("first", 3), ("second", 3), ("high", 1)):
        await subject.submit(job_id, priority=priority)
    worker = await subject.open()
    claims = await worker.claim(max_jobs=3)
    [last] = await worker.claim()

    assert [claim.job_id for claim in (*claims, last)] == ["high", "first", "second", "low"]


async def test_a_claim_waits_for_a_job_and_gets_it_at_once(subject: Subject) -> None:
    worker = await subject.open()
    waiting = asyncio.ensure_future(worker.claim(wait=9))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await subject.submit()
    [claim] = await waiting

    assert (claim.job_id, claim.attempt, claim.payload) == ("j1", 1, b"p")
    assert time.monotonic() - started < 1


async def test_a_claim_in_vain_is_an_empty_answer_after_its_wait(subject: Subject) -> None:
    worker = await subject.open()
    started = time.monotonic()

    assert await worker.claim(wait=0) == []
    assert await worker.claim(wait=0.2) == []
    assert time.monotonic() - started >= 0.2


async def test_a_repeat_of_a_claim_gets_what_the_first_got(subject: Subject) -> None:
    await subject.submit("a")
    await subject.submit("b")
    worker = await subject.open()
    first = await worker.claim(max_jobs=1, request_id="c")
    again = await worker.claim(max_jobs=1, request_id="c", repeat=True)
    nothing = await worker.claim(wait=0, request_id="unheard", repeat=True)

    assert first == again
    assert nothing == []


async def test_a_job_is_claimed_by_its_id_and_then_only_its_holder_gets_it_again(subject: Subject) -> None:
    await subject.submit()
    worker, other = await subject.open(), await subject.open()
    claim = await worker.claim_id(request_id="c")
    again = await worker.claim_id(request_id="c")
    held = await refusal(other.claim_id())
    early = await refusal(other.claim_id())

    assert claim == again
    facts = {"job_id": "j1", "state": "RUNNING", "holder": worker.session_id}
    assert (held.reason, held.metadata) == ("CLAIM_HELD", facts | {"token": str(claim.fencing_token)})
    assert (early.reason, early.metadata) == ("RELOCK_THROTTLED", {"job_id": "j1", "limit_of": "session"})


async def test_who_waits_for_a_job_gets_it_when_it_is_let_go(subject: Subject) -> None:
    await subject.submit()
    worker, other = await subject.open(), await subject.open()
    claim = await worker.claim_id()
    waiting = asyncio.ensure_future(other.claim_id(wait=9))
    await asyncio.sleep(0.1)
    await worker.release(claim)
    mine = await waiting

    assert (mine.attempt, mine.fencing_token > claim.fencing_token) == (2, True)


async def test_a_session_that_is_not_there_claims_nothing(subject: Subject) -> None:
    worker = Worker(subject, "0123456789abcdef")
    waits = await refusal(worker.claim(wait=0.2))
    assert await worker.claim(wait=0) == []
    await subject.submit()
    takes = await refusal(worker.claim(wait=0))
    by_id = await refusal(worker.claim_id())

    assert {one.reason for one in (waits, takes, by_id)} == {"SESSION_NOT_FOUND"}


# --- sessions -------------------------------------------------------------------------------------


async def test_a_beat_says_claim_by_claim_what_is_held(subject: Subject) -> None:
    await subject.submit("a")
    await subject.submit("b")
    worker = await subject.open(ttl=span(10))
    held, asked = sorted(await worker.claim(), key=lambda claim: claim.job_id)
    await subject.jobs.CancelJob(j.CancelJobRequest(job_id="b"), timeout=5)
    stale = w.Claim(job_id="a", fencing_token=held.fencing_token - 1)
    strange = w.Claim(job_id="nobody's", fencing_token=held.fencing_token)

    answer = await worker.beat(held, asked, stale, strange)

    verdicts = [one.verdict for one in answer.verdicts]
    lost = [w.VERDICT_LOST] * 2
    assert verdicts == [w.VERDICT_HELD, w.VERDICT_CANCEL_REQUESTED, *lost]
    assert (answer.authority, answer.number) == (w.AUTHORITY_CONFIRMED, 1)
    assert answer.safe_duration == span(8)
    assert answer.revision >= held.fencing_token


async def test_close_gives_back_uncharged_and_may_be_repeated(subject: Subject) -> None:
    await subject.submit()
    worker = await subject.open()
    await worker.claim()
    request = w.CloseSessionRequest(session_id=worker.session_id)
    released = (await subject.workers.CloseSession(request, timeout=5)).released
    again = (await subject.workers.CloseSession(request, timeout=5)).released
    gone = await refusal(worker.beat())
    [claim] = await (await subject.open()).claim()

    assert (released, again, gone.reason) == (1, 0, "SESSION_NOT_FOUND")
    assert (claim.attempt, claim.failures) == (2, 0)
    assert (await subject.job()).uncharged == 1


async def test_a_dead_session_loses_its_job_to_another(subject: Subject) -> None:
    await subject.submit()
    dead, other = await subject.open(), await subject.open()
    [old] = await dead.claim()
    await subject.end_session(dead.session_id)
    [new] = await other.claim(wait=9)
    late = await refusal(dead.complete(old))

    assert new.fencing_token > old.fencing_token
    assert (new.attempt, (await subject.job()).lease_losses) == (2, 1)
    current = {"held": str(old.fencing_token), "current": str(new.fencing_token)}
    assert (late.reason, late.metadata) == (
        "CLAIM_LOST",
        {"job_id": "j1", "state": "RUNNING", "ended_as": "LOST"} | current,
    )


async def test_a_job_whose_holders_keep_dying_is_quarantined(subject: Subject) -> None:
    await subject.submit(retry_policy=t.RetryPolicy(max_lease_losses=0))
    dead = await subject.open()
    await dead.claim()
    await subject.end_session(dead.session_id)
    job = await subject.becomes(QUARANTINED)

    assert (job.lease_losses, job.failures) == (1, 0)
    assert [one.outcome for one in job.attempts] == [t.ATTEMPT_OUTCOME_LOST]
