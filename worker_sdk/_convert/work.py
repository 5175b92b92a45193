"""Sessions, beats, claims and settlements: values to messages and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leasekeeper.v1 import worker_service_pb2 as pb
from worker_sdk._convert.status import from_status
from worker_sdk._convert.times import duration, optional_time, seconds
from worker_sdk._work import (
    BeatAnswer,
    BeatLine,
    BeatLock,
    ClaimedJob,
    Command,
    Completed,
    Failed,
    LockVerdictOn,
    OpenedSession,
    Outcome,
    QueueTypes,
    Verdict,
    VerdictOn,
)
from worker_sdk.errors import RequestError

__all__ = [
    "ClaimRequest",
    "SettlementMessage",
    "beat_from",
    "beat_to",
    "claim_to",
    "claimed_from",
    "open_to",
    "opened_from",
    "settled_from",
    "settlement_to",
]

ClaimRequest = pb.ClaimJobsRequest
SettlementMessage = pb.Settlement

_MAX_TYPE_BYTES = 127
_MAX_TEXT_BYTES = 512


def open_to(
    *, namespace: str, request_id: str, identity: str, ttl: float, sdk: str, labels: Mapping[str, str]
) -> pb.OpenSessionRequest:
    """Return the request that opens a session."""
    return pb.OpenSessionRequest(
        namespace=namespace,
        request_id=request_id,
        identity=identity,
        ttl=duration(ttl, "ttl"),
        sdk=sdk,
        labels=labels,
    )


def opened_from(message: pb.OpenSessionResponse) -> OpenedSession:
    """Return the session as granted."""
    return OpenedSession(
        session_id=message.session_id,
        ttl=seconds(message.ttl),
        heartbeat_interval=seconds(message.heartbeat_interval),
        safe_duration=seconds(message.safe_duration),
        revision=message.revision,
    )


def beat_to(
    *, namespace: str, session_id: str, number: int, sent: float, claims: Sequence[BeatLine]
) -> pb.HeartbeatRequest:
    """Return a beat."""
    request = pb.HeartbeatRequest(
        namespace=namespace, session_id=session_id, number=number, sent_at=duration(sent, "sent_at")
    )
    for claim in claims:
        if isinstance(claim, BeatLock):
            request.locks.add(name=claim.name, fencing_token=claim.fencing_token, request_id=claim.request_id)
            continue
        entry = request.claims.add(
            job_id=claim.job_id, fencing_token=claim.fencing_token, sequence=claim.sequence
        )
        if claim.progress is not None:
            entry.progress.ratio, entry.progress.note = claim.progress
    return request


def beat_from(message: pb.HeartbeatResponse) -> BeatAnswer:
    """Return the answer to a beat; verdicts and commands that this SDK does not know count as none."""
    confirmed = message.authority == pb.AUTHORITY_CONFIRMED
    return BeatAnswer(
        confirmed=confirmed,
        verdicts=tuple(VerdictOn(v.job_id, v.fencing_token, _verdict(v.verdict)) for v in message.verdicts),
        locks=tuple(
            LockVerdictOn(v.name, v.fencing_token, _verdict(v.verdict)) for v in message.lock_verdicts
        ),
        safe_duration=seconds(message.safe_duration),
        revision=message.revision,
        command=Command(message.command) if message.command in _COMMANDS else Command.NONE,
    )


def _verdict(number: int) -> Verdict:
    return Verdict(number) if number in _VERDICTS else Verdict.UNSPECIFIED


def claim_to(
    *,
    namespace: str,
    request_id: str,
    session_id: str,
    queues: Sequence[QueueTypes],
    max_jobs: int,
    wait: float,
    repeat: bool,
) -> pb.ClaimJobsRequest:
    """Return a request for jobs; *wait* in seconds."""
    return pb.ClaimJobsRequest(
        namespace=namespace,
        request_id=request_id,
        session_id=session_id,
        queues=[pb.QueueTypes(queue=wanted.queue, types=wanted.types) for wanted in queues],
        max_jobs=max_jobs,
        wait=duration(wait, "wait"),
        repeat=repeat,
    )


def claimed_from(message: pb.Claim) -> ClaimedJob:
    """Return a claimed job."""
    has = message.HasField
    labels = message.labels
    return ClaimedJob(
        message.job_id,
        message.fencing_token,
        message.queue,
        message.type,
        message.attempt,
        message.payload,
        message.content_type,
        dict(labels) if labels else _NO_LABELS,
        message.checkpoint,
        seconds(message.run_timeout) if has("run_timeout") else None,
        seconds(message.heartbeat_timeout) if has("heartbeat_timeout") else None,
        optional_time(message, "due_time"),
        optional_time(message, "submit_time"),
        message.priority,
        message.failures,
        message.max_retries,
    )


def settlement_to(job_id: str, fencing_token: int, outcome: Outcome) -> pb.Settlement:
    """Return one settlement. Texts are cut to what the coordinator takes, at a character's border."""
    message = pb.Settlement(job_id=job_id, fencing_token=fencing_token)
    if isinstance(outcome, Completed):
        message.complete.SetInParent()
        if outcome.result:
            message.complete.result = outcome.result
        if outcome.content_type:
            message.complete.result_content_type = outcome.content_type
        for encoded in outcome.follow_ups:
            message.complete.follow_ups.add().ParseFromString(encoded)
    elif isinstance(outcome, Failed):
        message.fail.failure.type = _cut(outcome.type, _MAX_TYPE_BYTES)
        message.fail.failure.message = _cut(outcome.message, _MAX_TEXT_BYTES)
        message.fail.no_retry = outcome.no_retry
        if outcome.delay is not None:
            message.fail.retry_delay.CopyFrom(duration(outcome.delay, "retry_delay"))
    else:
        message.release.reason = _cut(outcome.reason, _MAX_TEXT_BYTES)
    return message


def settled_from(message: pb.SettleResult) -> RequestError | None:
    """Return why a settlement was refused; None: it stands."""
    return from_status(message.error) if message.HasField("error") else None


def _cut(text: str, most: int) -> str:
    # Surrogates cannot travel: an exception's message may hold any string.
    encoded = text.encode("utf-8", "replace")
    return encoded[:most].decode("utf-8", "ignore")


_NO_LABELS: Mapping[str, str] = {}
_VERDICTS = frozenset(int(verdict) for verdict in Verdict)
_COMMANDS = frozenset(int(command) for command in Command)
