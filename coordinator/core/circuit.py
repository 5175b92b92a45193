"""The circuit breaker of one (queue, type): what is counted, when it opens, and how it is probed.

Two halves. ``OutcomeWindow`` and ``why_open`` are one coordinator's judgement of what it saw. ``Circuit`` is
the state that all coordinators share; each function below answers the next one, or None where nothing
changes, and whoever calls it swaps the shared record under a compare. Closed, open, half-open and probes as
in M. Nygard, "Release It!", and in the breakers of Hystrix, resilience4j and Polly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Final

from coordinator.core.job import AttemptOutcome, Job, JobState

__all__ = [
    "CLOSED",
    "Circuit",
    "CircuitPolicy",
    "CircuitState",
    "Counts",
    "Outcome",
    "OutcomeWindow",
    "Probe",
    "end_probe",
    "open_circuit",
    "outcome_of",
    "pause_ms",
    "start_probe",
    "verdict_of",
    "why_open",
]


class CircuitState(IntEnum):
    """The numbers are those of ``leasekeeper.v1.CircuitState``."""

    CLOSED = 1
    OPEN = 2
    HALF_OPEN = 3


class Outcome(Enum):
    """What the end of an attempt says of its type.

    NEITHER: given back, cancelled, never fetched, or lost for the first time: that says something of the
    worker, not of the work.
    """

    SUCCESS = "success"
    FAILURE = "failure"
    LEASE_LOSS = "lease loss"
    NEITHER = "neither"


_FAILED: Final = frozenset({AttemptOutcome.FAILED, AttemptOutcome.TIMED_OUT})
_WELL: Final = AttemptOutcome.SUCCEEDED
_LOST: Final = AttemptOutcome.LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitPolicy:
    """Thresholds. Spans are milliseconds.

    Attributes:
        window_ms: outcomes older than this are forgotten. Two minutes hold several lease losses one after the
            other (at the default TTL one is noticed after 10-23 s) and are short beside a deployment.
        buckets: parts of the window; what is forgotten is forgotten by the part.
        failure_ratio: of successes and failures. Jobs are retried, so each bad job counts up to six times by
            default: at half, every seventh bad job would hold all others. 0.8 is two bad jobs of five.
        min_outcomes: successes and failures below which the ratio says nothing. Of 20 attempts that fail
            every other time, 16 fail in one window of 170; of such that fail every fifth time, never
            (binomial tail 1e-8). Hystrix uses 20 as well.
        loss_ratio: of all attempts that ended, those lost by a job that was lost before.
        min_lost_sessions: sessions that must have ended so. A job is quarantined after four losses by
            default, of which three count: one bad job opens nothing, two do, and so does no single worker
            that loses a hundred jobs.
        first_pause_ms: before the first probe; doubles with each opening, up to ``longest_pause_ms``.
        jitter: share of the pause that chance takes away, so that many circuits are not probed together.
        probes_to_close: probes in a row that must succeed. One may be luck.
    """

    window_ms: int = 120_000
    buckets: int = 12
    failure_ratio: float = 0.8
    min_outcomes: int = 20
    loss_ratio: float = 0.5
    min_lost_sessions: int = 5
    first_pause_ms: int = 5_000
    longest_pause_ms: int = 300_000
    jitter: float = 0.2
    probes_to_close: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a window holds. ``attempts`` are all that ended; ``lost_sessions`` those that lost something."""

    attempts: int = 0
    successes: int = 0
    failures: int = 0
    lease_losses: int = 0
    lost_sessions: int = 0


class _Bucket:
    __slots__ = ("ends", "failures", "index", "losses", "sessions", "successes")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ends = self.successes = self.failures = self.losses = 0
        self.sessions: set[str] = set()


class OutcomeWindow:
    """Outcomes of the last ``span_ms``, in ``buckets`` parts of equal length.

    An attempt may end elsewhere: then only that it ended is known here (``ended``), which is what the ratio
    of losses is taken of. Times are milliseconds of a clock that never goes back.
    """

    __slots__ = ("_buckets", "_kept", "_limit", "_width")

    def __init__(self, span_ms: int, buckets: int, *, sessions_kept: int = 64) -> None:
        self._width = max(1, span_ms // buckets)
        self._kept = buckets
        self._limit = sessions_kept
        self._buckets: deque[_Bucket] = deque()

    def ended(self, now_ms: int) -> None:
        """An attempt ended, nobody here knows how."""
        self._now(now_ms).ends += 1

    def add(self, outcome: Outcome, now_ms: int, session: str = "") -> None:
        """An attempt ended so. A loss is no end of its own: that its claim went was told by ``ended``."""
        bucket = self._now(now_ms)
        if outcome is Outcome.LEASE_LOSS:
            bucket.losses += 1
            if len(bucket.sessions) < self._limit:
                bucket.sessions.add(session)
            return
        bucket.ends += 1
        if outcome is Outcome.SUCCESS:
            bucket.successes += 1
        elif outcome is Outcome.FAILURE:
            bucket.failures += 1

    def counts(self, now_ms: int) -> Counts:
        """What lies in the window now."""
        self._forget(now_ms // self._width)
        ends = successes = failures = losses = 0
        sessions: set[str] = set()
        for bucket in self._buckets:
            ends += bucket.ends
            successes += bucket.successes
            failures += bucket.failures
            losses += bucket.losses
            sessions |= bucket.sessions
        # Losses that a sweep found had their ends while nobody watched.
        attempts = max(ends, successes + failures + losses)
        return Counts(
            attempts=attempts,
            successes=successes,
            failures=failures,
            lease_losses=losses,
            lost_sessions=len(sessions),
        )

    def clear(self) -> None:
        """Forget everything."""
        self._buckets.clear()

    def _now(self, now_ms: int) -> _Bucket:
        index = now_ms // self._width
        buckets = self._buckets
        if buckets and buckets[-1].index >= index:
            return buckets[-1]
        self._forget(index)
        buckets.append(_Bucket(index))
        return buckets[-1]

    def _forget(self, index: int) -> None:
        buckets, oldest = self._buckets, index - self._kept
        while buckets and buckets[0].index <= oldest:
            buckets.popleft()


def outcome_of(job: Job) -> Outcome:
    """What the end of the last attempt of ``job``, as its record says it now, counts as."""
    ended = job.attempts[-1].outcome
    if ended is _WELL:
        return Outcome.SUCCESS
    if job.state is JobState.CANCELLED:
        return Outcome.NEITHER
    if ended in _FAILED:
        return Outcome.FAILURE
    if ended is _LOST and (job.lease_losses > 1 or job.state is JobState.QUARANTINED):
        return Outcome.LEASE_LOSS
    return Outcome.NEITHER


def why_open(counts: Counts, policy: CircuitPolicy) -> str:
    """Why a closed circuit is to open, empty if it is not."""
    judged = counts.successes + counts.failures
    if judged >= policy.min_outcomes and counts.failures >= policy.failure_ratio * judged:
        return f"{counts.failures} of {judged} attempts failed"
    if (
        counts.lost_sessions >= policy.min_lost_sessions
        and counts.lease_losses >= policy.loss_ratio * counts.attempts
    ):
        return (
            f"{counts.lease_losses} of {counts.attempts} attempts were lost with {counts.lost_sessions} "
            "sessions, by jobs that had been lost before"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A job that tries whether the type works again, the attempt that it is to make, who took the slot."""

    job_id: str
    attempt: int
    who: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circuit:
    """What all coordinators share. Times are Unix milliseconds.

    Attributes:
        state: see ``CircuitState``.
        since_ms: since when.
        probe_ms: when an open one may be probed; how long a pause was is in it, whatever a reader's settings.
        openings: times in a row that it opened without having closed.
        probe: what probes it now; at most one over all coordinators.
        passed: probes in a row that succeeded.
        reason: why it opened.
        who: the coordinator that opened it.
    """

    state: CircuitState = CircuitState.CLOSED
    since_ms: int = 0
    probe_ms: int = 0
    openings: int = 0
    probe: Probe | None = None
    passed: int = 0
    reason: str = ""
    who: str = ""


CLOSED: Final = Circuit()
"""A closed circuit is no record at all."""


def pause_ms(policy: CircuitPolicy, openings: int, jitter_number: float) -> int:
    """How long a circuit stays open that opened for the ``openings``-th time in a row.

    Args:
        policy: first and longest pause.
        openings: from 1.
        jitter_number: uniform in [0, 1).
    """
    doubled = policy.first_pause_ms << min(max(0, openings - 1), 40)
    pause = min(doubled, policy.longest_pause_ms)
    return max(1, round(pause * (1 - policy.jitter * jitter_number)))


def open_circuit(
    circuit: Circuit, policy: CircuitPolicy, now_ms: int, *, jitter_number: float, reason: str, who: str
) -> Circuit | None:
    """Open a closed or half-open circuit; an open one stays as it is."""
    if circuit.state is CircuitState.OPEN:
        return None
    openings = circuit.openings + 1
    return Circuit(
        state=CircuitState.OPEN,
        since_ms=now_ms,
        probe_ms=now_ms + pause_ms(policy, openings, jitter_number),
        openings=openings,
        reason=reason,
        who=who,
    )


def start_probe(circuit: Circuit, probe: Probe, now_ms: int) -> Circuit | None:
    """Take the slot: of a half-open circuit if it is free, of an open one once its pause is over."""
    if circuit.state is CircuitState.OPEN and now_ms >= circuit.probe_ms:
        return replace(circuit, state=CircuitState.HALF_OPEN, since_ms=now_ms, probe=probe, passed=0)
    if circuit.state is CircuitState.HALF_OPEN and circuit.probe is None:
        return replace(circuit, probe=probe)
    return None


def verdict_of(job: Job | None, probe: Probe) -> Outcome | None:
    """How a probe ended, by the record of its job; None while it runs.

    One that never began is NEITHER: whoever asks must know that nobody is about to begin it. Unlike
    elsewhere, a first loss counts: there is little else to go by.
    """
    attempts = job.attempts if job is not None else ()
    made = next((attempt for attempt in attempts if attempt.number == probe.attempt), None)
    if made is None or job is None:
        return Outcome.NEITHER
    if made.outcome is AttemptOutcome.RUNNING:
        return None
    if made.outcome is _WELL:
        return Outcome.SUCCESS
    if made.state_after is JobState.CANCELLED:
        return Outcome.NEITHER
    if made.outcome in _FAILED or made.outcome is _LOST:
        return Outcome.FAILURE
    return Outcome.NEITHER


def end_probe(
    circuit: Circuit,
    policy: CircuitPolicy,
    probe: Probe,
    verdict: Outcome,
    now_ms: int,
    *,
    jitter_number: float,
    who: str,
) -> Circuit | None:
    """Give the slot back: the last success needed closes, a failure opens for longer, NEITHER says nothing.

    Nothing changes if another probe, or none, has the slot.
    """
    held = circuit.probe
    if held is None or (held.job_id, held.attempt) != (probe.job_id, probe.attempt):
        return None
    if verdict is Outcome.NEITHER:
        return replace(circuit, probe=None)
    if verdict is Outcome.SUCCESS:
        passed = circuit.passed + 1
        return CLOSED if passed >= policy.probes_to_close else replace(circuit, probe=None, passed=passed)
    reason = f"job {probe.job_id} probed it, and was lost or failed"
    return open_circuit(circuit, policy, now_ms, jitter_number=jitter_number, reason=reason, who=who)
