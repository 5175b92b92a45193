"""What this coordinator knows of the claims that are held: from its own commits, from the watch, and from
beats.

It proposes, never decides: every use of it ends in a Txn that compares. It tells three things apart that
look alike: a claim that was settled, one whose session's lease has ended (claim and witness vanish in one
revision), and one that its session never mentions in its beats.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from coordinator.core.fencing import split_token
from coordinator.core.job import Claim, JobState, Progress
from coordinator.core.notice import Notice, NoticeKind
from coordinator.ports import Notices, Session, Stored
from coordinator.services.api import Beat, HeldClaim

__all__ = ["Holders", "Overdue", "Suspect"]

_RECENT_REVISIONS = 4_096
"""Revisions for which deletions are remembered until their other half arrives on the other watch."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A claim that seems lost. ``token`` is the claim's, 0 if it is not known."""

    namespace: str
    job_id: str
    session_id: str
    token: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """A claim that the beats of its own session speak against."""

    namespace: str
    job_id: str
    token: int
    undelivered: bool
    hold_ms: int
    reason: str


@dataclass(slots=True)
class _Held:
    claim: Claim
    stored: Stored | None = None
    progress: Progress | None = None
    last_beat_ms: int = 0
    sequence: int = -1
    moved: bool = False
    hung: bool = False
    # (monotonic seconds here, sender's monotonic ms) of the first beat of a span, and beats in it.
    same_since: tuple[float, int] | None = None
    missed_since: tuple[float, int] | None = None
    missed: int = 0
    reported: bool = False


class Holders:
    """Claims by job and by session.

    Args:
        suspect: called with each claim that seems lost; it must not block.
        notices: told once of each claim whose session beats and whose handler does not move: for half of its
            job's heartbeat timeout; or for ``hung_after_ms``, if its job has none and it has moved before.
        hung_after_ms: None: a handler without a heartbeat timeout is never said to hang.
        ended: called with (namespace, claim) for each claim that the watch saw end; it must not block.
    """

    def __init__(
        self,
        suspect: Callable[[Suspect], None],
        *,
        notices: Notices,
        hung_after_ms: int | None = None,
        ended: Callable[[str, Claim], None] = lambda namespace, claim: None,
    ) -> None:
        self._suspect = suspect
        self._notices = notices
        self._hung_after_ms = hung_after_ms
        self._ended = ended
        self._held: dict[tuple[str, str], _Held] = {}
        self._of_session: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self._sessions: dict[tuple[str, str], Session] = {}
        self._beaten_ms: dict[tuple[str, str], int] = {}
        self._ended_claims: OrderedDict[tuple[str, int], list[Suspect]] = OrderedDict()
        self._ended_sessions: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._closed_holding: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.locks_held_by: Callable[[str, str], int] = lambda namespace, session_id: 0
        """Keys of named locks on the same lease; set where there are locks."""

    # -- what settlement and queries ask

    def running(self, namespace: str, job_id: str) -> tuple[Stored, Claim] | None:
        """Record and claim of a job that this coordinator claimed or wrote last, if it seems to be
        running."""
        held = self._held.get((namespace, job_id))
        return None if held is None or held.stored is None else (held.stored, held.claim)

    def claim(self, namespace: str, job_id: str) -> Claim | None:
        """The claim that seems to stand."""
        held = self._held.get((namespace, job_id))
        return held.claim if held is not None else None

    def forget(self, namespace: str, job_id: str) -> None:
        """What is remembered of its record is outdated; the claim stays known."""
        held = self._held.get((namespace, job_id))
        if held is not None:
            held.stored = None

    def progress(self, namespace: str, job_id: str) -> Progress | None:
        """The progress that its beats told last."""
        held = self._held.get((namespace, job_id))
        return held.progress if held is not None else None

    def last_beat_ms(self, namespace: str, job_id: str) -> int:
        """Unix milliseconds of the last beat seen here that listed it, 0 for none."""
        held = self._held.get((namespace, job_id))
        return held.last_beat_ms if held is not None else 0

    def session(self, namespace: str, session_id: str) -> Session | None:
        """An open session, as far as the watch has come."""
        return self._sessions.get((namespace, session_id))

    def sessions(self, namespace: str) -> list[Session]:
        """The open sessions of a namespace, as far as the watch has come."""
        return [session for (where, _), session in self._sessions.items() if where == namespace]

    def session_beat_ms(self, namespace: str, session_id: str) -> int:
        """Unix milliseconds of the last confirmed beat of a session that was seen here, 0 for none."""
        return self._beaten_ms.get((namespace, session_id), 0)

    def claims_of(self, namespace: str, session_id: str) -> int:
        """How many claims the session is known to hold."""
        return len(self._of_session.get((namespace, session_id), ()))

    def claims(self) -> list[tuple[str, str, Claim]]:
        """Namespace, job id and claim of all that are held, as far as the watch has come."""
        return [(namespace, job_id, held.claim) for (namespace, job_id), held in self._held.items()]

    def held_by(self, namespace: str, session_id: str) -> int:
        """How many claims and locks the session is known to hold."""
        claims = len(self._of_session.get((namespace, session_id), ()))
        return claims + self.locks_held_by(namespace, session_id)

    def running_of(self, namespace: str, queue: str) -> Counter[str]:
        """How many claims are held of each type of a queue; looks at all that are held."""
        return Counter(
            held.claim.type
            for (where, _), held in self._held.items()
            if where == namespace and held.claim.queue == queue
        )

    # -- what commits and the watch tell

    def claimed(self, namespace: str, job_id: str, claim: Claim, stored: Stored | None) -> None:
        """A claim stands. An older one than is known changes nothing."""
        key = (namespace, job_id)
        held = self._held.get(key)
        if held is not None and held.claim.token >= claim.token:
            if held.claim.token == claim.token and stored is not None:
                held.stored = stored
            return
        if held is not None:
            self._leave_session(namespace, job_id, held.claim.session)
        self._held[key] = _Held(claim, stored)
        self._of_session[namespace, claim.session].add(job_id)

    def recorded(self, namespace: str, job_id: str, claim: Claim, stored: Stored) -> None:
        """The record that a claim wrote, if that claim still stands and nothing newer is known."""
        held = self._held.get((namespace, job_id))
        if held is not None and held.stored is None and held.claim.token == claim.token:
            held.stored = stored

    def rewritten(self, namespace: str, job_id: str, stored: Stored) -> None:
        """The record of a running job was written again (asked to stop)."""
        held = self._held.get((namespace, job_id))
        if held is not None and (held.stored is None or held.stored.revision < stored.revision):
            held.stored = stored

    def ended(self, namespace: str, job_id: str, token: int) -> None:
        """The claim of this token, or an older one, was ended by an own commit."""
        held = self._held.get((namespace, job_id))
        if held is not None and held.claim.token <= token:
            del self._held[namespace, job_id]
            self._leave_session(namespace, job_id, held.claim.session)

    def claim_deleted(self, namespace: str, job_id: str, revision: int) -> None:
        """The watch saw the claim key go. A loss, if its session's witness goes in the same revision.

        Maybe one, if the witness went before (the session was closed): by its settlement, or with the lease.
        """
        held = self._held.get((namespace, job_id))
        if held is None or split_token(held.claim.token).revision > revision:
            return
        del self._held[namespace, job_id]
        session_id = held.claim.session
        self._leave_session(namespace, job_id, session_id)
        self._ended(namespace, held.claim)
        suspect = Suspect(namespace, job_id, session_id, held.claim.token)
        ended = (namespace, session_id, revision) in self._ended_sessions
        if ended or (namespace, session_id) in self._closed_holding:
            self._suspect(suspect)
            return
        self._ended_claims.setdefault((namespace, revision), []).append(suspect)
        _trim(self._ended_claims)

    def session_seen(self, session: Session) -> None:
        """A session is open."""
        self._sessions[session.namespace, session.session_id] = session

    def session_deleted(self, namespace: str, session_id: str, revision: int) -> None:
        """The watch saw the witness go; claims that go, or went, in the same revision are lost."""
        self._sessions.pop((namespace, session_id), None)
        self._beaten_ms.pop((namespace, session_id), None)
        self._ended_sessions[namespace, session_id, revision] = None
        _trim(self._ended_sessions)
        if self._of_session.get((namespace, session_id)):
            self._closed_holding[namespace, session_id] = None
            _trim(self._closed_holding)
        for suspect in self._ended_claims.get((namespace, revision), ()):
            if suspect.session_id == session_id:
                self._suspect(suspect)

    def reset(self, namespace: str, claims: Iterable[tuple[str, Claim]], sessions: Iterable[Session]) -> None:
        """A new list replaces what was known; what beats told of claims that still stand is kept."""
        before = {key: held for key, held in self._held.items() if key[0] == namespace}
        for key, held in before.items():
            del self._held[key]
            self._leave_session(namespace, key[1], held.claim.session)
        for job_id, claim in claims:
            known = before.get((namespace, job_id))
            if known is not None and known.claim.token == claim.token:
                self._held[namespace, job_id] = known
                self._of_session[namespace, claim.session].add(job_id)
            else:
                self.claimed(namespace, job_id, claim, None)
        for session_key in [key for key in self._sessions if key[0] == namespace]:
            del self._sessions[session_key]
        for session in sessions:
            self.session_seen(session)
        for session_key in [key for key in self._beaten_ms if key[0] == namespace]:
            if session_key not in self._sessions:
                del self._beaten_ms[session_key]
        for session_key in self._of_session:
            if session_key[0] == namespace and session_key not in self._sessions:
                self._closed_holding[session_key] = None
        _trim(self._closed_holding)
        # Claims that vanished while nobody watched: whether they were settled or lost, the pass reads and
        # sees.
        for (_, job_id), held in before.items():
            if (namespace, job_id) not in self._held:
                self._suspect(Suspect(namespace, job_id, held.claim.session, held.claim.token))

    # -- what beats tell

    def beaten(self, namespace: str, beat: Beat, *, ttl_ms: int, now: float, now_ms: int) -> list[Overdue]:
        """Take in a confirmed beat; answers the claims that it speaks against, each once.

        A span counts only if it has passed on this clock and between the beats' send times, so that beats
        read late harm nobody and a worker's clock can only delay.
        """
        # Also of a session that the watch has not told yet, or has told the end of already.
        self._beaten_ms[namespace, beat.session_id] = now_ms
        if len(self._beaten_ms) > len(self._sessions) + _RECENT_REVISIONS:
            self._beaten_ms = {key: at for key, at in self._beaten_ms.items() if key in self._sessions}
        listed = {held.job_id: held for held in beat.claims}
        overdue: list[Overdue] = []
        for job_id in tuple(self._of_session.get((namespace, beat.session_id), ())):
            held = self._held[namespace, job_id]
            said = listed.get(job_id)
            if said is not None and said.token == held.claim.token:
                found = self._listed(held, said, beat, now, now_ms)
                self._watch_for_hang(namespace, job_id, held, beat, now)
            else:
                found = self._left_out(held, beat, ttl_ms, now)
            if found is not None and not held.reported:
                held.reported = True
                undelivered, reason = found
                token = held.claim.token
                overdue.append(Overdue(namespace, job_id, token, undelivered, ttl_ms, reason))
        return overdue

    def report_again(self, overdue: Sequence[Overdue]) -> None:
        """Taking them away did not succeed; the next beat may report them again."""
        for one in overdue:
            held = self._held.get((one.namespace, one.job_id))
            if held is not None and held.claim.token == one.token:
                held.reported = False

    @staticmethod
    def _listed(held: _Held, said: HeldClaim, beat: Beat, now: float, now_ms: int) -> tuple[bool, str] | None:
        held.missed_since, held.missed = None, 0
        held.last_beat_ms = now_ms
        if said.progress is not None:
            held.progress = said.progress
        if held.same_since is None or said.sequence != held.sequence:
            held.moved = held.same_since is not None
            held.sequence, held.same_since = said.sequence, (now, beat.sent_ms)
            return None
        limit = held.claim.heartbeat_timeout_ms
        if limit and _span(held.same_since, now, beat.sent_ms) >= limit:
            return False, f"heartbeat timeout: its handler did not move for {limit} ms"
        return None

    def _watch_for_hang(self, namespace: str, job_id: str, held: _Held, beat: Beat, now: float) -> None:
        """Tell of a handler that does not move, once; ``_listed`` has taken the beat in."""
        if held.hung or held.same_since is None:
            return
        claim = held.claim
        limit = claim.heartbeat_timeout_ms // 2 or (self._hung_after_ms if held.moved else None)
        if not limit or _span(held.same_since, now, beat.sent_ms) < limit:
            return
        held.hung = True
        notice = Notice(
            kind=NoticeKind.HUNG,
            reason=f"its session beats, and its handler has not moved for {limit} ms",
            namespace=namespace,
            queue=claim.queue,
            type=claim.type,
            job_id=job_id,
            session_id=claim.session,
            attempt=claim.attempt,
            token=claim.token,
            state_before=JobState.RUNNING,
            state_after=JobState.RUNNING,
            facts={"sequence": str(held.sequence)},
        )
        self._notices.publish(notice)

    @staticmethod
    def _left_out(held: _Held, beat: Beat, ttl_ms: int, now: float) -> tuple[bool, str] | None:
        if held.missed_since is None:
            held.missed_since, held.missed = (now, beat.sent_ms), 1
            return None
        held.missed += 1
        if held.missed >= 2 and _span(held.missed_since, now, beat.sent_ms) >= ttl_ms:
            return True, f"undelivered: its session's beats left it out for {ttl_ms} ms"
        return None

    def _leave_session(self, namespace: str, job_id: str, session_id: str) -> None:
        jobs = self._of_session.get((namespace, session_id))
        if jobs is not None:
            jobs.discard(job_id)
            if not jobs:
                del self._of_session[namespace, session_id]


def _span(since: tuple[float, int], now: float, sent_ms: int) -> float:
    """Milliseconds that passed on both clocks."""
    return min((now - since[0]) * 1000.0, float(sent_ms - since[1]))


def _trim(recent: OrderedDict[K, V]) -> None:
    while len(recent) > _RECENT_REVISIONS:
        recent.popitem(last=False)
