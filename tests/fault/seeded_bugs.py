"""Bugs to be planted in the core, one at a time: what the fleet's run must catch (``test_seeded_bugs.py``).

A property test that has never failed proves little. Each entry is a mistake that somebody could make, or
has made in a system like this one; it is applied by monkeypatching and lives for one test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from coordinator.core import commands as c
from coordinator.core import effects, invariants, machine, rules
from coordinator.core.effects import Slot, Where, Write
from coordinator.core.job import Claim, Job, JobState
from coordinator.core.machine import Guard, Row
from coordinator.core.rank import TARGET_WAIT_MS, Rank

Patch = pytest.MonkeyPatch
Rule = Callable[[Job, Any, int], Job | None]

BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[plant.__name__] = plant
    return plant


def change_rows(patch: Patch, wanted: tuple[type, ...], change: Callable[[Row], Row]) -> None:
    table = {key: change(row) if key[1] in wanted else row for key, row in machine.TRANSITIONS.items()}
    patch.setattr(machine, "TRANSITIONS", MappingProxyType(table))


def change_rule(patch: Patch, command: type, wrap: Callable[[Rule], Rule]) -> None:
    """Wrap the rules of ``command``; any target goes, so that the oracle objects and not the table."""
    anything = frozenset({*JobState, None})
    change_rows(patch, (command,), lambda row: Row(wrap(row.rule), anything, row.guard))


def _change_keys(patch: Patch, change: Callable[[Job, dict[Where, bool]], dict[Where, bool]]) -> None:
    """Change what keys a record has, in the code and in its own invariants: only the oracle can tell."""
    original = effects.keys_of

    def changed(job: Job) -> dict[Where, bool]:
        return change(job, original(job))

    patch.setattr(effects, "keys_of", changed)
    patch.setattr(invariants, "keys_of", changed)


def _change_effects(patch: Patch, change: Callable[[Write], Write | None]) -> None:
    original = effects.effects

    def changed(before: Job | None, after: Job | None, *, big_result: bool = False) -> tuple[Write, ...]:
        writes = [change(write) for write in original(before, after, big_result=big_result)]
        return tuple(write for write in writes if write is not None)

    patch.setattr(effects, "effects", changed)


# -- fencing -------------------------------------------------------------------------------------------------


@bug
def complete_does_not_check_the_token(patch: Patch) -> None:
    original = machine._check_token

    def unchecked(job: Job, claim: Claim | None, command: Any) -> Any:
        if isinstance(command, c.Complete) and job.state is JobState.RUNNING:
            return None
        return original(job, claim, command)

    patch.setattr(machine, "_check_token", unchecked)
    change_rows(patch, (c.Complete,), lambda row: replace(row, guard=Guard.STATE))


@bug
def settlements_compare_the_record_and_not_the_claim(patch: Patch) -> None:
    change_rows(patch, (c.Complete, c.Fail, c.Release), lambda row: replace(row, guard=Guard.STATE))


@bug
def a_loss_is_believed_without_looking_at_the_claim(patch: Patch) -> None:
    change_rows(patch, (c.Lose,), lambda row: replace(row, guard=Guard.STATE))


@bug
def a_claim_does_not_compare_the_witness_of_its_session(patch: Patch) -> None:
    change_rows(patch, (c.ClaimIt,), lambda row: replace(row, guard=Guard.STATE))


@bug
def a_replay_answers_whatever_the_content(patch: Patch) -> None:
    original = machine._check_token

    def careless(job: Job, claim: Claim | None, command: Any) -> Any:
        past = job.attempt_with(command.token)
        live = claim is not None and claim.token == command.token
        return machine.Replay(past) if past is not None and not live else original(job, claim, command)

    patch.setattr(machine, "_check_token", careless)


@bug
def a_replay_tells_the_present_and_not_the_past(patch: Patch) -> None:
    original = machine._check_token

    def confused(job: Job, claim: Claim | None, command: Any) -> Any:
        outcome = original(job, claim, command)
        if isinstance(outcome, machine.Replay):
            return machine.Replay(replace(outcome.attempt, state_after=job.state))
        return outcome

    patch.setattr(machine, "_check_token", confused)


@bug
def too_few_attempts_are_remembered(patch: Patch) -> None:
    patch.setattr(rules, "ATTEMPTS_KEPT", 4)


@bug
def a_submission_does_not_compare_absence(patch: Patch) -> None:
    original = machine.decide

    def careless(job: Job | None, claim: Claim | None, command: c.Command, now_ms: int) -> machine.Outcome:
        outcome = original(job, claim, command, now_ms)
        if isinstance(command, c.Submit) and isinstance(outcome, machine.Decision):
            return replace(outcome, guard=Guard.STATE)
        return outcome

    patch.setattr(machine, "decide", careless)


@bug
def a_repeated_settlement_is_refused(patch: Patch) -> None:
    patch.setattr(Job, "attempt_with", lambda self, token: None)


@bug
def a_settlement_forgets_its_token(patch: Patch) -> None:
    original = rules._end_attempt

    def forgetful(job: Job, now_ms: int, outcome: Any, **fields: Any) -> Job:
        return original(job, now_ms, outcome, **{**fields, "token": 0})

    patch.setattr(rules, "_end_attempt", forgetful)


@bug
def the_attempt_number_is_not_raised(patch: Patch) -> None:
    def stuck(rule: Rule) -> Rule:
        def claim(job: Job, command: Any, now_ms: int) -> Job | None:
            after = rule(job, command, now_ms)
            return after if after is None or after is job else replace(after, attempt=max(1, job.attempt))

        return claim

    change_rule(patch, c.ClaimIt, stuck)


# -- counting ------------------------------------------------------------------------------------------------


@bug
def a_failure_is_never_charged(patch: Patch) -> None:
    change_rule(
        patch, c.Fail, lambda rule: lambda job, command, now: rule(replace(job, failures=-1), command, now)
    )


@bug
def a_crash_burns_a_retry(patch: Patch) -> None:
    def burn(rule: Rule) -> Rule:
        return lambda job, command, now: rule(replace(job, failures=job.failures + 1), command, now)

    change_rule(patch, c.Lose, burn)


@bug
def a_poison_pill_is_handed_out_for_ever(patch: Patch) -> None:
    change_rule(
        patch,
        c.Lose,
        lambda rule: lambda job, command, now: rule(replace(job, lease_losses=-1), command, now),
    )


@bug
def returns_are_never_counted_as_losses(patch: Patch) -> None:
    patch.setattr(rules, "FREE_RETURNS", 10**9)


@bug
def one_retry_too_few(patch: Patch) -> None:
    def hasty(rule: Rule) -> Rule:
        def fail(job: Job, command: Any, now_ms: int) -> Job | None:
            last = job.failures + 1 >= job.terms.retry.max_retries > 0
            return rule(job, replace(command, no_retry=True) if last else command, now_ms)

        return fail

    change_rule(patch, c.Fail, hasty)


@bug
def backoff_is_skipped(patch: Patch) -> None:
    patch.setattr(rules, "delay_ms", lambda policy, failures, jitter_number: 0)


# -- cancellation --------------------------------------------------------------------------------------------


def _forget_the_request(rule: Rule) -> Rule:
    return lambda job, command, now: rule(replace(job, cancel_requested=False), command, now)


@bug
def cancel_is_lost_when_the_attempt_fails(patch: Patch) -> None:
    change_rule(patch, c.Fail, _forget_the_request)


@bug
def cancel_is_lost_when_the_holder_dies(patch: Patch) -> None:
    change_rule(patch, c.Lose, _forget_the_request)


@bug
def cancel_is_lost_when_the_job_is_released(patch: Patch) -> None:
    change_rule(patch, c.Release, _forget_the_request)


@bug
def a_forced_cancel_needs_no_request(patch: Patch) -> None:
    def eager(rule: Rule) -> Rule:
        def take_away(job: Job, command: Any, now_ms: int) -> Job | None:
            forced = command.why is c.Taken.CANCELLED
            return rule(replace(job, cancel_requested=job.cancel_requested or forced), command, now_ms)

        return take_away

    change_rule(patch, c.TakeAway, eager)


@bug
def the_request_to_stop_outlives_the_attempt(patch: Patch) -> None:
    original = rules._end_attempt

    def sticky(job: Job, now_ms: int, outcome: Any, **fields: Any) -> Job:
        return replace(original(job, now_ms, outcome, **fields), cancel_requested=job.cancel_requested)

    patch.setattr(rules, "_end_attempt", sticky)


# -- time ----------------------------------------------------------------------------------------------------


@bug
def a_job_taken_away_runs_again_at_once(patch: Patch) -> None:
    def at_once(rule: Rule) -> Rule:
        def take_away(job: Job, command: Any, now_ms: int) -> Job | None:
            after = rule(job, command, now_ms)
            if after is None or after.state is not JobState.SCHEDULED:
                return after
            ended = replace(after.attempts[-1], state_after=JobState.PENDING, ready_ms_after=now_ms)
            return replace(
                after,
                state=JobState.PENDING,
                ready_ms=now_ms,
                hold_ms=0,
                attempts=(*after.attempts[:-1], ended),
            )

        return take_away

    change_rule(patch, c.TakeAway, at_once)


@bug
def run_at_overrides_the_hold(patch: Patch) -> None:
    change_rule(
        patch, c.Update, lambda rule: lambda job, command, now: rule(replace(job, hold_ms=0), command, now)
    )


@bug
def a_job_is_claimed_after_its_queue_timeout(patch: Patch) -> None:
    original = rules._expired

    def blind(job: Job, now_ms: int) -> bool:
        return job.state is not JobState.PENDING and original(job, now_ms)

    patch.setattr(rules, "_expired", blind)


@bug
def a_due_time_in_the_past_jumps_the_queue(patch: Patch) -> None:
    def unbounded(
        *,
        ready_ms: int,
        submit_ms: int,
        due_ms: int,
        priority: int,
        counter: int,
        target_wait_ms: tuple[int, ...],
    ) -> Rank:
        ours = ready_ms + TARGET_WAIT_MS[priority - 1]
        return Rank(min(ours, due_ms) if due_ms else ours, counter)

    patch.setattr(rules, "rank", unbounded)


@bug
def a_waiting_job_told_to_run_now_loses_its_place(patch: Patch) -> None:
    def reset(rule: Rule) -> Rule:
        def update(job: Job, command: Any, now_ms: int) -> Job | None:
            if (
                command.run_at_ms is not None
                and command.run_at_ms <= now_ms
                and job.state is JobState.PENDING
            ):
                job = replace(job, ready_ms=now_ms)
            return rule(job, command, now_ms)

        return update

    change_rule(patch, c.Update, reset)


# -- keys ----------------------------------------------------------------------------------------------------


def _without(slot: Slot, state: JobState) -> Callable[[Job, dict[Where, bool]], dict[Where, bool]]:
    def change(job: Job, keys: dict[Where, bool]) -> dict[Where, bool]:
        return {w: v for w, v in keys.items() if w.slot is not slot or job.state is not state}

    return change


@bug
def the_due_key_of_a_queue_timeout_is_forgotten(patch: Patch) -> None:
    _change_keys(patch, _without(Slot.DUE, JobState.PENDING))


@bug
def the_ready_key_is_forgotten(patch: Patch) -> None:
    _change_keys(patch, _without(Slot.READY, JobState.PENDING))


@bug
def a_dead_job_loses_its_spec(patch: Patch) -> None:
    _change_keys(patch, _without(Slot.SPEC, JobState.DEAD))


@bug
def the_unique_key_is_kept_after_the_end(patch: Patch) -> None:
    def keep(job: Job, keys: dict[Where, bool]) -> dict[Where, bool]:
        if job.terms.unique_key and job.terminal:
            alive = replace(job, state=JobState.RUNNING)
            keys |= {w: v for w, v in _ORIGINAL_KEYS(alive).items() if w.slot is Slot.UNIQUE}
        return keys

    _change_keys(patch, keep)


@bug
def the_unique_key_is_given_up_with_the_first_claim(patch: Patch) -> None:
    _change_keys(patch, _without(Slot.UNIQUE, JobState.RUNNING))


@bug
def the_cancel_key_is_left_behind(patch: Patch) -> None:
    _change_effects(patch, lambda w: None if w.where.slot is Slot.CANCEL and not w.put else w)


@bug
def the_checkpoint_of_a_succeeded_job_is_kept(patch: Patch) -> None:
    _change_effects(patch, lambda w: None if w.where.slot is Slot.CHECKPOINT else w)


@bug
def a_big_result_outlives_its_job(patch: Patch) -> None:
    _change_effects(patch, lambda w: None if w.where.slot is Slot.RESULT and not w.put else w)


@bug
def an_ended_job_is_kept_for_ever(patch: Patch) -> None:
    _change_effects(patch, lambda w: w._replace(retained=False))


_ORIGINAL_KEYS = effects.keys_of
