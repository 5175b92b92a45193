"""What AdminService answers, from the values of the use cases."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core.job import JobState
from coordinator.reconciler.by_hand import PassRun
from coordinator.reconciler.report import Action
from coordinator.rpc.convert import cut_text, duration, job_state
from leasekeeper.v1 import admin_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types

__all__ = ["reconcile_response"]


def reconcile_response(runs: Sequence[PassRun], max_actions: int) -> pb.RunReconcileResponse:
    """RunReconcile's answer. Counts are complete; of the actions the first ``max_actions`` are listed."""
    response = pb.RunReconcileResponse()
    left = max_actions
    for run in runs:
        report = run.report
        listed = report.actions[:left]
        left -= len(listed)
        response.passes.append(
            pb.PassReport(
                examined=report.examined,
                counts=dict(report.counts),
                failed=report.failed,
                waiting=report.waiting,
                actions=[_action(action) for action in listed],
                duration=duration(run.duration_ms),
                error=cut_text(run.error),
                **{"pass": report.name},  # a word of Python's
            )
        )
    return response


def _action(action: Action) -> pb.ReconcileAction:
    return pb.ReconcileAction(
        kind=action.kind,
        job_id=action.job_id,
        state_before=_state(action.state_before),
        state_after=_state(action.state_after),
        reason=cut_text(action.reason),
    )


def _state(state: JobState | None) -> types.JobState.ValueType:
    return job_state(state) if state is not None else types.JOB_STATE_UNSPECIFIED
