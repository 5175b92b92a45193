"""A completion and its follow-up jobs: all or none, once, however often it is said."""

from __future__ import annotations

import pytest

from coordinator.core.commands import Cancel, Complete
from coordinator.core.effects import Slot, Where
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import Job, JobState
from coordinator.core.machine import Decision, decide
from coordinator.core.queue_settings import QueueSettings
from coordinator.errors import Reason, RequestError
from coordinator.ports import Commit, Operation
from coordinator.services.api import NewJob, Settle, Settled
from coordinator.services.commits import operation_of
from coordinator.services.settlement import SettlementService
from tests.support.builders import a_job, a_new_job, store_job
from tests.support.fake_ports import StillFeeds
from tests.support.memory_etcd import Fault
from tests.unit.services.conftest import World


async def complete(
    world: World, claimed: Commit, *jobs: NewJob, result: bytes = b"ok", job_id: str = "j1"
) -> Settled | RequestError:
    command = Complete(token=claimed.token, digest=b"", result=result)
    [answer] = await world.settlement.settle("default", [Settle(job_id, command, jobs)], world.deadline)
    return answer


def all_jobs(world: World) -> dict[str, JobState]:
    return {where.job_id: entry.value.state for where, entry in world.etcd.of_slot(Slot.STATE, "default")}


def assert_sound(world: World) -> None:
    for job_id in all_jobs(world):
        job: Job = world.stored(job_id).job
        assert check_job(job, world.etcd.claim("default", job_id)) == []
        assert check_keys(job, world.etcd.keys_of("default", job_id)) == []


DONE = Settled("j1", JobState.SUCCEEDED, 0)
BOTH = (a_new_job("a"), a_new_job("b", queue="other", unique_key="v"))


async def test_follow_ups_stand_at_the_revision_of_the_completion(world: World) -> None:
    claimed = await world.running()
    assert await complete(world, claimed, *BOTH) == DONE
    assert all_jobs(world) == {"j1": JobState.SUCCEEDED, "a": JobState.PENDING, "b": JobState.PENDING}
    assert len({world.stored(job_id).revision for job_id in all_jobs(world)}) == 1
    assert ("other", "t") in await world.store.list_types("default", deadline=world.deadline)
    assert_sound(world)


async def test_a_repeat_answers_as_the_first_time_and_submits_nothing_again(world: World) -> None:
    claimed = await world.running()
    unnamed = a_new_job("")
    assert await complete(world, claimed, *BOTH, unnamed) == DONE
    stood = all_jobs(world)
    commits = world.etcd.commits
    assert await complete(world, claimed, *BOTH, unnamed) == DONE
    assert (all_jobs(world), world.etcd.commits) == (stood, commits)
    assert len(stood) == 4


async def test_the_same_completion_with_other_follow_ups_is_another_one(world: World) -> None:
    claimed = await world.running()
    assert await complete(world, claimed, a_new_job("a")) == DONE
    for others in ((), (a_new_job("b"),), (a_new_job("a", payload=b"other"),)):
        refused = await complete(world, claimed, *others)
        assert isinstance(refused, RequestError)
        assert refused.reason is Reason.CLAIM_LOST
    assert set(all_jobs(world)) == {"j1", "a"}


async def test_one_that_stands_with_the_same_content_counts_as_submitted(world: World) -> None:
    await world.submission.submit("default", "r", [a_new_job("a")], world.deadline)
    claimed = await world.running()
    before = world.stored("a")
    assert await complete(world, claimed, *BOTH) == DONE
    assert world.stored("a") == before
    assert world.stored("b").job.state is JobState.PENDING


@pytest.mark.parametrize("remembered", [False, True])
async def test_another_job_with_its_id_refuses_the_settlement_and_the_claim_stays(
    world: World, remembered: bool
) -> None:
    await store_job(world.store, a_job("b", digest=b"other"))
    claimed = await world.running()
    if remembered:
        world.holders.remember(claimed)
    refused = await complete(world, claimed, *BOTH)
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.JOB_EXISTS
    assert refused.metadata["follow_up"] == "1"
    assert set(all_jobs(world)) == {"j1", "b"}
    assert world.etcd.claim("default", "j1") is not None
    assert await complete(world, claimed, a_new_job("a")) == DONE
    assert_sound(world)


async def test_another_owner_of_its_unique_key_refuses_the_settlement(world: World) -> None:
    await store_job(world.store, a_job("x", queue="other", unique_key="v"))
    claimed = await world.running()
    refused = await complete(world, claimed, *BOTH)
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.DUPLICATE_JOB
    assert refused.metadata["job_id"] == "x"
    assert set(all_jobs(world)) == {"j1", "x"}
    assert world.stored().job.state is JobState.RUNNING


async def test_a_follow_up_takes_the_unique_key_that_its_parent_gives_up(world: World) -> None:
    claimed = await world.running(unique_key="u")
    assert await complete(world, claimed, a_new_job("a", unique_key="u")) == DONE
    owner = world.etcd.keys[Where(Slot.UNIQUE, "default", "", queue="q", unique_key="u")]
    assert owner.value == "a"
    assert_sound(world)


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.RESENT, Fault.LOST_REQUEST, Fault.REFUSED])
async def test_whatever_becomes_of_the_commit_a_repeat_ends_with_all_of_it_once(
    world: World, fault: Fault
) -> None:
    claimed = await world.running()
    world.etcd.faults.append(fault)
    first = await complete(world, claimed, *BOTH)
    assert first == DONE or (isinstance(first, RequestError) and first.reason is not Reason.CLAIM_LOST)
    assert set(all_jobs(world)) in ({"j1"}, {"j1", "a", "b"})
    assert await complete(world, claimed, *BOTH) == DONE
    assert set(all_jobs(world)) == {"j1", "a", "b"}
    assert_sound(world)


async def test_a_claim_that_is_lost_submits_nothing(world: World) -> None:
    claimed = await world.running()
    await world.clock.advance(11)
    refused = await complete(world, claimed, *BOTH)
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.CLAIM_LOST
    assert set(all_jobs(world)) == {"j1"}


async def test_a_job_that_is_made_meanwhile_is_met_and_told(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    other = a_job("b", digest=b"other")

    def interfere(operation: Operation) -> None:
        world.etcd.interfere.clear()
        world.etcd.write([(Where(Slot.STATE, "default", "b"), other, None)])

    world.etcd.interfere.append(interfere)
    refused = await complete(world, claimed, *BOTH)
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.JOB_EXISTS
    assert "a" not in all_jobs(world)


async def test_follow_ups_are_taken_where_submissions_have_to_wait_for_space(world: World) -> None:
    claimed = await world.running()
    world.gauge.accepts_submissions = False
    assert await complete(world, claimed, *BOTH) == DONE
    assert set(all_jobs(world)) == {"j1", "a", "b"}


async def test_two_completions_of_one_batch_that_submit_one_job_submit_it_once(world: World) -> None:
    first, second = await world.running(), await world.running("j2")
    items = [
        Settle(job_id, Complete(token=claimed.token, digest=b""), (a_new_job("a"),))
        for job_id, claimed in (("j1", first), ("j2", second))
    ]
    answers = await world.settlement.settle("default", items, world.deadline)
    assert [answer.state for answer in answers if isinstance(answer, Settled)] == [JobState.SUCCEEDED] * 2
    assert set(all_jobs(world)) == {"j1", "j2", "a"}
    assert_sound(world)


async def test_one_that_names_the_id_made_for_another_is_refused_in_form(world: World) -> None:
    claimed = await world.running()
    refused = await complete(world, claimed, a_new_job("a"), a_new_job("a"))
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.VALIDATION_FAILED
    assert world.stored().job.state is JobState.RUNNING


async def test_a_parent_that_was_asked_to_stop_completes_with_its_follow_ups(world: World) -> None:
    claimed = await world.running()
    before = world.stored()
    asked = decide(before.job, claimed.claim, Cancel(token=claimed.token), world.clock.now_ms())
    assert isinstance(asked, Decision)
    assert (await world.store.commit(operation_of(before, asked, world.deadline))).won
    assert await complete(world, claimed, *BOTH) == DONE
    assert set(all_jobs(world)) == {"j1", "a", "b"}
    assert_sound(world)


class Unready(StillFeeds):
    """Namespaces whose settings are not listed yet."""

    async def ensure(self, namespace: str, *, deadline: float) -> None:
        raise RequestError(Reason.NOT_READY, "not listed yet", retry_after_ms=100)


async def test_follow_ups_take_what_they_leave_out_from_their_queue_once_it_is_known(world: World) -> None:
    claimed, other = await world.running(), await world.running("j2")
    settings = {"q": QueueSettings(run_timeout_ms=7_000)}

    def service(feeds: StillFeeds) -> SettlementService:
        return SettlementService(
            world.store,
            world.holders,
            world.present,
            world.clock,
            world.entropy,
            notices=world.notices,
            late=world.late_calls.add,
            feeds=feeds,
            settings=lambda namespace, queue: settings.get(queue),
        )

    items = [
        Settle("j1", Complete(token=claimed.token, digest=b""), (a_new_job("a"),)),
        Settle("j2", Complete(token=other.token, digest=b"")),
    ]
    refused, settled = await service(Unready()).settle("default", items, world.deadline)
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.NOT_READY
    assert settled == Settled("j2", JobState.SUCCEEDED, 0), "it has no follow-ups"
    [again] = await service(StillFeeds()).settle("default", items[:1], world.deadline)
    assert again == DONE
    assert world.stored("a").job.terms.run_timeout_ms == 7_000
