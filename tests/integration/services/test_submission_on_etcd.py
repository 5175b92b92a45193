"""Submission on a real etcd (fault cases 007, 066, 069, 071)."""

from __future__ import annotations

import asyncio

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import Reason, RequestError
from coordinator.services.api import SubmitOutcome
from tests.integration.services.conftest import Side, SideFactory
from tests.support.builders import a_new_job
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy


async def test_a_hundred_jobs_are_stored_in_few_groups_and_a_repeat_finds_each(side: Side) -> None:
    jobs = [a_new_job("", item=place) for place in range(100)]
    first = await side.submission.submit(side.namespace, "r1", jobs, side.deadline)
    again = await side.submission.submit(side.namespace, "r1", jobs, side.deadline)
    assert all(isinstance(one, SubmitOutcome) and one.created for one in first)
    for one, other in zip(first, again, strict=True):
        assert isinstance(one, SubmitOutcome)
        assert isinstance(other, SubmitOutcome)
        assert not other.created
        assert other.stored == one.stored
    assert len({one.stored.revision for one in first if isinstance(one, SubmitOutcome)}) <= 4


async def test_fifty_at_two_coordinators_with_one_unique_key_make_one_job(start_side: SideFactory) -> None:
    async with start_side() as first, start_side() as second:
        calls = [
            side.submission.submit(side.namespace, f"r{n}", [a_new_job("", unique_key="k")], side.deadline)
            for n in range(25)
            for side in (first, second)
        ]
        # Each request id comes to both coordinators: the repeat is no duplicate of itself.
        outcomes = [outcome for [outcome] in await asyncio.gather(*calls)]
        stored = {o.stored.job.job_id for o in outcomes if isinstance(o, SubmitOutcome)}
        refused = [o for o in outcomes if isinstance(o, RequestError)]
        assert len(stored) == 1
        assert sum(o.created for o in outcomes if isinstance(o, SubmitOutcome)) == 1
        assert {e.reason for e in refused} == {Reason.DUPLICATE_JOB}
        assert {e.metadata["job_id"] for e in refused} == stored
        assert len(refused) == 48


async def test_a_cancelled_or_deleted_job_frees_its_key_and_its_id_at_once(side: Side) -> None:
    later = side.clock.now_ms() + 3_600_000
    await side.submit(a_new_job("j1", unique_key="k", run_at_ms=later, payload=b"old"))
    await side.changes.cancel(side.namespace, "j1", "", "test", side.deadline)
    await side.submit(a_new_job("j2", unique_key="k"))
    await side.changes.delete(side.namespace, "j1", "", side.deadline)
    fresh = (await side.submit(a_new_job("j1", payload=b"new"), "again")).job
    assert (fresh.attempt, fresh.settle_ms, fresh.end_reason) == (0, 0, "")
    view = await side.queries.get(side.namespace, "j1", side.deadline)
    assert view.spec is not None
    assert view.spec.payload == b"new"


async def test_a_reply_lost_on_the_way_makes_no_second_job_and_no_wrong_refusal(
    start_side: SideFactory, etcd_server: EtcdProcess
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        start_side(proxy.endpoint, txn_timeout=0.5) as hurt,
        start_side() as sound,
    ):
        await hurt.submit(a_new_job("before"))  # the type is registered, the way is warm
        proxy.set_mode(ProxyMode.HALF_DROP)
        call = asyncio.create_task(
            hurt.submission.submit(hurt.namespace, "r1", [a_new_job("", payload=b"x")], hurt.deadline)
        )

        async def arrived() -> bool:
            listing = await sound.store.jobs.list_jobs(
                sound.namespace, cursor="", limit=100, deadline=sound.deadline
            )
            return len(listing.jobs) == 2

        await eventually(arrived, what="the submission reached etcd")
        proxy.set_mode(ProxyMode.PASS)
        [outcome] = await call
        assert isinstance(outcome, SubmitOutcome), outcome
        assert outcome.created, "it found its own first try"
        [again] = await sound.submission.submit(
            sound.namespace, "r1", [a_new_job("", payload=b"x")], sound.deadline
        )
        assert isinstance(again, SubmitOutcome)
        assert not again.created
        assert again.stored == outcome.stored
