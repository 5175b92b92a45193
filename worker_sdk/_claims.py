"""The claims of one worker, shared by its event loop and its beat thread, and what is known of each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from worker_sdk._follow_ups import FollowUps
from worker_sdk._latch import Latch
from worker_sdk._machine import BeatLog, ClaimPhase
from worker_sdk._work import BeatAnswer, BeatClaim, ClaimedJob, StopReason, Verdict

__all__ = ["BeatEffects", "ClaimBook", "HeldClaim"]

_NEVER = float("-inf")


class HeldClaim:
    """One claim. ``phase`` and ``deadline`` change under the book's lock; the rest belongs to the event loop.

    Attributes:
        deadline: until when this process may believe that it holds the job, seconds of the SDK's clock.
        given_away: somebody said that the claim is gone; False if only the deadline passed.
        lost, cancelled: set when the handler is told to stop.
        advances: grows with each sign of life that the handler gives itself.
    """

    __slots__ = (
        "advances",
        "cancelled",
        "checkpoint_sequence",
        "deadline",
        "follow_ups",
        "given_away",
        "interrupt",
        "job",
        "lost",
        "on_loop",
        "phase",
        "progress",
        "run_until",
        "started",
        "stop_reason",
        "task",
        "timer",
    )

    def __init__(self, job: ClaimedJob, deadline: float, phase: ClaimPhase) -> None:
        self.job = job
        self.deadline = deadline
        self.phase = phase
        self.given_away = False
        self.lost = Latch()
        self.cancelled = Latch()
        self.advances = 0
        self.progress: tuple[float, str] | None = None
        self.checkpoint_sequence = 0
        self.follow_ups = FollowUps()
        self.stop_reason: StopReason | None = None
        self.started = False
        # Whether the turning of the event loop is a sign of this handler's life.
        self.on_loop = True
        self.run_until: float | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        # Ends a handler that runs in another process; safe to call from any thread, and more than once.
        self.interrupt: Callable[[], None] | None = None

    def set_lost(self) -> None:
        """Set the flags of a loss; from any thread."""
        self.lost.set()
        self._cancel()

    def _cancel(self) -> None:
        self.cancelled.set()
        interrupt = self.interrupt
        if interrupt is not None:
            interrupt()

    def tell(self, reason: StopReason) -> bool:
        """Record why the handler is to stop, and set its flags; False if it was told as much before.

        The first reason stands, except that a loss goes over everything.
        """
        if self.stop_reason is StopReason.LOST or self.stop_reason is reason:
            return False
        if reason is StopReason.LOST:
            self.stop_reason = reason
            self.set_lost()
            return True
        if self.stop_reason is not None:
            return False
        self.stop_reason = reason
        self._cancel()
        return True


@dataclass(frozen=True, slots=True)
class BeatEffects:
    """What the event loop has to do after a beat."""

    startable: list[HeldClaim] = field(default_factory=list)
    lost: list[HeldClaim] = field(default_factory=list)
    cancelled: list[HeldClaim] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.startable or self.lost or self.cancelled)


class ClaimBook:
    """All claims of the present session. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._log = BeatLog()
        self._generation = 0
        self._claims: dict[tuple[str, int], HeldClaim] = {}

    def __len__(self) -> int:
        return len(self._claims)

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
        """Begin a new session; return its generation. `lose_all` has emptied the book before."""
        with self._lock:
            self._generation += 1
            self._log = BeatLog()
            self._log.confirm(sent=sent, safe_duration=safe_duration, revision=revision)
            return self._generation

    def admit(self, generation: int, jobs: Iterable[ClaimedJob], now: float) -> list[HeldClaim]:
        """Enter new claims of a session; none if that session is over, since its claims ended with it.

        A claim that no confirmed beat covers now is WAITING and must not start.
        """
        with self._lock:
            if generation != self._generation:
                return []
            admitted = []
            for job in jobs:
                key = (job.job_id, job.fencing_token)
                if key in self._claims:
                    continue  # a repeated call answered it again
                deadline = self._log.deadline_for(job.fencing_token)
                phase = ClaimPhase.RUNNING if deadline > now else ClaimPhase.WAITING
                claim = self._claims[key] = HeldClaim(job, deadline, phase)
                admitted.append(claim)
            return admitted

    def snapshot(self, loop_turns: int) -> list[tuple[HeldClaim, BeatClaim]]:
        """Return every claim with the line that a beat has for it."""
        with self._lock:
            claims = list(self._claims.values())
        return [
            (
                claim,
                BeatClaim(
                    claim.job.job_id,
                    claim.job.fencing_token,
                    claim.advances + (loop_turns if claim.on_loop else 0),
                    claim.progress,
                ),
            )
            for claim in claims
        ]

    def confirm(
        self, generation: int, claims: Sequence[HeldClaim], answer: BeatAnswer, *, sent: float
    ) -> BeatEffects:
        """Take in a confirmed beat that listed *claims*, in this order."""
        effects = BeatEffects()
        with self._lock:
            if generation != self._generation:
                return effects
            deadline = self._log.confirm(
                sent=sent, safe_duration=answer.safe_duration, revision=answer.revision
            )
            found = {(v.job_id, v.fencing_token): v.verdict for v in answer.verdicts}
            for claim in claims:
                verdict = found.get((claim.job.job_id, claim.job.fencing_token), Verdict.UNSPECIFIED)
                if verdict is Verdict.LOST:
                    self._lose(claim, effects.lost, given_away=True)
                elif verdict in (Verdict.HELD, Verdict.CANCEL_REQUESTED):
                    claim.deadline = max(claim.deadline, deadline)
                    if claim.phase is ClaimPhase.WAITING:
                        claim.phase = ClaimPhase.RUNNING
                        effects.startable.append(claim)
                    if verdict is Verdict.CANCEL_REQUESTED and claim.phase is ClaimPhase.RUNNING:
                        effects.cancelled.append(claim)
        return effects

    def asked_to_stop(self, claims: Iterable[tuple[str, int]]) -> BeatEffects:
        """Take in a request to stop (job id, token) that came before a beat's verdict says so too."""
        effects = BeatEffects()
        with self._lock:
            for key in claims:
                claim = self._claims.get(key)
                if claim is not None and claim.phase is ClaimPhase.RUNNING:
                    effects.cancelled.append(claim)
        return effects

    def _lose(self, claim: HeldClaim, lost: list[HeldClaim], *, given_away: bool) -> None:
        if claim.phase is ClaimPhase.SETTLING:
            # Perhaps it is gone because the settlement counted; only its answer tells.
            return
        claim.given_away = claim.given_away or given_away
        if claim.phase is not ClaimPhase.LOST:
            claim.phase = ClaimPhase.LOST
            lost.append(claim)

    def expire(self, now: float) -> list[HeldClaim]:
        """Return the running claims whose deadline has passed; from now on they are lost."""
        lost: list[HeldClaim] = []
        with self._lock:
            for claim in self._claims.values():
                if claim.phase is ClaimPhase.RUNNING and claim.deadline <= now:
                    self._lose(claim, lost, given_away=False)
        return lost

    def next_deadline(self, now: float) -> float:
        """Return the earliest deadline after which something must be stopped; infinity if there is none.

        Those of running claims, and the session's: a claim that arrives meanwhile may start with it.
        """
        with self._lock:
            running = [c.deadline for c in self._claims.values() if c.phase is ClaimPhase.RUNNING]
            session = self._log.deadline
        return min([*running, session if session > now else float("inf")])

    def lose_all(self) -> list[HeldClaim]:
        """End the session: empty the book and return the claims whose handlers must be told."""
        lost: list[HeldClaim] = []
        with self._lock:
            for claim in self._claims.values():
                self._lose(claim, lost, given_away=True)
            self._claims.clear()
            self._log = BeatLog()
            self._generation += 1
        return lost

    def lost_now(self, claim: HeldClaim, now: float) -> bool:
        """Return whether a claim is lost, by what was heard or by the clock alone."""
        return claim.phase is ClaimPhase.LOST or (claim.phase is ClaimPhase.RUNNING and claim.deadline <= now)

    def give_away(self, claim: HeldClaim) -> bool:
        """Record that the coordinator called the claim lost; False if that was known."""
        lost: list[HeldClaim] = []
        with self._lock:
            self._lose(claim, lost, given_away=True)
        return bool(lost)

    def ended(self, claim: HeldClaim) -> bool:
        """Record that the handler has ended; return whether its claim was lost before.

        The claim stays listed until `forget`: its settlement is not yet answered.
        """
        with self._lock:
            lost = claim.phase is ClaimPhase.LOST
            claim.phase = ClaimPhase.SETTLING
            claim.on_loop = True
            return lost

    def forget(self, claims: Iterable[HeldClaim]) -> None:
        """Drop claims whose settlement was answered, or that somebody else holds."""
        with self._lock:
            for claim in claims:
                self._claims.pop((claim.job.job_id, claim.job.fencing_token), None)

    def begun(self) -> list[str]:
        """Return the jobs, with their types, whose handlers began wherever they run and are not settled."""
        with self._lock:
            begun = [claim.job for claim in self._claims.values() if claim.started]
        return [f"{job.job_id} ({job.type})" for job in begun]

    def running(self, current: object) -> list[str]:
        """Return the jobs whose handlers run on the event loop, with their types.

        Args:
            current: the task that the loop runs now. If it is a handler's, that one alone.
        """
        with self._lock:
            found = [
                claim
                for claim in self._claims.values()
                if claim.phase is ClaimPhase.RUNNING and claim.started and claim.on_loop
            ]
        culprits = [claim for claim in found if current is not None and claim.task is current]
        return [f"{claim.job.job_id} ({claim.job.type})" for claim in culprits or found]

    def lose_on_loop(self) -> list[HeldClaim]:
        """Lose and drop what runs on the event loop, because it does not turn."""
        lost: list[HeldClaim] = []
        with self._lock:
            for key, claim in list(self._claims.items()):
                if claim.phase is ClaimPhase.RUNNING and claim.on_loop:
                    self._lose(claim, lost, given_away=True)
                    del self._claims[key]
        return lost
