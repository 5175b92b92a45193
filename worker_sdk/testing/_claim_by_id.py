"""ClaimJob on the fake's world: one job by its id, against contention, by the core's leaky bucket."""

from __future__ import annotations

import time
from typing import Final

from coordinator.core.bucket import EMPTY, UNTRIED, Bucket, BucketPolicy, Tries
from coordinator.core.commands import ClaimIt
from coordinator.core.job import Claim
from coordinator.core.machine import Decision, Refusal
from leasekeeper.v1 import worker_service_pb2 as pb
from worker_sdk.testing import _messages as messages
from worker_sdk.testing._claiming import claim_for, room_of
from worker_sdk.testing._fields import duration_ms
from worker_sdk.testing._refusals import Refused, not_found, refused_by, session_gone
from worker_sdk.testing._stage import Call, Stage
from worker_sdk.testing._work_forms import check_claim
from worker_sdk.testing._world import Place, Record

__all__ = ["ClaimById"]

_CONTENDED: Final = ("CLAIM_HELD", "NOT_CLAIMABLE")
_POLICY: Final = BucketPolicy()


class ClaimById:
    """Claims by id, and who waits for which job.

    Args:
        stage: where it plays.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._world = stage.world
        self._buckets: dict[tuple[str, Place], Bucket] = {}
        self._tries: dict[Place, Tries] = {}
        self._lines: dict[Place, list[object]] = {}

    def settled(self, session_id: str, place: Place) -> None:
        """Who settles cleanly what it held starts anew."""
        self._buckets.pop((session_id, place), None)

    def claim_job(self, request: pb.ClaimJobRequest, call: Call) -> pb.ClaimJobResponse:
        """ClaimJob."""
        check_claim(request)
        place = (request.namespace or "default", request.job_id)
        nonce = messages.digest("claim", request.session_id, request.request_id)
        record = self._world.records.get(place)
        if record is not None and _owns(record.claim, request.session_id, nonce):
            return pb.ClaimJobResponse(claim=messages.claim_message(record))
        wait_ms = duration_ms(request.wait)
        if not wait_ms:
            return self._at_once(request, place, nonce)
        return self._in_line(request, place, nonce, call, time.monotonic() + wait_ms / 1000)

    def _at_once(self, request: pb.ClaimJobRequest, place: Place, nonce: bytes) -> pb.ClaimJobResponse:
        now_ms, key = self._world.now_ms, (request.session_id, place)
        bucket = self._buckets.get(key, EMPTY)
        early = bucket.wait_ms(now_ms)
        if early:
            raise _throttled(request.job_id, early, own=True)
        tries = self._tries.get(place, UNTRIED)
        pause = tries.wait_ms(_POLICY, now_ms, in_line=False, line=bool(self._lines.get(place)))
        if pause:
            self._buckets[key] = bucket = bucket.failed(_POLICY, now_ms, at_least_ms=pause)
            raise _throttled(request.job_id, bucket.wait_ms(now_ms), own=False)
        try:
            return self._look(request, place, nonce)
        except Refused as refused:
            self._tries[place] = tries.begun().ended(_POLICY, now_ms, failed=True)
            if refused.reason in _CONTENDED:
                self._buckets[key] = bucket = bucket.failed(_POLICY, now_ms)
                refused.retry_after_ms = max(bucket.wait_ms(now_ms), _own_delay(refused))
            raise

    def _in_line(
        self, request: pb.ClaimJobRequest, place: Place, nonce: bytes, call: Call, until: float
    ) -> pb.ClaimJobResponse:
        line = self._lines.setdefault(place, [])
        mine = object()
        line.append(mine)
        try:
            while True:
                if (place[0], request.session_id) not in self._world.sessions:
                    raise session_gone(request.session_id)
                refused = _held_by_line(self._world.records.get(place), request.job_id)
                if line[0] is mine or refused is None:
                    try:
                        return self._look(request, place, nonce)
                    except Refused as error:
                        if error.reason not in _CONTENDED:
                            raise
                        refused = error
                if not self._stage.wait(call, until):
                    delay = self._buckets.get((request.session_id, place), EMPTY).failed(
                        _POLICY, self._world.now_ms
                    )
                    least = delay.wait_ms(self._world.now_ms)
                    refused.retry_after_ms = max(least, _own_delay(refused))
                    raise refused
        finally:
            line.remove(mine)
            if not line:
                del self._lines[place]
            self._stage.changed.notify_all()

    def _look(self, request: pb.ClaimJobRequest, place: Place, nonce: bytes) -> pb.ClaimJobResponse:
        record = self._world.records.get(place)
        if record is None:
            raise not_found(request.job_id)
        claim = claim_for(record.job, request.session_id, nonce, self._world.now_ms)
        outcome = self._world.decide(record, ClaimIt(claim=claim))
        if isinstance(outcome, Refusal):
            raise self._why_not(record, outcome)
        if not isinstance(outcome, Decision):
            raise Refused(
                "NOT_CLAIMABLE", "its time in the queue is over", metadata={"job_id": request.job_id}
            )
        queue = record.job.terms.queue
        if (place[0], queue) in self._stage.paused:
            raise Refused("QUEUE_PAUSED", f"queue {queue} is paused", metadata={"queue": queue})
        session = self._world.sessions.get((place[0], request.session_id))
        if session is None:
            raise session_gone(request.session_id)
        room_of(session)
        self._world.claim(record, claim, self._world.next_revision())
        return pb.ClaimJobResponse(claim=messages.claim_message(record))

    def _why_not(self, record: Record, refusal: Refusal) -> Refused:
        refused = refused_by(refusal)
        if refused.reason == "CLAIM_HELD":
            refused.metadata["token"] = str(record.claim.token if record.claim is not None else 0)
        elif refused.reason == "NOT_CLAIMABLE":
            refused.retry_after_ms = max(1, record.job.ready_ms - self._world.now_ms)
        return refused


def _owns(claim: Claim | None, session_id: str, nonce: bytes) -> bool:
    return claim is not None and (claim.session, claim.nonce) == (session_id, nonce)


def _own_delay(refused: Refused) -> int:
    # What the service adds to a CLAIM_HELD is the caller's delay alone.
    return 0 if refused.reason == "CLAIM_HELD" else refused.retry_after_ms or 0


def _held_by_line(record: Record | None, job_id: str) -> Refused | None:
    """What a caller who is not first in line is told; None: it has to look for itself."""
    if record is None or record.job.terminal:
        return None
    facts = {"job_id": job_id, "state": record.job.state.name}
    if record.claim is None:
        return Refused(
            "NOT_CLAIMABLE", f"not possible while the job is {record.job.state.name}", metadata=facts
        )
    facts |= {"holder": record.claim.session, "token": str(record.claim.token)}
    return Refused("CLAIM_HELD", "the job is held", metadata=facts)


def _throttled(job_id: str, delay_ms: int, *, own: bool) -> Refused:
    if own:
        message = "this session was told to come later; nothing was looked at"
    else:
        message = "too many tries for this job have failed of late; nothing was looked at"
    return Refused(
        "RELOCK_THROTTLED",
        message,
        metadata={"job_id": job_id, "limit_of": "session" if own else "job"},
        retry_after_ms=delay_ms,
    )
