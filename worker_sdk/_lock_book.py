"""The locks of one client, shared by its event loop and its beat thread, and what is known of each."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from worker_sdk._claims import BeatEffects, HeldClaim
from worker_sdk._latch import Latch
from worker_sdk._machine import BeatLog
from worker_sdk._work import BeatAnswer, BeatLock, LockVerdictOn, Verdict

__all__ = ["LockBook", "LockHold", "LockPhase"]

_NEVER = float("-inf")


class LockPhase(Enum):
    """Where a hold stands in its process.

    ::

        ASKED ──answered──▶ UNCOVERED ──covered──▶ HELD ──given back──▶ RELEASING ──▶ (gone)
          └──────────lost──────┴─────────lost───────┴──▶ LOST
    """

    ASKED = "asked"
    # Owned, but no confirmed beat vouches for it now: what it guards must not be touched.
    UNCOVERED = "uncovered"
    HELD = "held"
    LOST = "lost"
    RELEASING = "releasing"


class LockHold:
    """The locks of one AcquireLock call, all or none; from before the call until the release is answered.

    ``phase``, ``tokens`` and ``deadline`` change under the book's lock.

    Attributes:
        deadline: until when this process may believe that it owns them, seconds of the SDK's clock.
        lost: set when somebody else may own one of them.
        decided: set when the hold may be used, and when it is lost.
    """

    __slots__ = (
        "deadline",
        "decided",
        "generation",
        "lost",
        "names",
        "phase",
        "request_id",
        "seen",
        "tokens",
    )

    def __init__(self, request_id: str, names: tuple[str, ...], generation: int) -> None:
        self.request_id = request_id
        self.names = names
        self.generation = generation
        self.phase = LockPhase.ASKED
        self.tokens: dict[str, int] = {}
        self.deadline = _NEVER
        self.lost = Latch()
        self.decided = Latch()
        # By name: token and deadline that the last confirmed beat which listed it showed of its entry.
        self.seen: dict[str, tuple[int, float]] = {}

    def vouched(self) -> float:
        """Return the deadline that the beats which listed every name prove."""
        if not self.tokens:
            return _NEVER
        found = [self.seen.get(name, (0, _NEVER)) for name in self.names]
        shown = zip(self.names, found, strict=True)
        return min(until if token == self.tokens[name] else _NEVER for name, (token, until) in shown)


@dataclass(frozen=True, slots=True)
class ListedLock:
    """One name of a hold as a beat listed it."""

    hold: LockHold
    name: str
    token: int


class LockBook:
    """All locks of the present session. Every method may be called from any thread.

    Implements `_session.Book`. Whoever must hear of a loss waits on the hold's latches, so the event loop is
    told nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._log = BeatLog()
        self._generation = 0
        self._holds: dict[str, LockHold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def generation(self) -> int:
        """Counts sessions; 0 before the first."""
        return self._generation

    @property
    def session_deadline(self) -> float:
        """Until when the session is safe; minus infinity if it is not."""
        with self._lock:
            return self._log.deadline

    def opened(self, *, sent: float, safe_duration: float, revision: int) -> int:
        """Begin a new session; return its generation."""
        with self._lock:
            self._generation += 1
            self._log = BeatLog()
            self._log.confirm(sent=sent, safe_duration=safe_duration, revision=revision)
            return self._generation

    def ask(self, generation: int, request_id: str, names: tuple[str, ...]) -> LockHold | None:
        """Enter locks that are about to be asked for; None if that session is over."""
        with self._lock:
            if generation != self._generation:
                return None
            hold = self._holds[request_id] = LockHold(request_id, names, generation)
            return hold

    def owned(self, hold: LockHold, tokens: Mapping[str, int], now: float) -> bool:
        """AcquireLock has answered; False: no beat vouches for the locks yet, or the session has ended.

        The hold takes the deadline of the last confirmed beat that lies below its token, or of a later one
        that listed it, in its wait, with this very token.
        """
        with self._lock:
            if hold.phase is not LockPhase.ASKED:
                return False
            hold.tokens = dict(tokens)
            hold.phase = LockPhase.UNCOVERED
            known = min(self._log.deadline_for(token) for token in hold.tokens.values())
            self._cover(hold, max(known, hold.vouched()), now)
            return hold.phase is LockPhase.HELD

    def _cover(self, hold: LockHold, deadline: float, now: float) -> None:
        hold.deadline = max(hold.deadline, deadline)
        if hold.phase is LockPhase.UNCOVERED and hold.deadline > now:
            hold.phase = LockPhase.HELD
            hold.decided.set()

    def snapshot(self, loop_turns: int) -> Sequence[tuple[ListedLock, BeatLock]]:
        """Return every name of every hold with the line that a beat has for it."""
        with self._lock:
            listed = [
                ListedLock(hold, name, hold.tokens.get(name, 0))
                for hold in self._holds.values()
                if hold.phase is not LockPhase.LOST
                for name in hold.names
            ]
        return [(one, BeatLock(one.name, one.token, one.hold.request_id)) for one in listed]

    def confirm(
        self, generation: int, claims: Sequence[ListedLock], answer: BeatAnswer, *, sent: float
    ) -> BeatEffects:
        """Take in a confirmed beat that listed *claims*, in this order."""
        with self._lock:
            if generation != self._generation:
                return BeatEffects()
            deadline = self._log.confirm(
                sent=sent, safe_duration=answer.safe_duration, revision=answer.revision
            )
            # A coordinator that knows nothing of locks gives no verdicts: then nothing is proved.
            for listed, verdict in zip(claims, answer.locks, strict=False):
                self._judge(listed, verdict, deadline)
            for hold in {listed.hold for listed in claims}:
                if hold.phase in (LockPhase.UNCOVERED, LockPhase.HELD):
                    self._cover(hold, hold.vouched(), sent)
        return BeatEffects()

    def _judge(self, listed: ListedLock, verdict: LockVerdictOn, deadline: float) -> None:
        if verdict.verdict is Verdict.HELD and listed.name == verdict.name:
            listed.hold.seen[listed.name] = (verdict.fencing_token, deadline)
        elif verdict.verdict is Verdict.LOST and listed.token:
            # Of a wait it says only that no entry stood then.
            self._lose(listed.hold)

    @staticmethod
    def _lose(hold: LockHold) -> None:
        if hold.phase is LockPhase.RELEASING:
            return  # perhaps it is gone because the release counted; only its answer tells
        hold.phase = LockPhase.LOST
        hold.lost.set()
        hold.decided.set()

    def expire(self, now: float) -> list[HeldClaim]:
        """Locks whose deadline has passed are lost from now on."""
        with self._lock:
            for hold in self._holds.values():
                if hold.phase is LockPhase.HELD and hold.deadline <= now:
                    self._lose(hold)
        return []

    def next_deadline(self, now: float) -> float:
        """Return the earliest deadline after which something must be stopped; infinity if there is none."""
        with self._lock:
            held = [hold.deadline for hold in self._holds.values() if hold.phase is LockPhase.HELD]
            session = self._log.deadline
        return min([*held, session if session > now else float("inf")])

    def lose_all(self) -> list[HeldClaim]:
        """End the session: everything is lost, and nothing listed any more."""
        with self._lock:
            for hold in self._holds.values():
                self._lose(hold)
            self._holds.clear()
            self._log = BeatLog()
            self._generation += 1
        return []

    def lost_now(self, hold: LockHold, now: float) -> bool:
        """Return whether a hold is lost, by what was heard or by the clock alone."""
        return hold.phase is not LockPhase.HELD or hold.deadline <= now

    def releasing(self, hold: LockHold) -> bool:
        """The holder is done; False: it was lost before."""
        with self._lock:
            if hold.phase is LockPhase.LOST:
                return False
            hold.phase = LockPhase.RELEASING
            return True

    def forget(self, hold: LockHold) -> None:
        """List it no more: it was given back, or was never had."""
        with self._lock:
            if self._holds.get(hold.request_id) is hold:
                del self._holds[hold.request_id]

    def lose_on_loop(self) -> list[HeldClaim]:
        """Return nothing: locks belong to whoever asked for them, on whatever loop or thread that is."""
        return []

    def running(self, current: object = None) -> list[str]:
        """Return the names of the locks that are held."""
        with self._lock:
            return [
                name for hold in self._holds.values() if hold.phase is LockPhase.HELD for name in hold.names
            ]

    begun = running
