"""Every field of every request: what is refused, with which reason, and under which name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.errors import Reason, RequestError
from coordinator.rpc import limits, validation, worker_validation
from coordinator.rpc.limits import CallLimits
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as w
from tests.unit.rpc import builders as b

LIMITS = CallLimits()
DAY = 24 * 3600


def refused(check: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check()
    return caught.value


def span(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=round((seconds - int(seconds)) * 1e9))


def policy(**changes: Any) -> types.RetryPolicy:
    return types.RetryPolicy(**changes)


BAD_JOBS: list[tuple[str, dict[str, Any]]] = [
    ("job.queue", {"queue": ""}),
    ("job.queue", {"queue": "Mail"}),
    ("job.queue", {"queue": "a/b"}),
    ("job.queue", {"queue": "a" * 64}),
    ("job.queue", {"queue": "-a"}),
    ("job.queue", {"queue": "mail\n"}),
    ("job.type", {"type": ""}),
    ("job.type", {"type": ".."}),
    ("job.job_id", {"job_id": "a\0b"}),
    ("job.job_id", {"job_id": "\0"}),
    ("job.job_id", {"job_id": "a\nb"}),
    ("job.job_id", {"job_id": "\x7f"}),
    ("job.job_id", {"job_id": "\x85"}),
    ("job.job_id", {"job_id": "x" * 257}),
    ("job.job_id", {"job_id": "é" * 129}),
    ("job.job_id", {"job_id": "x" * 10_000}),
    ("job.unique_key", {"unique_key": "k\r"}),
    ("job.unique_key", {"unique_key": "k" * 257}),
    ("job.content_type", {"content_type": "t" * 128}),
    ("job.content_type", {"content_type": "text/plain\r\nx: y"}),
    ("job.labels", {"labels": {f"k{n}": "v" for n in range(17)}}),
    ("job.labels['']", {"labels": {"": "v"}}),
    ("job.labels['k']", {"labels": {"k": "v" * 256}}),
    ("job.labels['k']", {"labels": {"k": "\x00"}}),
    ("job.priority", {"priority": -1}),
    ("job.priority", {"priority": 6}),
    ("job.due_time", {"due_time": Timestamp(seconds=-1)}),
    ("job.due_time", {"due_time": Timestamp(seconds=1, nanos=-1)}),
    ("job.run_at", {"run_at": Timestamp(nanos=1_000_000_000)}),
    ("job.run_at", {"run_at": Timestamp(seconds=limits.LARGEST_TIMESTAMP_MS // 1000 + 1)}),
    ("job.run_timeout", {"run_timeout": span(0)}),
    ("job.run_timeout", {"run_timeout": span(-1)}),
    ("job.queue_timeout", {"queue_timeout": Duration(seconds=1, nanos=-1)}),
    ("job.queue_timeout", {"queue_timeout": Duration(nanos=2_000_000_000)}),
    ("job.total_timeout", {"total_timeout": span(3651 * DAY)}),
    ("job.total_timeout", {"total_timeout": Duration(seconds=2**63 - 1)}),
    ("job.heartbeat_timeout", {"heartbeat_timeout": Duration(nanos=-1)}),
    ("job.retry_policy.max_retries", {"retry_policy": policy(max_retries=1001)}),
    ("job.retry_policy.max_lease_losses", {"retry_policy": policy(max_lease_losses=2**32 - 1)}),
    ("job.retry_policy.multiplier", {"retry_policy": policy(multiplier=math.nan)}),
    ("job.retry_policy.multiplier", {"retry_policy": policy(multiplier=math.inf)}),
    ("job.retry_policy.multiplier", {"retry_policy": policy(multiplier=0.99)}),
    ("job.retry_policy.jitter", {"retry_policy": policy(jitter=1.01)}),
    ("job.retry_policy.jitter", {"retry_policy": policy(jitter=-math.inf)}),
    ("job.retry_policy.initial_delay", {"retry_policy": policy(initial_delay=span(0))}),
    ("job.retry_policy.max_delay", {"retry_policy": policy(max_delay=span(31 * DAY))}),
    ("job.retry_policy.non_retryable_types[1]", {"retry_policy": policy(non_retryable_types=["a", ""])}),
    ("job.retry_policy.non_retryable_types", {"retry_policy": policy(non_retryable_types=["a"] * 65)}),
    ("job.rollback.queue", {"rollback": types.RollbackJob(type="t")}),
    ("job.rollback.type", {"rollback": types.RollbackJob(queue="q", type="../t")}),
    ("job.rollback.priority", {"rollback": types.RollbackJob(queue="q", type="t", priority=6)}),
    ("job.rollback.content_type", {"rollback": types.RollbackJob(queue="q", type="t", content_type="\n")}),
]


@pytest.mark.parametrize(("field", "changes"), BAD_JOBS, ids=lambda value: str(value)[:60])
def test_a_bad_field_of_a_job_is_named(field: str, changes: dict[str, Any]) -> None:
    error = refused(lambda: validation.check_submit(b.submit(**changes)))

    assert Reason.VALIDATION_FAILED is error.reason
    assert error.fields[0].field.startswith(field)


# Fault case 093: whatever is not a control character is just text, up to 256 bytes.
ODD_IDS = [
    " ",
    ".",
    "..",
    "/",
    "//",
    "a/b",
    "a/",
    "../q",
    "é",
    "e\u0301",
    "😀",
    "\u200f",
    "\u2028",
    "%2F",
    "*",
    "{x}",
    "x" * 255,
    "x" * 256,
    "é" * 128,
    "A",
    "a",
]


@pytest.mark.parametrize("text", ODD_IDS, ids=ascii)
def test_an_odd_id_is_just_text(text: str) -> None:
    validation.check_submit(b.submit(job_id=text, unique_key=text))
    validation.check_get(j.GetJobRequest(job_id=text))


GOOD_JOBS: list[dict[str, Any]] = [
    {"payload": b""},
    {"payload": bytes(limits.PAYLOAD_BYTES)},
    {"payload": bytes(range(256))},
    {"priority": 5},
    {"queue": "a" * 63, "type": "0._-"},
    {"labels": {"k" * 63: "v" * 255}},
    {"due_time": Timestamp(), "run_at": Timestamp(seconds=limits.LARGEST_TIMESTAMP_MS // 1000)},
    {"run_timeout": Duration(nanos=1), "total_timeout": span(3650 * DAY)},
    {
        "retry_policy": policy(
            max_retries=0, multiplier=1, jitter=0, initial_delay=span(0.001), max_lease_losses=1000
        )
    },
    {"rollback": types.RollbackJob(queue="q", type="t", payload=bytes(4096), priority=5)},
]


@pytest.mark.parametrize("changes", GOOD_JOBS, ids=lambda value: str(value)[:40])
def test_a_job_at_its_limits_is_accepted(changes: dict[str, Any]) -> None:
    validation.check_submit(b.submit(**changes))


# Fault case 089: one limit, whatever the size.
@pytest.mark.parametrize("size", [256 * 1024 + 1, 512 * 1024, 1 << 20, (3 << 20) // 2, 2 << 20, 10 << 20])
def test_a_payload_over_the_limit_names_size_and_limit(size: int) -> None:
    error = refused(lambda: validation.check_submit(b.submit(payload=bytes(size))))

    assert Reason.PAYLOAD_TOO_LARGE is error.reason
    assert {"size": str(size), "limit": "262144"} == error.metadata
    assert ["job.payload"] == [violation.field for violation in error.fields]


def test_the_payload_of_a_rollback_job_has_a_limit_of_its_own() -> None:
    rollback = types.RollbackJob(queue="q", type="t", payload=bytes(4097))

    error = refused(lambda: validation.check_submit(b.submit(rollback=rollback)))

    assert Reason.PAYLOAD_TOO_LARGE is error.reason
    assert {"size": "4097", "limit": "4096"} == error.metadata
    assert ["job.rollback.payload"] == [violation.field for violation in error.fields]


def test_a_job_is_required() -> None:
    error = refused(lambda: validation.check_submit(j.SubmitJobRequest()))

    assert ["job"] == [violation.field for violation in error.fields]


def test_a_job_without_id_needs_a_request_id() -> None:
    error = refused(lambda: validation.check_submit(b.submit(job_id="")))

    assert ["request_id"] == [violation.field for violation in error.fields]


def test_all_violations_are_told_at_once() -> None:
    error = refused(lambda: validation.check_submit(b.submit(queue="", type="X", priority=9)))

    assert ["job.queue", "job.type", "job.priority"] == [violation.field for violation in error.fields]
    assert "and 2 more" in error.message


def test_no_more_than_10_violations_are_told() -> None:
    request = b.claim_jobs(queues=[w.QueueTypes(queue="mail", types=["A"] * 100)])

    error = refused(lambda: worker_validation.check_claims(request, LIMITS))

    assert 10 == len(error.fields)
    assert "and 99 more" in error.message


def test_a_bad_job_of_a_batch_is_refused_alone() -> None:
    batch = b.submit_batch(b.job_spec(job_id="a"), b.job_spec(job_id="b", queue="B"), b.job_spec(job_id="c"))

    errors = validation.check_submit_batch(batch)

    assert [True, False, True] == [error is None for error in errors]
    assert errors[1] is not None
    assert ["jobs[1].queue"] == [violation.field for violation in errors[1].fields]


@pytest.mark.parametrize("count", [0, 101])
def test_a_batch_has_1_to_100_jobs(count: int) -> None:
    batch = b.submit_batch(*(b.job_spec(job_id=f"j{n}") for n in range(count)))

    error = refused(lambda: validation.check_submit_batch(batch))

    assert ["jobs"] == [violation.field for violation in error.fields]


def test_no_two_jobs_of_a_batch_have_one_id() -> None:
    error = refused(lambda: validation.check_submit_batch(b.submit_batch(b.job_spec(), b.job_spec())))

    assert ["jobs[1].job_id"] == [violation.field for violation in error.fields]


def test_several_jobs_of_a_batch_may_come_without_id() -> None:
    assert [None, None] == validation.check_submit_batch(
        b.submit_batch(b.job_spec(job_id=""), b.job_spec(job_id=""))
    )


def test_follow_ups_are_256_kib_in_all() -> None:
    most = [b.job_spec(job_id=str(n), payload=b"p" * (64 << 10)) for n in range(4)]
    error = refused(lambda: worker_validation.check_complete(b.complete(follow_ups=most)))

    assert error.reason is Reason.PAYLOAD_TOO_LARGE
    worker_validation.check_complete(b.complete(follow_ups=most[:3]))


def test_a_bad_follow_up_of_a_batch_is_named_with_its_path() -> None:
    how = w.Completion(follow_ups=[b.job_spec(type="")])
    request = w.SettleJobsRequest(settlements=[w.Settlement(job_id="j", fencing_token=1, complete=how)])
    [error] = worker_validation.check_settle_batch(request)

    assert error is not None
    assert [v.field for v in error.fields] == ["settlements[0].complete.follow_ups[0].type"]


CHECKS: dict[type[Message], Callable[[Any], object]] = {
    j.GetJobRequest: validation.check_get,
    j.ListJobsRequest: validation.check_list,
    j.WatchJobsRequest: validation.check_watch,
    j.WaitJobRequest: lambda request: validation.check_wait(request, LIMITS),
    j.UpdateJobRequest: validation.check_update,
    j.CancelJobRequest: validation.check_cancel,
    j.DeleteJobRequest: validation.check_delete,
    j.RetryJobRequest: validation.check_retry,
    j.RedriveJobsRequest: validation.check_redrive,
    j.ListAttemptsRequest: validation.check_list_attempts,
    w.OpenSessionRequest: lambda request: worker_validation.check_open_session(request, LIMITS),
    w.CloseSessionRequest: worker_validation.check_close_session,
    w.HeartbeatRequest: worker_validation.check_heartbeat,
    w.ClaimJobsRequest: lambda request: worker_validation.check_claims(request, LIMITS),
    w.ClaimJobRequest: lambda request: worker_validation.check_claim(request, LIMITS),
    w.CompleteJobRequest: worker_validation.check_complete,
    w.FailJobRequest: worker_validation.check_fail,
    w.ReleaseJobRequest: worker_validation.check_release,
    w.SettleJobsRequest: worker_validation.check_settle_batch,
    w.SaveCheckpointRequest: worker_validation.check_checkpoint,
}

BAD_CALLS: list[tuple[str, Message]] = [
    ("namespace", j.GetJobRequest(namespace="_system", job_id="x")),
    ("job_id", j.GetJobRequest()),
    ("page_size", j.ListJobsRequest(page_size=-1)),
    ("page_size", j.ListJobsRequest(page_size=1001)),
    ("page_token", j.ListJobsRequest(page_token="x" * 3000)),
    ("states[0]", j.ListJobsRequest(states=[0])),  # type: ignore[list-item]
    ("states[1]", j.WatchJobsRequest(states=[1, 99])),  # type: ignore[list-item]
    ("resume_revision", j.WatchJobsRequest(resume_revision=-1)),
    ("job_ids[0]", j.WatchJobsRequest(job_ids=[""])),
    ("job_ids", j.WatchJobsRequest(job_ids=["x"] * 1001)),
    ("timeout", j.WaitJobRequest(job_id="x", timeout=span(30.001))),
    ("timeout", j.WaitJobRequest(job_id="x", timeout=span(-1))),
    ("priority", j.UpdateJobRequest(job_id="x")),
    ("priority", j.UpdateJobRequest(job_id="x", priority=7)),
    ("request_id", j.CancelJobRequest(job_id="x", request_id="r" * 129)),
    ("etag", j.DeleteJobRequest(job_id="x", etag="e" * 200)),
    ("job_id", j.RetryJobRequest()),
    ("etag", j.RetryJobRequest(job_id="x", etag="e" * 200)),
    ("run_at", j.RetryJobRequest(job_id="x", run_at=Timestamp(seconds=-1))),
    ("states[0]", j.RedriveJobsRequest(states=[types.JOB_STATE_CANCELLED])),
    ("states[1]", j.RedriveJobsRequest(states=[types.JOB_STATE_DEAD, 9])),  # type: ignore[list-item]
    ("queue", j.RedriveJobsRequest(queue="Q")),
    ("labels['k']", j.RedriveJobsRequest(labels={"k": "\0"})),
    ("failure_type", j.RedriveJobsRequest(failure_type="f" * 128)),
    ("settled_before", j.RedriveJobsRequest(settled_before=Timestamp(nanos=-1))),
    ("max_jobs", j.RedriveJobsRequest(max_jobs=1_001)),
    ("jobs_per_second", j.RedriveJobsRequest(jobs_per_second=-1)),
    ("page_token", j.RedriveJobsRequest(page_token="t" * 2_049)),
    ("request_id", j.RedriveJobsRequest(request_id="r" * 129)),
    ("job_id", j.ListAttemptsRequest()),
    ("request_id", b.open_session(request_id="")),
    ("identity", b.open_session(identity="a\r\nb")),
    ("identity", b.open_session(identity="i" * 256)),
    ("sdk", b.open_session(sdk="\0")),
    ("ttl", b.open_session(ttl=Duration(seconds=1, nanos=-1))),
    ("session_id", w.CloseSessionRequest(session_id="zz")),
    ("session_id", b.heartbeat(session_id="")),
    ("number", b.heartbeat(number=0)),
    ("sent_at", b.heartbeat(sent_at=None)),
    ("sent_at", b.heartbeat(sent_at=span(-1))),
    (
        "claims[0].fencing_token",
        b.heartbeat(claims=[w.HeldClaim(job_id="x")]),
    ),
    (
        "claims[0].sequence",
        b.heartbeat(claims=[w.HeldClaim(job_id="x", fencing_token=1, sequence=-1)]),
    ),
    (
        "claims[0].progress.ratio",
        b.heartbeat(
            claims=[w.HeldClaim(job_id="x", fencing_token=1, progress=types.Progress(ratio=math.nan))]
        ),
    ),
    (
        "claims[0].progress.note",
        b.heartbeat(
            claims=[w.HeldClaim(job_id="x", fencing_token=1, progress=types.Progress(note="n" * 4096))]
        ),
    ),
    ("follow_ups", b.complete(follow_ups=[b.job_spec(job_id=str(n)) for n in range(21)])),
    ("follow_ups[1].queue", b.complete(follow_ups=[b.job_spec(), b.job_spec(job_id="x", queue="Q")])),
    ("follow_ups[1].job_id", b.complete(follow_ups=[b.job_spec(), b.job_spec()])),
    ("follow_ups[0].job_id", b.complete(job_id="me", follow_ups=[b.job_spec(job_id="me")])),
    (
        "follow_ups[1].unique_key",
        b.complete(follow_ups=[b.job_spec(job_id=n, unique_key="u") for n in "ab"]),
    ),
    ("request_id", b.claim_jobs(request_id="")),
    ("queues", b.claim_jobs(queues=[])),
    (
        "queues[0].types",
        b.claim_jobs(queues=[w.QueueTypes(queue="q")]),
    ),
    (
        "queues[0].types[0]",
        b.claim_jobs(queues=[w.QueueTypes(queue="q", types=["*"])]),
    ),
    (
        "queues",
        b.claim_jobs(queues=[w.QueueTypes(queue="q", types=["t"] * 257)]),
    ),
    (
        "queues",
        b.claim_jobs(queues=[w.QueueTypes(queue="q", types=["t"])] * 33),
    ),
    ("max_jobs", b.claim_jobs(max_jobs=0)),
    ("max_jobs", b.claim_jobs(max_jobs=101)),
    ("wait", b.claim_jobs(wait=span(31))),
    ("wait", b.claim_jobs(wait=span(-0.5))),
    (
        "job_id",
        w.ClaimJobRequest(request_id="r", session_id=b.SESSION),
    ),
    ("job_id", b.complete(job_id="")),
    ("fencing_token", b.complete(fencing_token=0)),
    ("fencing_token", b.complete(fencing_token=-1)),
    ("result_content_type", b.complete(result_content_type="\n")),
    ("fencing_token", w.FailJobRequest(job_id="x")),
    (
        "failure.type",
        w.FailJobRequest(job_id="x", fencing_token=1, failure=types.Failure(type="t" * 128)),
    ),
    (
        "retry_delay",
        w.FailJobRequest(job_id="x", fencing_token=1, retry_delay=span(-1)),
    ),
    (
        "retry_delay",
        w.FailJobRequest(job_id="x", fencing_token=1, retry_delay=span(31 * DAY)),
    ),
    ("fencing_token", w.ReleaseJobRequest(job_id="x")),
    (
        "delay",
        w.ReleaseJobRequest(job_id="x", fencing_token=1, delay=span(31 * DAY)),
    ),
    ("settlements", w.SettleJobsRequest()),
    (
        "settlements",
        w.SettleJobsRequest(settlements=[w.Settlement()] * 101),
    ),
    ("fencing_token", w.SaveCheckpointRequest(job_id="x")),
    (
        "sequence",
        w.SaveCheckpointRequest(job_id="x", fencing_token=1, sequence=-1),
    ),
]


@pytest.mark.parametrize(
    ("field", "request_"),
    BAD_CALLS,
    ids=[f"{type(request).__name__}.{field}" for field, request in BAD_CALLS],
)
def test_a_bad_field_of_a_call_is_named(field: str, request_: Message) -> None:
    error = refused(lambda: CHECKS[type(request_)](request_))

    assert Reason.VALIDATION_FAILED is error.reason
    assert field in [violation.field for violation in error.fields]


# Fault case 095; NaN cannot be written as a Duration.
@pytest.mark.parametrize("seconds", [-1, 0, 0.5, 1, 1.999999999, 3600.000000001, 10**10, 2**62])
def test_a_ttl_out_of_range_names_the_range(seconds: float) -> None:
    error = refused(lambda: worker_validation.check_open_session(b.open_session(ttl=span(seconds)), LIMITS))

    assert Reason.TTL_OUT_OF_RANGE is error.reason
    assert ("2 s", "3600 s") == (error.metadata["min"], error.metadata["max"])


@pytest.mark.parametrize("seconds", [2, 10, 3600])
def test_a_ttl_in_range_is_accepted(seconds: int) -> None:
    worker_validation.check_open_session(b.open_session(ttl=span(seconds)), LIMITS)


def test_a_result_over_the_limit_names_size_and_limit() -> None:
    error = refused(lambda: worker_validation.check_complete(b.complete(result=bytes(64 * 1024 + 1))))

    assert Reason.RESULT_TOO_LARGE is error.reason
    assert {"size": "65537", "limit": "65536"} == error.metadata


def test_a_checkpoint_over_the_limit_names_size_and_limit() -> None:
    request = w.SaveCheckpointRequest(job_id="x", fencing_token=1, checkpoint=bytes(256 * 1024 + 1))

    error = refused(lambda: worker_validation.check_checkpoint(request))

    assert Reason.PAYLOAD_TOO_LARGE is error.reason


def test_a_bad_settlement_of_a_batch_is_refused_alone() -> None:
    settlements = [
        w.Settlement(job_id="a", fencing_token=1, complete=w.Completion()),
        w.Settlement(job_id="b", fencing_token=1),
        w.Settlement(job_id="c", complete=w.Completion()),
        w.Settlement(job_id="d", fencing_token=1, complete=w.Completion(result=bytes(70_000))),
        w.Settlement(job_id="e", fencing_token=1, release=w.Release(delay=span(-1))),
    ]

    errors = worker_validation.check_settle_batch(w.SettleJobsRequest(settlements=settlements))

    told = [(error.reason.value, error.fields[0].field) if error is not None else None for error in errors]
    assert [
        None,
        ("VALIDATION_FAILED", "settlements[1].how"),
        ("VALIDATION_FAILED", "settlements[2].fencing_token"),
        ("RESULT_TOO_LARGE", "settlements[3].complete.result"),
        ("VALIDATION_FAILED", "settlements[4].release.delay"),
    ] == told
