"""ClaimJob on the fake's world: one job by its id, against contention, by the core's leaky bucket."""

from __future__ import annotations

import time
from typing import Final

from coordinator.core.bucket import EMPTY, UNTRIED, Bucket, BucketPolicy, Tries
from coordinator.core.commands import ClaimIt
from coordinator.core.fencing import make_token, split_token
from coordinator.core.job import Claim, claim_for
from coordinator.core.machine import Decision, Refusal
from leasekeeper.v1 import worker_service_pb2 as pb
from worker_sdk.testing import _messages as messages
from worker_sdk.testing._claiming import room_of
from worker_sdk.testing._fields import duration_ms
from worker_sdk.testing._refusals import Refused, not_found, refused_by, session_gone
from worker_sdk.testing._stage import Call, Stage
from worker_sdk.testing._work_forms import check_claim
from worker_sdk.testing._world import Bar, Place, Record

__all__ = ["ClaimById"]

_CONTENDED: Final = ("CLAIM_HELD", "NOT_CLAIMABLE", "LOCK_HELD")
_POLICY: Final = BucketPolicy()


class _Line:
    """Who waits for one job, first come first, and what the last look found in the way."""

    def __init__(self) -> None:
        self.places: list[object] = []
        self.seen: Refused | None = None
        self.revision = 0

    def saw(self, what: Refused, revision: int) -> None:
        """Somebody looked."""
        self.seen, self.revision = what, revision


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
        self._lines: dict[Place, _Line] = {}

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
        now_ms, key = _now_ms(), (request.session_id, place)
        bucket = self._buckets.get(key, EMPTY)
        early = bucket.wait_ms(now_ms)
        if early:
            raise _throttled(request.job_id, early, own=True)
        tries = self._tries.get(place, UNTRIED)
        pause = tries.wait_ms(_POLICY, now_ms, in_line=False, line=place in self._lines)
        if pause:
            self._buckets[key] = bucket = bucket.failed(_POLICY, now_ms, at_least_ms=pause)
            raise _throttled(request.job_id, bucket.wait_ms(now_ms), own=False)
        try:
            return self._try(request, place, nonce)
        except Refused as refused:
            if refused.reason in _CONTENDED:
                self._buckets[key] = bucket = bucket.failed(_POLICY, now_ms)
                refused.retry_after_ms = max(bucket.wait_ms(now_ms), _own_delay(refused))
            raise

    def _in_line(
        self, request: pb.ClaimJobRequest, place: Place, nonce: bytes, call: Call, until: float
    ) -> pb.ClaimJobResponse:
        line = self._lines.setdefault(place, _Line())
        mine = object()
        line.places.append(mine)
        try:
            while True:
                if (place[0], request.session_id) not in self._world.sessions:
                    raise session_gone(request.session_id)
                look_at = until
                if line.places[0] is mine and self._has_news(line, place):
                    now_ms = _now_ms()
                    tries = self._tries.get(place, UNTRIED)
                    pause = tries.wait_ms(_POLICY, now_ms, in_line=True, line=True)
                    if not pause:
                        try:
                            return self._try(request, place, nonce)
                        except Refused as refused:
                            if refused.reason not in _CONTENDED:
                                raise
                            line.saw(refused, self._world.records[place].revision)
                    else:
                        look_at = min(until, time.monotonic() + pause / 1000)
                if not self._stage.wait(call, look_at) and time.monotonic() >= until:
                    raise self._in_vain(request, place, line)
                if not call.alive():
                    raise self._in_vain(request, place, line)
        finally:
            line.places.remove(mine)
            if not line.places:
                del self._lines[place]
            self._stage.changed.notify_all()

    def _has_news(self, line: _Line, place: Place) -> bool:
        """Whether a look may find anything else than the last one did; a lock comes free without the job."""
        record = self._world.records.get(place)
        if record is None or line.seen is None or line.revision != record.revision:
            return True
        return line.seen.reason == "LOCK_HELD" and self._world.bar(record.job) is None

    def _in_vain(self, request: pb.ClaimJobRequest, place: Place, line: _Line) -> Refused:
        """Its wait is over; it was no burden, so it is not charged."""
        now_ms = _now_ms()
        bucket = self._buckets.get((request.session_id, place), EMPTY)
        level = bucket.leaked(_POLICY, now_ms).level
        delay = max(bucket.wait_ms(now_ms), _POLICY.delay_ms(level))
        if line.seen is None:
            return _throttled(request.job_id, delay, own=False)
        seen = line.seen
        told = Refused(seen.reason, seen.message, metadata=seen.metadata)
        told.retry_after_ms = max(delay, _own_delay(seen))
        return told

    def _try(self, request: pb.ClaimJobRequest, place: Place, nonce: bytes) -> pb.ClaimJobResponse:
        """A look that counts among the tries for the job if it fails."""
        try:
            return self._look(request, place, nonce)
        except Refused:
            now_ms = _now_ms()
            tries = self._tries.get(place, UNTRIED).begun()
            self._tries[place] = tries.ended(_POLICY, now_ms, failed=True)
            raise

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
        session = self._world.sessions.get((place[0], request.session_id))
        if session is not None:
            room_of(session)
        bar = self._world.bar(record.job)
        if bar is not None:
            raise self._barred(bar)
        queue = record.job.terms.queue
        paused = self._stage.paused.get((place[0], queue))
        if paused is not None:
            metadata = {"queue": queue, "reason": paused}
            raise Refused("QUEUE_PAUSED", f"queue {queue} is paused", metadata=metadata)
        if session is None:
            raise session_gone(request.session_id)
        self._world.claim(record, claim, self._world.next_revision())
        return pb.ClaimJobResponse(claim=messages.claim_message(record))

    def _barred(self, bar: Bar) -> Refused:
        name, asked = bar.lock.name, bar.lock.permits
        if bar.rival is not None:
            current = bar.rival.permits
            return Refused(
                "PERMITS_MISMATCH",
                f"this semaphore is used with {current} permits, not {asked}",
                metadata={"name": name, "asked": str(asked), "current": str(current)},
            )
        [first, *_] = (*bar.line.owners, *bar.line.waiters, *bar.line.misfits)
        token = make_token(split_token(self._world.token).epoch, first.revision)
        return Refused(
            "LOCK_HELD",
            "the lock is held",
            metadata={"name": name, "holder": first.session, "token": str(token)},
        )

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
    # What the service tells with a hold is the caller's delay alone.
    return 0 if refused.reason in ("CLAIM_HELD", "LOCK_HELD") else refused.retry_after_ms or 0


def _now_ms() -> int:
    # Of the real clock, whatever the world's says: callers obey these delays in real time.
    return round(time.monotonic() * 1000)


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
