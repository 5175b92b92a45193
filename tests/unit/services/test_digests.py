"""Digests tell apart what differs, and stay what they were: they are stored."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.commands import Complete, Fail, Release, Settlement
from coordinator.core.job import JobLock, Progress, Rollback
from coordinator.core.lock_order import LockMode
from coordinator.core.retry import RetryPolicy
from coordinator.services.digests import (
    claim_nonce,
    job_digest,
    made_job_id,
    made_session_id,
    request_digest,
    session_digest,
    settlement_digest,
)
from tests.support.builders import a_new_job

OTHER: dict[str, Any] = {
    "queue": "q2",
    "type": "t2",
    "payload": b"{} ",
    "content_type": "text/plain",
    "labels": {"a": "b"},
    "priority": 4,
    "due_ms": 1,
    "run_at_ms": 1,
    "queue_timeout_ms": 1,
    "run_timeout_ms": 1,
    "total_timeout_ms": 1,
    "heartbeat_timeout_ms": 1,
    "retry": RetryPolicy(max_retries=4),
    "unique_key": "k",
    "rollback": Rollback(queue="r", type="t"),
    "locks": (JobLock(name="l"),),
}

OTHER_POLICY: dict[str, Any] = {
    "max_retries": 6,
    "initial_ms": 2,
    "multiplier": 3.0,
    "cap_ms": 4,
    "jitter": 0.5,
    "non_retryable_types": ("X",),
    "max_lease_losses": 9,
}


def test_every_field_of_a_job_counts_but_its_id_and_its_place() -> None:
    """A new field of NewJob fails here until somebody decides whether it counts.

    Whether a policy was said or left out does not: a job that says the defaults is the same job as one that
    says nothing, whatever its queue adds to the latter.
    """
    job = a_new_job()
    assert {field.name for field in fields(job)} == {"job_id", "item", "own_retry", *OTHER}
    variants = [replace(job, **{name: value}) for name, value in OTHER.items()]
    assert len({job_digest(one) for one in (job, *variants)}) == len(OTHER) + 1
    assert job_digest(replace(job, job_id="other", item=7, own_retry=False)) == job_digest(job)


def test_every_field_of_a_retry_policy_counts() -> None:
    policy = RetryPolicy()
    assert {field.name for field in fields(policy)} == set(OTHER_POLICY)
    variants = [policy, *(replace(policy, **{name: value}) for name, value in OTHER_POLICY.items())]
    assert len({job_digest(a_new_job(retry=one)) for one in variants}) == len(variants)


def test_every_field_of_a_lock_counts() -> None:
    lock = JobLock(name="l", mode=LockMode.SEMAPHORE, permits=2)
    others = [replace(lock, name="m"), replace(lock, mode=LockMode.SHARED), replace(lock, permits=3)]
    variants = [(lock,), *((other,) for other in others), (lock, others[0]), ()]

    assert len({job_digest(a_new_job(locks=one)) for one in variants}) == len(variants)


def test_every_field_of_a_rollback_job_counts() -> None:
    rollback = Rollback(queue="r", type="t")
    other: dict[str, Any] = {"queue": "s", "type": "u", "payload": b"p", "content_type": "c", "priority": 1}
    assert {field.name for field in fields(rollback)} == set(other)
    variants = [rollback, *(replace(rollback, **{name: value}) for name, value in other.items())]
    assert len({job_digest(a_new_job(rollback=one)) for one in variants}) == len(variants)


def test_neighbouring_fields_do_not_run_into_each_other() -> None:
    assert job_digest(a_new_job(queue="ab", type="c")) != job_digest(a_new_job(queue="a", type="bc"))
    assert job_digest(a_new_job(labels={"a": "bc"})) != job_digest(a_new_job(labels={"ab": "c"}))
    assert job_digest(a_new_job(labels={"a": "b", "c": "d"})) == job_digest(
        a_new_job(labels={"c": "d", "a": "b"})
    )
    split = RetryPolicy(non_retryable_types=("a", "b"))
    assert job_digest(a_new_job(retry=split)) != job_digest(
        a_new_job(retry=RetryPolicy(non_retryable_types=("ab",)))
    )


def test_settlements_of_other_content_differ_and_progress_and_token_do_not_count() -> None:
    said: list[Settlement] = [
        Complete(token=1, digest=b""),
        Complete(token=1, digest=b"", result=b"r"),
        Complete(token=1, digest=b"", result_content_type="r"),
        Fail(token=1, digest=b""),
        Fail(token=1, digest=b"", failure_type="x"),
        Fail(token=1, digest=b"", failure_message="x"),
        Fail(token=1, digest=b"", retry_delay_ms=0),
        Fail(token=1, digest=b"", no_retry=True),
        Release(token=1, digest=b""),
        Release(token=1, digest=b"", delay_ms=1),
        Release(token=1, digest=b"", reason="x"),
    ]
    assert len({settlement_digest(one) for one in said}) == len(said)
    for one in said:
        assert settlement_digest(replace(one, token=2, progress=Progress(ratio=1))) == settlement_digest(one)


@pytest.mark.parametrize(
    ("digest", "stored"),
    [
        (job_digest(a_new_job()), "950e9c9d45d3cd1cbfe056c84c939202"),
        (settlement_digest(Complete(token=1, digest=b"", result=b"r")), "a4a1eeb8554b6e3017e0ca9fb4eb7581"),
        (request_digest("r1"), "cd363d6c8dfd5b96a6d4b7563f894df3"),
        (made_job_id("default", "r1", 0), "4nwsdknnz6byrvbqvtempy6osq"),
        (made_session_id("default", "r1"), "1e949363e1cba6be"),
        (claim_nonce("00", "r1"), "66abb2d2223d7bde83cab4ec080c0d9a"),
    ],
)
def test_what_is_stored_stays_what_it_was(digest: bytes | str, stored: str) -> None:
    """Another value here would refuse repeats of requests that an older release has answered."""
    assert (digest.hex() if isinstance(digest, bytes) else digest) == stored


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=128), st.integers(0, 99))
def test_made_ids_have_their_form(namespace: str, request_id: str, item: int) -> None:
    job_id = made_job_id(namespace, request_id, item)
    assert len(job_id) == 26
    assert set(job_id) <= set("abcdefghijklmnopqrstuvwxyz234567")
    session_id = made_session_id(namespace, request_id)
    assert len(session_id) == 16
    assert 0 < int(session_id, 16) < 2**63


def test_no_request_id_has_no_digest() -> None:
    assert request_digest("") == b""


def test_a_session_is_told_apart_by_all_that_its_worker_said() -> None:
    said: dict[str, Any] = {"identity": "a", "sdk": "b", "labels": {}, "ttl_ms": 1}
    other: dict[str, Any] = {"identity": "x", "sdk": "x", "labels": {"x": "y"}, "ttl_ms": 2}
    digests = {session_digest(**said), *(session_digest(**{**said, name: other[name]}) for name in said)}
    assert len(digests) == 5
