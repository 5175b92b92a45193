"""Form of every request of LockService; the rules of `coordinator.rpc.validation` hold here too."""

from __future__ import annotations

from typing import Final

from coordinator.core.lock_order import MAX_PERMITS
from coordinator.rpc import limits
from coordinator.rpc.field_checks import (
    Violations,
    check_count,
    check_duration,
    check_id,
    check_name,
    check_number,
    check_session_id,
    check_text,
    check_token,
)
from coordinator.rpc.limits import CallLimits
from coordinator.rpc.validation import check_request_id
from leasekeeper.v1 import lock_service_pb2 as pb
from leasekeeper.v1 import types_pb2

__all__ = [
    "check_acquire",
    "check_check_token",
    "check_get_lock",
    "check_list_locks",
    "check_observe",
    "check_release_lock",
    "check_revoke",
]

_MODES = frozenset(
    (
        types_pb2.LOCK_MODE_UNSPECIFIED,
        types_pb2.LOCK_MODE_EXCLUSIVE,
        types_pb2.LOCK_MODE_SHARED,
        types_pb2.LOCK_MODE_SEMAPHORE,
    )
)


_ACQUIRED: Final = tuple(f"names[{index}]" for index in range(limits.LOCKS_PER_ACQUIRE))
_RELEASED: Final = tuple(
    (f"locks[{index}]", f"locks[{index}].name", f"locks[{index}].fencing_token")
    for index in range(limits.LOCKS_PER_RELEASE)
)


def _start(namespace: str) -> Violations:
    found = Violations()
    check_name(found, "namespace", namespace, required=False)
    return found


def check_acquire(request: pb.AcquireLockRequest, call_limits: CallLimits) -> None:
    """AcquireLock."""
    found = _start(request.namespace)
    check_request_id(found, request.request_id, required=True)
    check_session_id(found, "session_id", request.session_id)
    names, mode = request.names, request.mode
    if check_count(found, "names", len(names), 1, limits.LOCKS_PER_ACQUIRE):
        seen: set[str] = set()
        for field, name in zip(_ACQUIRED, names, strict=False):
            check_id(found, field, name)
            if name in seen:
                found.add(field, "is named twice")
            seen.add(name)
    if mode not in _MODES:
        found.add("mode", f"{mode} is not a lock mode")
    elif mode == types_pb2.LOCK_MODE_SEMAPHORE:
        check_number(found, "permits", request.permits, 1, MAX_PERMITS)
    elif request.permits not in (0, 1):
        found.add("permits", f"only a semaphore has permits, is {request.permits}")
    if len(request.value) > limits.LOCK_VALUE_BYTES:
        found.add("value", f"is {len(request.value)} bytes long, the limit is {limits.LOCK_VALUE_BYTES}")
    if request.HasField("wait"):
        check_duration(found, "wait", request.wait, call_limits.wait_max_ms)
    if request.repeats < 0:
        found.add("repeats", f"must not be negative, is {request.repeats}")
    found.check()


def check_release_lock(request: pb.ReleaseLockRequest) -> None:
    """ReleaseLock."""
    found = _start(request.namespace)
    check_request_id(found, request.request_id)
    check_session_id(found, "session_id", request.session_id)
    locks = request.locks
    if check_count(found, "locks", len(locks), 1, limits.LOCKS_PER_RELEASE):
        seen: set[tuple[str, int]] = set()
        for (field, name_field, token_field), lock in zip(_RELEASED, locks, strict=False):
            held = (lock.name, lock.fencing_token)
            check_id(found, name_field, held[0])
            check_token(found, token_field, held[1])
            if held in seen:
                found.add(field, "is named twice")
            seen.add(held)
    found.check()


def _lock(found: Violations, name: str) -> None:
    check_id(found, "name", name)
    found.check()


def check_get_lock(request: pb.GetLockRequest) -> None:
    """GetLock."""
    _lock(_start(request.namespace), request.name)


def check_observe(request: pb.ObserveLockRequest) -> None:
    """ObserveLock."""
    _lock(_start(request.namespace), request.name)


def check_list_locks(request: pb.ListLocksRequest) -> None:
    """ListLocks."""
    found = _start(request.namespace)
    check_number(found, "page_size", request.page_size, 0, limits.PAGE_SIZE)
    check_text(found, "page_token", request.page_token, limits.PAGE_TOKEN_BYTES)
    found.check()


def check_check_token(request: pb.CheckTokenRequest) -> None:
    """CheckToken."""
    found = _start(request.namespace)
    check_token(found, "fencing_token", request.fencing_token)
    _lock(found, request.name)


def check_revoke(request: pb.RevokeLockRequest) -> None:
    """RevokeLock. A long reason is cut, not refused."""
    found = _start(request.namespace)
    check_request_id(found, request.request_id)
    check_token(found, "fencing_token", request.fencing_token)
    _lock(found, request.name)
