"""AdminService: validate, convert, call the use case, convert back. No rule of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.notice import NoticeKind
from coordinator.reconciler.by_hand import PassRun
from coordinator.rpc import limits
from coordinator.rpc.admin_convert import reconcile_response
from coordinator.rpc.admin_sessions import SessionMethods, SessionsPort
from coordinator.rpc.admin_validation import check_reconcile
from coordinator.rpc.convert import namespace_of
from coordinator.rpc.notice_convert import check_watch_notices, notice_kinds, watch_notices_response
from coordinator.services.notices import StreamedNotice
from leasekeeper.v1 import admin_service_pb2 as pb

__all__ = ["AdminServicer", "AdminUseCases", "NoticesPort", "ReconcilePort"]


class ReconcilePort(Protocol):
    """What RunReconcile needs."""

    async def run(
        self, namespace: str, names: Sequence[str], *, dry_run: bool, deadline: float
    ) -> Sequence[PassRun]:
        """Run passes, and tell what each did."""


class NoticesPort(Protocol):
    """What WatchNotices needs."""

    def watch(
        self, namespace: str, kinds: frozenset[NoticeKind], *, include_recent: bool
    ) -> AsyncGenerator[StreamedNotice, None]:
        """Notices as they arise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminUseCases:
    """The use cases behind AdminService."""

    reconcile: ReconcilePort
    notices: NoticesPort
    sessions: SessionsPort


class AdminServicer(SessionMethods):
    """The methods of ``leasekeeper.v1.AdminService``; request and absolute deadline in, response out."""

    def __init__(self, use_cases: AdminUseCases) -> None:
        self._reconcile = use_cases.reconcile
        self._notices = use_cases.notices
        self._sessions = use_cases.sessions

    async def run_reconcile(
        self, request: pb.RunReconcileRequest, deadline: float
    ) -> pb.RunReconcileResponse:
        """RunReconcile."""
        check_reconcile(request)
        runs = await self._reconcile.run(
            namespace_of(request.namespace), request.passes, dry_run=request.dry_run, deadline=deadline
        )
        return reconcile_response(runs, request.max_actions or limits.DEFAULT_RECONCILE_ACTIONS)

    async def watch_notices(
        self, request: pb.WatchNoticesRequest
    ) -> AsyncGenerator[pb.WatchNoticesResponse, None]:
        """WatchNotices."""
        check_watch_notices(request)
        notices = self._notices.watch(
            namespace_of(request.namespace), notice_kinds(request), include_recent=request.include_recent
        )
        async with aclosing(notices):
            async for streamed in notices:
                yield watch_notices_response(streamed)
