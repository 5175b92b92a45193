"""Counts how attempts end, for each (queue, type): what this coordinator judges circuits by.

It hears of its own commits, which say how an attempt ended, and of claims that the watch saw end, which say
only that one did. The second makes the ratio of losses right where one coordinator recovers what another's
workers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final

from coordinator.core.circuit import CircuitPolicy, Counts, Outcome, OutcomeWindow, outcome_of, why_open
from coordinator.core.job import AttemptOutcome, Claim, Job, JobState
from coordinator.ports import Clock, Commit, Operation
from coordinator.services.waiters import Pair

__all__ = ["Outcomes"]

# Looked up once: a member of an enum costs thirty times what a global costs.
_RUNNING: Final = JobState.RUNNING
_LOST: Final = AttemptOutcome.LOST
_SUCCESS: Final = Outcome.SUCCESS
_NEITHER: Final = Outcome.NEITHER
_LEASE_LOSS: Final = Outcome.LEASE_LOSS


class Outcomes:
    """Implements ``ports.CommitObserver``.

    Args:
        clock: the window slides on its monotonic time.
        policy: thresholds.
        barred: pairs whose circuit is not closed: nothing is counted of them.
        tripped: called with a pair, why its circuit is to open, and the counts; it must not block.
        ended_barred: called with a job of a barred pair whose attempt has ended; it must not block.
    """

    def __init__(
        self,
        clock: Clock,
        policy: CircuitPolicy,
        *,
        barred: Container[Pair],
        tripped: Callable[[Pair, str, Counts], None],
        ended_barred: Callable[[Pair, Job], None],
    ) -> None:
        self._clock = clock
        self._policy = policy
        self._barred = barred
        self._tripped = tripped
        self._ended_barred = ended_barred
        self._windows: dict[Pair, OutcomeWindow] = {}

    def applied(self, operation: Operation, commit: Commit) -> None:
        """Take in an own commit: does it end an attempt, and how?"""
        before, job = operation.before, operation.after
        if before is None or job is None or before.job.state is not _RUNNING or job.state is _RUNNING:
            return
        terms = job.terms
        pair = (job.namespace, terms.queue, terms.type)
        if pair in self._barred:
            self._ended_barred(pair, job)
            return
        outcome = outcome_of(job)
        last = job.attempts[-1]
        if outcome is _NEITHER and last.outcome is _LOST:
            return  # that its claim ended was told by the watch
        window, now_ms = self._window(pair), self._now_ms()
        window.add(outcome, now_ms, last.session)
        if outcome is _SUCCESS or outcome is _NEITHER:
            return
        counts = window.counts(now_ms)
        why = why_open(counts, self._policy)
        if why:
            self._tripped(pair, why, counts)

    def claim_ended(self, namespace: str, claim: Claim) -> None:
        """The watch saw a claim go that no commit of this coordinator ended."""
        pair = (namespace, claim.queue, claim.type)
        if pair not in self._barred:
            self._window(pair).ended(self._now_ms())

    def counts(self, pair: Pair) -> Counts:
        """What was counted within the window."""
        window = self._windows.get(pair)
        return window.counts(self._now_ms()) if window is not None else Counts()

    def forget(self, pair: Pair) -> None:
        """Begin anew: what was counted belongs to another state of the circuit."""
        self._windows.pop(pair, None)

    def _window(self, pair: Pair) -> OutcomeWindow:
        window = self._windows.get(pair)
        if window is None:
            policy = self._policy
            window = self._windows[pair] = OutcomeWindow(policy.window_ms, policy.buckets)
        return window

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)
