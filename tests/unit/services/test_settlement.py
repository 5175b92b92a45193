"""Settlement: fenced by the token, replayed when repeated (promise P2; fault cases 043, 045, 073)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from coordinator.core.commands import Cancel, Complete, Fail, Release, Settlement
from coordinator.core.effects import Slot, Where, effects
from coordinator.core.fencing import make_token
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import AttemptOutcome, JobState, Progress
from coordinator.core.machine import Decision, decide
from coordinator.core.notice import NoticeKind
from coordinator.errors import EtcdUnavailable, Reason, RequestError
from coordinator.ports import Commit, Operation
from coordinator.services.api import Settle, Settled
from tests.support.builders import a_job, a_session, claim_job, open_session, store_job
from tests.support.memory_etcd import Fault
from tests.unit.services.conftest import World


async def settle(world: World, *commands: Settlement, job_id: str = "j1") -> list[Settled | RequestError]:
    items = [Settle(job_id, command) for command in commands]
    return await world.settlement.settle("default", items, world.deadline)


async def settle_one(world: World, command: Settlement, job_id: str = "j1") -> Settled:
    [result] = await settle(world, command, job_id=job_id)
    assert isinstance(result, Settled), result
    return result


async def refuse_one(world: World, command: Settlement, job_id: str = "j1") -> RequestError:
    [result] = await settle(world, command, job_id=job_id)
    assert isinstance(result, RequestError), result
    return result


def complete(claimed: Commit, result: bytes = b"ok") -> Complete:
    return Complete(token=claimed.token, digest=b"", result=result)


def fail(claimed: Commit, **fields: object) -> Fail:
    return Fail(token=claimed.token, digest=b"", failure_type="Boom", failure_message="it broke", **fields)  # type: ignore[arg-type]


def assert_sound(world: World, job_id: str = "j1") -> None:
    job = world.stored(job_id).job
    assert check_job(job, world.etcd.claim("default", job_id)) == []
    assert check_keys(job, world.etcd.keys_of("default", job_id)) == []


async def test_a_remembered_claim_is_settled_without_a_read(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    reads = world.etcd.reads
    assert await settle_one(world, complete(claimed)) == Settled("j1", JobState.SUCCEEDED, 0)
    assert world.etcd.reads == reads
    assert world.holders.running("default", "j1") is None, "what was remembered is outdated"
    assert_sound(world)


async def test_a_claim_that_another_coordinator_made_is_read_and_settled(world: World) -> None:
    claimed = await world.running()
    assert (await settle_one(world, complete(claimed))).state is JobState.SUCCEEDED
    assert_sound(world)


async def test_a_repeat_answers_as_the_first_time_did(world: World) -> None:
    claimed = await world.running()
    first = await settle_one(world, fail(claimed))
    assert first.ready_ms > world.clock.now_ms()
    await world.clock.advance(0.2)
    commits = world.etcd.commits
    assert await settle_one(world, fail(claimed)) == first
    assert world.etcd.commits == commits
    assert world.stored().job.failures == 1


@pytest.mark.parametrize("first", ["complete", "fail", "release"])
async def test_a_different_second_settlement_is_refused_and_the_first_stands(
    world: World, first: str
) -> None:
    claimed = await world.running()
    said: dict[str, Settlement] = {
        "complete": complete(claimed),
        "fail": fail(claimed),
        "release": Release(token=claimed.token, digest=b""),
        "other result": complete(claimed, b"other"),
    }
    stands = await settle_one(world, said[first])
    for name, second in said.items():
        if name != first:
            refused = await refuse_one(world, second)
            assert refused.reason is Reason.CLAIM_LOST
            assert refused.metadata["held"] == str(claimed.token)
            assert refused.metadata["current"] == "0"
    assert world.stored().job.state is stands.state
    assert world.stored().job.attempts[-1].token == claimed.token
    assert_sound(world)


async def test_an_old_holder_changes_nothing_after_its_job_was_claimed_again(world: World) -> None:
    old = await world.running()
    await settle_one(world, Release(token=old.token, digest=b""))
    new = await claim_job(world.store, world.stored())
    refused = await refuse_one(world, complete(old))
    assert refused.reason is Reason.CLAIM_LOST
    assert refused.metadata["current"] == str(new.token)
    assert new.token > old.token
    assert (await settle_one(world, complete(new))).state is JobState.SUCCEEDED


async def test_a_late_success_after_expiry_is_refused_whether_or_not_it_was_recovered(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    await world.clock.advance(11)
    refused = await refuse_one(world, complete(claimed))
    assert refused.reason is Reason.CLAIM_LOST
    assert refused.metadata["current"] == "0"
    assert world.stored().job.state is JobState.RUNNING, "recovery is not settlement's business"
    await open_session(world.sessions, a_session("00000000000000b2"))


async def test_two_settlements_of_one_job_in_a_batch_go_one_after_the_other(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    first, repeat, other = await settle(world, complete(claimed), complete(claimed), fail(claimed))
    assert first == repeat == Settled("j1", JobState.SUCCEEDED, 0)
    assert isinstance(other, RequestError)
    assert other.reason is Reason.CLAIM_LOST


async def test_the_first_of_one_jobs_settlements_stands_even_if_its_commit_is_slow(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    commit = world.store.commit

    async def slowly(operation: Operation) -> Commit:
        for _ in range(20):
            await asyncio.sleep(0)
        return await commit(operation)

    def first_slow(operation: Operation) -> asyncio.Future[Commit]:
        world.store.commit = commit  # type: ignore[method-assign]
        return asyncio.ensure_future(slowly(operation))

    world.store.commit = first_slow  # type: ignore[method-assign]
    first, second = await settle(world, complete(claimed), fail(claimed))
    assert first == Settled("j1", JobState.SUCCEEDED, 0)
    assert isinstance(second, RequestError)


async def test_a_batch_of_different_jobs_is_one_group(world: World) -> None:
    claims = [await world.running(f"j{n}") for n in range(4)]
    for claimed in claims:
        world.holders.remember(claimed)
    groups = world.etcd.groups
    items = [Settle(f"j{n}", complete(claimed)) for n, claimed in enumerate(claims)]
    results = await world.settlement.settle("default", items, world.deadline)
    assert [r.job_id for r in results if isinstance(r, Settled)] == ["j0", "j1", "j2", "j3"]
    assert world.etcd.groups == groups + 1


async def test_an_unknown_outcome_is_told_as_unknown_and_a_repeat_finds_out(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    world.etcd.faults.append(Fault.LOST_REPLY)
    assert (await refuse_one(world, complete(claimed))).reason is Reason.OUTCOME_UNKNOWN
    assert (await settle_one(world, complete(claimed))).state is JobState.SUCCEEDED

    other = await world.running("j2")
    world.etcd.faults.append(Fault.LOST_REQUEST)
    assert (await refuse_one(world, complete(other), "j2")).reason is Reason.OUTCOME_UNKNOWN
    assert (await settle_one(world, complete(other), "j2")).state is JobState.SUCCEEDED


async def test_our_own_first_try_found_by_the_second_is_the_answer(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    world.etcd.faults.append(Fault.RESENT)
    assert await settle_one(world, complete(claimed)) == Settled("j1", JobState.SUCCEEDED, 0)
    assert len(world.stored().job.attempts) == 1


async def test_a_memory_that_is_outdated_costs_a_round_and_no_wrong_answer(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    before = world.stored()
    outcome = decide(before.job, claimed.claim, Cancel(reason="stop"), world.clock.now_ms())
    assert isinstance(outcome, Decision)
    asked = await world.store.commit(
        Operation(
            guard=outcome.guard,
            before=before,
            after=outcome.job,
            writes=effects(before.job, outcome.job),
            deadline=world.deadline,
            cancelled_by="me",
        )
    )
    assert asked.won
    assert (await settle_one(world, fail(claimed))).state is JobState.CANCELLED
    assert_sound(world)


async def test_a_settlement_that_keeps_losing_gives_up_without_a_verdict(world: World) -> None:
    claimed = await world.running()

    def touch(operation: Operation) -> None:
        where = Where(Slot.STATE, "default", "j1")
        world.etcd.write([(where, world.stored().job, None)])

    world.etcd.interfere.append(touch)
    refused = await refuse_one(world, complete(claimed))
    assert refused.reason is Reason.TOO_MANY_REQUESTS
    assert world.stored().job.state is JobState.RUNNING


async def test_cancel_and_complete_race_to_one_end_that_the_answers_match(world: World) -> None:
    claimed = await world.running()
    world.holders.remember(claimed)
    before = world.stored()
    cancelled = decide(before.job, claimed.claim, Cancel(), world.clock.now_ms())
    assert isinstance(cancelled, Decision)
    operation = Operation(
        guard=cancelled.guard,
        before=before,
        after=cancelled.job,
        writes=effects(before.job, cancelled.job),
        deadline=world.deadline,
        cancelled_by="me",
    )
    asked, [settled] = await asyncio.gather(
        asyncio.ensure_future(world.store.commit(operation)), settle(world, complete(claimed))
    )
    assert isinstance(settled, Settled)
    assert world.stored().job.state is settled.state is JobState.SUCCEEDED
    assert asked.won or asked.stored is not None
    assert_sound(world)


async def test_a_token_from_a_lost_future_is_refused_for_that_call_alone(world: World) -> None:
    claimed = await world.running()
    future = make_token(1, world.etcd.revision + 1_000)
    good, bad = await settle(world, complete(claimed), Complete(token=future, digest=b""))
    assert isinstance(good, Settled)
    assert isinstance(bad, RequestError)
    assert bad.reason is Reason.EPOCH_REGRESSED
    assert world.present.refreshed == 1


async def test_a_present_that_lags_is_asked_for_before_a_token_is_judged(world: World) -> None:
    claimed = await world.running()
    world.present.lag = 50
    assert isinstance(await settle_one(world, complete(claimed)), Settled)


async def test_a_token_of_another_epoch_is_stale_even_for_a_repeat(world: World) -> None:
    claimed = await world.running()
    await settle_one(world, complete(claimed))
    world.etcd.epoch = 2
    assert (await refuse_one(world, complete(claimed))).reason is Reason.CLAIM_LOST


async def test_nothing_is_settled_while_the_store_is_known_to_have_gone_back(world: World) -> None:
    claimed = await world.running()
    world.present.regressed = True
    with pytest.raises(RequestError) as caught:
        await settle(world, complete(claimed))
    assert caught.value.reason is Reason.EPOCH_REGRESSED
    assert world.stored().job.state is JobState.RUNNING


async def test_progress_that_beats_told_is_kept_with_the_settlement(world: World) -> None:
    claimed = await world.running()
    world.holders.told["default", "j1"] = Progress(ratio=0.5, note="half")
    await settle_one(world, fail(claimed))
    assert world.stored().job.progress == Progress(ratio=0.5, note="half")


async def test_a_failure_backs_off_with_jitter_and_dies_when_retries_are_used_up(world: World) -> None:
    claimed = await world.running()
    for failures in range(1, 7):
        result = await settle_one(world, fail(claimed, retry_delay_ms=0))
        assert world.stored().job.failures == failures
        if failures <= 5:
            assert result.state is JobState.PENDING
            claimed = await claim_job(world.store, world.stored())
    assert world.stored().job.state is JobState.DEAD
    assert world.stored().job.attempts[-1].outcome is AttemptOutcome.FAILED
    assert_sound(world)


async def test_a_large_result_lies_beside_the_record(world: World) -> None:
    claimed = await world.running()
    await settle_one(world, complete(claimed, b"x" * 5_000))
    assert world.stored().job.result == b""
    assert world.stored().job.result_size == 5_000
    snapshot = await world.store.read("default", "j1", deadline=world.deadline, result=True)
    assert snapshot.result == b"x" * 5_000


async def test_settling_an_unknown_job_says_so(world: World) -> None:
    await world.running("other")
    refused = await refuse_one(world, Complete(token=1 << 44, digest=b""), "nobody")
    assert refused.reason is Reason.JOB_NOT_FOUND


async def test_an_etcd_that_does_not_answer_a_read_is_told_as_that(world: World) -> None:
    claimed = await world.running()
    world.etcd.read_error = EtcdUnavailable("planned")
    assert (await refuse_one(world, complete(claimed))).reason is Reason.ETCD_UNAVAILABLE


async def test_a_checkpoint_needs_the_present_token_and_keeps_the_latest_sequence(world: World) -> None:
    claimed = await world.running()

    async def save(sequence: int, data: bytes, token: int = claimed.token) -> bool:
        return await world.settlement.checkpoint("default", "j1", token, sequence, data, None, world.deadline)

    assert await save(2, b"two")
    assert not await save(1, b"one")
    world.holders.remember(replace(claimed))
    assert await save(3, b"three")
    with pytest.raises(RequestError) as caught:
        await save(4, b"four", claimed.token - 1)
    assert caught.value.reason is Reason.CLAIM_LOST
    assert caught.value.metadata["current"] == str(claimed.token)
    snapshot = await world.store.read("default", "j1", deadline=world.deadline, checkpoint=True)
    assert snapshot.checkpoint is not None
    assert (snapshot.checkpoint.data, snapshot.checkpoint.attempt) == (b"three", 1)


async def test_the_checkpoint_goes_to_the_next_attempt(world: World) -> None:
    claimed = await world.running()
    await world.settlement.checkpoint("default", "j1", claimed.token, 1, b"here", None, world.deadline)
    await settle_one(world, fail(claimed, retry_delay_ms=0))
    again = await claim_job(world.store, world.stored())
    assert again.checkpoint is not None
    assert again.checkpoint.data == b"here"


async def test_a_record_that_cannot_be_decoded_is_not_called_missing_and_hurts_no_other(world: World) -> None:
    claimed, other = await world.running(), await world.running("j2")
    world.store.garbled.add("j1")
    items = [Settle("j1", complete(claimed)), Settle("j2", complete(other))]
    garbled, settled = await world.settlement.settle("default", items, world.deadline)
    assert isinstance(garbled, RequestError)
    assert garbled.reason is Reason.INTERNAL
    assert isinstance(settled, Settled)


async def test_a_memory_of_an_earlier_attempt_refuses_nobody(world: World) -> None:
    old = await world.running()
    await settle_one(world, Release(token=old.token, digest=b""))
    new = await claim_job(world.store, world.stored())
    world.holders.remember(old)
    saved = await world.settlement.checkpoint("default", "j1", new.token, 1, b"c", None, world.deadline)
    assert saved
    snapshot = await world.store.read("default", "j1", deadline=world.deadline, checkpoint=True)
    assert snapshot.checkpoint is not None
    assert snapshot.checkpoint.attempt == 2
    world.holders.remember(old)
    assert (await settle_one(world, complete(new))).state is JobState.SUCCEEDED


async def test_a_job_that_its_settlement_ends_dead_is_told(world: World) -> None:
    claimed = await world.running()

    await settle_one(world, fail(claimed, no_retry=True))

    [notice] = world.notices.notices
    assert (notice.kind, notice.job_id, notice.token) == (NoticeKind.DEAD, "j1", claimed.token)
    assert (notice.state_before, notice.state_after) == (JobState.RUNNING, JobState.DEAD)
    assert notice.reason == world.stored().job.end_reason
    assert notice.facts == {"failure_type": "Boom"}


async def test_a_job_that_goes_on_or_ends_well_is_not_told(world: World) -> None:
    claimed = await world.running()
    await settle_one(world, fail(claimed))
    other = await claim_job(world.store, await store_job(world.store, a_job("j2")))
    await settle_one(world, complete(other), "j2")

    assert world.notices.notices == []


async def test_a_token_above_the_present_is_told_at_most_once_a_second(world: World) -> None:
    await world.running()
    future = make_token(1, 10_000)

    for _ in range(5):
        await refuse_one(world, Complete(token=future, digest=b""))
    await world.clock.advance(1.5)
    with pytest.raises(RequestError):
        await world.settlement.checkpoint("default", "j1", future, 1, b"", None, world.deadline)

    first, second = world.notices.of(NoticeKind.EPOCH)
    assert (first.namespace, first.job_id, first.token) == ("default", "j1", future)
    assert first.facts == {"present": str(world.present.token())}
    assert second.facts["more_before"] == "4"
