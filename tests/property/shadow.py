"""What should be, told from the promises alone: the oracle of the fleet.

Nothing here calls the core's rules, table, effects or ranks; all it shares with the core are the names of
states. Each step says what the answer must be and changes the shadow to what must be stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.core.job import JobState as S

REMEMBERED = 8
FREE = 20
TARGETS = {1: 1_000, 2: 10_000, 3: 60_000, 4: 600_000, 5: 3_600_000}
FIRST_DELAY, LONGEST_DELAY = 1_000, 4_000
ENDED = (S.SUCCEEDED, S.DEAD, S.CANCELLED, S.QUARANTINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a producer asks for."""

    retries: int = 1
    losses: int = 1
    unique: str = ""
    priority: int = 3
    due_in: int = 0
    run_in: int = 0
    queue_timeout: int = 0
    total_timeout: int = 0
    content: int = 0
    rollback: bool = False


@dataclass(slots=True)
class Run:
    """One attempt as the outside saw it; ``answer`` is what its end was answered with."""

    number: int
    session: str
    token: int
    how: str = ""
    digest: bytes = b""
    answer: tuple[S, int] | None = None
    stored_token: int = 0


@dataclass(slots=True)
class Shadow:
    """One incarnation of a job."""

    order: Order
    submit_ms: int
    counter: int
    state: S = S.PENDING
    ready_ms: int = 0
    due_ms: int = 0
    priority: int = 3
    failures: int = 0
    losses: int = 0
    uncharged: int = 0
    asked_to_stop: bool = False
    held: bool = False
    hold: int = 0
    hold_until: int = 0
    on_hold: bool = False
    retried_at: int = 0
    retried_by: bytes = b""
    earlier_runs: int = 0
    checkpoint: bool = False
    big_result: bool = False
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def submitted(cls, order: Order, now: int, counter: int) -> Shadow:
        """As acknowledged at ``now``."""
        new = cls(order=order, submit_ms=now, counter=counter, priority=order.priority)
        new.due_ms = now + order.due_in if order.due_in else 0
        new.ready_ms = now + max(0, order.run_in)
        new.state = S.SCHEDULED if order.run_in > 0 else S.PENDING
        return new

    @property
    def ended(self) -> bool:
        """No more without an operator."""
        return self.state in ENDED

    @property
    def failed(self) -> bool:
        """No more unless an operator says so."""
        return self.state in (S.DEAD, S.QUARANTINED)

    @property
    def lost(self) -> bool:
        """Its holder died and nobody has noticed yet."""
        return self.state is S.RUNNING and not self.held

    def rank_ms(self) -> int:
        """Virtual deadline."""
        ours = self.ready_ms + TARGETS[self.priority]
        return max(self.submit_ms, min(ours, self.due_ms) if self.due_ms else ours)

    def due_at(self) -> int:
        """Where its due key stands, 0 for none."""
        moments = []
        if self.state is S.SCHEDULED:
            moments.append(self.ready_ms)
        if self.state is S.PENDING and self.order.queue_timeout:
            moments.append(self.ready_ms + self.order.queue_timeout)
        if self.state in (S.SCHEDULED, S.PENDING) and self.order.total_timeout:
            moments.append((self.retried_at or self.submit_ms) + self.order.total_timeout)
        return min(moments, default=0)

    def out_of_time(self, now: int) -> bool:
        """A queue or total timeout has passed."""
        began = self.retried_at or self.submit_ms
        total = self.order.total_timeout and now >= began + self.order.total_timeout
        queue = self.order.queue_timeout and now >= self.ready_ms + self.order.queue_timeout
        return bool(total or (queue and self.state is S.PENDING))

    def kinds(self) -> set[str]:
        """Kinds of key that must exist, one by one (claims: only while held)."""
        kinds = {"state"}
        kinds |= {"job"} if self.state not in (S.SUCCEEDED, S.CANCELLED) else set()
        kinds |= {"ready"} if self.state is S.PENDING else set()
        kinds |= {"due"} if self.due_at() else set()
        kinds |= {"claim"} if self.held else set()
        kinds |= {"cancel"} if self.state is S.RUNNING and self.asked_to_stop else set()
        kinds |= {"checkpoint"} if self.checkpoint else set()
        kinds |= {"result"} if self.big_result else set()
        kinds |= {"unique"} if self.order.unique and not self.ended else set()
        return kinds

    def claim(self, session: str, token: int, now: int) -> str:
        """A claim; ``token`` is the one it would get."""
        if self.ended:
            return "JOB_TERMINAL"
        if self.state is S.RUNNING:
            return "CLAIM_HELD"
        if self.state is S.SCHEDULED:
            return "NOT_CLAIMABLE"
        if self.out_of_time(now):
            return "unchanged"
        assert now >= self.hold_until, "runs again before its old holder can have heard of it"
        self.runs.append(Run(len(self.runs) + 1, session, token))
        self.state, self.held = S.RUNNING, True
        return "done"

    def settle(self, how: str, token: int, digest: bytes, now: int, *, delay: int | None, final: bool) -> str:
        """complete, fail or release under ``token``; ``final``: told not to retry."""
        if not (self.held and self.runs[-1].token == token):
            recent = self.runs[-REMEMBERED:]
            same = [r for r in recent if r.how == how and r.stored_token == token and r.digest == digest]
            return "replay" if same else "CLAIM_LOST"
        stop = self.asked_to_stop
        if how == "complete":
            self._end(S.SUCCEEDED)
        elif how == "fail":
            self.failures += 1
            if stop:
                self._end(S.CANCELLED)
            elif final or self.failures > self.order.retries:
                self._end(S.DEAD)
            else:
                self._wait(now, self._backoff() if delay is None else delay)
        else:
            self._returned(now, delay or 0)
        self._close(how, token, digest)
        return "done"

    def take_away(self, why: str, token: int, now: int, hold: int) -> str:
        """The coordinator ends the claim."""
        if not (self.held and self.runs[-1].token == token):
            return "CLAIM_LOST"
        if why == "CANCELLED" and not self.asked_to_stop:
            return "unchanged"
        if self.asked_to_stop:
            self._end(S.CANCELLED)
        elif why == "TIMED_OUT":
            self.failures += 1
            if self.failures > self.order.retries:
                self._end(S.DEAD)
            else:
                self._wait(now, max(hold, self._backoff()))
        else:
            self._returned(now, hold)
        self.on_hold = self.state is S.SCHEDULED
        self.hold = 0 if self.state is S.CANCELLED else hold
        self.hold_until = now + self.hold
        self._close("taken", token, b"")
        return "done"

    def lose(self, known_token: int, now: int, delay: int) -> str:
        """Somebody reports that the holder died; ``delay``: among many."""
        if not self.lost:
            return "unchanged"
        self.losses += 1
        if self.asked_to_stop:
            self._end(S.CANCELLED)
        elif self.losses > self.order.losses:
            self._end(S.QUARANTINED)
        else:
            self._wait(now, delay)
        self._close("lost", self.runs[-1].stored_token or known_token, b"")
        return "done"

    def cancel(self, known_token: int) -> str:
        """Somebody wants it stopped."""
        if self.state is S.CANCELLED:
            return "unchanged"
        if self.ended:
            return "JOB_TERMINAL"
        if self.state is not S.RUNNING:
            self._end(S.CANCELLED)
            return "done"
        if self.asked_to_stop:
            return "unchanged"
        self.asked_to_stop = True
        self.runs[-1].stored_token = self.runs[-1].stored_token or known_token
        return "done"

    def fall_due(self, now: int) -> str:
        """Time has passed."""
        if self.ended or self.state is S.RUNNING:
            return "unchanged"
        if self.out_of_time(now):
            self._end(S.DEAD)
            return "done"
        if self.state is S.SCHEDULED and now >= self.ready_ms:
            self.state, self.on_hold, self.hold = S.PENDING, False, 0
            return "done"
        return "unchanged"

    def retry(self, now: int, run_at: int, request: bytes) -> str:
        """An operator wants it to run again."""
        if not self.ended or (request and request == self.retried_by):
            return "unchanged"
        if self.state in (S.SUCCEEDED, S.CANCELLED):
            return "JOB_TERMINAL"
        self.failures = self.losses = self.uncharged = 0
        self.earlier_runs = len(self.runs)
        self.retried_at, self.retried_by = max(now, self.retried_at + 1), request
        self.on_hold = self.hold > 0
        self._wait(now, max(self.hold, run_at - now))
        return "done"

    def update(self, now: int, *, priority: int | None, due_ms: int | None, run_at: int | None) -> str:
        """New wishes for a waiting job."""
        if self.ended:
            return "JOB_TERMINAL"
        if self.state is S.RUNNING:
            return "NOT_CLAIMABLE"
        was = (self.priority, self.due_ms, self.ready_ms, self.state)
        self.priority = self.priority if priority is None else priority
        self.due_ms = self.due_ms if due_ms is None else due_ms
        if run_at is not None and not (self.state is S.PENDING and run_at <= now):
            self.ready_ms = max(run_at, self.ready_ms if self.on_hold else now)
            self.state = S.SCHEDULED if self.on_hold or self.ready_ms > now else S.PENDING
        return "unchanged" if was == (self.priority, self.due_ms, self.ready_ms, self.state) else "done"

    def _backoff(self) -> int:
        return int(min(FIRST_DELAY * 2 ** (self.failures - 1), LONGEST_DELAY))

    def _wait(self, now: int, delay: int) -> None:
        self.state = S.SCHEDULED if delay > 0 else S.PENDING
        self.ready_ms = now + delay

    def _returned(self, now: int, delay: int) -> None:
        self.uncharged += 1
        extra = self.uncharged > FREE
        self.losses += extra
        if self.asked_to_stop:
            self._end(S.CANCELLED)
        elif extra and self.losses > self.order.losses:
            self._end(S.QUARANTINED)
        else:
            self._wait(now, delay)

    def _end(self, state: S) -> None:
        self.state, self.on_hold = state, False
        if self.state in (S.SUCCEEDED, S.CANCELLED):
            self.checkpoint = False

    def _close(self, how: str, token: int, digest: bytes) -> None:
        run = self.runs[-1]
        run.how, run.digest, run.stored_token = how, digest, token
        run.answer = (self.state, 0 if self.ended else self.ready_ms)
        self.held = self.asked_to_stop = False
