"""Form of the message that opens a Work stream. Its other messages are checked as the unary requests are."""

from __future__ import annotations

from coordinator.rpc import limits
from coordinator.rpc.field_checks import Violations, check_count, check_name, check_session_id
from coordinator.rpc.validation import check_request_id
from leasekeeper.v1 import worker_service_pb2 as pb

__all__ = ["check_work_open"]


def _types(found: Violations, path: str, wanted: pb.QueueTypes, before: int) -> int:
    """Check one queue, with ``before`` types named so far; how many it names."""
    check_name(found, f"{path}.queue", wanted.queue)
    if not wanted.types:
        found.add(f"{path}.types", "must have at least one type")
    elif before + len(wanted.types) <= limits.TYPES_PER_CLAIM:
        for place, type_ in enumerate(wanted.types):
            check_name(found, f"{path}.types[{place}]", type_)
    return len(wanted.types)


def check_work_open(request: pb.WorkOpen) -> None:
    """The first message of Work. Credits are the stream's to check."""
    found = Violations()
    check_name(found, "namespace", request.namespace, required=False)
    check_request_id(found, request.request_id, required=True)
    check_session_id(found, "session_id", request.session_id)
    queues = types_in_all = 0
    if check_count(found, "lanes", len(request.lanes), 0, limits.QUEUES_PER_CLAIM):
        for index, lane in enumerate(request.lanes):
            queues += len(lane.queues)
            if not lane.queues:
                found.add(f"lanes[{index}].queues", "must have at least one queue")
            elif queues <= limits.QUEUES_PER_CLAIM:
                for place, wanted in enumerate(lane.queues):
                    path = f"lanes[{index}].queues[{place}]"
                    types_in_all += _types(found, path, wanted, types_in_all)
        if queues > limits.QUEUES_PER_CLAIM:
            found.add("lanes", f"name {queues} queues in all, the limit is {limits.QUEUES_PER_CLAIM}")
        if types_in_all > limits.TYPES_PER_CLAIM:
            found.add("lanes", f"name {types_in_all} types in all, the limit is {limits.TYPES_PER_CLAIM}")
    found.check()
