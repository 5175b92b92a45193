"""Malformed requests: the fake refuses each as the service does, word for word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.conformance.rpc.subject import Subject
from tests.conformance.rpc.transcript import Transcript
from tests.unit.rpc import builders as b

LONG = "x" * 300
BAD_SPANS = [
    Duration(seconds=-1),
    Duration(),
    Duration(seconds=1, nanos=-1),
    Duration(nanos=1_000_000_000),
    Duration(seconds=10**12),
]
BAD_TIMES = [Timestamp(seconds=-1), Timestamp(nanos=-1), Timestamp(seconds=40_000_000_000)]
BAD_IDS = ["", LONG, "a\x00b", "ü" * 129, "a\x85"]
BAD_NAMES = ["", "UP", "-a", "a" * 64, "a b", "ä"]
BAD_LABELS = [{"": "v"}, {"k" * 64: "v"}, {"k": "v" * 256}, {f"k{n}": "" for n in range(17)}, {"k\n": "\r"}]


def bad_jobs() -> Iterator[t.JobSpec]:
    yield t.JobSpec()
    for name in BAD_NAMES:
        yield b.job_spec(queue=name)
        yield b.job_spec(type=name)
        yield b.job_spec(rollback=t.RollbackJob(queue=name, type=name))
    for text in BAD_IDS[1:]:
        yield b.job_spec(job_id=text)
        yield b.job_spec(unique_key=text)
    for span in BAD_SPANS:
        for field in ("queue_timeout", "run_timeout", "total_timeout", "heartbeat_timeout"):
            yield b.job_spec(**{field: span})
        yield b.job_spec(retry_policy=t.RetryPolicy(initial_delay=span, max_delay=span))
    for time in BAD_TIMES:
        yield b.job_spec(due_time=time, run_at=time)
    for labels in BAD_LABELS:
        yield b.job_spec(labels=labels)
    yield b.job_spec(payload=bytes(262_145))
    yield b.job_spec(payload=bytes(262_145), queue="UP")
    yield b.job_spec(queue="UP", payload=bytes(262_145))
    yield b.job_spec(content_type="c" * 128, priority=6)
    yield b.job_spec(priority=-1)
    for policy in (
        t.RetryPolicy(max_retries=1001, max_lease_losses=1001),
        t.RetryPolicy(multiplier=0.5, jitter=1.5),
        t.RetryPolicy(multiplier=float("nan"), jitter=float("inf")),
        t.RetryPolicy(non_retryable_types=["x"] * 65),
        t.RetryPolicy(non_retryable_types=["", "y" * 128]),
    ):
        yield b.job_spec(retry_policy=policy)
    yield b.job_spec(locks=[t.JobLock(name=f"l{n}") for n in range(9)])
    yield b.job_spec(locks=[t.JobLock(name="l", permits=2), t.JobLock(name="l"), t.JobLock()])
    semaphores = [t.JobLock(name=f"{n}", mode=t.LOCK_MODE_SEMAPHORE, permits=n) for n in (0, 1001)]
    yield b.job_spec(locks=[*semaphores, t.JobLock(name="m", mode=9)])  # type: ignore[arg-type]
    yield b.job_spec(
        rollback=t.RollbackJob(queue="q", type="t", payload=bytes(4097), content_type=LONG, priority=9)
    )


def bad_job_requests() -> Iterator[tuple[str, Any]]:
    yield "SubmitJob", j.SubmitJobRequest()
    yield "SubmitJob", j.SubmitJobRequest(job=b.job_spec(job_id=""))
    for job in bad_jobs():
        yield "SubmitJob", j.SubmitJobRequest(job=job)
    yield "SubmitJob", j.SubmitJobRequest(namespace="NO", request_id="r" * 129, job=b.job_spec())
    yield "SubmitJobs", j.SubmitJobsRequest()
    yield "SubmitJobs", j.SubmitJobsRequest(jobs=[b.job_spec(job_id=f"{n}") for n in range(101)])
    yield "SubmitJobs", j.SubmitJobsRequest(jobs=[b.job_spec(), b.job_spec()])
    yield "SubmitJobs", j.SubmitJobsRequest(jobs=[b.job_spec(job_id=""), b.job_spec(job_id="")])
    yield "SubmitJobs", j.SubmitJobsRequest(jobs=list(bad_jobs())[1:90:11], request_id="r")
    big = [b.job_spec(job_id=f"{n}", payload=bytes(250_000)) for n in range(13)]
    yield "SubmitJobs", j.SubmitJobsRequest(jobs=big)
    for text in BAD_IDS:
        yield "GetJob", j.GetJobRequest(job_id=text, namespace="x")
        yield "ListAttempts", j.ListAttemptsRequest(job_id=text)
        yield "WaitJob", j.WaitJobRequest(job_id=text)
        yield "CancelJob", j.CancelJobRequest(job_id=text, request_id=LONG)
        yield "UpdateJob", j.UpdateJobRequest(job_id=text, etag=LONG, priority=7)
        yield "RetryJob", j.RetryJobRequest(job_id=text, etag=LONG)
        yield "DeleteJob", j.DeleteJobRequest(job_id=text, etag="\n")
    yield "UpdateJob", j.UpdateJobRequest(job_id="a")
    for time in BAD_TIMES:
        yield "UpdateJob", j.UpdateJobRequest(job_id="a", due_time=time, run_at=time)
        yield "RetryJob", j.RetryJobRequest(job_id="a", run_at=time)
        yield "RedriveJobs", j.RedriveJobsRequest(settled_before=time)
    for span in BAD_SPANS:
        if span != Duration():
            yield "WaitJob", j.WaitJobRequest(job_id="a", timeout=span)
    for size in (-1, 1001):
        yield "ListJobs", j.ListJobsRequest(page_size=size, queue="UP", type="UP", page_token="p" * 3000)
        yield "RedriveJobs", j.RedriveJobsRequest(max_jobs=size, jobs_per_second=size)
    yield "ListJobs", j.ListJobsRequest(states=[0, 1, 9], labels=BAD_LABELS[0])  # type: ignore[list-item]
    yield "ListJobs", j.ListJobsRequest(page_token="not.ours")
    yield "ListJobs", j.ListJobsRequest(page_token="none")
    yield "RedriveJobs", j.RedriveJobsRequest(states=[t.JOB_STATE_PENDING], failure_type=LONG, queue="UP")
    yield "RedriveJobs", j.RedriveJobsRequest(page_token="not.ours")


def bad_work_requests() -> Iterator[tuple[str, Any]]:
    yield "OpenSession", w.OpenSessionRequest()
    yield "OpenSession", b.open_session(identity=LONG, sdk=LONG, labels=BAD_LABELS[1])
    for span in (*BAD_SPANS, Duration(seconds=1), Duration(seconds=3601)):
        yield "OpenSession", b.open_session(ttl=span)
        yield "ClaimJobs", b.claim_jobs(wait=span if span != Duration() else Duration(seconds=31))
        yield "ClaimJob", w.ClaimJobRequest(wait=span)
    for session in ("", "xyz", "0123456789ABCDEF", "0" * 17):
        yield "CloseSession", w.CloseSessionRequest(session_id=session)
        yield "Heartbeat", b.heartbeat(session_id=session)
        yield "ClaimJobs", b.claim_jobs(session_id=session)
        yield "ClaimJob", w.ClaimJobRequest(request_id="r", session_id=session, job_id="a")
    yield "Heartbeat", w.HeartbeatRequest()
    yield "Heartbeat", b.heartbeat(number=0, sent_at=Duration(seconds=-1))
    progress = t.Progress(ratio=2, note="n" * 5000)
    claims = [w.HeldClaim(job_id=LONG, sequence=-1, progress=progress), w.HeldClaim()]
    yield "Heartbeat", b.heartbeat(claims=claims)
    yield "Heartbeat", b.heartbeat(claims=[w.HeldClaim(job_id="a", fencing_token=1)] * 2001)
    yield "ClaimJobs", w.ClaimJobsRequest()
    yield "ClaimJobs", b.claim_jobs(max_jobs=101, queues=[w.QueueTypes(queue="UP"), w.QueueTypes(queue="q")])
    yield "ClaimJobs", b.claim_jobs(queues=[w.QueueTypes(queue="q", types=["t"] * 257)])
    yield "ClaimJobs", b.claim_jobs(queues=[w.QueueTypes(queue="q", types=["UP", ""])])
    yield "ClaimJobs", b.claim_jobs(queues=[w.QueueTypes(queue="q", types=["t"])] * 33)
    yield "CompleteJob", w.CompleteJobRequest()
    yield "CompleteJob", b.complete(result=bytes(65_537), result_content_type=LONG)
    yield "CompleteJob", b.complete(follow_ups=[b.job_spec(job_id="j1"), *list(bad_jobs())[:3]])
    twice = [b.job_spec(job_id="f", unique_key="u"), b.job_spec(job_id="f", unique_key="u")]
    yield "CompleteJob", b.complete(follow_ups=twice)
    yield "CompleteJob", b.complete(follow_ups=[b.job_spec(job_id=f"{n}") for n in range(21)])
    large = [b.job_spec(job_id=f"{n}", payload=bytes(100_000)) for n in range(3)]
    yield "CompleteJob", b.complete(follow_ups=large)
    yield "FailJob", w.FailJobRequest(job_id="a", failure=t.Failure(type=LONG), retry_delay=BAD_SPANS[0])
    yield "FailJob", w.FailJobRequest(job_id="a", fencing_token=-1, retry_delay=BAD_SPANS[4])
    yield "ReleaseJob", w.ReleaseJobRequest(job_id="a", delay=BAD_SPANS[2])
    yield "SettleJobs", w.SettleJobsRequest()
    settlements = [
        w.Settlement(),
        w.Settlement(job_id="a", fencing_token=1, complete=w.Completion(result=bytes(65_537))),
        w.Settlement(job_id="a", fencing_token=1, complete=w.Completion(follow_ups=twice)),
        w.Settlement(job_id="a", fail=w.FailureSettlement(retry_delay=BAD_SPANS[0])),
        w.Settlement(job_id="a", fencing_token=1, release=w.Release(delay=BAD_SPANS[3])),
    ]
    yield "SettleJobs", w.SettleJobsRequest(settlements=settlements)
    yield "SettleJobs", w.SettleJobsRequest(settlements=settlements * 21)
    yield "SaveCheckpoint", w.SaveCheckpointRequest(checkpoint=bytes(262_145), sequence=-1, progress=progress)


async def answers(subject: Subject) -> Transcript:
    transcript = Transcript()
    for method, request in bad_job_requests():
        await transcript.note(getattr(subject.jobs, method)(request, timeout=5))
    for method, request in bad_work_requests():
        await transcript.note(getattr(subject.workers, method)(request, timeout=5))
    return transcript


async def test_every_malformed_request_is_refused_in_the_same_words(both: tuple[Subject, Subject]) -> None:
    methods = [method for method, _ in (*bad_job_requests(), *bad_work_requests())]
    fake, service = [await answers(subject) for subject in both]

    assert len(methods) > 150
    differences = [
        f"{method}:\n  fake    {ours}\n  service {theirs}"
        for method, ours, theirs in zip(methods, fake.lines, service.lines, strict=True)
        if ours != theirs
    ]
    assert not differences, "\n".join(differences)
