"""RunReconcile: its form, what reaches the use case, and what is told of each pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.core.job import JobState
from coordinator.errors import Reason, RequestError
from coordinator.reconciler.by_hand import PassRun
from coordinator.reconciler.report import Action, Report
from coordinator.rpc import limits
from coordinator.rpc.admin_servicer import AdminServicer, AdminUseCases
from coordinator.services.notices import NoticeHub
from leasekeeper.v1 import admin_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types
from tests.support.clock import SteppingClock
from tests.support.fake_ports import SteadyEntropy


class Asked:
    """A use case that notes what it is asked, and answers with ``runs``."""

    def __init__(self, *runs: PassRun) -> None:
        self.runs = runs
        self.asked: list[tuple[str, tuple[str, ...], bool, float]] = []

    async def run(
        self, namespace: str, names: Sequence[str], *, dry_run: bool, deadline: float
    ) -> Sequence[PassRun]:
        self.asked.append((namespace, tuple(names), dry_run, deadline))
        return self.runs


async def reconcile(use: Asked, **fields: Any) -> pb.RunReconcileResponse:
    servicer = AdminServicer(
        AdminUseCases(
            reconcile=use,
            notices=NoticeHub(SteppingClock(), SteadyEntropy(), coordinator_id="c1"),
            sessions=None,  # type: ignore[arg-type]
        )
    )
    return await servicer.run_reconcile(pb.RunReconcileRequest(**fields), 77.0)


def lost(count: int = 1, *, reason: str = "its holder died") -> Report:
    report = Report("lost", examined=9, failed=2, waiting=4)
    for number in range(count):
        report.add(
            Action(
                kind="recovered",
                job_id=f"j{number}",
                reason=reason,
                state_before=JobState.RUNNING,
                state_after=JobState.PENDING,
            )
        )
    return report


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("namespace", {"namespace": "Mail"}),
        ("passes[1]", {"passes": ["lost", "a b"]}),
        ("passes[0]", {"passes": [""]}),
        ("passes", {"passes": ["lost"] * 33}),
        ("max_actions", {"max_actions": -1}),
        ("max_actions", {"max_actions": 1_001}),
    ],
)
async def test_a_bad_field_is_named_and_nothing_runs(field: str, fields: dict[str, Any]) -> None:
    use = Asked()
    with pytest.raises(RequestError) as caught:
        await reconcile(use, **fields)

    assert caught.value.reason is Reason.VALIDATION_FAILED
    assert [field] == [violation.field for violation in caught.value.fields]
    assert [] == use.asked


async def test_the_use_case_is_asked_for_what_the_request_says() -> None:
    use = Asked()
    await reconcile(use)
    await reconcile(use, namespace="mail", dry_run=True, passes=["due", "lost"], max_actions=1_000)

    assert [("default", (), False, 77.0), ("mail", ("due", "lost"), True, 77.0)] == use.asked


async def test_each_pass_is_told_with_counts_actions_duration_and_error() -> None:
    told = await reconcile(
        Asked(
            PassRun(report=lost(), duration_ms=1_250),
            PassRun(report=Report("due"), error="no member answers"),
        )
    )

    first, second = told.passes
    assert ("lost", 9, 2, {"recovered": 1}) == (
        getattr(first, "pass"),
        first.examined,
        first.failed,
        dict(first.counts),
    )
    assert 4 == first.waiting
    assert 1_250 == first.duration.ToMilliseconds()
    assert (
        pb.ReconcileAction(
            kind="recovered",
            job_id="j0",
            state_before=types.JOB_STATE_RUNNING,
            state_after=types.JOB_STATE_PENDING,
            reason="its holder died",
        )
        == first.actions[0]
    )
    assert ("due", "no member answers") == (getattr(second, "pass"), second.error)


async def test_an_action_without_states_says_unspecified() -> None:
    report = Report("repair")
    report.add(Action(kind="due-key-removed", job_id="j1", reason="no job has it"))

    [action] = (await reconcile(Asked(PassRun(report=report)))).passes[0].actions

    assert (types.JOB_STATE_UNSPECIFIED,) * 2 == (action.state_before, action.state_after)


@pytest.mark.parametrize(
    ("wanted", "listed"), [(0, [80, 20]), (100, [80, 20]), (30, [30, 0]), (200, [80, 80])]
)
async def test_the_listed_actions_are_bounded_over_all_passes_and_counts_are_complete(
    wanted: int, listed: list[int]
) -> None:
    told = await reconcile(Asked(PassRun(report=lost(80)), PassRun(report=lost(80))), max_actions=wanted)

    assert listed == [len(one.actions) for one in told.passes]
    assert [80, 80] == [one.counts["recovered"] for one in told.passes]


async def test_the_longest_answer_stays_below_what_a_client_takes() -> None:
    use = Asked(PassRun(report=lost(1_000, reason="é" * 5_000), error="x" * 5_000))

    told = await reconcile(use, max_actions=1_000)

    assert 1_000 == len(told.passes[0].actions)
    assert all(len(one.reason.encode()) <= limits.REASON_BYTES for one in told.passes[0].actions)
    assert told.ByteSize() < 1 << 20
