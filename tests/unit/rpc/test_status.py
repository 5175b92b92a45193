"""One table from reasons to codes, total and equal to the published list; details that a caller can read."""

from __future__ import annotations

import logging

import grpc
import pytest
from google.rpc import error_details_pb2

from coordinator.errors import (
    CodecError,
    DeadlinePassed,
    EtcdUnavailable,
    FieldViolation,
    OutcomeUnknown,
    Reason,
    RequestError,
    StorageError,
    StorageFull,
    TooManyRequests,
)
from coordinator.rpc.status import CODES, to_request_error, to_status
from leasekeeper.v1 import errors_pb2

PREFIX = "ERROR_REASON_"


def incident() -> str:
    return "inc1"


def test_every_reason_has_a_code() -> None:
    assert set(Reason) == set(CODES)


def test_the_reasons_are_those_of_the_contract() -> None:
    published = {name.removeprefix(PREFIX) for name in errors_pb2.ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118

    assert published == {reason.value for reason in Reason}


def test_a_status_says_reason_domain_and_metadata() -> None:
    status = to_status(RequestError(Reason.CLAIM_LOST, "gone", metadata={"held": "5", "current": "0"}))

    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (grpc.StatusCode.FAILED_PRECONDITION.value[0], "gone") == (status.code, status.message)
    assert ("CLAIM_LOST", "leasekeeper") == (info.reason, info.domain)
    assert {"held": "5", "current": "0"} == dict(info.metadata)


@pytest.mark.parametrize(
    "reason", [reason for reason in Reason if CODES[reason] is grpc.StatusCode.UNAVAILABLE]
)
def test_what_may_be_repeated_says_when(reason: Reason) -> None:
    status = to_status(RequestError(reason, "later"))

    retry = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(retry)
    assert 0 < retry.retry_delay.ToMilliseconds() <= 5_000


def test_a_delay_of_the_error_itself_counts() -> None:
    status = to_status(RequestError(Reason.CLAIM_HELD, "held", retry_after_ms=1_234))

    retry = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(retry)
    assert 1_234 == retry.retry_delay.ToMilliseconds()


def test_fields_travel_as_bad_request() -> None:
    fields = [FieldViolation("job.queue", "is required")]

    status = to_status(RequestError(Reason.VALIDATION_FAILED, "bad", fields=fields))

    bad = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(bad)
    assert [("job.queue", "is required")] == [(v.field, v.description) for v in bad.field_violations]


def test_details_stay_below_what_a_peer_takes_in_headers() -> None:
    long = "é" * 9_000
    error = RequestError(
        Reason.VALIDATION_FAILED, long, metadata={"job_id": long}, fields=[FieldViolation(long, long)] * 10
    )

    status = to_status(error)

    # Binary headers travel in base64, the message percent-encoded; 8 KiB is the limit that gRPC starts with.
    assert status.ByteSize() * 4 / 3 + len(status.message.encode()) * 3 < 8_192


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutcomeUnknown("?"), Reason.OUTCOME_UNKNOWN),
        (StorageFull("?"), Reason.OUTCOME_UNKNOWN),
        (TooManyRequests("?"), Reason.TOO_MANY_REQUESTS),
        (DeadlinePassed("?"), Reason.ETCD_UNAVAILABLE),
        (EtcdUnavailable("?"), Reason.ETCD_UNAVAILABLE),
        (CodecError("?"), Reason.INTERNAL),
        (ValueError("?"), Reason.INTERNAL),
    ],
)
def test_an_error_that_slips_through_is_told_as_what_it_is(error: Exception, reason: Reason) -> None:
    assert reason is to_request_error(error, incident).reason


@pytest.mark.parametrize(
    "kind", [kind for kind in StorageError.__subclasses__() if kind is not OutcomeUnknown]
)
def test_no_storage_error_is_told_as_success_or_as_the_callers_fault(kind: type[StorageError]) -> None:
    code = CODES[to_request_error(kind("?"), incident).reason]

    assert code not in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


def test_a_fault_of_ours_is_logged_once_and_keeps_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        told = to_request_error(KeyError("secret"), incident)

    assert "secret" not in told.message
    assert {"incident": "inc1"} == told.metadata
    assert 1 == len(caplog.records)
    assert "inc1" in caplog.text
