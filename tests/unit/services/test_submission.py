"""A job is created once, or refused with the reason (fault cases 007, 065, 066, 069, 070, 071)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from coordinator.core.commands import Cancel, Command, Complete, Fail
from coordinator.core.effects import Slot, Where, effects
from coordinator.core.invariants import check_keys
from coordinator.core.job import JobState
from coordinator.core.machine import Decision, decide
from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.ports import Operation, Stored
from coordinator.services.api import NewJob, SubmitOutcome
from coordinator.services.submission import Submission
from tests.support.builders import FAR, a_new_job
from tests.support.fake_ports import SteadyEntropy
from tests.support.memory_etcd import Fault
from tests.unit.services.conftest import World


async def submit(world: World, *jobs: NewJob, request_id: str = "r1") -> list[SubmitOutcome | RequestError]:
    return await world.submission.submit("default", request_id, jobs, world.deadline)


async def submit_one(world: World, job: NewJob, request_id: str = "r1") -> SubmitOutcome:
    [outcome] = await submit(world, job, request_id=request_id)
    assert isinstance(outcome, SubmitOutcome), outcome
    return outcome


async def refuse_one(world: World, job: NewJob, request_id: str = "r1") -> RequestError:
    [outcome] = await submit(world, job, request_id=request_id)
    assert isinstance(outcome, RequestError), outcome
    return outcome


async def apply(world: World, command: Command, job_id: str = "j1") -> Stored | None:
    before, claim = world.stored(job_id), world.etcd.claim("default", job_id)
    outcome = decide(before.job, claim, command, world.clock.now_ms())
    assert isinstance(outcome, Decision), outcome
    commit = await world.store.commit(
        Operation(
            guard=outcome.guard,
            before=before,
            after=outcome.job,
            writes=effects(before.job, outcome.job),
            deadline=FAR,
            token=claim.token if claim is not None else 0,
        )
    )
    assert commit.won
    return commit.stored


async def test_a_batch_is_stored_together_and_answered_in_its_order(world: World) -> None:
    outcomes = await submit(world, *(a_new_job(f"j{n}") for n in range(5)))
    stored = [o.stored for o in outcomes if isinstance(o, SubmitOutcome) and o.created]
    assert [s.job.job_id for s in stored] == [f"j{n}" for n in range(5)]
    assert len({s.revision for s in stored}) == 1
    assert world.store.types == {("default", "q", "t"): None}
    assert list(world.feeds.namespaces()) == ["default"]
    assert [s.job.rank for s in stored] == sorted(s.job.rank for s in stored)


async def test_a_repeat_finds_the_same_job_whether_its_id_was_given_or_made(world: World) -> None:
    for job in (a_new_job("given"), a_new_job("")):
        first = await submit_one(world, job)
        again = await submit_one(world, job)
        assert first.created
        assert not again.created
        assert again.stored == first.stored


async def test_made_ids_differ_by_request_item_and_namespace(world: World) -> None:
    outcomes = await submit(world, a_new_job(""), a_new_job("", item=1))
    outcomes += await submit(world, a_new_job(""), request_id="r2")
    outcomes += await world.submission.submit("other", "r1", [a_new_job("")], world.deadline)
    ids = {o.stored.job.job_id for o in outcomes if isinstance(o, SubmitOutcome)}
    assert len(ids) == 4


async def test_a_made_id_is_of_the_place_in_the_call_also_when_others_of_the_call_were_refused(
    world: World,
) -> None:
    whole = await submit(world, a_new_job(""), a_new_job("", item=1))
    rest = await submit(world, a_new_job("", item=1))
    assert isinstance(whole[1], SubmitOutcome)
    assert isinstance(rest[0], SubmitOutcome)
    assert rest[0].stored.job.job_id == whole[1].stored.job.job_id
    assert not rest[0].created


async def test_the_same_id_with_other_content_is_refused_and_the_first_stands(world: World) -> None:
    first = await submit_one(world, a_new_job(payload=b"1"))
    other = await refuse_one(world, a_new_job(payload=b"2"), request_id="r2")
    assert other.reason is Reason.JOB_EXISTS
    reused = await refuse_one(world, a_new_job(payload=b"2"), request_id="r1")
    assert reused.reason is Reason.REQUEST_ID_REUSED
    assert world.stored() == first.stored


async def test_two_jobs_with_one_id_refuse_the_call_and_store_nothing(world: World) -> None:
    with pytest.raises(RequestError) as caught:
        await submit(world, a_new_job("a"), a_new_job("b", item=1), a_new_job("a", item=3))
    assert caught.value.reason is Reason.VALIDATION_FAILED
    assert [field.field for field in caught.value.fields] == ["jobs[0].job_id", "jobs[3].job_id"]
    assert not world.etcd.keys


async def test_a_lost_reply_and_a_repeat_make_one_job(world: World) -> None:
    world.etcd.faults.append(Fault.LOST_REPLY)
    unknown = await refuse_one(world, a_new_job(""))
    assert unknown.reason is Reason.OUTCOME_UNKNOWN
    assert unknown.retry_after_ms
    again = await submit_one(world, a_new_job(""))
    assert not again.created
    assert len(list(world.etcd.of_slot(Slot.STATE, "default"))) == 1


async def test_a_lost_request_and_a_repeat_make_one_job(world: World) -> None:
    world.etcd.faults.append(Fault.LOST_REQUEST)
    assert (await refuse_one(world, a_new_job(""))).reason is Reason.OUTCOME_UNKNOWN
    assert (await submit_one(world, a_new_job(""))).created


async def test_our_own_first_try_found_by_the_second_counts_as_created(world: World) -> None:
    world.etcd.faults.append(Fault.RESENT)
    assert (await submit_one(world, a_new_job())).created


async def test_of_two_coordinators_that_take_the_same_request_at_once_one_has_created(world: World) -> None:
    """Their clocks and counters agree, so the record looks alike; only who wrote it differs."""
    sides = [
        Submission(world.store, world.feeds, world.gauge, world.clock, SteadyEntropy()) for _ in range(2)
    ]
    calls = (side.submit("default", "r1", [a_new_job("")], world.deadline) for side in sides)
    outcomes = [outcome for [outcome] in await asyncio.gather(*calls)]
    assert [o.created for o in outcomes if isinstance(o, SubmitOutcome)] == [True, False]


async def test_somebody_elses_job_found_by_a_second_try_does_not_count_as_created(world: World) -> None:
    other = Submission(world.store, world.feeds, world.gauge, world.clock, world.entropy)

    def overtake(operation: Operation) -> None:
        world.etcd.interfere.clear()
        assert operation.after is not None
        theirs = replace(operation.after, terms=replace(operation.after.terms, request_digest=b"other"))
        world.etcd.write([(Where(Slot.STATE, "default", "j1"), theirs, None)])

    lost = world.etcd._lost
    world.etcd._lost = lambda operation: replace(lost(operation), resent=True)  # type: ignore[method-assign,assignment]
    world.etcd.interfere.append(overtake)
    [outcome] = await other.submit("default", "r1", [a_new_job()], world.deadline)
    assert isinstance(outcome, SubmitOutcome)
    assert not outcome.created


async def test_one_bad_item_leaves_the_others_alone(world: World) -> None:
    await submit_one(world, a_new_job("j1", payload=b"old"), request_id="r0")
    outcomes = await submit(world, a_new_job("j0"), a_new_job("j1", payload=b"new"), a_new_job("j2"))
    assert [isinstance(o, SubmitOutcome) for o in outcomes] == [True, False, True]


async def test_a_taken_unique_key_names_its_job_and_says_whether_the_content_differs(world: World) -> None:
    await submit_one(world, a_new_job("first", unique_key="k", payload=b"1"))
    same = await refuse_one(world, a_new_job("second", unique_key="k", payload=b"1"))
    other = await refuse_one(world, a_new_job("third", unique_key="k", payload=b"2"))
    assert same.reason is other.reason is Reason.DUPLICATE_JOB
    assert same.metadata == {"job_id": "first", "unique_key": "k", "state": "PENDING", "same_content": "true"}
    assert other.metadata["same_content"] == "false"


async def test_a_repeat_is_no_duplicate_of_itself(world: World) -> None:
    first = await submit_one(world, a_new_job("first", unique_key="k"))
    again = await submit_one(world, a_new_job("first", unique_key="k"))
    assert again.stored == first.stored


async def test_fifty_at_once_with_one_unique_key_make_one_job_and_all_hear_its_name(world: World) -> None:
    calls = (submit(world, a_new_job("", unique_key="k"), request_id=f"r{n}") for n in range(50))
    outcomes = [outcome for [outcome] in await asyncio.gather(*calls)]
    created = [o for o in outcomes if isinstance(o, SubmitOutcome)]
    refused = [o for o in outcomes if isinstance(o, RequestError)]
    assert len(created) == 1
    assert {e.metadata["job_id"] for e in refused} == {created[0].stored.job.job_id}
    assert len(refused) == 49


async def test_two_jobs_of_one_call_with_one_unique_key_make_one_job(world: World) -> None:
    first, second = await submit(world, a_new_job("a", unique_key="k"), a_new_job("b", unique_key="k"))
    assert isinstance(first, SubmitOutcome)
    assert isinstance(second, RequestError)
    assert second.metadata["job_id"] == "a"


async def test_every_end_of_a_job_frees_its_unique_key_in_the_same_step(world: World) -> None:
    await submit_one(
        world, a_new_job("cancelled", unique_key="k", run_at_ms=world.clock.now_ms() + 3_600_000)
    )
    await apply(world, Cancel(), "cancelled")
    await submit_one(world, a_new_job("next", unique_key="k"), request_id="r2")

    done = await world.running("done", unique_key="u")
    await apply(world, Complete(token=done.token, digest=b"d"), "done")
    await submit_one(world, a_new_job("after-done", unique_key="u"), request_id="r3")

    dead = await world.running("dead", unique_key="v")
    await apply(world, Fail(token=dead.token, digest=b"d", no_retry=True), "dead")
    assert world.stored("dead").job.state is JobState.DEAD
    await submit_one(world, a_new_job("after-dead", unique_key="v"), request_id="r4")
    for name in ("cancelled", "done", "dead", "next"):
        assert check_keys(world.stored(name).job, world.etcd.keys_of("default", name)) == []


async def test_a_job_that_vanished_between_loss_and_look_is_submitted_again(world: World) -> None:
    await submit_one(world, a_new_job("owner", unique_key="k"))
    lost = world.etcd._lost

    def forgetful(operation: Operation) -> object:
        world.etcd._lost = lost  # type: ignore[method-assign]
        commit = lost(operation)
        world.etcd.write((), world.etcd.keys_of("default", "owner"))
        return replace(commit, unique_owner="")

    world.etcd._lost = forgetful  # type: ignore[method-assign,assignment]
    assert (await submit_one(world, a_new_job("next", unique_key="k"), request_id="r2")).created


async def test_an_id_used_again_after_deletion_inherits_nothing(world: World) -> None:
    old = await world.running("j1", total_timeout_ms=1_000)
    await apply(world, Complete(token=old.token, digest=b"d"))
    world.etcd.write((), world.etcd.keys_of("default", "j1"))
    fresh = (await submit_one(world, a_new_job("j1", payload=b"new"), request_id="r9")).stored.job
    assert (fresh.attempt, fresh.attempts, fresh.failures, fresh.lease_losses) == (0, (), 0, 0)
    assert fresh.terms.submit_ms == world.clock.now_ms()
    assert not fresh.cancel_requested


async def test_a_full_store_refuses_new_jobs_and_still_answers_repeats(world: World) -> None:
    first = await submit_one(world, a_new_job("there"))
    world.gauge.accepts_submissions = False
    again, refused = await submit(world, a_new_job("there"), a_new_job("new"))
    assert isinstance(again, SubmitOutcome)
    assert again.stored == first.stored
    assert isinstance(refused, RequestError)
    assert refused.reason is Reason.STORAGE_FULL
    assert refused.retry_after_ms
    assert world.etcd.stored("default", "new") is None


async def test_what_was_surely_not_written_is_told_as_that(world: World) -> None:
    world.etcd.faults.append(Fault.REFUSED)
    assert (await refuse_one(world, a_new_job())).reason is Reason.TOO_MANY_REQUESTS
    world.etcd.read_error = EtcdUnavailable("planned")
    with pytest.raises(RequestError) as caught:
        await submit(world, a_new_job("x", type="new-type"))
    assert caught.value.reason is Reason.ETCD_UNAVAILABLE


async def test_a_job_for_later_waits_and_one_for_the_past_does_not(world: World) -> None:
    now = world.clock.now_ms()
    later, past = await submit(
        world, a_new_job("l", run_at_ms=now + 500), a_new_job("p", run_at_ms=now - 500)
    )
    assert isinstance(later, SubmitOutcome)
    assert isinstance(past, SubmitOutcome)
    assert later.stored.job.state is JobState.SCHEDULED
    assert past.stored.job.state is JobState.PENDING
