"""Bugs to be planted in a coordinator process, one at a time, and the fault test that must catch each.

``tests/fault/seeded_bugs.py`` plants bugs in the pure core and judges with a model; these sit where only real
processes and a real etcd meet them. Each is planted by `hurt_coordinator` before the coordinator starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.fault.support.lapse import lapse

__all__ = ["BUGS", "ProcessBug"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessBug:
    """A bug.

    Args:
        plant: changes the code of this process, for good.
        caught_by: the test, below ``tests/fault``.
        says: pattern of what the failing test says, so that it fails for the right reason.
        slow: takes more than a few seconds, so it is left out of the core.
    """

    plant: Callable[[], None]
    caught_by: str
    says: str
    slow: bool = False


BUGS: dict[str, ProcessBug] = {}


def _bug(
    caught_by: str, says: str, *, slow: bool = False
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def keep(plant: Callable[[], None]) -> Callable[[], None]:
        BUGS[plant.__name__] = ProcessBug(plant=plant, caught_by=caught_by, says=says, slow=slow)
        return plant

    return keep


def _guard_becomes(changed: str, compares: Callable[[Any, Any, bytes, bytes], list[bytes]]) -> None:
    """Operations under guard *changed* compare something else; what they read for losers stays."""
    from coordinator.core.machine import Guard
    from coordinator.etcd.txn import TxnCodec

    original = TxnCodec._guard

    def guard(
        self: Any, operation: Any, keys: Any, state_key: bytes, claim_key: bytes, ready_key: bytes
    ) -> tuple[list[bytes], list[bytes]]:
        sound, elses = original(self, operation, keys, state_key, claim_key, ready_key)
        if operation.guard is Guard[changed]:
            return compares(operation, keys, state_key, claim_key), elses
        return sound, elses

    TxnCodec._guard = guard  # type: ignore[method-assign]


@_bug(
    "test_rescue.py::test_a_rescue_that_comes_late_changes_nothing",
    says="a late rescue changed",
)
def the_recovery_of_lost_jobs_compares_nothing() -> None:
    from coordinator.etcd import wire

    _guard_becomes("UNHELD", lambda operation, keys, state, claim: [wire.create_eq(state + b"~", 0)])


@_bug(
    "test_rescue.py::test_a_coordinator_that_starts_recovers_no_live_job[50-2-0.0]",
    says="this token stood for has ended",
)
def the_lost_pass_does_not_look_at_the_claim() -> None:
    from coordinator.core.machine import Guard
    from coordinator.reconciler.lost import LostPass

    original = LostPass._operation

    def operation(self: Any, suspect: Any, found: Any, *rest: Any, **more: Any) -> Any:
        made = original(self, suspect, replace(found, claim=None), *rest, **more)
        if made is not None:
            made.guard = Guard.STATE
        return made

    LostPass._operation = operation  # type: ignore[method-assign]


def _no_token_for(commands: Sequence[type]) -> None:
    """These settlements are taken whatever their token."""
    from coordinator.core import machine
    from coordinator.core.job import JobState

    check = machine._check_token

    def unchecked(job: Any, claim: Any, command: Any) -> Any:
        if isinstance(command, tuple(commands)) and job.state is JobState.RUNNING:
            return None
        return check(job, claim, command)

    machine._check_token = unchecked
    table = {
        key: replace(row, guard=machine.Guard.STATE) if key[1] in commands else row
        for key, row in machine.TRANSITIONS.items()
    }
    machine.TRANSITIONS = table  # type: ignore[misc, assignment]


@_bug(
    "test_tokens_and_release.py::test_a_holder_that_slept_past_its_lease_ends_nothing_of_the_next_one[release]",
    says="not refused",
)
def a_release_needs_no_token() -> None:
    from coordinator.core.commands import Release

    _no_token_for((Release,))


@_bug(
    "test_tokens_and_release.py::test_a_holder_that_slept_past_its_lease_ends_nothing_of_the_next_one[complete]",
    says="not refused",
)
def a_completion_needs_no_token() -> None:
    from coordinator.core.commands import Complete

    _no_token_for((Complete,))


def _answer_before_commit(module: Any) -> None:
    """The module's operations are called won at once, and sent half a second later."""
    from coordinator.ports import Commit, Stored

    commit_each = module.commit_each
    late: set[asyncio.Task[Any]] = set()

    async def early(store: Any, operations: Sequence[Any]) -> list[Any]:
        async def send() -> None:
            await lapse(0.5)
            for one in operations:
                one.deadline += 5
            await commit_each(store, operations)

        task = asyncio.ensure_future(send())
        late.add(task)
        task.add_done_callback(late.discard)
        return [Commit(won=True, revision=1, stored=Stored(one.after, 1)) for one in operations]

    module.commit_each = early


@_bug(
    "test_answers.py::test_what_was_answered_outlives_the_coordinator[submit]",
    says="nowhere|JOB_NOT_FOUND|KeyError",
)
def a_submission_is_answered_before_it_is_committed() -> None:
    from coordinator.services import submission

    _answer_before_commit(submission)


@_bug("test_answers.py::test_what_was_answered_outlives_the_coordinator[complete]", says="RUNNING")
def a_completion_is_answered_before_it_is_committed() -> None:
    from coordinator.services import settlement

    _answer_before_commit(settlement)


@_bug(
    "test_watches.py::test_a_watch_that_missed_compacted_history_lists_again",
    says="its view is not what etcd holds|not within",
)
def a_watch_goes_on_after_a_gap_without_a_new_list() -> None:
    from coordinator.etcd.namespace_feed import NamespaceFeed

    original = NamespaceFeed.relist

    async def relist(self: Any, revision: int) -> None:
        if not self.ready.is_set():
            await original(self, revision)

    NamespaceFeed.relist = relist  # type: ignore[method-assign]


@_bug("test_answers.py::test_a_job_asked_to_stop_that_fails_is_cancelled", says="CANCELLED")
def a_failure_overwrites_a_cancellation() -> None:
    from tests.fault.seeded_bugs import BUGS as CORE_BUGS

    CORE_BUGS["cancel_is_lost_when_the_attempt_fails"](pytest.MonkeyPatch())


@_bug(
    "test_leases_and_loss.py::test_a_claim_whose_key_was_deleted_is_called_lost_and_not_made_again",
    says="'HELD' == 'LOST'",
)
def a_beat_does_not_look_at_the_claim() -> None:
    from coordinator.services import sessions
    from coordinator.services.api import Verdict

    sessions._verdict = lambda held, read: Verdict.HELD


@_bug("test_rescue.py::test_a_job_taken_from_a_live_session_waits_for_its_holder_to_hear", says="waited")
def the_due_pass_knows_no_hold() -> None:
    from coordinator.reconciler.due import DuePass

    DuePass._waited = lambda self, namespace, due, hold_ms: True  # type: ignore[method-assign]


@_bug(
    "test_lost_replies.py::test_a_claim_whose_reply_was_lost_is_given_again_for_the_same_request_id",
    says="unpack|RPC|DEADLINE",
)
def a_repeated_claim_looks_for_nothing() -> None:
    from coordinator.services.redelivery import Redelivery

    async def of_request(self: Any, *found: Any) -> list[Any]:
        return []

    Redelivery.of_request = of_request  # type: ignore[method-assign]


@_bug(
    "test_storage_full.py::test_a_full_store_lets_work_under_way_finish_once", says="STORAGE_FULL", slow=True
)
def the_watermarks_stop_nobody() -> None:
    from coordinator.etcd.storage_gauge import EtcdStorageGauge

    EtcdStorageGauge.accepts_submissions = property(lambda self: True)  # type: ignore[assignment]


@_bug(
    "test_contention.py::test_of_two_hundred_contenders_four_a_second_reach_etcd_and_one_has_the_job_in_time[ignore]",
    says="most_in_a_second",
)
def every_contender_may_try() -> None:
    from coordinator.core.bucket import UNTRIED
    from coordinator.services.contention import Contention

    def place(self: Any, resource: Any, *, in_line: bool) -> int:
        self._tries[resource] = self._tries.get(resource, UNTRIED).begun()
        return 0

    Contention._place = place  # type: ignore[method-assign]


@_bug(
    "test_contention.py::test_of_two_hundred_who_wait_at_two_coordinators_one_is_woken_and_few_look",
    says="waiting is not polling",
)
def whoever_waits_polls() -> None:
    from coordinator.services.claim_by_id import ClaimById, ClaimByIdConfig

    original = ClaimById.__init__

    def hasty(self: Any, *parts: Any, **more: Any) -> None:
        original(self, *parts, **more)
        self._config = ClaimByIdConfig(glance=0.26, safety_look=0.0)

    ClaimById.__init__ = hasty  # type: ignore[method-assign]


@_bug("test_locks.py::test_histories_of_locks_are_sound", says="waits at|enters after|at once|owners on")
def whoever_waits_for_a_lock_is_told_to_own_it() -> None:
    from coordinator.services.lock_lines import LockLines, Standing

    original = LockLines.standing

    def standing(self: LockLines, namespace: str, entry: Any) -> Standing:
        found = original(self, namespace, entry)
        return Standing.OWNS if found is Standing.WAITS else found

    LockLines.standing = standing  # type: ignore[method-assign]


@_bug("test_locks.py::test_histories_of_locks_are_sound", says="waits at|enters after|at once|owners on")
def a_lock_is_taken_without_comparing_that_nobody_came_before() -> None:
    from coordinator.etcd.lock_store import EtcdLockStore

    original = EtcdLockStore.acquire

    async def acquire(self: Any, namespace: str, asked: Any, *, after: int | None, deadline: float) -> Any:
        # The caller still believes that it owns at once; the compare is one that always holds.
        return await original(
            self, namespace, asked, after=None if after is None else 1 << 40, deadline=deadline
        )

    EtcdLockStore.acquire = acquire  # type: ignore[method-assign]
