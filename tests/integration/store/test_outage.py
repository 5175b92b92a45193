"""etcd dies and comes back: what was acknowledged is there, the rest is found out, and work goes on."""

from __future__ import annotations

import asyncio

from coordinator.errors import EtcdUnavailable, NotApplied, OutcomeUnknown
from coordinator.ports import Commit
from tests.integration.store.conftest import HarnessFactory
from tests.support.polling import eventually
from tests.support.services import EtcdFactory

JOBS = 400


async def test_nothing_acknowledged_is_lost_over_a_crash_of_etcd(
    etcd_factory: EtcdFactory, make_harness: HarnessFactory
) -> None:
    server = etcd_factory()
    async with make_harness(server.endpoint) as harness:
        await harness.store.namespaces.ensure(harness.namespace, deadline=harness.deadline())
        outcomes: dict[str, Commit | Exception] = {}

        async def submit(job_id: str) -> None:
            try:
                outcomes[job_id] = await harness.submit(job_id)
            except (OutcomeUnknown, NotApplied, EtcdUnavailable) as error:
                outcomes[job_id] = error

        async with asyncio.TaskGroup() as tasks:
            for number in range(JOBS):
                tasks.create_task(submit(f"j{number}"))
                if number == JOBS // 2:
                    await eventually(lambda: len(outcomes) > 20)
                    server.kill()
            await asyncio.to_thread(server.restart)
        assert len(outcomes) == JOBS
        found = await harness.store.jobs.read_many(
            harness.namespace, list(outcomes), deadline=harness.deadline(10)
        )
        there = {each.stored.job.job_id for each in found if each.stored is not None}
        acknowledged = {
            job_id
            for job_id, outcome in outcomes.items()
            # Lost to our own first try: the record carries our digest.
            if isinstance(outcome, Commit) and (outcome.won or outcome.resent)
        }
        refused = {job_id for job_id, outcome in outcomes.items() if isinstance(outcome, NotApplied)}
        assert acknowledged
        assert acknowledged <= there
        assert not refused & there
        await eventually(lambda: harness.told.fresh.get(harness.namespace), timeout=15)
        _, token = await harness.claimed("after")
        assert token


async def test_an_unreachable_etcd_ends_calls_by_their_deadline(
    etcd_factory: EtcdFactory, make_harness: HarnessFactory
) -> None:
    server = etcd_factory()
    async with make_harness(server.endpoint) as harness:
        session = await harness.open_session()
        server.pause()
        began = harness.clock.monotonic()
        results = await asyncio.gather(
            _answer(harness.submit_later("j1", 0, seconds=0.5)),
            harness.store.jobs.read(harness.namespace, "j1", deadline=harness.deadline(0.5)),
            harness.store.sessions.keep_alive(session.session_id, deadline=harness.deadline(0.5)),
            harness.store.sessions.confirm(
                harness.namespace, session.session_id, ("j1",), deadline=harness.deadline(0.5)
            ),
            return_exceptions=True,
        )
        took = harness.clock.monotonic() - began
        server.resume()
        assert [type(result) for result in results] == [
            OutcomeUnknown,
            EtcdUnavailable,
            OutcomeUnknown,
            EtcdUnavailable,
        ]
        assert took < 1.0


async def _answer(pending: object) -> Commit:
    return await pending  # type: ignore[misc]
