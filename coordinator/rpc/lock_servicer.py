"""LockService: validate, convert, call the use case, convert back. No rule of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.lock_order import LockEntry, LockMode
from coordinator.ports import Clock
from coordinator.rpc import limits
from coordinator.rpc import lock_validation as validation
from coordinator.rpc.convert import cut_text, namespace_of, timestamp
from coordinator.rpc.field_checks import duration_ms
from coordinator.rpc.limits import CallLimits
from coordinator.services.lock_values import HeldName, LockListing, LockView, LockWish
from leasekeeper.v1 import lock_service_pb2 as pb
from leasekeeper.v1 import types_pb2

__all__ = ["AcquisitionPort", "LockServicer", "LockUseCases", "LocksPort"]


class AcquisitionPort(Protocol):
    """What AcquireLock needs."""

    async def acquire(self, namespace: str, wish: LockWish, deadline: float) -> list[LockEntry]:
        """Take locks."""


class LocksPort(Protocol):
    """What the other methods need."""

    async def release(
        self, namespace: str, session_id: str, held: Sequence[HeldName], *, repeat: bool, deadline: float
    ) -> int:
        """Give back."""

    async def revoke(
        self, namespace: str, name: str, token: int, *, reason: str, deadline: float
    ) -> LockEntry:
        """Take away."""

    async def get(self, namespace: str, name: str, deadline: float) -> LockView:
        """One lock."""

    async def check(self, namespace: str, name: str, token: int, deadline: float) -> tuple[bool, int]:
        """Whether a token owns, and the largest that does."""

    async def list_locks(self, namespace: str, count: int, cursor: str, deadline: float) -> LockListing:
        """A page of locks."""

    def observe(self, namespace: str, name: str) -> AsyncGenerator[LockView, None]:
        """Owners, then each change."""

    def token_at(self, revision: int) -> int:
        """A revision on the scale of fencing tokens; 0 stays 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockUseCases:
    """The use cases behind LockService."""

    acquisition: AcquisitionPort
    locks: LocksPort


class LockServicer:
    """The methods of ``leasekeeper.v1.LockService``; request and absolute deadline in, response out."""

    def __init__(self, use_cases: LockUseCases, clock: Clock, call_limits: CallLimits) -> None:
        self._acquisition = use_cases.acquisition
        self._locks = use_cases.locks
        self._clock = clock
        self._limits = call_limits

    async def acquire_lock(self, request: pb.AcquireLockRequest, deadline: float) -> pb.AcquireLockResponse:
        """AcquireLock. The wait ends before the caller's deadline, so that the answer still leaves."""
        validation.check_acquire(request, self._limits)
        left_ms = int((deadline - self._clock.monotonic()) * 1000)
        wish = LockWish(
            session_id=request.session_id,
            request_id=request.request_id,
            names=tuple(request.names),
            mode=LockMode(request.mode) if request.mode else LockMode.EXCLUSIVE,
            permits=request.permits or 1,
            value=request.value,
            wait_ms=max(0, min(duration_ms(request.wait), left_ms)),
            repeats=request.repeats,
        )
        entries = await self._acquisition.acquire(namespace_of(request.namespace), wish, deadline)
        return pb.AcquireLockResponse(
            locks=[
                pb.HeldLock(name=entry.name, fencing_token=self._locks.token_at(entry.revision))
                for entry in entries
            ]
        )

    async def release_lock(self, request: pb.ReleaseLockRequest, deadline: float) -> pb.ReleaseLockResponse:
        """ReleaseLock."""
        validation.check_release_lock(request)
        released = await self._locks.release(
            namespace_of(request.namespace),
            request.session_id,
            [HeldName(lock.name, lock.fencing_token) for lock in request.locks],
            repeat=request.repeat,
            deadline=deadline,
        )
        return pb.ReleaseLockResponse(released=released)

    async def get_lock(self, request: pb.GetLockRequest, deadline: float) -> pb.GetLockResponse:
        """GetLock."""
        validation.check_get_lock(request)
        view = await self._locks.get(namespace_of(request.namespace), request.name, deadline)
        return pb.GetLockResponse(lock=self._message(view))

    async def list_locks(self, request: pb.ListLocksRequest, deadline: float) -> pb.ListLocksResponse:
        """ListLocks."""
        validation.check_list_locks(request)
        page = await self._locks.list_locks(
            namespace_of(request.namespace),
            request.page_size or limits.DEFAULT_PAGE_SIZE,
            request.page_token,
            deadline,
        )
        return pb.ListLocksResponse(
            locks=[self._message(view) for view in page.locks], next_page_token=page.cursor
        )

    async def check_token(self, request: pb.CheckTokenRequest, deadline: float) -> pb.CheckTokenResponse:
        """CheckToken."""
        validation.check_check_token(request)
        current, largest = await self._locks.check(
            namespace_of(request.namespace), request.name, request.fencing_token, deadline
        )
        return pb.CheckTokenResponse(current=current, largest=largest)

    async def revoke_lock(self, request: pb.RevokeLockRequest, deadline: float) -> pb.RevokeLockResponse:
        """RevokeLock."""
        validation.check_revoke(request)
        entry = await self._locks.revoke(
            namespace_of(request.namespace),
            request.name,
            request.fencing_token,
            reason=cut_text(request.reason, limits.REASON_BYTES),
            deadline=deadline,
        )
        return pb.RevokeLockResponse(session_id=entry.session)

    async def observe_lock(
        self, request: pb.ObserveLockRequest
    ) -> AsyncGenerator[pb.ObserveLockResponse, None]:
        """ObserveLock."""
        validation.check_observe(request)
        views = self._locks.observe(namespace_of(request.namespace), request.name)
        async with aclosing(views):
            async for view in views:
                yield pb.ObserveLockResponse(lock=self._message(view))

    def _message(self, view: LockView) -> pb.Lock:
        return pb.Lock(
            name=view.name,
            owners=[self._entry(entry) for entry in view.line.owners],
            # Those to be removed for their permits stand in line until they are.
            waiters=[
                self._entry(entry)
                for entry in sorted((*view.line.waiters, *view.line.misfits), key=lambda one: one.revision)
            ],
            revision=self._locks.token_at(view.revision),
        )

    def _entry(self, entry: LockEntry) -> pb.LockEntry:
        return pb.LockEntry(
            session_id=entry.session,
            job_id=entry.job_id,
            mode=types_pb2.LockMode.ValueType(entry.mode.value),
            permits=entry.permits if entry.mode is LockMode.SEMAPHORE else 0,
            fencing_token=self._locks.token_at(entry.revision),
            value=entry.value,
            since=timestamp(entry.since_ms),
        )
