"""How every coordinator ends attempts and jobs, by settlements, by hand and by time, and tells of it."""

from __future__ import annotations

import asyncio

import pytest

from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.conformance.rpc.subject import Subject, span
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal

SCHEDULED, PENDING, RUNNING = t.JOB_STATE_SCHEDULED, t.JOB_STATE_PENDING, t.JOB_STATE_RUNNING
SUCCEEDED, DEAD, CANCELLED = t.JOB_STATE_SUCCEEDED, t.JOB_STATE_DEAD, t.JOB_STATE_CANCELLED
QUARANTINED = t.JOB_STATE_QUARANTINED
FAST = t.RetryPolicy(initial_delay=span(0.05), max_delay=span(0.05), jitter=0)


# --- settling -------------------------------------------------------------------------------------


async def test_a_settlement_repeats_and_another_content_is_too_late(subject: Subject) -> None:
    await subject.submit()
    worker = await subject.open()
    [claim] = await worker.claim()
    first = await worker.complete(claim, b"r")
    again = await worker.complete(claim, b"r")
    other = await refusal(worker.complete(claim, b"s"))
    failed = await refusal(worker.fail(claim))
    job = await subject.job()

    assert (first.state, again.state) == (SUCCEEDED, SUCCEEDED)
    assert {other.reason, failed.reason} == {"CLAIM_LOST"}
    assert (other.metadata["ended_as"], other.metadata["current"]) == ("SUCCEEDED", "0")
    assert (job.result, job.spec.payload, job.fencing_token) == (b"r", b"", claim.fencing_token)


async def test_a_failed_job_backs_off_and_runs_again(subject: Subject) -> None:
    await subject.submit(retry_policy=FAST)
    worker = await subject.open()
    [claim] = await worker.claim()
    answer = await worker.fail(claim)
    assert answer.state == SCHEDULED
    await subject.pass_time(0.06)
    [again] = await worker.claim(wait=9)

    assert (again.attempt, again.failures) == (2, 1)
    assert (await subject.job()).failure.type == "Boom"


async def test_retries_used_up_or_refused_make_it_dead(subject: Subject) -> None:
    for job_id in ("used", "told", "typed"):
        policy = t.RetryPolicy(max_retries=0 if job_id == "used" else 5, non_retryable_types=["Bad"])
        await subject.submit(job_id, retry_policy=policy)
    worker = await subject.open()
    claims = {claim.job_id: claim for claim in await worker.claim()}
    await worker.fail(claims["used"])
    await worker.fail(claims["told"], no_retry=True)
    await worker.fail(claims["typed"], "Bad")

    assert [(await subject.job(one)).state for one in claims] == [DEAD] * 3
    ends = [(await subject.job(one)).end_reason for one in ("used", "told", "typed")]
    assert ends == ["retries used up", "told not to retry", "failure type Bad is not retryable"]


async def test_a_token_of_the_future_is_told_as_a_store_that_went_back(subject: Subject) -> None:
    await subject.submit()
    worker = await subject.open()
    [claim] = await worker.claim()
    future = w.Claim(job_id="j1", fencing_token=claim.fencing_token + 10**9)
    refused = [await refusal(worker.complete(future)), await refusal(worker.save(future, b"", 1))]

    assert [one.reason for one in refused] == ["EPOCH_REGRESSED"] * 2
    assert refused[0].metadata["held"] == str(future.fencing_token)
    assert (await worker.complete(claim)).state == SUCCEEDED


async def test_a_checkpoint_goes_to_the_next_attempt_and_an_older_one_gives_way(subject: Subject) -> None:
    await subject.submit()
    worker = await subject.open()
    [claim] = await worker.claim()
    progress = t.Progress(ratio=0.5, note="half")
    stored = [
        await worker.save(claim, b"two", 2, progress=progress),
        await worker.save(claim, b"one", 1),
    ]
    told = (await subject.job()).progress
    await worker.release(claim)
    [again] = await worker.claim()
    stale = await refusal(worker.save(claim, b"late", 9))
    first = await worker.save(again, b"of the next", 0)

    assert (stored, first, told.note) == ([True, False], True, "half")
    assert again.checkpoint == b"two"
    assert stale.reason == "CLAIM_LOST"
    assert set(stale.metadata) == {"job_id", "held", "current", "state"}


async def test_follow_up_jobs_come_with_the_completion_all_or_none(subject: Subject) -> None:
    await subject.submit("j1", unique_key="u")
    await subject.submit("taken", unique_key="t", type="other")
    worker = await subject.open()
    [claim] = await worker.claim()
    clash = [b.job_spec(job_id="n1"), b.job_spec(job_id="n2", unique_key="t")]
    refused = await refusal(worker.complete(claim, follow_ups=clash))
    missing = await refusal(subject.job("n1"))
    good = [b.job_spec(job_id="n1", unique_key="u"), b.job_spec(job_id="")]
    done = [(await worker.complete(claim, follow_ups=good)).state for _ in range(2)]
    claims = await worker.claim()

    assert (refused.reason, refused.metadata) == (
        "DUPLICATE_JOB",
        {"job_id": "taken", "unique_key": "t", "follow_up": "1"},
    )
    assert (missing.reason, done) == ("JOB_NOT_FOUND", [SUCCEEDED] * 2)
    assert (len(claims), "n1" in {one.job_id for one in claims}) == (2, True)


async def test_a_job_runs_only_with_its_locks_and_its_end_gives_them_back(subject: Subject) -> None:
    exclusive = [t.JobLock(name="l")]
    for job_id in ("one", "two"):
        await subject.submit(job_id, locks=exclusive)
    await subject.submit("free", priority=5)
    worker, other = await subject.open(), await subject.open()
    claims = {claim.job_id: claim for claim in await worker.claim()}
    if "free" not in claims:
        claims |= {claim.job_id: claim for claim in await worker.claim()}
    held = await refusal(other.claim_id("two"))
    waiting = asyncio.ensure_future(other.claim(wait=9))
    await asyncio.sleep(0.1)
    await worker.fail(claims["one"], no_retry=True)
    [second] = await waiting

    assert set(claims) == {"one", "free"}
    token = str(claims["one"].fencing_token)
    assert (held.reason, held.metadata) == (
        "LOCK_HELD",
        {"name": "l", "holder": worker.session_id, "token": token},
    )
    assert (second.job_id, list(second.lock_names)) == ("two", ["l"])


async def test_shared_locks_and_semaphores_let_as_many_run_as_they_say(subject: Subject) -> None:
    semaphore = t.JobLock(name="s", mode=t.LOCK_MODE_SEMAPHORE, permits=2)
    locks = {
        "s1": semaphore,
        "s2": semaphore,
        "s3": semaphore,
        "other": t.JobLock(name="s", mode=t.LOCK_MODE_SEMAPHORE, permits=3),
        "r1": t.JobLock(name="r", mode=t.LOCK_MODE_SHARED),
        "r2": t.JobLock(name="r", mode=t.LOCK_MODE_SHARED),
        "w1": t.JobLock(name="r"),
    }
    for job_id, lock in locks.items():
        await subject.submit(job_id, locks=[lock])
    worker, other = await subject.open(), await subject.open()
    claims: list[str] = []
    for _ in range(len(locks)):
        claims += [claim.job_id for claim in await worker.claim(wait=0.2)]
    mismatch = await refusal(other.claim_id("other"))

    assert sorted(claims) == ["r1", "r2", "s1", "s2"]
    facts = {"name": "s", "asked": "3", "current": "2"}
    assert (mismatch.reason, mismatch.metadata) == ("PERMITS_MISMATCH", facts)
    assert [lock.name for lock in (await subject.job("w1")).spec.locks] == ["r"]


async def test_who_waits_for_a_job_gets_it_when_its_lock_comes_free(subject: Subject) -> None:
    await subject.submit("holds", locks=[t.JobLock(name="l")])
    await subject.submit("waits", type="other", locks=[t.JobLock(name="l")])
    worker, other = await subject.open(), await subject.open()
    [claim] = await worker.claim()
    waiting = asyncio.ensure_future(other.claim_id("waits", wait=9))
    await asyncio.sleep(0.1)
    await worker.complete(claim)

    assert (await waiting).job_id == "waits"


# --- by hand --------------------------------------------------------------------------------------


async def test_cancel_ends_a_waiting_job_and_asks_a_running_one(subject: Subject) -> None:
    await subject.submit("waits", type="other")
    await subject.submit("runs")
    worker = await subject.open()
    [claim] = await worker.claim()
    cancelled = []
    for job_id in ("waits", "runs", "waits", "runs"):
        request = j.CancelJobRequest(job_id=job_id, reason="enough")
        cancelled.append((await subject.jobs.CancelJob(request, timeout=5)).job)
    released = await worker.release(claim)
    job = await subject.job("runs")

    states = [(one.state, one.cancel_requested) for one in cancelled]
    assert states == [(CANCELLED, False), (RUNNING, True)] * 2
    assert (released.state, job.state, job.end_reason) == (CANCELLED, CANCELLED, "enough")


async def test_only_a_terminal_job_is_deleted_and_its_id_begins_anew(subject: Subject) -> None:
    await subject.submit()
    early = await refusal(subject.jobs.DeleteJob(j.DeleteJobRequest(job_id="j1"), timeout=5))
    worker = await subject.open()
    [old] = await worker.claim()
    await worker.complete(old)
    tagged = j.DeleteJobRequest(job_id="j1", etag="1")
    stale = await refusal(subject.jobs.DeleteJob(tagged, timeout=5))
    await subject.jobs.DeleteJob(j.DeleteJobRequest(job_id="j1"), timeout=5)
    gone = await refusal(subject.job())
    again = await subject.submit()
    [new] = await worker.claim()

    assert (early.reason, early.metadata) == ("NOT_CLAIMABLE", {"job_id": "j1", "state": "PENDING"})
    assert (stale.reason, stale.retry_ms, set(stale.metadata)) == ("ETAG_MISMATCH", 0, {"job_id", "etag"})
    assert (gone.reason, again.created, new.attempt) == ("JOB_NOT_FOUND", True, 1)
    assert new.fencing_token > old.fencing_token


async def test_update_changes_what_waits_and_nothing_else(subject: Subject) -> None:
    await subject.submit("a")
    await subject.submit("b")
    changed = (await subject.jobs.UpdateJob(j.UpdateJobRequest(job_id="b", priority=1), timeout=5)).job
    repeat = j.UpdateJobRequest(job_id="b", priority=1, etag="1")
    again = (await subject.jobs.UpdateJob(repeat, timeout=5)).job
    worker = await subject.open()
    [first] = await worker.claim(max_jobs=1)
    runs = await refusal(subject.jobs.UpdateJob(j.UpdateJobRequest(job_id="b", priority=2), timeout=5))

    assert (changed.spec.priority, first.job_id, again.etag) == (1, "b", changed.etag)
    assert runs.reason == "NOT_CLAIMABLE"


async def test_a_dead_job_is_retried_by_hand_once_for_each_request(subject: Subject) -> None:
    await subject.submit(retry_policy=t.RetryPolicy(max_retries=0))
    worker = await subject.open()

    async def retry(request_id: str) -> t.Job:
        request = j.RetryJobRequest(job_id="j1", request_id=request_id)
        job: t.Job = (await subject.jobs.RetryJob(request, timeout=5)).job
        return job

    states = []
    for request_id in ("one", "one", "two"):
        for claim in await worker.claim(wait=0.1):
            await worker.fail(claim)
        states.append((await retry(request_id)).state)

    assert states == [PENDING, DEAD, PENDING]


async def test_dead_jobs_are_redriven_by_what_they_failed_of(subject: Subject) -> None:
    worker = await subject.open()
    for job_id, kind in (("a", "Bad"), ("b", "Worse"), ("c", "Bad")):
        await subject.submit(job_id, retry_policy=t.RetryPolicy(max_retries=0))
        [claim] = await worker.claim()
        await worker.fail(claim, kind)
    request = j.RedriveJobsRequest(failure_type="Bad", request_id="r", validate_only=True)
    would = await subject.jobs.RedriveJobs(request, timeout=5)
    request.validate_only = False
    did = await subject.jobs.RedriveJobs(request, timeout=5)
    again = await subject.jobs.RedriveJobs(request, timeout=5)

    assert sorted(would.job_ids) == sorted(did.job_ids) == ["a", "c"]
    assert (list(again.job_ids), did.next_page_token) == ([], "")
    assert (await subject.job("b")).state == DEAD


async def test_a_rollback_job_comes_with_the_death_of_its_parent(subject: Subject) -> None:
    rollback = t.RollbackJob(queue="undo", type="undo", payload=b"back")
    await subject.submit(rollback=rollback, retry_policy=t.RetryPolicy(max_retries=0))
    worker = await subject.open()
    [claim] = await worker.claim()
    await worker.fail(claim)
    undo = [w.QueueTypes(queue="undo", types=["undo"])]
    [child] = await worker.claim(queues=undo)

    assert (await subject.job()).rollback_job_id == child.job_id
    assert (child.payload, child.labels["leasekeeper.rollback-of"]) == (b"back", "j1")


# --- time -----------------------------------------------------------------------------------------


async def test_a_delayed_job_is_due_in_its_time(subject: Subject) -> None:
    answer = await subject.submit()
    submitted = (await subject.job()).submit_time.ToMilliseconds()
    later = t.JobSpec(job_id="later", queue="mail", type="send")
    later.run_at.FromMilliseconds(submitted + 400)
    scheduled = await subject.jobs.SubmitJob(j.SubmitJobRequest(job=later), timeout=5)
    worker = await subject.open()
    [claim] = await worker.claim()
    early = await refusal(worker.claim_id("later"))
    await subject.pass_time(0.5)
    await subject.becomes(PENDING, "later")

    assert (answer.state, scheduled.state, claim.job_id) == (PENDING, SCHEDULED, "j1")
    assert (early.reason, early.metadata) == ("NOT_CLAIMABLE", {"job_id": "later", "state": "SCHEDULED"})
    assert early.retry_ms
    assert 0 < early.retry_ms <= 400


@pytest.mark.parametrize("field", ["queue_timeout", "total_timeout"])
async def test_a_job_that_waits_too_long_is_dead(subject: Subject, field: str) -> None:
    await subject.submit("j1", **{field: span(0.2)})
    await subject.pass_time(0.3)
    job = await subject.becomes(DEAD)

    assert job.end_reason == field.replace("_", " ")


async def test_a_run_that_takes_too_long_is_taken_away(subject: Subject) -> None:
    await subject.submit(run_timeout=span(0.2), retry_policy=t.RetryPolicy(max_retries=0))
    worker = await subject.open()
    [claim] = await worker.claim()
    await subject.pass_time(0.3)
    job = await subject.becomes(DEAD)
    answer = await worker.beat(claim)
    late = await refusal(worker.complete(claim))

    assert [one.outcome for one in job.attempts] == [t.ATTEMPT_OUTCOME_TIMED_OUT]
    assert job.end_reason.startswith("run timeout: it ran for ")
    assert [one.verdict for one in answer.verdicts] == [w.VERDICT_LOST]
    assert late.metadata["ended_as"] == "TIMED_OUT"


# --- reading --------------------------------------------------------------------------------------


async def test_lists_are_filtered_and_paged(subject: Subject) -> None:
    for number in range(7):
        await subject.submit(f"j{number}", labels={"odd": str(number % 2)})
    seen: list[str] = []
    request = j.ListJobsRequest(page_size=2, labels={"odd": "1"}, states=[PENDING])
    for _ in range(10):
        page = await subject.jobs.ListJobs(request, timeout=5)
        seen += [job.job_id for job in page.jobs]
        request.page_token = page.next_page_token
        if not request.page_token:
            break

    assert sorted(seen) == ["j1", "j3", "j5"]


async def test_wait_answers_when_the_job_ends_or_its_time_is_up(subject: Subject) -> None:
    await subject.submit()
    worker = await subject.open()
    [claim] = await worker.claim()
    request = j.WaitJobRequest(job_id="j1", timeout=span(0.2))
    early = await subject.jobs.WaitJob(request, timeout=5)
    request.timeout.CopyFrom(span(9))
    waiting = asyncio.ensure_future(subject.jobs.WaitJob(request, timeout=15))
    await asyncio.sleep(0.1)
    await worker.complete(claim, b"r" * 2000)
    answer = await waiting

    assert (early.finished, early.job.state) == (False, RUNNING)
    assert (answer.finished, answer.job.state, len(answer.job.result)) == (True, SUCCEEDED, 2000)


async def test_a_watch_tells_every_change_and_resumes(subject: Subject) -> None:
    stream = subject.jobs.WatchJobs(j.WatchJobsRequest(job_ids=["j1"]), timeout=20)
    start = await stream.read()
    await subject.submit("j2")
    await subject.submit()
    worker = await subject.open()
    claims = {claim.job_id: claim for claim in await worker.claim()}
    if "j1" not in claims:
        claims |= {claim.job_id: claim for claim in await worker.claim()}
    await worker.complete(claims["j1"])
    await subject.jobs.DeleteJob(j.DeleteJobRequest(job_id="j1"), timeout=5)
    told = [await stream.read() for _ in range(4)]
    stream.cancel()
    resume = j.WatchJobsRequest(job_ids=["j1"], resume_revision=told[1].revision)
    resumed = subject.jobs.WatchJobs(resume, timeout=20)
    await resumed.read()
    rest = [await resumed.read() for _ in range(2)]
    resumed.cancel()

    assert not start.HasField("job")
    assert [one.job.state for one in told[:3]] == [PENDING, RUNNING, SUCCEEDED]
    assert (told[3].deleted, told[3].job.job_id) == (True, "j1")
    assert [one.revision for one in rest] == [one.revision for one in told[2:]]


@pytest.mark.parametrize(
    "method", ["GetJob", "ListAttempts", "WaitJob", "CancelJob", "RetryJob", "DeleteJob", "UpdateJob"]
)
async def test_a_job_that_is_not_there_is_not_found(subject: Subject, method: str) -> None:
    more = {"priority": 1} if method == "UpdateJob" else {}
    request = getattr(j, f"{method}Request")(job_id="nobody", **more)
    error = await refusal(getattr(subject.jobs, method)(request, timeout=5))

    assert (error.reason, error.metadata) == ("JOB_NOT_FOUND", {"job_id": "nobody"})
