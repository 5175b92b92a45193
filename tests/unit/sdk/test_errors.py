"""Every reason has a class, and whatever comes over the wire becomes one of the SDK's errors."""

from __future__ import annotations

import grpc
import pytest
from google.rpc.status_pb2 import Status

from leasekeeper.v1 import errors_pb2
from tests.support.fake_worker_server import status_of
from worker_sdk import errors
from worker_sdk._convert.status import from_rpc_failure, from_status

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DETAILS = "grpc-status-details-bin"


def reasons() -> list[str]:
    prefix = "ERROR_REASON_"
    names = [name.removeprefix(prefix) for name in errors_pb2.ErrorReason.keys()]  # noqa: SIM118  no dict
    return [name for name in names if name != "UNSPECIFIED"]


@pytest.mark.parametrize("reason", reasons())
def test_every_published_reason_has_a_class_of_its_own(reason: str) -> None:
    found = errors.error_class(reason)
    assert found is not None
    assert found.__name__.lower() in {reason.replace("_", "").lower(), "internalerror"}


def test_the_classes_name_no_reason_that_is_not_published() -> None:
    unknown = [name for name in errors._CLASSES if name not in reasons()]
    assert unknown == []


def test_details_become_attributes() -> None:
    status = status_of(
        grpc.StatusCode.INVALID_ARGUMENT,
        "VALIDATION_FAILED",
        "two fields are bad",
        fields=[("job.queue", "empty"), ("job.type", "too long")],
    )
    error = from_status(status)
    assert isinstance(error, errors.ValidationFailed)
    assert [(v.field, v.description) for v in error.fields] == [
        ("job.queue", "empty"),
        ("job.type", "too long"),
    ]
    assert str(error) == "two fields are bad"


def test_a_lost_claim_tells_both_tokens_and_a_duplicate_its_job() -> None:
    lost = from_status(
        status_of(grpc.StatusCode.FAILED_PRECONDITION, "CLAIM_LOST", metadata={"held": "7", "current": "9"})
    )
    assert isinstance(lost, errors.ClaimLost)
    assert (lost.held, lost.current) == (7, 9)
    duplicate = from_status(
        status_of(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_JOB", metadata={"job_id": "other"})
    )
    assert isinstance(duplicate, errors.DuplicateJob)
    assert duplicate.job_id == "other"


def test_retry_info_becomes_retry_after() -> None:
    error = from_status(status_of(UNAVAILABLE, "DRAINING", retry_after=1.25))
    assert error.retry_after == 1.25


def test_an_unknown_reason_falls_back_to_the_code() -> None:
    error = from_status(status_of(grpc.StatusCode.NOT_FOUND, "MOON_NOT_FOUND"))
    assert type(error) is errors.NotFound
    assert error.reason == "MOON_NOT_FOUND"


def test_a_foreign_domain_is_no_reason_of_ours() -> None:
    status = status_of(UNAVAILABLE, "CLAIM_LOST")
    info = errors  # keep the name short below
    foreign = Status(code=14, message="proxy", details=[])
    assert type(from_status(foreign)) is info.Unavailable
    assert isinstance(from_status(status), errors.ClaimLost)


@pytest.mark.parametrize("trailing", [[], [(DETAILS, b"\xff\xff")], [(DETAILS, "text")], [("x", "y")]])
def test_missing_or_broken_details_leave_the_code(trailing: list[tuple[str, str | bytes]]) -> None:
    error = from_rpc_failure(grpc.StatusCode.NOT_FOUND, "gone", trailing, changes=True)
    assert type(error) is errors.NotFound


def test_details_that_contradict_the_code_are_not_believed() -> None:
    details = status_of(grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND").SerializeToString()
    error = from_rpc_failure(grpc.StatusCode.INTERNAL, "boom", [(DETAILS, details)], changes=True)
    assert type(error) is errors.InternalError


@pytest.mark.parametrize(
    "code",
    [UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED],
)
def test_an_unanswered_change_is_of_unknown_outcome(code: grpc.StatusCode) -> None:
    error = from_rpc_failure(code, "connection reset", [], changes=True)
    assert type(error) is errors.OutcomeUnknown
    assert not isinstance(error, errors.Unavailable)


def test_a_change_that_was_never_sent_is_merely_unavailable() -> None:
    error = from_rpc_failure(
        UNAVAILABLE, "failed to connect to all addresses; last error: refused", [], changes=True
    )
    assert type(error) is errors.Unavailable


def test_an_unanswered_read_changed_nothing() -> None:
    assert type(from_rpc_failure(UNAVAILABLE, "reset", [], changes=False)) is errors.Unavailable
    late = from_rpc_failure(grpc.StatusCode.DEADLINE_EXCEEDED, "", [], changes=False)
    assert type(late) is errors.DeadlineExceeded


def test_a_coordinator_that_says_nothing_was_done_is_believed() -> None:
    details = status_of(UNAVAILABLE, "ETCD_UNAVAILABLE").SerializeToString()
    error = from_rpc_failure(UNAVAILABLE, "", [(DETAILS, details)], changes=True)
    assert type(error) is errors.EtcdUnavailable
