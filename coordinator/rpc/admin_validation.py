"""Form of every request of AdminService; the rules of `coordinator.rpc.validation` hold here too."""

from __future__ import annotations

from typing import Final

from coordinator.rpc import limits
from coordinator.rpc.field_checks import Violations, check_count, check_name
from leasekeeper.v1 import admin_service_pb2 as pb

__all__ = ["check_reconcile"]

_PASSES_NAMED: Final = 32
"""Far more than there are: which names exist the use case says."""


def check_reconcile(request: pb.RunReconcileRequest) -> None:
    """RunReconcile.

    Raises:
        RequestError: VALIDATION_FAILED.
    """
    found = Violations()
    check_name(found, "namespace", request.namespace, required=False)
    if check_count(found, "passes", len(request.passes), 0, _PASSES_NAMED):
        for place, name in enumerate(request.passes):
            check_name(found, f"passes[{place}]", name)
    if not 0 <= request.max_actions <= limits.RECONCILE_ACTIONS:
        found.add(
            "max_actions", f"must be from 0 to {limits.RECONCILE_ACTIONS}, is {request.max_actions}; 0 is 100"
        )
    found.check()
