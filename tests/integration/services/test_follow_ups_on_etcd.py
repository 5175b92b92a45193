"""A completion and its follow-up jobs on a real etcd: one revision, once, whatever becomes of the reply."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator import failpoints
from coordinator.core.commands import Complete
from coordinator.core.job import JobState
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import Reason, RequestError
from coordinator.ports import Commit
from coordinator.services.api import NewJob, Settle, Settled
from tests.integration.services.conftest import Side, SideFactory
from tests.support.builders import a_new_job
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy


async def complete(side: Side, job_id: str, claimed: Commit, *jobs: NewJob) -> Settled | RequestError:
    item = Settle(job_id, Complete(token=claimed.token, digest=b""), jobs)
    [answer] = await side.settlement.settle(side.namespace, [item], side.deadline)
    return answer


async def ids(side: Side) -> set[str]:
    page = await side.store.jobs.list_jobs(side.namespace, cursor="", limit=200, deadline=side.deadline)
    return {stored.job.job_id for stored in page.jobs}


async def test_twenty_widest_follow_ups_stand_at_the_revision_of_their_parent(side: Side) -> None:
    claimed = await side.claim(await side.submit(a_new_job("j1", unique_key="mine")), await side.open())
    jobs = [
        a_new_job(f"f{n}", unique_key=f"k{n}", queue_timeout_ms=60_000, payload=b"p" * 12_000)
        for n in range(19)
    ]
    jobs.append(a_new_job("", unique_key="mine"))
    answer = await complete(side, "j1", claimed, *jobs)
    assert answer == Settled("j1", JobState.SUCCEEDED, 0)
    stood = await ids(side)
    assert len(stood) == 21
    assert len({(await side.stored(job_id)).revision for job_id in stood}) == 1
    assert await complete(side, "j1", claimed, *jobs) == answer
    [refused] = await side.submission.submit(
        side.namespace, "r", [a_new_job("x", unique_key="mine")], side.deadline
    )
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.DUPLICATE_JOB


async def test_a_follow_up_that_cannot_be_leaves_the_claim_and_everything_else(side: Side) -> None:
    await side.submit(a_new_job("taken", payload=b"other"))
    await side.submit(a_new_job("owner", unique_key="k"))
    claimed = await side.claim(await side.submit(a_new_job("j1")), await side.open())
    before = await side.stored("j1")
    for bad, reason in (
        (a_new_job("taken"), Reason.JOB_EXISTS),
        (a_new_job("new", unique_key="k"), Reason.DUPLICATE_JOB),
    ):
        refused = await complete(side, "j1", claimed, a_new_job("good"), bad)
        assert isinstance(refused, RequestError)
        assert refused.reason is reason
        assert refused.metadata["follow_up"] == "1"
    assert await side.stored("j1") == before
    assert await ids(side) == {"j1", "taken", "owner"}
    assert isinstance(await complete(side, "j1", claimed, a_new_job("good")), Settled)


async def test_forty_completions_at_two_coordinators_that_submit_one_job_submit_it_once(
    start_side: SideFactory,
) -> None:
    async with start_side() as first, start_side() as second:
        session = await first.open()
        claims = {}
        for n in range(40):
            claims[f"j{n}"] = await first.claim(await first.submit(a_new_job(f"j{n}")), session)
        answers = await asyncio.gather(
            *(
                complete((first, second)[n % 2], job_id, claim, a_new_job("after"), a_new_job(f"own-{n}"))
                for n, (job_id, claim) in enumerate(claims.items())
            )
        )
        assert all(isinstance(answer, Settled) for answer in answers), answers
        assert len(await ids(first)) == 81
        revision = (await first.stored("after")).revision
        together = [n for n in range(40) if (await first.stored(f"own-{n}")).revision == revision]
        assert together, "one of them brought it along"
        assert (await first.stored("after")).job.state is JobState.PENDING


async def test_a_reply_lost_on_the_way_is_answered_by_the_repeat_and_by_another_coordinator(
    start_side: SideFactory, etcd_server: EtcdProcess
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        start_side(proxy.endpoint, txn_timeout=0.5) as hurt,
        start_side() as sound,
    ):
        session = await hurt.open()
        warm = await hurt.claim(await hurt.submit(a_new_job("warm")), session)
        await complete(hurt, "warm", warm)  # type and retention lease are had before replies are lost
        claimed = await hurt.claim(await hurt.submit(a_new_job("j1")), session)
        jobs = (a_new_job("a", unique_key="k"), a_new_job(""))
        proxy.set_mode(ProxyMode.HALF_DROP)
        call = asyncio.create_task(complete(hurt, "j1", claimed, *jobs))

        async def settled() -> object:
            return len(await ids(sound)) == 4

        await eventually(settled, what="the completion reached etcd")
        assert not call.done()
        proxy.set_mode(ProxyMode.PASS)
        answer = await call
        assert answer == Settled("j1", JobState.SUCCEEDED, 0)
        stood = {job_id: await sound.stored(job_id) for job_id in await ids(sound)}
        assert await complete(sound, "j1", claimed, *jobs) == answer
        assert {job_id: await sound.stored(job_id) for job_id in await ids(sound)} == stood


@pytest.mark.parametrize("point", ["settle.before-commit", "settle.after-commit"])
async def test_a_coordinator_that_dies_around_the_commit_leaves_all_or_nothing(
    start_side: SideFactory, tmp_path: Path, point: str
) -> None:
    async with start_side() as dying, start_side() as other:
        claimed = await dying.claim(await dying.submit(a_new_job("j1")), await dying.open())
        jobs = (a_new_job("a"), a_new_job("b", unique_key="k"))
        failpoints.arm(f"{point}=pause:{tmp_path / 'go'}")
        try:
            call = asyncio.create_task(complete(dying, "j1", claimed, *jobs))
            await eventually((tmp_path / "go.reached").exists, what="the point is reached")
            assert await ids(other) == ({"j1", "a", "b"} if point.endswith("after-commit") else {"j1"})
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        finally:
            failpoints.disarm()
        assert await complete(other, "j1", claimed, *jobs) == Settled("j1", JobState.SUCCEEDED, 0)
        assert await ids(other) == {"j1", "a", "b"}
        assert len({(await other.stored(job_id)).revision for job_id in ("j1", "a", "b")}) == 1
