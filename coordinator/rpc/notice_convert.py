"""Notices as messages: the form of WatchNotices' request, and what goes into its answers and to webhooks."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from coordinator.core.notice import NoticeKind, PublishedNotice
from coordinator.rpc.convert import duration, timestamp
from coordinator.rpc.field_checks import Violations, check_count, check_name
from coordinator.services.notices import StreamedNotice
from leasekeeper.v1 import admin_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types

__all__ = ["check_watch_notices", "notice_json", "notice_kinds", "notice_message", "watch_notices_response"]

_KINDS: Final = frozenset(kind.value for kind in NoticeKind)


def check_watch_notices(request: pb.WatchNoticesRequest) -> None:
    """WatchNotices.

    Raises:
        RequestError: VALIDATION_FAILED.
    """
    found = Violations()
    check_name(found, "namespace", request.namespace, required=False)
    if check_count(found, "kinds", len(request.kinds), 0, len(_KINDS)):
        for index, kind in enumerate(request.kinds):
            if kind not in _KINDS:
                found.add(f"kinds[{index}]", f"{kind} is not a kind of notice")
    found.check()


def notice_kinds(request: pb.WatchNoticesRequest) -> frozenset[NoticeKind]:
    """The kinds that WatchNotices asks for; empty: all."""
    return frozenset(map(NoticeKind, request.kinds))


def notice_message(published: PublishedNotice) -> pb.Notice:
    """A notice as it is published."""
    notice = published.notice
    before, after = notice.state_before, notice.state_after
    return pb.Notice(
        notice_id=published.notice_id,
        kind=pb.NoticeKind.ValueType(notice.kind.value),
        time=timestamp(published.time_ms),
        namespace=notice.namespace,
        queue=notice.queue,
        type=notice.type,
        job_id=notice.job_id,
        session_id=notice.session_id,
        attempt=notice.attempt,
        fencing_token=notice.token,
        state_before=types.JobState.ValueType(before.value if before is not None else 0),
        state_after=types.JobState.ValueType(after.value if after is not None else 0),
        reason=notice.reason,
        overlap=duration(notice.overlap_ms) if notice.overlap_ms else None,
        facts=notice.facts,
        coordinator_id=published.coordinator_id,
    )


def watch_notices_response(streamed: StreamedNotice) -> pb.WatchNoticesResponse:
    """One message of WatchNotices."""
    return pb.WatchNoticesResponse(notice=notice_message(streamed.published), missed=streamed.missed)


def notice_json(published: PublishedNotice) -> dict[str, Any]:
    """A notice in the JSON form of protobuf, so that generated code can read it from a webhook's body."""
    return MessageToDict(notice_message(published))
