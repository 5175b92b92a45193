"""Form of every request of QueueService; the rules of `coordinator.rpc.validation` hold here too."""

from __future__ import annotations

from coordinator.core.queue_settings import contradictions
from coordinator.rpc import limits
from coordinator.rpc.field_checks import Violations, check_duration, check_name, check_number, check_text
from coordinator.rpc.queue_convert import queue_settings
from coordinator.rpc.validation import check_request_id, check_retry_policy
from leasekeeper.v1 import queue_service_pb2 as pb

__all__ = ["check_list_queues", "check_named_queue", "check_pause", "check_resume", "check_update_queue"]

_PRIORITIES = 5


def check_named_queue(request: pb.GetQueueRequest | pb.GetQueueStatsRequest) -> None:
    """GetQueue, GetQueueStats.

    Raises:
        RequestError: VALIDATION_FAILED.
    """
    _queue(request).check()


def check_list_queues(request: pb.ListQueuesRequest) -> None:
    """ListQueues.

    Raises:
        RequestError: VALIDATION_FAILED.
    """
    found = Violations()
    check_name(found, "namespace", request.namespace, required=False)
    check_number(found, "page_size", request.page_size, 0, limits.PAGE_SIZE)
    check_text(found, "page_token", request.page_token, limits.PAGE_TOKEN_BYTES)
    found.check()


def check_pause(request: pb.PauseQueueRequest) -> None:
    """PauseQueue. Its reason is cut, not refused.

    Raises:
        RequestError: VALIDATION_FAILED.
    """
    found = _queue(request)
    check_request_id(found, request.request_id)
    found.check()


def check_resume(request: pb.ResumeQueueRequest) -> None:
    """ResumeQueue.

    Raises:
        RequestError: VALIDATION_FAILED.
    """
    found = _queue(request)
    check_request_id(found, request.request_id)
    found.check()


def check_update_queue(request: pb.UpdateQueueRequest) -> None:
    """UpdateQueue: ranges first, and contradictions between values that are in range.

    Raises:
        RequestError: VALIDATION_FAILED.
    """
    found = _queue(request)
    check_request_id(found, request.request_id)
    check_text(found, "etag", request.etag, limits.REQUEST_ID_BYTES)
    if not request.HasField("settings"):
        found.add("settings", "is required; empty ones set everything to its default")
    found.place = "settings"
    settings = request.settings
    waits = settings.target_waits
    if waits and len(waits) != _PRIORITIES:
        found.add("target_waits", f"must have {_PRIORITIES} items, one a priority, or none; has {len(waits)}")
    else:
        for place, wait in enumerate(waits):
            check_duration(found, f"target_waits[{place}]", wait, limits.LONGEST_DELAY_MS, positive=True)
    for name in ("queue_timeout", "run_timeout", "total_timeout", "heartbeat_timeout"):
        if settings.HasField(name):
            check_duration(found, name, getattr(settings, name), limits.LONGEST_TIMEOUT_MS, positive=True)
    if settings.HasField("retry_policy"):
        check_retry_policy(found, settings.retry_policy)
    if not found:
        for one in contradictions(queue_settings(settings)):
            found.add(one.field, one.text)
    found.check()


def _queue(
    request: pb.GetQueueRequest
    | pb.GetQueueStatsRequest
    | pb.UpdateQueueRequest
    | pb.PauseQueueRequest
    | pb.ResumeQueueRequest,
) -> Violations:
    found = Violations()
    check_name(found, "namespace", request.namespace, required=False)
    check_name(found, "queue", request.queue)
    return found
