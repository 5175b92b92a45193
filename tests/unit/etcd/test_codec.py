"""Records: what goes in comes out, and what cannot be read is said to be so."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.job import (
    Attempt,
    AttemptOutcome,
    Claim,
    Job,
    JobLock,
    JobState,
    Progress,
    Rollback,
    Terms,
)
from coordinator.core.lock_order import LockMode
from coordinator.core.rank import Rank
from coordinator.core.retry import RetryPolicy
from coordinator.errors import CodecError
from coordinator.etcd import codec
from coordinator.etcd.codec import JobCodec
from coordinator.etcd.terms_codec import TermsCodec
from coordinator.ports import Checkpoint, Session, Spec
from leasekeeper.internal.storage.v1.records_pb2 import StateRecord

ms = st.integers(0, 2**43)
small = st.integers(0, 1000)
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
labels = st.dictionaries(text, text, max_size=3)
ratios = st.floats(0, 1)

retries = st.builds(
    RetryPolicy,
    max_retries=small,
    initial_ms=ms,
    multiplier=st.floats(1, 10),
    cap_ms=ms,
    jitter=ratios,
    non_retryable_types=st.lists(text, max_size=2).map(tuple),
    max_lease_losses=small,
)
all_terms = st.builds(
    Terms,
    queue=st.just("q"),
    type=st.just("t"),
    priority=st.integers(1, 5),
    labels=labels,
    submit_ms=ms,
    due_ms=ms,
    counter=small,
    retry=retries,
    queue_timeout_ms=ms,
    run_timeout_ms=ms,
    total_timeout_ms=ms,
    heartbeat_timeout_ms=ms,
    unique_key=text,
    payload_size=small,
    digest=st.binary(max_size=32),
    request_digest=st.binary(max_size=16),
    rollback=st.none()
    | st.builds(
        Rollback, queue=st.just("q"), type=st.just("t"), payload=st.binary(max_size=9), content_type=text
    ),
    locks=st.lists(
        st.builds(JobLock, name=text, mode=st.sampled_from(LockMode), permits=st.integers(1, 1_000)),
        max_size=8,
    ).map(tuple),
)
ended = st.builds(
    Attempt,
    number=small,
    session=text,
    start_ms=ms,
    token=st.integers(0, 2**63 - 1),
    end_ms=ms,
    outcome=st.sampled_from([each for each in AttemptOutcome if each is not AttemptOutcome.RUNNING]),
    digest=st.binary(max_size=32),
    failure_type=text,
    failure_message=text,
    state_after=st.none() | st.sampled_from(JobState),
    ready_ms_after=ms,
)
under_way = st.builds(Attempt, number=small, session=text, start_ms=ms, token=st.integers(0, 2**63 - 1))
jobs = st.builds(
    Job,
    namespace=st.just("default"),
    job_id=st.just("j"),
    terms=all_terms,
    state=st.sampled_from(JobState),
    ready_ms=ms,
    rank=st.builds(Rank, ms, small),
    attempt=small,
    failures=small,
    lease_losses=small,
    uncharged=small,
    hold_ms=ms,
    cancel_requested=st.booleans(),
    cancel_reason=text,
    attempts=st.lists(ended | under_way, max_size=8).map(tuple),
    progress=st.none() | st.builds(Progress, ratio=ratios, note=text),
    result=st.binary(max_size=20),
    result_content_type=text,
    result_size=small,
    end_reason=text,
    settle_ms=ms,
    retry_ms=ms,
    retry_digest=st.binary(max_size=16),
    rollback_job=text,
)


@given(jobs)
def test_a_job_is_read_as_it_was_written(job: Job) -> None:
    jobs_codec = JobCodec()
    assert jobs_codec.decode("default", "j", jobs_codec.encode(job)) == job


def filled(kind: type, **fixed: object) -> dict[str, object]:
    """A value that is not the default for every field of a dataclass, by its declared type."""
    samples: dict[str, object] = {
        "str": "text",
        "int": 7,
        "float": 0.5,
        "bool": True,
        "bytes": b"bytes",
        "tuple[str, ...]": ("text",),
        "tuple[int, ...]": (1, 2, 3, 4, 5),
        "Mapping[str, str]": {"a": "b"},
        "Rank": Rank(5, 6),
        "JobState": JobState.RUNNING,
        "JobState | None": JobState.DEAD,
        "AttemptOutcome": AttemptOutcome.FAILED,
        "Progress | None": Progress(ratio=0.5, note="half"),
        "Rollback | None": Rollback(queue="r", type="t", payload=b"p", content_type="c", priority=2),
        "tuple[JobLock, ...]": (JobLock(name="a"), JobLock(name="b", mode=LockMode.SEMAPHORE, permits=3)),
    }
    return {field.name: fixed.get(field.name, samples.get(str(field.type))) for field in fields(kind)}


def test_no_field_of_a_job_is_forgotten() -> None:
    """Fields are written by name; one that is added to the core must be added to the record too."""
    terms = Terms(**filled(Terms, retry=RetryPolicy(**filled(RetryPolicy))))  # type: ignore[arg-type]
    attempt = Attempt(**filled(Attempt))  # type: ignore[arg-type]
    values = filled(Job, namespace="default", job_id="j", terms=terms, attempts=(attempt,))
    assert None not in values.values()
    job = Job(**values)  # type: ignore[arg-type]
    jobs_codec = JobCodec()
    assert jobs_codec.decode("default", "j", jobs_codec.encode(job)) == job


@pytest.mark.parametrize("name", [member.name for member in fields(Job)])
def test_no_field_that_alone_is_unusual_is_forgotten(name: str) -> None:
    """Usual records are written by hand: one more field of the core must be looked at there too."""
    attempt = Attempt(**filled(Attempt, failure_type="", failure_message=""))  # type: ignore[arg-type]
    sample = filled(Job, namespace="default", job_id="j", terms=Terms(**filled(Terms, retry=RetryPolicy())))  # type: ignore[arg-type]
    sample["attempts"] = (attempt,)
    usual = Job(
        namespace="default",
        job_id="j",
        terms=Terms(queue="q", type="t", submit_ms=1),
        state=JobState.RUNNING,
        ready_ms=1,
        rank=Rank(1, 0),
        attempt=1,
    )
    job = replace(usual, **{name: sample[name]})  # type: ignore[arg-type]
    jobs_codec = JobCodec()
    assert jobs_codec.decode("default", "j", jobs_codec.encode(job)) == job


@pytest.mark.parametrize("name", [member.name for member in fields(Terms)])
def test_no_term_that_alone_is_unusual_is_forgotten(name: str) -> None:
    """Usual terms are written by hand as well."""
    sample = filled(Terms, retry=RetryPolicy(max_retries=77))
    usual = Terms(queue="q", type="t", submit_ms=1)
    job = Job(
        namespace="default",
        job_id="j",
        terms=replace(usual, **{name: sample[name]}),  # type: ignore[arg-type]
        state=JobState.PENDING,
        ready_ms=1,
        rank=Rank(1, 0),
    )
    jobs_codec = JobCodec()
    assert jobs_codec.decode("default", "j", jobs_codec.encode(job)) == job


def test_no_field_of_a_claim_checkpoint_or_session_is_forgotten() -> None:
    claim = Claim(**filled(Claim))  # type: ignore[arg-type]
    assert codec.decode_claim(codec.encode_claim(claim), claim.token) == claim
    checkpoint = Checkpoint(**filled(Checkpoint))  # type: ignore[arg-type]
    assert codec.decode_checkpoint(codec.encode_checkpoint(checkpoint), checkpoint.revision) == checkpoint
    session = Session(**filled(Session, namespace="default", session_id="00000000000000ff"))  # type: ignore[arg-type]
    value = codec.encode_session(session)
    assert codec.decode_session("default", "00000000000000ff", value, session.revision) == session


@given(jobs, st.lists(all_terms, min_size=6, max_size=10))
def test_remembered_terms_are_never_taken_for_others(job: Job, others: list[Terms]) -> None:
    terms = TermsCodec(generation=2)
    first = terms.encode(job.terms)
    for other in others:
        terms.encode(other)
        terms.encode(job.terms)
    assert terms.encode_last(job.terms) == terms.encode_last(job.terms) == first
    fresh = TermsCodec()
    assert [terms.encode(other) for other in others] == [fresh.encode(other) for other in others]
    assert terms.encode(job.terms) == first


@given(
    st.builds(
        Claim, session=text, attempt=small, nonce=st.binary(max_size=16), start_ms=ms, queue=text, type=text
    )
)
def test_a_claim_is_read_with_the_token_of_its_key(claim: Claim) -> None:
    read = codec.decode_claim(codec.encode_claim(claim), 77)
    assert read.token == 77
    assert (read.session, read.attempt, read.nonce, read.start_ms, read.queue, read.type) == (
        claim.session,
        claim.attempt,
        claim.nonce,
        claim.start_ms,
        claim.queue,
        claim.type,
    )


@given(
    st.builds(
        Checkpoint,
        attempt=small,
        sequence=small,
        data=st.binary(max_size=20),
        progress=st.none() | st.builds(Progress, ratio=ratios, note=text),
        saved_ms=ms,
        revision=st.just(9),
    )
)
def test_a_checkpoint_is_read_as_it_was_written(checkpoint: Checkpoint) -> None:
    assert codec.decode_checkpoint(codec.encode_checkpoint(checkpoint), 9) == checkpoint


@given(labels)
def test_a_session_is_read_as_it_was_written(some: dict[str, str]) -> None:
    session = Session(
        namespace="default",
        session_id="00000000000000ff",
        identity="worker",
        sdk="python",
        labels=some,
        opened_ms=5,
        ttl_ms=10_000,
        epoch=3,
        command=2,
        request_digest=b"d",
        revision=9,
    )
    assert codec.decode_session("default", "00000000000000ff", codec.encode_session(session), 9) == session


def test_small_records_are_read_as_they_were_written() -> None:
    spec = Spec(payload=b"\0\xff", content_type="application/json")
    assert codec.decode_spec(codec.encode_spec(spec)) == spec
    assert codec.decode_unique(codec.encode_unique("a/é")) == "a/é"
    assert codec.decode_result(codec.encode_result(b"r" * 2000, "text/plain")) == b"r" * 2000
    assert codec.decode_epoch(codec.encode_epoch(12)) == 12


DECODERS = [
    lambda value: JobCodec().decode("default", "j", value),
    lambda value: codec.decode_claim(value, 1),
    lambda value: codec.decode_checkpoint(value, 1),
    lambda value: codec.decode_session("default", "00000000000000ff", value, 1),
    codec.decode_spec,
    codec.decode_due,
    codec.decode_unique,
    codec.decode_result,
    codec.decode_epoch,
]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("value", [b"", b"\xff\xff", b"\x08\x02", b"\x08", b"not a record"])
def test_what_is_no_record_of_a_known_format_is_refused(decode: object, value: bytes) -> None:
    with pytest.raises(CodecError):
        decode(value)  # type: ignore[operator]


@pytest.mark.parametrize("decode", DECODERS)
@given(value=st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(decode: object, value: bytes) -> None:
    try:
        decode(value)  # type: ignore[operator]
    except CodecError:
        pass


def test_a_record_of_an_unknown_state_is_refused() -> None:
    value = StateRecord(format=1, state=99)
    value.terms.queue = "q"
    value.terms.type = "t"
    with pytest.raises(CodecError):
        JobCodec().decode("default", "j", value.SerializeToString())


def test_a_record_without_terms_is_refused() -> None:
    with pytest.raises(CodecError):
        JobCodec().decode("default", "j", StateRecord(format=1, state=2).SerializeToString())


def test_an_epoch_below_one_is_refused() -> None:
    with pytest.raises(CodecError):
        codec.decode_epoch(codec.encode_epoch(0))
