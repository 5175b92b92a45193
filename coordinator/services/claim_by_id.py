"""Claims of one job by its id, against contention.

A caller that does not wait tries once, if it may (``services.contention``). Callers that wait stand in line:
the first of the line looks at the store when the job begins to wait, when what this coordinator knows of
claims says that nobody holds it, and from time to time whatever is known; the others cost the store nothing.

What is known proposes, as everywhere: a claim is made by the Txn alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coordinator.core.job import AttemptOutcome, JobState
from coordinator.errors import Reason, RequestError
from coordinator.ports import Clock, Commit, JobStore, NamespaceFeeds, Operation, Present
from coordinator.services.abandoned import Abandoned
from coordinator.services.api import ClaimedJob
from coordinator.services.circuit_gate import ALL_CLOSED, CircuitGate
from coordinator.services.claim_look import ClaimCall, ClaimLook, is_held
from coordinator.services.claiming import Delivery, session_not_found
from coordinator.services.contention import Contention, Resource, Throttled, Try
from coordinator.services.digests import claim_nonce
from coordinator.services.fencing import check_present
from coordinator.services.holders import Holders
from coordinator.services.index import Index
from coordinator.services.job_lines import JobLines, Line, Place
from coordinator.services.lock_gate import NO_LOCKS, LockGate
from coordinator.services.redelivery import Redelivery
from coordinator.services.waiting import wait_event

__all__ = ["JOB", "ClaimById", "ClaimByIdConfig", "OneClaim"]

JOB: Final = "job"
"""The kind of these resources."""

_ROUNDS: Final = 10_000
"""Rounds of one call at most; each waits or looks, so this is never met in practice."""

_CONTENDED: Final = frozenset({Reason.CLAIM_HELD, Reason.NOT_CLAIMABLE, Reason.LOCK_HELD})
"""What a caller may wait for, and is charged for."""

_OF_THE_SESSION: Final = frozenset({Reason.SESSION_NOT_FOUND, Reason.SESSION_FULL})
"""What keeps one session from a claim and says nothing of the job."""

_CLEAN: Final = frozenset({AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED, AttemptOutcome.RELEASED})
"""How an attempt ends that its holder has settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimByIdConfig:
    """Limits. Spans are seconds.

    Attributes:
        session_keys: claims of one session.
        commit_timeout: of one commit.
        glance: how often the first in line asks what is known here; the store, where that says that the job
            is free or where nothing is known.
        safety_look: how often it asks the store whatever is known. With the wait for a place among the tries
            it stays below 5.5 s, the bound of docs/contention.md.
    """

    session_keys: int = 500
    commit_timeout: float = 5.0
    glance: float = 1.0
    safety_look: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneClaim:
    """A job that a session wants. ``wait_ms`` 0: answer at once; ``repeat``: the answer of this very request
    was lost."""

    session_id: str
    request_id: str
    job_id: str
    wait_ms: int
    repeat: bool


class ClaimById:
    """Claims by id.

    Args:
        jobs: where jobs are.
        feeds: makes sure that a namespace is watched.
        present: where the store's history stands.
        index: whether the watch is alive.
        holders: what is known of claims.
        lines: who waits.
        contention: who may try.
        delivery: hands over what was won.
        redelivery: claims of earlier calls.
        abandoned: commits whose caller is gone.
        clock: time.
        config: limits.
        expired: called with (namespace, job id) for a waiting job whose time has run out; it must not block.
        circuits: what holds jobs back.
        locks: which jobs wait for a lock.
    """

    def __init__(
        self,
        jobs: JobStore,
        feeds: NamespaceFeeds,
        present: Present,
        index: Index,
        holders: Holders,
        lines: JobLines,
        contention: Contention,
        delivery: Delivery,
        redelivery: Redelivery,
        abandoned: Abandoned,
        clock: Clock,
        config: ClaimByIdConfig,
        *,
        expired: Callable[[str, str], None],
        circuits: CircuitGate = ALL_CLOSED,
        locks: LockGate = NO_LOCKS,
    ) -> None:
        self._feeds = feeds
        self._present = present
        self._index = index
        self._holders = holders
        self._lines = lines
        self._contention = contention
        self._clock = clock
        self._config = config
        self._locks = locks
        self._draining = False
        self._store = ClaimLook(
            jobs,
            holders,
            delivery,
            redelivery,
            abandoned,
            circuits,
            clock,
            session_keys=config.session_keys,
            commit_timeout=config.commit_timeout,
            expired=expired,
            locks=locks,
        )

    @property
    def conflicts(self) -> int:
        """Claims that lost: the job had been taken, or changed."""
        return self._store.conflicts

    @property
    def waiting(self) -> int:
        """Calls that wait in line."""
        return len(self._lines)

    @property
    def throttled(self) -> int:
        """Calls that were refused without a look."""
        return self._contention.throttled

    def drain(self) -> None:
        """Answer whoever waits, and refuse new calls."""
        self._draining = True
        self._lines.wake_all()

    async def claim(self, namespace: str, wanted: OneClaim, deadline: float) -> ClaimedJob:
        """That job; waits up to ``wait_ms`` while it, or a lock that it names, is held, or it is not due.

        Raises:
            RequestError: JOB_NOT_FOUND, JOB_TERMINAL, NOT_CLAIMABLE, CLAIM_HELD, LOCK_HELD, PERMITS_MISMATCH,
            RELOCK_THROTTLED (the store was not asked), CIRCUIT_OPEN and QUEUE_PAUSED (also of a call that
            would wait), SESSION_NOT_FOUND, SESSION_FULL, DRAINING, NOT_READY, ETCD_UNAVAILABLE,
            OUTCOME_UNKNOWN.
        """
        if self._draining:
            raise RequestError(Reason.DRAINING, "this coordinator is stopping", retry_after_ms=100)
        check_present(self._present)
        await self._feeds.ensure(namespace, deadline=deadline)
        call = ClaimCall(
            namespace=namespace,
            session_id=wanted.session_id,
            nonce=claim_nonce(wanted.session_id, wanted.request_id),
            job_id=wanted.job_id,
            deadline=deadline,
        )
        if call.owns(self._holders.claim(namespace, wanted.job_id)):
            # It has it already: nothing that contention could refuse.
            outcome = await self._store.look(call)
            if isinstance(outcome, ClaimedJob):
                return outcome
        if wanted.wait_ms <= 0:
            return await self._at_once(call)
        until = min(deadline, self._clock.monotonic() + wanted.wait_ms / 1000)
        line, place = self._lines.join(namespace, wanted.job_id)
        try:
            return await self._in_line(call, line, place, until, own_look=wanted.repeat)
        finally:
            self._lines.leave(namespace, wanted.job_id, line, place)

    def applied(self, operation: Operation, commit: Commit) -> None:
        """``ports.CommitObserver``: who settles cleanly what it held starts anew."""
        after = commit.stored
        if not operation.token or after is None or not self._contention:
            return
        job = after.job
        if job.state is not JobState.RUNNING and job.attempts and job.attempts[-1].outcome in _CLEAN:
            self._contention.settled(job.attempts[-1].session, Resource(JOB, job.namespace, job.job_id))

    # -- without waiting

    async def _at_once(self, call: ClaimCall) -> ClaimedJob:
        for _ in range(_ROUNDS):
            one = self._contention.begin(call.session_id, _resource(call))
            if isinstance(one, Throttled):
                raise _throttled(call, one)
            outcome = await self._tried(call, one)
            if isinstance(outcome, ClaimedJob):
                return outcome
            if outcome is not None:
                if outcome.reason in _CONTENDED:
                    delay = self._contention.charged(call.session_id, _resource(call))
                    raise _told_again(outcome, max(delay, outcome.retry_after_ms or 0))
                raise outcome
        raise RequestError(Reason.TOO_MANY_REQUESTS, "the job changes hands too fast", retry_after_ms=100)

    async def _tried(self, call: ClaimCall, one: Try) -> ClaimedJob | RequestError | None:
        """As `ClaimLook.look`; whatever happens, the try has ended."""
        won = False
        try:
            outcome = await self._store.look(call)
            won = isinstance(outcome, ClaimedJob)
        finally:
            self._contention.end(one, won=won)
        return outcome

    # -- waiting

    async def _in_line(
        self, call: ClaimCall, line: Line, place: Place, until: float, *, own_look: bool
    ) -> ClaimedJob:
        """Wait for it. ``own_look``: a repeat may have its claim already, and nobody else would see."""
        opened = self._is_open(call)
        for _ in range(_ROUNDS):
            place.moved.clear()
            now = self._clock.monotonic()
            if line.over is not None:
                raise _told_again(line.over, line.over.retry_after_ms)
            if now >= until or self._draining:
                raise self._in_vain(call, line)
            if opened and not self._is_open(call):
                raise session_not_found(call.session_id)
            pause = until - now
            if own_look:
                pause = 0
            elif line.is_first(place):
                pause = min(pause, self._due_in(call, line, now))
            if pause > 0:
                await wait_event(self._clock, place.moved, pause)
                continue
            own_look = False
            one = self._contention.begin_in_line(_resource(call))
            if isinstance(one, Throttled):
                line.look_at = now + one.delay_ms / 1000
                continue
            outcome = await self._look_for_all(call, line, one)
            if outcome is not None:
                return outcome
        raise RequestError(Reason.TOO_MANY_REQUESTS, "the job changes hands too fast", retry_after_ms=100)

    def _due_in(self, call: ClaimCall, line: Line, now: float) -> float:
        """Seconds until the first in line has to look; 0: now."""
        known = self._holders.claim(call.namespace, call.job_id)
        newer = known is not None and known.token > line.token > 0
        if line.news:
            if known is None or not newer:
                return max(0.0, line.look_at - now)
        elif now < line.look_at:
            return line.look_at - now
        held = newer or (known is not None and known.token == line.token)
        believed = line.news or self._index.ready(call.namespace)
        if known is None or not held or not believed or now >= line.looked_at + self._config.safety_look:
            return 0.0
        # It is held, as the watch tells: the store would say the same.
        line.news = False
        line.saw(is_held(call, known), known.token, now + self._config.glance)
        return self._config.glance

    async def _look_for_all(self, call: ClaimCall, line: Line, one: Try) -> ClaimedJob | None:
        news, line.news = line.news, False
        try:
            outcome = await self._tried(call, one)
        except BaseException as error:
            line.news = line.news or news
            line.look_at = self._clock.monotonic()
            if isinstance(error, RequestError) and error.reason not in _OF_THE_SESSION:
                line.look_at += self._config.glance  # the store is in trouble: it is no better for the next
            raise
        line.looked_at = now = self._clock.monotonic()
        if isinstance(outcome, ClaimedJob):
            line.news = False
            line.saw(is_held(call, outcome.claim), outcome.claim.token, now + self._config.glance)
            return outcome
        if outcome is None:
            line.look_at = now
        elif outcome.reason not in _CONTENDED:
            line.end(outcome)
        else:
            if outcome.reason is Reason.LOCK_HELD:
                self._locks.wanted(call.namespace, call.job_id, outcome.metadata["name"])
            next_look = now if line.news else now + self._config.glance
            line.saw(outcome, int(outcome.metadata.get("token", "0")), next_look)
        return None

    def _in_vain(self, call: ClaimCall, line: Line) -> RequestError:
        """Its wait is over. It was no burden, so it is not charged."""
        delay = self._contention.next_delay_ms(call.session_id, _resource(call))
        if line.seen is None:
            return _throttled(call, Throttled(delay, own=False))
        return _told_again(line.seen, max(delay, line.seen.retry_after_ms or 0))

    def _is_open(self, call: ClaimCall) -> bool:
        return self._holders.session(call.namespace, call.session_id) is not None


def _resource(call: ClaimCall) -> Resource:
    return Resource(JOB, call.namespace, call.job_id)


def _throttled(call: ClaimCall, why: Throttled) -> RequestError:
    if why.own:
        message = "this session was told to come later; nothing was looked at"
    else:
        message = "too many tries for this job have failed of late; nothing was looked at"
    return RequestError(
        Reason.RELOCK_THROTTLED,
        message,
        metadata={"job_id": call.job_id, "limit_of": "session" if why.own else "job"},
        retry_after_ms=why.delay_ms,
    )


def _told_again(error: RequestError, retry_after_ms: int | None) -> RequestError:
    """The same for another caller, or with another delay."""
    return RequestError(error.reason, error.message, metadata=error.metadata, retry_after_ms=retry_after_ms)
