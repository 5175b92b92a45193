"""Settings and pauses: one shared record, changed by swaps, heeded by dispatch, taken in at submission."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core.commands import Submit, Update
from coordinator.core.job import Terms
from coordinator.core.machine import Decision, decide
from coordinator.core.queue_settings import QueueSettings, QueueState
from coordinator.core.rank import TARGET_WAIT_MS
from coordinator.core.retry import RetryPolicy
from coordinator.errors import NotApplied, OutcomeUnknown, Reason, RequestError
from coordinator.ports import StoredQueue
from coordinator.services.api import NewJob
from coordinator.services.queues import Queues
from tests.support.builders import FAR, a_new_job
from tests.support.memory_queues import MemoryQueues
from tests.unit.services.circuit_bench import T, bench, opened
from tests.unit.services.workbench import NS, Coordinator, ids, polling

Q = (NS, "q")
SPANS = ("queue_timeout_ms", "run_timeout_ms", "total_timeout_ms", "heartbeat_timeout_ms")
SETTINGS = QueueSettings(run_timeout_ms=5_000)


class Feeds:
    """``ports.NamespaceFeeds`` that notes what it is to make."""

    def __init__(self) -> None:
        self.listed = True
        self.made: list[str] = []

    async def ensure(self, namespace: str, *, deadline: float) -> None:
        self.made.append(namespace)

    def namespaces(self) -> list[str]:
        return self.made


def queues(c: Coordinator, feeds: Feeds | None = None) -> Queues:
    return Queues(c.queues, c.index, feeds or Feeds(), c.clock)


def store(c: Coordinator) -> MemoryQueues:
    assert c.queue_store is not None
    return c.queue_store


async def test_a_paused_queue_hands_out_nothing_and_takes_in_all() -> None:
    c = await bench()
    await c.submit("a")
    [held] = await c.claim()
    await queues(c).pause(NS, "q", reason="stocktaking", digest=b"", deadline=FAR)
    await c.submit("b")
    assert await c.claim(n=5) == []
    assert c.holders.claim(NS, held.stored.job.job_id) is not None
    await queues(c).resume(NS, "q", digest=b"", deadline=FAR)
    assert ids(await c.claim(n=5, request="r2")) == ["b"]


async def test_a_claim_by_id_is_told_that_the_queue_is_paused_and_why() -> None:
    c = await bench()
    await c.submit("a")
    await queues(c).pause(NS, "q", reason="stocktaking", digest=b"", deadline=FAR)
    with pytest.raises(RequestError) as caught:
        await c.claim_one("a")
    assert caught.value.reason is Reason.QUEUE_PAUSED
    assert caught.value.metadata["queue"] == "q"
    assert caught.value.metadata["reason"] == "stocktaking"


async def test_those_who_wait_are_woken_when_the_queue_is_resumed_by_another_coordinator() -> None:
    c = await bench()
    await c.submit("a", "b")
    store(c).put(Q, QueueState(paused=True))
    async with polling(c, request="r1") as one, polling(c, request="r2") as other:
        store(c).put(Q, QueueState())
        async with asyncio.timeout(5):
            found = [*await one, *await other]
        assert sorted(ids(found)) == ["a", "b"]


async def test_a_paused_queue_is_not_probed_and_other_queues_go_on() -> None:
    c = await bench()
    await opened(c, "held")
    await c.clock.advance(60)
    await c.submit("a")
    await queues(c).pause(NS, "q", reason="", digest=b"", deadline=FAR)
    assert T in c.circuits.barred
    assert await c.claim(n=5) == []
    with pytest.raises(RequestError) as caught:
        await c.claim_one("a")
    assert caught.value.reason is Reason.QUEUE_PAUSED


async def test_a_pause_keeps_its_first_reason_and_both_are_idempotent() -> None:
    c = await bench()
    use = queues(c)
    first = await use.pause(NS, "q", reason="one", digest=b"1", deadline=FAR)
    again = await use.pause(NS, "q", reason="two", digest=b"2", deadline=FAR)
    assert again == first
    resumed = await use.resume(NS, "q", digest=b"3", deadline=FAR)
    assert not resumed.stored.state.paused
    assert await use.resume(NS, "q", digest=b"4", deadline=FAR) == resumed
    assert store(c).swaps == 2


async def test_settings_are_replaced_under_the_etag_and_a_pause_stays() -> None:
    c = await bench()
    use = queues(c)
    paused = await use.pause(NS, "q", reason="r", digest=b"", deadline=FAR)
    etag = str(paused.stored.revision)
    changed = await use.update(NS, "q", SETTINGS, etag=etag, digest=b"1", deadline=FAR)
    assert changed.stored.state.settings == SETTINGS
    assert changed.stored.state.paused
    with pytest.raises(RequestError) as caught:
        await use.update(NS, "q", QueueSettings(), etag=etag, digest=b"2", deadline=FAR)
    assert caught.value.reason is Reason.ETAG_MISMATCH
    repeated = await use.update(NS, "q", SETTINGS, etag=etag, digest=b"1", deadline=FAR)
    assert repeated == changed
    assert (await use.get(NS, "q", FAR)) == changed


async def test_the_etag_of_a_queue_that_nobody_has_set_is_that_of_no_record() -> None:
    c = await bench()
    use = queues(c)
    unset = await use.get(NS, "q", FAR)
    assert unset.stored == StoredQueue()
    await use.update(NS, "q", SETTINGS, etag="0", digest=b"", deadline=FAR)
    with pytest.raises(RequestError) as caught:
        await use.update(NS, "q", SETTINGS, etag="0", digest=b"", deadline=FAR)
    assert caught.value.reason is Reason.ETAG_MISMATCH


async def test_a_change_that_meets_another_is_made_again_on_what_stands() -> None:
    c = await bench()
    store(c).before_swap = lambda: store(c).put(Q, QueueState(settings=SETTINGS))
    paused = await queues(c).pause(NS, "q", reason="r", digest=b"", deadline=FAR)
    assert paused.stored.state.settings == SETTINGS
    assert paused.stored.state.paused


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(OutcomeUnknown("?"), Reason.OUTCOME_UNKNOWN), (NotApplied("no"), Reason.ETCD_UNAVAILABLE)],
)
async def test_an_unknown_outcome_is_told_as_unknown(failure: Exception, reason: Reason) -> None:
    c = await bench()
    use = queues(c)
    await use.get(NS, "q", FAR)

    def fails() -> None:
        raise failure

    store(c).before_swap = fails
    with pytest.raises(RequestError) as caught:
        await use.pause(NS, "q", reason="r", digest=b"", deadline=FAR)
    assert caught.value.reason is reason


async def test_queues_are_listed_page_by_page_with_jobs_or_with_a_record() -> None:
    c = await bench()
    await c.submit("a")
    feeds = Feeds()
    use = queues(c, feeds)
    store(c).put((NS, "b"), QueueState(settings=SETTINGS))
    store(c).put((NS, "z"), QueueState(paused=True))
    store(c).put(("other", "o"), QueueState())
    first = use.list(NS, 2, "")
    assert [one.queue for one in first.queues] == ["b", "q"]
    second = use.list(NS, 2, first.cursor)
    assert [one.queue for one in second.queues] == ["z"]
    assert second.cursor == ""
    with pytest.raises(RequestError) as caught:
        use.list("other", 2, first.cursor)
    assert caught.value.reason is Reason.VALIDATION_FAILED
    feeds.listed = False
    with pytest.raises(RequestError) as caught:
        use.list(NS, 2, "")
    assert caught.value.reason is Reason.NOT_READY
    assert feeds.made == []


async def test_a_list_replaces_what_was_known_and_a_deleted_record_is_the_default() -> None:
    c = await bench()
    store(c).put(Q, QueueState(paused=True))
    assert Q in c.queues.paused
    store(c).watchers.clear()  # the watch breaks
    store(c).put(Q, None)
    await c.queues.relist(NS, c.etcd.revision)
    assert c.queues.paused == {}
    assert c.queues.settings(*Q) is None


def terms_of(job: NewJob, settings: QueueSettings | None) -> Terms:
    return job.terms(submit_ms=1, counter=0, digest=b"d", request_digest=b"", settings=settings)


def test_a_job_takes_from_its_queue_what_it_leaves_out_and_nothing_else() -> None:
    settings = QueueSettings(
        target_wait_ms=(1, 2, 3, 4, 5),
        retry=RetryPolicy(max_retries=1),
        queue_timeout_ms=10,
        run_timeout_ms=20,
        total_timeout_ms=30,
        heartbeat_timeout_ms=5,
    )
    left_out = terms_of(a_new_job(own_retry=False), settings)
    for name in ("target_wait_ms", "retry", *SPANS):
        assert getattr(left_out, name) == getattr(settings, name)
    said = a_new_job(retry=RetryPolicy(max_retries=7), **dict.fromkeys(SPANS, 99))
    own = terms_of(said, settings)
    assert own.retry.max_retries == 7
    assert {getattr(own, name) for name in SPANS} == {99}
    assert own.target_wait_ms == (1, 2, 3, 4, 5)
    assert left_out.digest == own.digest == b"d"
    assert terms_of(said, None) == terms_of(said, QueueSettings())


def test_the_rank_of_a_job_goes_by_the_target_waits_of_its_queue_also_after_an_update() -> None:
    waits = (10, 20, 30, 40, 50_000)
    command = Submit(
        namespace=NS,
        job_id="j",
        terms=terms_of(a_new_job(priority=1), QueueSettings(target_wait_ms=waits)),
        run_at_ms=0,
    )
    submitted = decide(None, None, command, 1_000)
    assert isinstance(submitted, Decision)
    assert submitted.job is not None
    assert submitted.job.rank.ms == 1_010
    updated = decide(submitted.job, None, Update(priority=5), 2_000)
    assert isinstance(updated, Decision)
    assert updated.job is not None
    assert updated.job.rank.ms == 51_000


def test_target_waits_of_a_queue_default_to_those_of_the_service() -> None:
    assert len(TARGET_WAIT_MS) == 5
    assert QueueSettings().retry is None
    assert QueueSettings(retry=RetryPolicy()).retry == RetryPolicy()
