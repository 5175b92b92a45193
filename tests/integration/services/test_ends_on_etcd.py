"""Settlement, cancel and recovery on a real etcd (fault cases 009, 043, 045, 073, 074, 075)."""

from __future__ import annotations

import asyncio

from coordinator.core.commands import Complete, Fail
from coordinator.core.job import JobState
from coordinator.errors import Reason, RequestError
from coordinator.reconciler.due import PROMOTED
from coordinator.services.api import JobView, Settle, Settled
from coordinator.services.holders import Suspect
from tests.integration.services.conftest import Side, SideFactory
from tests.support.builders import a_new_job, claim_operation
from tests.support.polling import eventually


async def settle(side: Side, job_id: str, command: Complete | Fail) -> Settled | RequestError:
    [result] = await side.settlement.settle(side.namespace, [Settle(job_id, command)], side.deadline)
    return result


async def test_finishing_twice_is_answered_alike_by_every_coordinator(start_side: SideFactory) -> None:
    async with start_side() as first, start_side() as second:
        session = await first.open()
        claimed = await first.claim(await first.submit(a_new_job("j1")), session)
        done = Complete(token=claimed.token, digest=b"", result=b"r")
        answers = [await settle(side, "j1", done) for side in (first, second, first)]
        assert answers == [Settled("j1", JobState.SUCCEEDED, 0)] * 3
        other = await settle(second, "j1", Fail(token=claimed.token, digest=b""))
        assert isinstance(other, RequestError)
        assert other.reason is Reason.CLAIM_LOST


async def test_cancel_and_complete_race_to_one_end_that_every_answer_matches(side: Side) -> None:
    session = await side.open()
    for n in range(60):
        job_id = f"j{n}"
        claimed = await side.claim(await side.submit(a_new_job(job_id)), session)
        cancelling = side.changes.cancel(side.namespace, job_id, "", "test", side.deadline)
        completing = settle(side, job_id, Complete(token=claimed.token, digest=b""))
        both = (cancelling, completing) if n % 2 else (completing, cancelling)
        answers = await asyncio.gather(*both, return_exceptions=True)
        stored = await side.stored(job_id)
        assert stored.job.state is JobState.SUCCEEDED
        for answer in answers:
            if isinstance(answer, Settled):
                assert answer.state is JobState.SUCCEEDED
            elif isinstance(answer, JobView):
                assert answer.stored.job.cancel_requested, "it was asked to stop, and finished first"
            else:
                assert isinstance(answer, RequestError)
                assert answer.reason is Reason.JOB_TERMINAL


async def test_cancel_and_claim_race_to_cancelled_or_asked_to_stop(side: Side) -> None:
    session = await side.open()
    for n in range(60):
        job_id = f"j{n}"
        stored = await side.submit(a_new_job(job_id))
        cancelling = asyncio.ensure_future(
            side.changes.cancel(side.namespace, job_id, "", "test", side.deadline)
        )
        if n % 2:
            await asyncio.sleep(0.001)
        claim = await side.store.jobs.commit(claim_operation(stored, session, now_ms=side.clock.now_ms()))
        view = await cancelling
        job = (await side.stored(job_id)).job
        if claim.won:
            assert job.state is JobState.RUNNING
            assert job.cancel_requested
            assert view.stored.job.cancel_requested
        else:
            assert job.state is view.stored.job.state is JobState.CANCELLED


async def test_a_session_that_ends_gives_its_jobs_to_others_without_being_asked(
    start_side: SideFactory,
) -> None:
    async with start_side() as first, start_side() as second:
        session = await first.open()
        claims = [await first.claim(await first.submit(a_new_job(f"j{n}")), session) for n in range(30)]
        await eventually(lambda: second.holders.held_by(second.namespace, session.session_id) == 30)
        await first.store.sessions.close(first.namespace, session.session_id, deadline=first.deadline)

        async def recovered() -> bool:
            jobs = [(await first.stored(f"j{n}")).job for n in range(30)]
            return all(job.state is JobState.PENDING for job in jobs)

        await eventually(recovered, what="all jobs wait again", timeout=3)
        for n, claimed in enumerate(claims):
            job = (await second.stored(f"j{n}")).job
            assert (job.lease_losses, job.failures, job.attempts[-1].token) == (1, 0, claimed.token)
        late = await settle(second, "j0", Complete(token=claims[0].token, digest=b""))
        assert isinstance(late, RequestError)
        assert late.metadata["ended_as"] == "LOST"
        again = await second.claim(await second.stored("j0"), await second.open())
        assert again.token > claims[0].token


async def test_many_recoverers_of_one_job_count_one_loss_and_spare_the_next_holder(
    start_side: SideFactory,
) -> None:
    async with start_side() as first, start_side() as second:
        session = await first.open()
        for n in range(10):
            job_id = f"j{n}"
            claimed = await first.claim(await first.submit(a_new_job(job_id)), session)
            suspicion = Suspect(first.namespace, job_id, session.session_id, claimed.token)
            for side in (first, second):
                side.lost.suspect(suspicion)
            await asyncio.gather(first.lost.judge_queued(), second.lost.judge_queued())
            assert (await first.stored(job_id)).job.state is JobState.RUNNING, "its holder lives"
        await first.store.sessions.close(first.namespace, session.session_id, deadline=first.deadline)
        await asyncio.gather(*(side.lost.run_once(side.namespace) for side in (first, second)))
        for n in range(10):
            job = (await first.stored(f"j{n}")).job
            assert (job.state, job.lease_losses) == (JobState.PENDING, 1)


async def test_a_job_asked_to_stop_whose_holder_dies_stays_cancelled(side: Side) -> None:
    session = await side.open()
    await side.claim(await side.submit(a_new_job("j1", unique_key="k")), session)
    await side.changes.cancel(side.namespace, "j1", "stop", "test", side.deadline)
    await side.store.sessions.close(side.namespace, session.session_id, deadline=side.deadline)

    async def cancelled() -> bool:
        return (await side.stored("j1")).job.state is JobState.CANCELLED

    await eventually(cancelled)
    await side.submit(a_new_job("j2", unique_key="k"))
    assert (await side.lost.run_once(side.namespace)).changed == 0


async def test_a_job_comes_back_after_its_backoff_and_its_checkpoint_with_it(side: Side) -> None:
    session = await side.open()
    claimed = await side.claim(await side.submit(a_new_job("j1")), session)
    saved = await side.settlement.checkpoint(
        side.namespace, "j1", claimed.token, 1, b"here", None, side.deadline
    )
    assert saved
    failed = await settle(side, "j1", Fail(token=claimed.token, digest=b"", retry_delay_ms=50))
    assert isinstance(failed, Settled)
    assert failed.state is JobState.SCHEDULED

    async def promoted() -> bool:
        return (await side.due.run_once(side.namespace)).counts[PROMOTED] == 1

    await eventually(promoted)
    again = await side.claim(await side.stored("j1"), session)
    assert again.checkpoint is not None
    assert again.checkpoint.data == b"here"
