"""The methods of WorkerService on the fake's world. Each is called with the stage's lock held."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from coordinator.core.commands import Release, TakeAway, Taken
from coordinator.core.job import Claim, claim_for
from leasekeeper.v1 import worker_service_pb2 as pb
from worker_sdk.testing import _messages as messages
from worker_sdk.testing import _work_forms as forms
from worker_sdk.testing._claim_by_id import ClaimById
from worker_sdk.testing._claiming import room_of
from worker_sdk.testing._fields import duration_ms
from worker_sdk.testing._refusals import Refused, session_gone
from worker_sdk.testing._settlements import Settlements
from worker_sdk.testing._stage import Call, Stage
from worker_sdk.testing._world import Record, Session

__all__ = ["WorkCalls"]

_REPLY_BYTES: Final = 3 << 20


class WorkCalls:
    """WorkerService.

    Args:
        stage: where it plays.

    Attributes:
        interval_ms: how often workers are to beat; None: by their TTL.
        command: what the next beats tell every worker.
        by_id: ClaimJob.
        settlements: how attempts end, and checkpoints.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._world = stage.world
        self.interval_ms: int | None = None
        self.command = pb.WORKER_COMMAND_UNSPECIFIED
        self.by_id = ClaimById(stage)
        self.settlements = Settlements(stage, self.by_id.settled)

    # -- sessions

    def open_session(self, request: pb.OpenSessionRequest, call: Call) -> pb.OpenSessionResponse:
        """OpenSession."""
        forms.check_open_session(request)
        ttl_ms = duration_ms(request.ttl) if request.HasField("ttl") else 10_000
        namespace = _ns(request.namespace)
        session_id = messages.made_session_id(namespace, request.request_id)
        labels = sorted(request.labels.items())
        digest = messages.digest(request.identity, request.sdk, labels, ttl_ms)
        session = self._world.sessions.get((namespace, session_id))
        if session is None:
            granted = -(-ttl_ms // 1000) * 1000  # etcd counts in seconds
            session = Session(session_id, granted, digest, self._world.now_ms)
            self._world.sessions[namespace, session_id] = session
            self._world.next_revision()
        elif session.digest != digest:
            raise Refused(
                "REQUEST_ID_REUSED",
                "this request_id opened a session with other content before",
                metadata={"session_id": session_id},
            )
        return pb.OpenSessionResponse(
            session_id=session_id,
            ttl=messages.span(session.ttl_ms),
            heartbeat_interval=messages.span(self.interval_ms or min(session.ttl_ms // 3, 5_000)),
            safe_duration=messages.span(_safe_ms(session)),
            revision=self._world.token,
        )

    def close_session(self, request: pb.CloseSessionRequest, call: Call) -> pb.CloseSessionResponse:
        """CloseSession."""
        forms.check_close_session(request)
        namespace = _ns(request.namespace)
        session = self._world.sessions.get((namespace, request.session_id))
        if session is None:
            return pb.CloseSessionResponse()
        held = list(session.claims.items())
        for job_id, claim in held:
            release = Release(token=claim.token, digest=b"session closed", reason="session closed")
            self._world.act(self._world.records[namespace, job_id], release)
        del self._world.sessions[namespace, request.session_id]
        return pb.CloseSessionResponse(released=len(held))

    def heartbeat(self, request: pb.HeartbeatRequest, call: Call) -> pb.HeartbeatResponse:
        """Heartbeat."""
        forms.check_heartbeat(request)
        if request.locks:
            raise Refused("NOT_IN_THE_FAKE", "the fake coordinator does not know locks")
        namespace = _ns(request.namespace)
        session = self._world.sessions.get((namespace, request.session_id))
        if session is None:
            raise Refused(
                "SESSION_NOT_FOUND",
                "the session has ended; everything that it held is lost",
                metadata={"session_id": request.session_id},
            )
        session.beat_ms = self._world.now_ms
        verdicts = [self._verdict(namespace, held) for held in request.claims]
        self._judge(namespace, session, request.claims)
        return pb.HeartbeatResponse(
            authority=pb.AUTHORITY_CONFIRMED,
            verdicts=verdicts,
            safe_duration=messages.span(_safe_ms(session)),
            revision=self._world.token,
            command=self.command,
            number=request.number,
        )

    def _verdict(self, namespace: str, held: pb.HeldClaim) -> pb.ClaimVerdict:
        record = self._world.records.get((namespace, held.job_id))
        verdict = pb.VERDICT_LOST
        if record is not None and record.claim is not None and record.claim.token == held.fencing_token:
            asked = record.job.cancel_requested
            verdict = pb.VERDICT_CANCEL_REQUESTED if asked else pb.VERDICT_HELD
        return pb.ClaimVerdict(job_id=held.job_id, fencing_token=held.fencing_token, verdict=verdict)

    def _judge(self, namespace: str, session: Session, listed: Sequence[pb.HeldClaim]) -> None:
        """Take away the claims that the session's own beats speak against. Spans are of the world's clock."""
        said = {held.job_id: held for held in listed}
        for job_id, claim in list(session.claims.items()):
            record = self._world.records[namespace, job_id]
            held = said.get(job_id)
            if held is not None and held.fencing_token == claim.token:
                why = self._listed(record, claim, held)
            else:
                why = self._left_out(record, session)
            if why is not None:
                taken, reason = why
                command = TakeAway(
                    token=claim.token,
                    why=taken,
                    hold_ms=session.ttl_ms,
                    reason=reason,
                    jitter_number=self.settlements.jitter,
                )
                self._world.act(record, command)

    def _listed(self, record: Record, claim: Claim, held: pb.HeldClaim) -> tuple[Taken, str] | None:
        now_ms = self._world.now_ms
        record.missed_ms, record.missed, record.last_beat_ms = None, 0, now_ms
        if held.HasField("progress"):
            record.progress = messages.progress_of(held.progress)
        if record.same_ms is None or held.sequence != record.sequence:
            record.sequence, record.same_ms = held.sequence, now_ms
            return None
        limit = claim.heartbeat_timeout_ms
        if limit and now_ms - record.same_ms >= limit:
            return Taken.TIMED_OUT, f"heartbeat timeout: its handler did not move for {limit} ms"
        return None

    def _left_out(self, record: Record, session: Session) -> tuple[Taken, str] | None:
        now_ms = self._world.now_ms
        if record.missed_ms is None:
            record.missed_ms, record.missed = now_ms, 1
            return None
        record.missed += 1
        if now_ms - record.missed_ms < session.ttl_ms:
            return None
        return Taken.UNDELIVERED, f"undelivered: its session's beats left it out for {session.ttl_ms} ms"

    # -- claims

    def claim_jobs(self, request: pb.ClaimJobsRequest, call: Call) -> pb.ClaimJobsResponse:
        """ClaimJobs."""
        forms.check_claims(request)
        namespace = _ns(request.namespace)
        nonce = messages.digest("claim", request.session_id, request.request_id)
        wait_ms = duration_ms(request.wait)
        until = time.monotonic() + wait_ms / 1000
        if request.repeat:
            before = self._of_call(namespace, request.session_id, nonce)
            if before or not wait_ms:
                return pb.ClaimJobsResponse(claims=before)
        while True:
            claims = self._take(request, namespace, nonce)
            if claims or not wait_ms or not self._stage.wait(call, until):
                return pb.ClaimJobsResponse(claims=claims)

    def _of_call(self, namespace: str, session_id: str, nonce: bytes) -> list[pb.Claim]:
        session = self._world.sessions.get((namespace, session_id))
        held = session.claims.items() if session is not None else ()
        records = [self._world.records[namespace, job_id] for job_id, claim in held if claim.nonce == nonce]
        return [messages.claim_message(record) for record in records]

    def _take(self, request: pb.ClaimJobsRequest, namespace: str, nonce: bytes) -> list[pb.Claim]:
        session = self._world.sessions.get((namespace, request.session_id))
        pairs = {
            (wanted.queue, type_): None
            for wanted in request.queues
            for type_ in wanted.types
            if (namespace, wanted.queue) not in self._stage.paused
        }
        if session is None:
            # The service asks for the session only where it has to wait or to commit.
            if duration_ms(request.wait) or any(self._world.waiting(namespace, pairs)):
                raise session_gone(request.session_id)
            return []
        most = min(request.max_jobs, room_of(session))
        claims: list[pb.Claim] = []
        size, revision = 0, 0
        for record in self._world.waiting(namespace, pairs):
            if len(claims) == most:
                break
            size += record.job.terms.payload_size + 512 + ((256 << 10) if record.job.attempt else 0)
            if claims and size > _REPLY_BYTES:
                break
            revision = revision or self._world.next_revision()
            claim = claim_for(record.job, session.session_id, nonce, self._world.now_ms)
            if self._world.claim(record, claim, revision):
                claims.append(messages.claim_message(record))
        return claims

    def claim_job(self, request: pb.ClaimJobRequest, call: Call) -> pb.ClaimJobResponse:
        """ClaimJob."""
        return self.by_id.claim_job(request, call)

    def complete_job(self, request: pb.CompleteJobRequest, call: Call) -> pb.CompleteJobResponse:
        """CompleteJob."""
        return self.settlements.complete_job(request, call)

    def fail_job(self, request: pb.FailJobRequest, call: Call) -> pb.FailJobResponse:
        """FailJob."""
        return self.settlements.fail_job(request, call)

    def release_job(self, request: pb.ReleaseJobRequest, call: Call) -> pb.ReleaseJobResponse:
        """ReleaseJob."""
        return self.settlements.release_job(request, call)

    def settle_jobs(self, request: pb.SettleJobsRequest, call: Call) -> pb.SettleJobsResponse:
        """SettleJobs."""
        return self.settlements.settle_jobs(request, call)

    def save_checkpoint(self, request: pb.SaveCheckpointRequest, call: Call) -> pb.SaveCheckpointResponse:
        """SaveCheckpoint."""
        return self.settlements.save_checkpoint(request, call)


def _ns(namespace: str) -> str:
    return namespace or "default"


def _safe_ms(session: Session) -> int:
    return max(0, session.ttl_ms - max(1_000, session.ttl_ms // 5))
