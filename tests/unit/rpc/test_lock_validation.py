"""Every field of every request of LockService: what is refused, and under which name."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.errors import Reason, RequestError
from coordinator.rpc import lock_validation as validation
from coordinator.rpc.limits import CallLimits
from leasekeeper.v1 import lock_service_pb2 as pb
from leasekeeper.v1 import types_pb2
from tests.unit.rpc.test_totality import messages, told

S = "00000000000000a1"
GOOD: dict[str, Any] = {"request_id": "r", "session_id": S, "names": ["a/b", "ä"], "value": b"v" * 1024}
SEMAPHORE = types_pb2.LOCK_MODE_SEMAPHORE


def fields_of(check: Any, *args: Any) -> list[str]:
    with pytest.raises(RequestError) as caught:
        check(*args)
    assert caught.value.reason is Reason.VALIDATION_FAILED
    return [violation.field for violation in caught.value.fields]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mode": types_pb2.LOCK_MODE_SHARED},
        {"mode": SEMAPHORE, "permits": 1000},
        {"permits": 1},
        {"wait": Duration(seconds=30)},
        {"names": [f"n{n}" for n in range(8)]},
        {"names": ["n" * 256]},
    ],
)
def test_a_good_acquisition_passes(more: dict[str, Any]) -> None:
    validation.check_acquire(pb.AcquireLockRequest(**GOOD | more), CallLimits())


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("namespace", {"namespace": "A"}),
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "r" * 129}),
        ("session_id", {"session_id": ""}),
        ("session_id", {"session_id": "mine"}),
        ("names", {"names": []}),
        ("names", {"names": [f"n{n}" for n in range(9)]}),
        ("names[0]", {"names": [""]}),
        ("names[1]", {"names": ["a", "b\n"]}),
        ("names[1]", {"names": ["a", "a"]}),
        ("names[0]", {"names": ["é" * 129]}),
        ("mode", {"mode": 4}),
        ("permits", {"mode": SEMAPHORE}),
        ("permits", {"mode": SEMAPHORE, "permits": 1001}),
        ("permits", {"mode": SEMAPHORE, "permits": -1}),
        ("permits", {"mode": types_pb2.LOCK_MODE_SHARED, "permits": 2}),
        ("value", {"value": b"v" * 1025}),
        ("repeats", {"repeats": -1}),
        ("wait", {"wait": Duration(seconds=31)}),
        ("wait", {"wait": Duration(seconds=-1)}),
        ("wait", {"wait": Duration(seconds=1, nanos=-1)}),
    ],
)
def test_a_bad_acquisition_names_the_field(field: str, more: dict[str, Any]) -> None:
    request = pb.AcquireLockRequest(**GOOD | more)
    assert fields_of(validation.check_acquire, request, CallLimits()) == [field]


def test_a_release_names_each_lock_once_with_its_token() -> None:
    held = pb.HeldLock(name="a", fencing_token=5)
    validation.check_release_lock(pb.ReleaseLockRequest(session_id=S, locks=[held]))
    bad = pb.ReleaseLockRequest(
        session_id=S, locks=[held, held, pb.HeldLock(name="b"), pb.HeldLock(fencing_token=1)]
    )
    assert fields_of(validation.check_release_lock, bad) == [
        "locks[1]",
        "locks[2].fencing_token",
        "locks[3].name",
    ]
    assert fields_of(validation.check_release_lock, pb.ReleaseLockRequest(session_id=S)) == ["locks"]


def test_the_other_requests_name_their_fields() -> None:
    assert fields_of(validation.check_get_lock, pb.GetLockRequest()) == ["name"]
    assert fields_of(validation.check_observe, pb.ObserveLockRequest(namespace="A")) == ["namespace", "name"]
    assert fields_of(validation.check_list_locks, pb.ListLocksRequest(page_size=1001)) == ["page_size"]
    token = pb.CheckTokenRequest(name="l")
    assert fields_of(validation.check_check_token, token) == ["fencing_token"]
    revoke = pb.RevokeLockRequest(name="l", fencing_token=-1, reason="r" * 9999)
    assert fields_of(validation.check_revoke, revoke) == ["fencing_token"]


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        messages(pb.AcquireLockRequest),
        messages(pb.ReleaseLockRequest),
        messages(pb.ListLocksRequest),
        messages(pb.RevokeLockRequest),
    )
)
def test_whatever_comes_is_refused_precisely_or_is_within_the_bounds(request: Any) -> None:
    try:
        if isinstance(request, pb.AcquireLockRequest):
            validation.check_acquire(request, CallLimits())
            assert 1 <= len(set(request.names)) == len(request.names) <= 8
            assert (request.mode == SEMAPHORE) <= (1 <= request.permits <= 1000)
        elif isinstance(request, pb.ReleaseLockRequest):
            validation.check_release_lock(request)
            assert all(lock.fencing_token > 0 for lock in request.locks)
        elif isinstance(request, pb.ListLocksRequest):
            validation.check_list_locks(request)
        else:
            validation.check_revoke(request)
    except RequestError as error:
        told(error)
