"""Whatever a caller sends: it is refused precisely, or converts to values that the core takes."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.job import FAILED
from coordinator.core.queue_settings import QueueState, contradictions
from coordinator.core.retry import delay_ms
from coordinator.errors import Reason, RequestError
from coordinator.etcd.queue_store import decode_queue, encode_queue
from coordinator.rpc import convert, validation, worker_convert, worker_validation
from coordinator.rpc.limits import CallLimits
from coordinator.rpc.queue_convert import queue_settings
from coordinator.rpc.queue_validation import check_update_queue
from coordinator.rpc.status import to_status
from coordinator.services.digests import job_digest, settlement_digest
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import queue_service_pb2 as q
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w

LIMITS = CallLimits()
FORM_REASONS = {
    Reason.VALIDATION_FAILED,
    Reason.PAYLOAD_TOO_LARGE,
    Reason.RESULT_TOO_LARGE,
    Reason.TTL_OUT_OF_RANGE,
}

texts = st.one_of(st.sampled_from(["", "a", "mail", "0123456789abcdef"]), st.text(max_size=300))
integers = {
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1) | st.integers(0, 6),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, 6),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1) | st.integers(0, 100_000),
}
leaves: dict[int, st.SearchStrategy[Any]] = {
    **integers,
    FieldDescriptor.TYPE_STRING: texts,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=50),
    FieldDescriptor.TYPE_DOUBLE: st.floats() | st.sampled_from([1.0, 0.5, math.nan, math.inf]),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 12),
}


@st.composite
def messages(draw: st.DrawFn, kind: type[Message]) -> Any:
    """Any message of a type; each field is there or not."""
    message = kind()
    fill(draw, message, kind.DESCRIPTOR)
    return message


def fill(draw: st.DrawFn, message: Any, descriptor: Descriptor) -> None:
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name).update(draw(st.dictionaries(texts, texts, max_size=3)))
        elif field.message_type is not None and field.is_repeated:
            for _ in range(draw(st.integers(0, 2))):
                fill(draw, getattr(message, field.name).add(), field.message_type)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(draw, getattr(message, field.name), field.message_type)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(leaves[field.type], max_size=3)))
        else:
            setattr(message, field.name, draw(leaves[field.type]))


def told(error: RequestError | None) -> bool:
    """Whether it is a refusal of form, with fields, that can be sent."""
    if error is None:
        return False
    assert error.reason in FORM_REASONS
    assert error.fields
    assert to_status(error).details
    return True


@settings(max_examples=300, deadline=None)
@given(messages(j.SubmitJobsRequest))
def test_any_submission(request: j.SubmitJobsRequest) -> None:
    try:
        errors = validation.check_submit_batch(request)
    except RequestError as error:
        told(error)
        return
    for spec, error in zip(request.jobs, errors, strict=True):
        if told(error):
            continue
        job = convert.new_job(spec)
        job_digest(job)
        job.terms(submit_ms=1, counter=0, digest=b"", request_digest=b"")
        assert 1 <= delay_ms(job.retry, 1_000, 0.999) <= 30 * 24 * 3_600_000
        assert all(0 <= value < 10**14 for value in (job.due_ms, job.run_at_ms, job.total_timeout_ms))
        for name in ("queue_timeout", "run_timeout", "total_timeout", "heartbeat_timeout"):
            assert spec.HasField(name) == (getattr(job, f"{name}_ms") > 0)


@settings(max_examples=300, deadline=None)
@given(messages(w.SettleJobsRequest))
def test_any_settlement(request: w.SettleJobsRequest) -> None:
    try:
        errors = worker_validation.check_settle_batch(request)
    except RequestError as error:
        told(error)
        return
    for item, error in zip(request.settlements, errors, strict=True):
        if not told(error):
            settle = worker_convert.settle(item)
            assert settle.command.token > 0
            settlement_digest(settle.command, settle.follow_ups)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        messages(w.HeartbeatRequest),
        messages(w.ClaimJobsRequest),
        messages(w.OpenSessionRequest),
        messages(j.ListJobsRequest),
        messages(j.WatchJobsRequest),
        messages(j.UpdateJobRequest),
        messages(j.RedriveJobsRequest),
        messages(w.SaveCheckpointRequest),
    )
)
def test_any_other_request(request: Any) -> None:
    try:
        if isinstance(request, w.HeartbeatRequest):
            worker_validation.check_heartbeat(request)
            assert worker_convert.beat(request).sent_ms >= 0
        elif isinstance(request, w.ClaimJobsRequest):
            worker_validation.check_claims(request, LIMITS)
            assert worker_convert.claim_query(request, 0).queues
        elif isinstance(request, w.OpenSessionRequest):
            worker_validation.check_open_session(request, LIMITS)
            assert 2_000 <= worker_convert.new_session(request, LIMITS).ttl_ms <= 3_600_000
        elif isinstance(request, j.ListJobsRequest):
            validation.check_list(request)
            convert.list_filter(request, 1)
        elif isinstance(request, j.WatchJobsRequest):
            validation.check_watch(request)
            convert.watch_filter(request)
        elif isinstance(request, j.RedriveJobsRequest):
            validation.check_redrive(request)
            query = convert.redrive_query(request)
            assert query.states <= FAILED
            assert 1 <= query.max_jobs <= 1_000
            assert 1 <= query.jobs_per_second <= 1_000
        elif isinstance(request, j.UpdateJobRequest):
            validation.check_update(request)
        else:
            worker_validation.check_checkpoint(request)
            convert.progress_of(request.progress)
    except RequestError as error:
        told(error)


@settings(max_examples=300, deadline=None)
@given(messages(q.UpdateQueueRequest))
def test_any_settings_of_a_queue(request: q.UpdateQueueRequest) -> None:
    try:
        check_update_queue(request)
    except RequestError as error:
        told(error)
        return
    wanted = queue_settings(request.settings)
    state = QueueState(settings=wanted)
    assert decode_queue(encode_queue(state)) == state
    assert contradictions(wanted) == ()
    assert list(wanted.target_wait_ms) == sorted(wanted.target_wait_ms)
    assert len(wanted.target_wait_ms) in (0, 5)
    if wanted.retry is not None:
        assert 1 <= delay_ms(wanted.retry, 1_000, 0.999) <= 30 * 24 * 3_600_000


@given(st.text(max_size=700), st.integers(0, 600))
def test_a_cut_text_is_text_within_its_limit(text: str, limit: int) -> None:
    cut = convert.cut_text(text, limit)

    assert len(cut.encode()) <= limit
    assert text.startswith(cut)
    assert cut == text or len(cut.encode()) > limit - 4


def test_every_state_and_outcome_has_its_published_number() -> None:
    from coordinator.core.job import AttemptOutcome, JobState

    assert {f"JOB_STATE_{state.name}": state.value for state in JobState} == {
        name: number for name, number in t.JobState.items() if number
    }
    assert {f"ATTEMPT_OUTCOME_{outcome.name}": outcome.value for outcome in AttemptOutcome} == {
        name: number for name, number in t.AttemptOutcome.items() if number
    }
