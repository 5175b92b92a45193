"""The methods of AdminService that are about sessions: validate, convert, call the use case, convert back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coordinator.core.job import Claim
from coordinator.core.lock_order import LockEntry
from coordinator.rpc import limits
from coordinator.rpc.convert import duration, namespace_of, timestamp
from coordinator.rpc.field_checks import (
    Violations,
    check_duration,
    check_labels,
    check_name,
    check_number,
    check_session_id,
    check_text,
    duration_ms,
)
from coordinator.rpc.validation import check_request_id
from coordinator.services.session_admin import SessionDetails, SessionPage, SessionView
from leasekeeper.v1 import admin_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as workers

__all__ = ["SessionMethods", "SessionsPort"]

_LONGEST_DRAIN_MS = 24 * 3_600_000


class SessionsPort(Protocol):
    """What the methods need."""

    def list(self, namespace: str, labels: Mapping[str, str], page_size: int, cursor: str) -> SessionPage:
        """A page of sessions."""

    async def get(self, namespace: str, session_id: str, deadline: float) -> SessionDetails:
        """One, with what it holds."""

    async def drain(
        self, namespace: str, session_id: str, terminate_after_ms: int | None, deadline: float
    ) -> SessionView:
        """Ask its worker to claim nothing more, and perhaps to exit."""

    async def resume(self, namespace: str, session_id: str, deadline: float) -> SessionView:
        """Take that back."""


class SessionMethods:
    """ListSessions, GetSession, DrainSession; request and absolute deadline in, response out."""

    _sessions: SessionsPort

    async def list_sessions(
        self, request: pb.ListSessionsRequest, deadline: float
    ) -> pb.ListSessionsResponse:
        """ListSessions."""
        found = Violations()
        check_name(found, "namespace", request.namespace, required=False)
        check_number(found, "page_size", request.page_size, 0, limits.PAGE_SIZE)
        check_text(found, "page_token", request.page_token, limits.PAGE_TOKEN_BYTES)
        check_labels(found, "labels", request.labels)
        found.check()
        page = self._sessions.list(
            namespace_of(request.namespace),
            dict(request.labels),
            request.page_size or limits.DEFAULT_PAGE_SIZE,
            request.page_token,
        )
        return pb.ListSessionsResponse(sessions=map(_session, page.sessions), next_page_token=page.cursor)

    async def get_session(self, request: pb.GetSessionRequest, deadline: float) -> pb.GetSessionResponse:
        """GetSession."""
        found = Violations()
        check_name(found, "namespace", request.namespace, required=False)
        check_session_id(found, "session_id", request.session_id)
        found.check()
        details = await self._sessions.get(namespace_of(request.namespace), request.session_id, deadline)
        return pb.GetSessionResponse(
            session=_session(details.view),
            claims=[_claim(job_id, claim) for job_id, claim in details.held.claims],
            locks=[_lock(entry, token) for entry, token in details.held.locks],
        )

    async def drain_session(
        self, request: pb.DrainSessionRequest, deadline: float
    ) -> pb.DrainSessionResponse:
        """DrainSession."""
        found = Violations()
        check_name(found, "namespace", request.namespace, required=False)
        check_request_id(found, request.request_id)
        check_session_id(found, "session_id", request.session_id)
        limited = request.HasField("terminate_after")
        if limited:
            check_duration(found, "terminate_after", request.terminate_after, _LONGEST_DRAIN_MS)
        if limited and request.resume:
            found.add("resume", "takes a drain back, so it cannot come with terminate_after")
        found.check()
        namespace, session_id = namespace_of(request.namespace), request.session_id
        if request.resume:
            view = await self._sessions.resume(namespace, session_id, deadline)
        else:
            after = duration_ms(request.terminate_after) if limited else None
            view = await self._sessions.drain(namespace, session_id, after, deadline)
        return pb.DrainSessionResponse(session=_session(view))


def _session(view: SessionView) -> pb.Session:
    session = view.session
    return pb.Session(
        session_id=session.session_id,
        identity=session.identity,
        sdk=session.sdk,
        labels=session.labels,
        open_time=timestamp(session.opened_ms),
        ttl=duration(session.ttl_ms),
        last_beat_time=timestamp(view.beat_ms),
        command=workers.WorkerCommand.ValueType(view.command),
        terminate_time=timestamp(session.terminate_ms),
        claim_count=view.claims,
        lock_count=view.locks,
    )


def _claim(job_id: str, claim: Claim) -> pb.SessionClaim:
    return pb.SessionClaim(
        job_id=job_id,
        fencing_token=claim.token,
        queue=claim.queue,
        type=claim.type,
        attempt=claim.attempt,
        claim_time=timestamp(claim.start_ms),
    )


def _lock(entry: LockEntry, token: int) -> pb.SessionLock:
    return pb.SessionLock(
        name=entry.name,
        fencing_token=token,
        mode=types.LockMode.ValueType(entry.mode.value),
        job_id=entry.job_id,
    )
