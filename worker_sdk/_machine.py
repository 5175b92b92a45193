"""What a session and its claims may believe, as pure arithmetic: no I/O, no clock, no threads.

Times are seconds of one clock (`worker_sdk._seams.boottime`), revisions and tokens share one scale. The
rules are those of the coordinator's contract: a confirmed beat proves the session's lease up to its *send*
time plus the safe duration, and a claim rests only on beats that could know of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_sdk.config import RetryConfig

__all__ = [
    "BeatLog",
    "BeatPlan",
    "ClaimPhase",
    "ConfirmedBeat",
    "backoff_delay",
    "beat_interval",
    "beat_timeout",
    "credit_size",
    "poll_size",
    "retry_delay",
]

_KEPT_BEATS = 16
_MAX_INTERVAL = 5.0
_MAX_EXPONENT = 64.0


def beat_interval(ttl: float) -> float:
    """Return the seconds between beats for a granted TTL: a third of it, at most 5 s."""
    return min(ttl / 3, _MAX_INTERVAL)


def beat_timeout(interval: float) -> float:
    """Return the deadline of one beat, seconds.

    Short enough for a second try at another coordinator in time.
    """
    return max(0.5, interval * 0.6)


def backoff_delay(
    attempt: int, *, initial: float, maximum: float, multiplier: float, jitter: float, fraction: float
) -> float:
    """Return the delay before try `attempt` + 1, seconds; `attempt` counts failures and starts at 1.

    Grows without jitter from `initial` to `maximum`, then a share `jitter` of it is scaled by `fraction`
    (0-1), so that the result lies in (0, maximum]. The exponent is bounded: a float power raises where it
    overflows.
    """
    exponent = min(max(attempt - 1, 0), _MAX_EXPONENT)
    full = (
        min(maximum, initial * min(multiplier, 1e4) ** exponent) if multiplier > 1 else min(maximum, initial)
    )
    return full * (1 - jitter * min(max(fraction, 0.0), 0.999))


def retry_delay(retry: RetryConfig, failures: int, fraction: float) -> float:
    """Return ``backoff_delay`` after so many failures, as *retry* has it."""
    return backoff_delay(
        failures,
        initial=retry.initial,
        maximum=retry.maximum,
        multiplier=retry.multiplier,
        jitter=retry.jitter,
        fraction=fraction,
    )


def poll_size(
    *, limit: int, busy: int, promised: int, loops: int, batch: int, held: int, capacity: int
) -> int:
    """Return how many jobs the next claim call may ask for; 0: none.

    Args:
        limit, busy, promised: slots of the pool, those in use, and those promised to calls under way.
        loops: claim loops that share the pool; each takes at most its share, so that calls overlap.
        batch: most jobs in one call.
        held: claims of the session, those whose settlement is not yet answered included.
        capacity: claims that one session may hold.
    """
    share = -(-limit // loops)
    return max(0, min(limit - busy - promised, share, batch, capacity - held - promised))


def credit_size(*, limit: int, outstanding: int, free: int) -> int:
    """Return for how many jobs more leave is to be given now; 0: none yet.

    All that is *free*. While more than half of the slots have leave outstanding, small amounts are gathered
    first: a message for each job that ends would cost more than the wait saves.
    """
    return 0 if outstanding * 2 > limit and free * 16 < limit else free


class ClaimPhase(Enum):
    """Where a claim stands in its worker.

    ::

        WAITING ──covered──▶ RUNNING ──handler ended──▶ SETTLING ──answered──▶ (gone)
           └──lost──▶ (gone)    └──lost──▶ LOST ──handler ended──▶ (gone, or SETTLING by a release)
    """

    # Claimed, but no confirmed beat vouches for it now: it must not start.
    WAITING = "waiting"
    RUNNING = "running"
    # The handler was told to stop, because somebody else may hold the job.
    LOST = "lost"
    SETTLING = "settling"


@dataclass(frozen=True, slots=True)
class ConfirmedBeat:
    """A beat (or the opening) that was confirmed at `revision` and proves the session until `deadline`."""

    revision: int
    deadline: float


class BeatLog:
    """The last confirmed beats of one session, and what they prove for claims that they could not list."""

    __slots__ = ("_beats",)

    def __init__(self) -> None:
        self._beats: deque[ConfirmedBeat] = deque(maxlen=_KEPT_BEATS)

    def confirm(self, *, sent: float, safe_duration: float, revision: int) -> float:
        """Record a confirmed beat; return its deadline. It counts from the moment at which it was *sent*."""
        deadline = sent + safe_duration
        self._beats.append(ConfirmedBeat(revision, deadline))
        return deadline

    def deadline_for(self, token: int) -> float:
        """Return the deadline that a new claim starts with; minus infinity: nothing vouches for it.

        The last confirmed beat whose revision lies below the token: at that revision the session was alive
        and the claim not yet there. A beat with a later revision that did not list the claim says nothing
        about it: the claim may have been taken away before.
        """
        best = float("-inf")
        for beat in self._beats:
            if beat.revision < token and beat.deadline > best:
                best = beat.deadline
        return best

    @property
    def deadline(self) -> float:
        """Until when the session itself is safe; minus infinity before the first confirmation."""
        return max((beat.deadline for beat in self._beats), default=float("-inf"))


class BeatPlan:
    """When the next beat is due. A failed beat is repeated at once elsewhere, then with short pauses."""

    __slots__ = ("_endpoints", "_failures", "_interval", "due")

    def __init__(self, *, now: float, interval: float, endpoints: int) -> None:
        self._interval = interval
        self._endpoints = endpoints
        self._failures = 0
        self.due = now

    @property
    def failures(self) -> int:
        """Beats that failed in a row."""
        return self._failures

    def confirmed(self, *, sent: float) -> None:
        """Plan the next beat one interval after the confirmed one was sent."""
        self._failures = 0
        self.due = sent + self._interval

    def failed(self, *, now: float, fraction: float) -> None:
        """Plan a repeat.

        At once while another coordinator is untried, then after at most a quarter interval.
        """
        self._failures += 1
        if self._failures < max(2, self._endpoints):
            self.due = now
            return
        rounds = self._failures - max(2, self._endpoints) + 1
        self.due = now + backoff_delay(
            rounds,
            initial=min(0.1, self._interval / 8),
            maximum=self._interval / 4,
            multiplier=2.0,
            jitter=0.5,
            fraction=fraction,
        )

    def hurry(self, now: float) -> None:
        """Beat at once: a claim waits for it."""
        self.due = min(self.due, now)
