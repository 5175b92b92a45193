"""Between the published messages of workers and the values of the services.

Total functions: the input is validated already.
"""

from __future__ import annotations

from coordinator.core.commands import Complete, Fail, Release, Settlement
from coordinator.errors import RequestError
from coordinator.rpc.convert import cut_text, duration, job_state, new_job, progress_of, timestamp
from coordinator.rpc.field_checks import duration_ms
from coordinator.rpc.limits import CallLimits
from coordinator.rpc.status import to_status
from coordinator.services.api import (
    Beat,
    BeatLock,
    BeatReply,
    ClaimedJob,
    ClaimQuery,
    HeldClaim,
    NewJob,
    NewSession,
    OpenedSession,
    Settle,
    Settled,
)
from leasekeeper.v1 import worker_service_pb2 as pb

__all__ = [
    "beat",
    "claim_message",
    "claim_query",
    "complete",
    "fail",
    "follow_ups",
    "heartbeat_response",
    "new_session",
    "open_session_response",
    "release",
    "settle",
    "settle_result",
]


def new_session(request: pb.OpenSessionRequest, call_limits: CallLimits) -> NewSession:
    """A session to open."""
    ttl_ms = duration_ms(request.ttl) if request.HasField("ttl") else call_limits.ttl_default_ms
    return NewSession(
        request_id=request.request_id,
        identity=request.identity,
        sdk=request.sdk,
        labels=dict(request.labels),
        ttl_ms=ttl_ms,
    )


def open_session_response(opened: OpenedSession) -> pb.OpenSessionResponse:
    """OpenSession's answer."""
    return pb.OpenSessionResponse(
        session_id=opened.session_id,
        ttl=duration(opened.ttl_ms),
        heartbeat_interval=duration(opened.interval_ms),
        safe_duration=duration(opened.safe_ms),
        revision=opened.position,
    )


def beat(request: pb.HeartbeatRequest) -> Beat:
    """One heartbeat."""
    return Beat(
        session_id=request.session_id,
        number=request.number,
        sent_ms=request.sent_at.seconds * 1000 + request.sent_at.nanos // 1_000_000,
        claims=[
            HeldClaim(
                job_id=claim.job_id,
                token=claim.fencing_token,
                sequence=claim.sequence,
                progress=progress_of(claim.progress) if claim.HasField("progress") else None,
            )
            for claim in request.claims
        ],
        locks=[BeatLock(lock.name, lock.fencing_token, lock.request_id) for lock in request.locks],
    )


def heartbeat_response(said: Beat, reply: BeatReply) -> pb.HeartbeatResponse:
    """Heartbeat's answer; verdicts in the order of the beat's claims."""
    message = pb.HeartbeatResponse(
        authority=pb.Authority.ValueType(reply.authority.value),
        safe_duration=duration(reply.safe_ms) if reply.safe_ms else None,
        revision=reply.position,
        command=pb.WorkerCommand.ValueType(reply.command),
        number=said.number,
    )
    message.verdicts.extend(
        pb.ClaimVerdict(
            job_id=claim.job_id, fencing_token=claim.token, verdict=pb.Verdict.ValueType(verdict.value)
        )
        for claim, verdict in zip(said.claims, reply.verdicts, strict=bool(reply.verdicts))
    )
    message.lock_verdicts.extend(
        pb.LockVerdict(name=lock.name, fencing_token=token, verdict=pb.Verdict.ValueType(verdict.value))
        for lock, (verdict, token) in zip(said.locks, reply.locks, strict=bool(reply.locks))
    )
    return message


def claim_query(request: pb.ClaimJobsRequest, wait_ms: int) -> ClaimQuery:
    """What a worker wants to claim; a pair named twice counts once."""
    pairs = dict.fromkeys((wanted.queue, type_) for wanted in request.queues for type_ in wanted.types)
    return ClaimQuery(
        session_id=request.session_id,
        request_id=request.request_id,
        queues=tuple(pairs),
        max_jobs=request.max_jobs,
        wait_ms=wait_ms,
        repeat=request.repeat,
    )


def claim_message(claimed: ClaimedJob) -> pb.Claim:
    """A claimed job."""
    job, claim, spec = claimed.stored.job, claimed.claim, claimed.spec
    terms = job.terms
    message = pb.Claim(
        job_id=job.job_id,
        fencing_token=claim.token,
        queue=terms.queue,
        type=terms.type,
        attempt=claim.attempt,
        payload=spec.payload,
        priority=terms.priority,
        max_retries=terms.retry.max_retries,
    )
    seconds, ms = divmod(terms.submit_ms, 1000)
    message.submit_time.seconds = seconds
    message.submit_time.nanos = ms * 1_000_000
    # Most jobs have none of these, and an assignment costs as much as the look.
    if spec.content_type:
        message.content_type = spec.content_type
    if terms.labels:
        message.labels.update(terms.labels)
    if job.failures:
        message.failures = job.failures
    if claimed.checkpoint is not None:
        message.checkpoint = claimed.checkpoint.data
    if claim.run_timeout_ms:
        message.run_timeout.CopyFrom(duration(claim.run_timeout_ms))
    if terms.heartbeat_timeout_ms:
        message.heartbeat_timeout.CopyFrom(duration(terms.heartbeat_timeout_ms))
    if terms.locks:
        message.lock_names.extend([lock.name for lock in terms.locks])
    due = timestamp(terms.due_ms)
    if due is not None:
        message.due_time.CopyFrom(due)
    return message


def complete(token: int, how: pb.CompleteJobRequest | pb.Completion) -> Complete:
    """A completion. Its digest, like every settlement's, is the service's to compute."""
    return Complete(token=token, digest=b"", result=how.result, result_content_type=how.result_content_type)


def follow_ups(how: pb.CompleteJobRequest | pb.Completion) -> tuple[NewJob, ...]:
    """The jobs that a completion submits, if any."""
    return tuple(new_job(spec, item) for item, spec in enumerate(how.follow_ups)) if how.follow_ups else ()


def fail(token: int, how: pb.FailJobRequest | pb.FailureSettlement) -> Fail:
    """A failure; its message is cut to 512 bytes."""
    return Fail(
        token=token,
        digest=b"",
        failure_type=how.failure.type,
        failure_message=cut_text(how.failure.message),
        retry_delay_ms=duration_ms(how.retry_delay) if how.HasField("retry_delay") else None,
        no_retry=how.no_retry,
    )


def release(token: int, how: pb.ReleaseJobRequest | pb.Release) -> Release:
    """A release; its reason is cut to 512 bytes."""
    delay_ms = duration_ms(how.delay) if how.HasField("delay") else 0
    return Release(token=token, digest=b"", delay_ms=delay_ms, reason=cut_text(how.reason))


def settle(item: pb.Settlement) -> Settle:
    """One settlement of a batch."""
    how, token = item.WhichOneof("how"), item.fencing_token
    command: Settlement
    if how == "complete":
        return Settle(item.job_id, complete(token, item.complete), follow_ups(item.complete))
    if how == "fail":
        command = fail(token, item.fail)
    else:
        command = release(token, item.release)
    return Settle(item.job_id, command)


def settle_result(job_id: str, outcome: Settled | RequestError) -> pb.SettleResult:
    """One result of SettleJobs."""
    if isinstance(outcome, RequestError):
        return pb.SettleResult(job_id=job_id, error=to_status(outcome))
    result = pb.SettleResult(job_id=job_id, state=job_state(outcome.state))
    ready = timestamp(outcome.ready_ms)
    if ready is not None:
        result.ready_time.CopyFrom(ready)
    return result
