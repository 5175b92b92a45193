"""What an error of etcd means is decided in one place, and never claims more than etcd said."""

from __future__ import annotations

import grpc
import pytest

from coordinator.errors import (
    Compacted,
    DuplicateKey,
    EtcdUnavailable,
    FutureRevision,
    InvalidRequest,
    LeaseExists,
    LeaseNotFound,
    NotApplied,
    OutcomeUnknown,
    PermissionDenied,
    RequestTooLarge,
    StorageError,
    StorageFull,
    TooManyRequests,
)
from coordinator.etcd.outcome import classify, is_stale_login

Code = grpc.StatusCode


def rpc_error(code: Code, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


CERTAIN = [
    (Code.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request", DuplicateKey),
    (Code.INVALID_ARGUMENT, "etcdserver: too many operations in txn request", RequestTooLarge),
    (Code.INVALID_ARGUMENT, "etcdserver: request is too large", RequestTooLarge),
    (Code.INVALID_ARGUMENT, "etcdserver: key is not provided", InvalidRequest),
    (Code.INVALID_ARGUMENT, "etcdserver: user name is empty", PermissionDenied),
    (
        Code.INVALID_ARGUMENT,
        "etcdserver: authentication failed, invalid user ID",
        PermissionDenied,
    ),
    (Code.NOT_FOUND, "etcdserver: requested lease not found", LeaseNotFound),
    (Code.FAILED_PRECONDITION, "etcdserver: lease already exists", LeaseExists),
    (Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests", TooManyRequests),
    (Code.PERMISSION_DENIED, "etcdserver: permission denied", PermissionDenied),
    (Code.UNAUTHENTICATED, "etcdserver: invalid auth token", PermissionDenied),
    (Code.UNIMPLEMENTED, "unknown method", InvalidRequest),
]

UNKNOWN = [
    (Code.UNAVAILABLE, "etcdserver: request timed out"),
    (Code.UNAVAILABLE, "etcdserver: leader changed"),
    (Code.UNAVAILABLE, "etcdserver: no leader"),
    (Code.UNAVAILABLE, "failed to connect to all addresses"),
    (Code.DEADLINE_EXCEEDED, "Deadline Exceeded"),
    (Code.CANCELLED, "Cancelled by the server"),
    (Code.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (5000000 vs. 4194304)"),
    (Code.RESOURCE_EXHAUSTED, "too many requests, says a proxy on the way"),
    (Code.INTERNAL, "stream terminated by RST_STREAM"),
    (Code.UNKNOWN, ""),
    (Code.DATA_LOSS, "etcdserver: corrupt cluster"),
]


@pytest.mark.parametrize(("code", "details", "expected"), CERTAIN)
def test_a_refusal_before_the_proposal_means_nothing_was_written(
    code: Code, details: str, expected: type[StorageError]
) -> None:
    found = classify(rpc_error(code, details), mutation=True)
    assert type(found) is expected
    assert isinstance(found, NotApplied)
    assert details in str(found)


@pytest.mark.parametrize(("code", "details"), UNKNOWN)
def test_every_other_error_of_a_write_leaves_its_outcome_unknown(code: Code, details: str) -> None:
    assert type(classify(rpc_error(code, details), mutation=True)) is OutcomeUnknown


@pytest.mark.parametrize(("code", "details"), UNKNOWN)
def test_the_same_error_of_a_read_is_mere_unavailability(code: Code, details: str) -> None:
    assert type(classify(rpc_error(code, details), mutation=False)) is EtcdUnavailable


def test_nospace_is_unknown_because_etcd_may_have_applied_the_write() -> None:
    found = classify(
        rpc_error(Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded"), mutation=True
    )
    assert type(found) is StorageFull
    assert isinstance(found, OutcomeUnknown)


def test_lost_history_and_missing_history_are_told_apart() -> None:
    compacted = classify(
        rpc_error(Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted"), mutation=False
    )
    assert type(compacted) is Compacted
    future = classify(
        rpc_error(Code.OUT_OF_RANGE, "mvcc: required revision is a future revision"),
        mutation=False,
    )
    assert type(future) is FutureRevision


@pytest.mark.parametrize(
    ("code", "details", "stale"),
    [
        (Code.UNAUTHENTICATED, "etcdserver: invalid auth token", True),
        (Code.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", True),
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", False),
        (Code.UNAVAILABLE, "invalid auth token, says somebody else", False),
    ],
)
def test_only_a_refused_token_calls_for_a_new_login(code: Code, details: str, stale: bool) -> None:
    assert is_stale_login(rpc_error(code, details)) is stale
