"""Sessions: open, beat, close. A beat's answer is worth exactly what was read from etcd after a renewal
that counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.core.commands import Release
from coordinator.core.job import Claim
from coordinator.core.machine import Decision, decide
from coordinator.core.session_command import command_at
from coordinator.errors import (
    EtcdUnavailable,
    NotApplied,
    OutcomeUnknown,
    Reason,
    RequestError,
    StorageError,
)
from coordinator.ports import (
    Clock,
    Commit,
    Confirmation,
    JobStore,
    KeptAlive,
    NamespaceFeeds,
    Operation,
    Present,
    Session,
    SessionStore,
    Snapshot,
)
from coordinator.services.api import (
    Authority,
    Beat,
    BeatLock,
    BeatReply,
    HeldClaim,
    NewSession,
    OpenedSession,
    Verdict,
)
from coordinator.services.commits import commit_each, operation_of
from coordinator.services.digests import made_session_id, session_digest
from coordinator.services.holders import Holders, Overdue
from coordinator.services.late_calls import HEARTBEAT
from coordinator.services.lock_delivery import LockDelivery, waiter_of
from coordinator.services.storage_errors import refused

__all__ = ["SessionConfig", "Sessions", "interval_ms", "margin_ms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Times of sessions, milliseconds. ``tries``: renewals and reads until both are of one raft term."""

    default_ttl_ms: int = 10_000
    longest_interval_ms: int = 5_000
    tries: int = 3


def interval_ms(ttl_ms: int, longest_ms: int = 5_000) -> int:
    """How often to beat: a third of the granted TTL, at most ``longest_ms``."""
    return min(ttl_ms // 3, longest_ms)


def margin_ms(ttl_ms: int) -> int:
    """What a holder keeps clear of the TTL for clock drift and its own pauses."""
    return max(1_000, ttl_ms // 5)


class Sessions:
    """Sessions of workers.

    Args:
        overdue: takes in the claims that a beat speaks against; it must not block.
        late: takes in namespace, job id, token and kind of call, where a beat lists a claim that is gone.
        locks: takes in the beats, for the locks that they leave out.
    """

    def __init__(
        self,
        jobs: JobStore,
        sessions: SessionStore,
        feeds: NamespaceFeeds,
        present: Present,
        holders: Holders,
        clock: Clock,
        config: SessionConfig,
        *,
        overdue: Callable[[Sequence[Overdue]], None],
        late: Callable[[str, str, int, str], None],
        locks: LockDelivery | None = None,
    ) -> None:
        self._jobs = jobs
        self._sessions = sessions
        self._feeds = feeds
        self._present = present
        self._holders = holders
        self._clock = clock
        self._config = config
        self._overdue = overdue
        self._late = late
        self._locks = locks

    async def open(self, namespace: str, new: NewSession, deadline: float) -> OpenedSession:
        """Open a session; the same request again answers the same session.

        Raises:
            RequestError: REQUEST_ID_REUSED, NOT_READY, ETCD_UNAVAILABLE, OUTCOME_UNKNOWN.
        """
        await self._feeds.ensure(namespace, deadline=deadline)
        ttl_ms = new.ttl_ms or self._config.default_ttl_ms
        digest = session_digest(identity=new.identity, sdk=new.sdk, labels=new.labels, ttl_ms=ttl_ms)
        session = Session(
            namespace=namespace,
            session_id=made_session_id(namespace, new.request_id),
            identity=new.identity,
            sdk=new.sdk,
            labels=new.labels,
            opened_ms=self._clock.now_ms(),
            ttl_ms=ttl_ms,
            request_digest=digest,
        )
        try:
            opened = await self._sessions.open(session, deadline=deadline)
        except StorageError as error:
            raise refused(error) from error
        self._holders.session_seen(opened)
        return OpenedSession(
            session_id=opened.session_id,
            ttl_ms=opened.ttl_ms,
            interval_ms=interval_ms(opened.ttl_ms, self._config.longest_interval_ms),
            safe_ms=max(0, opened.ttl_ms - margin_ms(opened.ttl_ms)),
            position=self._present.token(),
        )

    async def beat(self, namespace: str, beat: Beat, deadline: float) -> BeatReply:
        """Renew, then read what the session still holds.

        CONFIRMED needs both: a keepalive with TTL > 0 and, after it, a linearizable read, by members of
        one raft term. A keepalive alone proves nothing: an old leader may answer for a lease that the new
        one has revoked.

        Raises:
            RequestError: SESSION_NOT_FOUND (its lease has ended, and all its claims with it).
        """
        for _ in range(self._config.tries):
            try:
                renewed = await self._renew_and_read(namespace, beat, deadline)
            except (OutcomeUnknown, EtcdUnavailable, NotApplied):
                return BeatReply(authority=Authority.UNKNOWN)
            if renewed is None:
                for held in beat.claims:
                    self._late(namespace, held.job_id, held.token, HEARTBEAT)
                if self._locks is not None:
                    self._locks.forget(namespace, beat.session_id)
                raise _gone(beat.session_id)
            kept, read, session = renewed
            if kept.raft_term == read.raft_term and not self._present.regressed:
                return self._confirmed(namespace, beat, kept, read, session)
            if self._clock.monotonic() >= deadline:
                break
        return BeatReply(authority=Authority.UNKNOWN)

    async def close(self, namespace: str, session_id: str, deadline: float) -> int:
        """Release what it holds, by token and uncharged, then revoke; answers how many claims went back.

        Repeating it is no error.

        Raises:
            RequestError: ETCD_UNAVAILABLE, OUTCOME_UNKNOWN, TOO_MANY_REQUESTS: it claims nothing any more,
                but may still hold something; repeat the call, or that is lost with the lease.
        """
        try:
            # First the witness: a poll of this session, here or elsewhere, may be committing a claim right
            # now. After this it is committed, and released below, or it loses. Else it would end with the
            # lease, as a loss that is charged.
            await self._sessions.shut(namespace, session_id, deadline=deadline)
            claims = await self._sessions.claims_of(namespace, session_id, deadline=deadline)
            released = await self._release(namespace, claims, deadline) if claims else 0
            await self._sessions.close(namespace, session_id, deadline=deadline)
        except StorageError as error:
            raise refused(error) from error
        return released

    async def _renew_and_read(
        self, namespace: str, beat: Beat, deadline: float
    ) -> tuple[KeptAlive, Confirmation, Session] | None:
        """None: the session has ended."""
        # A session's id is its lease's: who names another's must not keep that alive.
        known = self._holders.session(namespace, beat.session_id)
        if known is None and not await self._sessions.read(namespace, beat.session_id, deadline=deadline):
            return None
        kept = await self._sessions.keep_alive(beat.session_id, deadline=deadline)
        if kept.ttl_ms <= 0:
            return None
        job_ids = [held.job_id for held in beat.claims]
        read = await self._sessions.confirm(
            namespace, beat.session_id, job_ids, locks=_places(beat), deadline=deadline
        )
        return (kept, read, read.session) if read.session is not None else None

    def _confirmed(
        self, namespace: str, beat: Beat, kept: KeptAlive, read: Confirmation, session: Session
    ) -> BeatReply:
        verdicts = tuple(_verdict(held, read) for held in beat.claims)
        for held, verdict in zip(beat.claims, verdicts, strict=True):
            if verdict is Verdict.LOST:
                self._late(namespace, held.job_id, held.token, HEARTBEAT)
        ttl_ms = kept.ttl_ms
        late = self._holders.beaten(
            namespace, beat, ttl_ms=ttl_ms, now=self._clock.monotonic(), now_ms=self._clock.now_ms()
        )
        if late:
            self._overdue(late)
        if self._locks is not None:
            self._locks.beaten(namespace, beat, ttl_ms=ttl_ms, now=self._clock.monotonic())
        return BeatReply(
            authority=Authority.CONFIRMED,
            verdicts=verdicts,
            locks=tuple(_lock_verdict(beat.session_id, lock, read) for lock in beat.locks),
            safe_ms=max(0, ttl_ms - margin_ms(ttl_ms)),
            position=read.position,
            command=command_at(session.command, session.terminate_ms, self._clock.now_ms()),
        )

    async def _release(self, namespace: str, claims: Sequence[tuple[str, Claim]], deadline: float) -> int:
        """Release ``claims``; answers how many.

        Raises:
            StorageError: some could not be. Were the lease revoked all the same, they would count as losses.
        """
        released = 0
        left = list(claims)
        failure: StorageError | None = None
        for _ in range(self._config.tries):
            found = await self._jobs.read_many(namespace, [job_id for job_id, _ in left], deadline=deadline)
            now_ms = self._clock.now_ms()
            operations = [
                (held, operation)
                for held, snapshot in zip(left, found, strict=True)
                if (operation := _release_operation(snapshot, held[1], now_ms, deadline)) is not None
            ]
            results = await commit_each(self._jobs, [operation for _, operation in operations])
            left, failure = [], None
            for (held, _), result in zip(operations, results, strict=True):
                if isinstance(result, StorageError):
                    failure = result
                if not isinstance(result, Commit):
                    left.append(held)
                elif result.won:
                    released += 1
                elif result.claim is not None and result.claim.token == held[1].token:
                    left.append(held)  # its record was changed meanwhile, as by a cancellation
            if not left:
                return released
        if failure is not None:
            raise failure
        return released


def _verdict(held: HeldClaim, read: Confirmation) -> Verdict:
    claim = read.claims.get(held.job_id)
    if claim is None or claim.token != held.token:
        return Verdict.LOST
    return Verdict.CANCEL_REQUESTED if held.job_id in read.cancelled else Verdict.HELD


def _places(beat: Beat) -> list[tuple[str, str]]:
    return [(lock.name, waiter_of(beat.session_id, lock)) for lock in beat.locks]


def _lock_verdict(session_id: str, lock: BeatLock, read: Confirmation) -> tuple[Verdict, int]:
    # What has owned once owns as long as it stands: a deletion before it only adds owners.
    token = read.locks.get((lock.name, waiter_of(session_id, lock)), 0)
    if not token or (lock.token and token != lock.token):
        return Verdict.LOST, lock.token
    return Verdict.HELD, token


def _release_operation(found: Snapshot, claim: Claim, now_ms: int, deadline: float) -> Operation | None:
    if found.stored is None or found.claim is None or found.claim.token != claim.token:
        return None
    release = Release(token=claim.token, digest=b"session closed", reason="session closed")
    outcome = decide(found.stored.job, claim, release, now_ms)
    if not isinstance(outcome, Decision):
        return None
    return operation_of(found.stored, outcome, deadline, token=claim.token)


def _gone(session_id: str) -> RequestError:
    return RequestError(
        Reason.SESSION_NOT_FOUND,
        "the session has ended; everything that it held is lost",
        metadata={"session_id": session_id},
    )
