"""A fleet of jobs under several sessions and two coordinators, as a Hypothesis state machine.

The oracle is ``shadow.py``: what holders, producers and operators were told, and what follows from it by the
promises. The store is ``memory_store.py``. Commands are steered to jobs that they can move (a claim to a
waiting job, a settlement to a held one), ends are followed by resubmissions, and cancellation is rare:
otherwise terminal states swallow most steps.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from coordinator.core import commands as c
from coordinator.core import machine
from coordinator.core.effects import Slot
from coordinator.core.job import JobState
from tests.property.memory_store import Read
from tests.property.shadow import FREE, Order
from tests.property.world import IDS, Act, World

PICK = st.integers(0, 30)
DIGESTS = st.sampled_from([b"a", b"b"])
DELAYS = st.sampled_from([None, 0, 700])
HOW = st.sampled_from(["complete", "fail", "fail", "release"])
ORDERS = st.builds(
    Order,
    retries=st.integers(0, 2),
    losses=st.integers(0, 2),
    unique=st.sampled_from(["", "", "u1", "u2"]),
    priority=st.integers(1, 5),
    due_in=st.sampled_from([0, 0, -5_000, 3_000]),
    run_in=st.sampled_from([0, 0, 0, 2_000]),
    queue_timeout=st.sampled_from([0, 0, 8_000]),
    total_timeout=st.sampled_from([0, 0, 7_000, 40_000]),
    content=st.integers(0, 1),
    rollback=st.sampled_from([False, False, True]),
)


class Fleet(World):
    """See the module."""

    # -- the world -----------------------------------------------------------------------------------------

    @initialize(orders=st.lists(ORDERS, min_size=6, max_size=6))
    def open(self, orders: list[Order]) -> None:
        """Three sessions and six jobs, some of them claimed."""
        for _ in range(3):
            self._new_session()
        for turn, (job_id, order) in enumerate(zip(IDS, orders, strict=False)):
            self._submit(job_id, order)
            if turn % 2:
                self._do(self._claim_of(job_id, turn))

    @rule(ms=st.sampled_from([1, 900, 1_500, 4_000, 9_000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(pick=PICK, order=ORDERS)
    def submit(self, pick: int, order: Order) -> None:
        """A new job, or one more try with an id that is taken."""
        self._submit(IDS[pick % len(IDS)], order)

    @rule(pick=PICK)
    def submit_the_same_again(self, pick: int) -> None:
        """Its producer never got the answer."""
        job_id = IDS[pick % len(IDS)]
        if job_id in self.shadows:
            self._submit(job_id, self.shadows[job_id].order)

    @precondition(lambda self: self._with(lambda s: s.ended))
    @rule(pick=PICK, order=ORDERS)
    def delete_and_resubmit(self, pick: int, order: Order) -> None:
        job_id = self._choose(pick, lambda s: s.ended)
        self._delete(job_id)
        self._submit(job_id, order)

    @precondition(lambda self: self._with(lambda s: s.state is JobState.PENDING))
    @rule(pick=PICK, count=st.integers(1, 4), stale=st.booleans())
    def claim(self, pick: int, count: int, stale: bool) -> None:
        """Up to ``count`` waiting jobs, by several sessions."""
        for turn in range(min(count, len(self._with(lambda s: s.state is JobState.PENDING)))):
            self._do(
                self._claim_of(self._choose(pick, lambda s: s.state is JobState.PENDING), pick + turn),
                stale=stale,
            )

    @precondition(lambda self: self._with(lambda s: s.state is JobState.PENDING))
    @rule(pick=PICK)
    def claim_for_a_session_that_has_ended(self, pick: int) -> None:
        """Its witness is gone, so no claim is put: nothing would ever take it away."""
        job_id = self._choose(pick, lambda s: s.state is JobState.PENDING)
        act = self._claim_of(job_id, 0)
        assert act.claim is not None
        ended = replace(act.claim, session="session-0000")
        read = self.store.read(job_id)
        outcome = machine.decide(read.job, read.claim, c.ClaimIt(claim=ended), self.now)
        if isinstance(outcome, machine.Decision):
            assert not self._commit(replace(act, claim=ended), read, outcome)

    @rule(pick=PICK, session=PICK)
    def claim_whatever_it_is(self, pick: int, session: int) -> None:
        self._do(self._claim_of(IDS[pick % len(IDS)], session))

    @precondition(lambda self: self._with(lambda s: s.held))
    @rule(
        pick=PICK,
        how=HOW,
        digest=DIGESTS,
        delay=DELAYS,
        final=PICK,
        big=st.booleans(),
    )
    def settle(self, pick: int, how: str, digest: bytes, delay: int | None, final: int, big: bool) -> None:
        job_id = self._choose(pick, lambda s: s.held)
        token = self.shadows[job_id].runs[-1].token
        self._do(self._settlement(job_id, how, token, digest, delay=delay, final=final == 0, big=big))

    @precondition(lambda self: self._with(lambda s: s.held))
    @rule(pick=PICK, how=HOW, digest=DIGESTS)
    def settle_and_lose_the_reply(self, pick: int, how: str, digest: bytes) -> None:
        """The commit is applied, the answer never arrives: the caller will say it again."""
        job_id = self._choose(pick, lambda s: s.held)
        act = self._settlement(job_id, how, self.shadows[job_id].runs[-1].token, digest, delay=0)
        self._do(act)
        self.unanswered.append(act)

    @precondition(lambda self: bool(self.unanswered))
    @rule(pick=PICK)
    def repeat_what_was_not_answered(self, pick: int) -> None:
        self._do(self.unanswered[pick % len(self.unanswered)])

    @precondition(lambda self: self._with(lambda s: len(s.runs) > s.held))
    @rule(pick=PICK, run=PICK, how=HOW, digest=DIGESTS)
    def settle_under_an_old_token(self, pick: int, run: int, how: str, digest: bytes) -> None:
        job_id = self._choose(pick, lambda s: len(s.runs) > s.held)
        runs = self.shadows[job_id].runs
        self._do(self._settlement(job_id, how, runs[run % len(runs)].token, digest, delay=0))

    @precondition(lambda self: self._with(lambda s: len(s.runs) > 1))
    @rule(pick=PICK, how=HOW, digest=DIGESTS, off=st.sampled_from([0, -1, 1, 2**44]))
    def settle_under_a_token_that_never_was(self, pick: int, how: str, digest: bytes, off: int) -> None:
        job_id = self._choose(pick, lambda s: len(s.runs) > 1)
        token = self.shadows[job_id].runs[-1].token + off if off else 0
        if token not in {run.token for run in self.shadows[job_id].runs}:
            self._do(self._settlement(job_id, how, token, digest, delay=0))

    @precondition(lambda self: self._with(lambda s: s.held))
    @rule(pick=PICK)
    def save_checkpoint(self, pick: int) -> None:
        job_id = self._choose(pick, lambda s: s.held)
        assert self.store.save_checkpoint(job_id, self.shadows[job_id].runs[-1].token)
        self.shadows[job_id].checkpoint = True

    @precondition(lambda self: bool(self.store.sessions))
    @rule(pick=PICK)
    def session_expires(self, pick: int) -> None:
        """Witness and claims vanish in one revision; the process lives on and does not know."""
        sessions = sorted(self.store.sessions)
        for job_id in self.store.expire(sessions[pick % len(sessions)]):
            self.shadows[job_id].held = False
        self._new_session()

    @precondition(lambda self: self._with(lambda s: s.lost))
    @rule(pick=PICK, known=st.booleans(), stale=st.booleans(), delay=st.sampled_from([0, 700]))
    def loss_is_noticed(self, pick: int, known: bool, stale: bool, delay: int) -> None:
        self._do(self._loss(self._choose(pick, lambda s: s.lost), known=known, delay=delay), stale=stale)

    @precondition(lambda self: self._with(lambda s: s.held))
    @rule(pick=PICK, blind=st.booleans())
    def loss_is_reported_of_a_live_claim(self, pick: int, blind: bool) -> None:
        """A false alarm; ``blind``: decided without having seen the claim."""
        job_id = self._choose(pick, lambda s: s.held)
        read = self.store.read(job_id)
        self._do(self._loss(job_id, known=True), read=Read(read.job, read.revision, None) if blind else read)

    @precondition(lambda self: self._with(lambda s: s.held))
    @rule(pick=PICK, why=st.sampled_from(list(c.Taken)), hold=st.sampled_from([2_000, 10_000]))
    def take_away(self, pick: int, why: c.Taken, hold: int) -> None:
        job_id = self._choose(pick, lambda s: s.held)
        self._do(self._taking(job_id, why, hold))

    @precondition(lambda self: self._with(lambda s: s.held))
    @rule(pick=PICK, first=HOW, second=HOW, digests=st.tuples(DIGESTS, DIGESTS), cancel=PICK, lost=PICK)
    def race(
        self, pick: int, first: str, second: str, digests: tuple[bytes, bytes], cancel: int, lost: int
    ) -> None:
        """Two coordinators decide on one read; meanwhile it may be cancelled, or its session end."""
        job_id = self._choose(pick, lambda s: s.held)
        token = self.shadows[job_id].runs[-1].token
        read = self.store.read(job_id)
        if cancel % 6 == 0:
            self._do(self._cancel(job_id))
        if lost % 3 == 0:
            self._expire_holder_of(job_id)
        self._do(self._settlement(job_id, first, token, digests[0], delay=0), read=read)
        self._do(self._settlement(job_id, second, token, digests[1], delay=0), read=read)

    @precondition(lambda self: self._with(lambda s: not s.ended))
    @rule(pick=PICK, luck=st.integers(0, 2), stale=st.booleans())
    def cancel(self, pick: int, luck: int, stale: bool) -> None:
        job_id = self._choose(pick, lambda s: not s.ended)
        if luck == 0 or self.shadows[job_id].state is JobState.RUNNING:
            self._do(self._cancel(job_id), stale=stale)

    @precondition(lambda self: self._with(lambda s: s.held))
    @rule(pick=PICK, how=st.sampled_from(["fail", "release", "complete", "lose", "take away"]))
    def attempt_ends_after_a_request_to_stop(self, pick: int, how: str) -> None:
        job_id = self._choose(pick, lambda s: s.held)
        self._do(self._cancel(job_id))
        if how == "lose":
            self._expire_holder_of(job_id)
            self._do(self._loss(job_id, known=True))
        elif how == "take away":
            self._do(self._taking(job_id, list(c.Taken)[pick % len(c.Taken)], 2_000))
        else:
            token = self.shadows[job_id].runs[-1].token
            self._do(self._settlement(job_id, how, token, b"a", delay=0))

    @precondition(lambda self: self._with(lambda s: s.state is JobState.PENDING))
    @rule(pick=PICK, how=HOW, delay=DELAYS, big=st.booleans(), saves=st.booleans())
    def one_attempt_from_claim_to_settlement(
        self, pick: int, how: str, delay: int | None, big: bool, saves: bool
    ) -> None:
        job_id = self._choose(pick, lambda s: s.state is JobState.PENDING)
        self._do(self._claim_of(job_id, pick))
        if self.shadows[job_id].held:
            token = self.shadows[job_id].runs[-1].token
            if saves:
                assert self.store.save_checkpoint(job_id, token)
                self.shadows[job_id].checkpoint = True
            self._do(self._settlement(job_id, how, token, b"a", delay=delay, big=big))

    @rule(stale=st.booleans())
    def sweep_of_due_jobs(self, stale: bool) -> None:
        for job_id in sorted(self.shadows):
            self._do(
                Act(job_id=job_id, command=c.FallDue(), expected=lambda s: s.fall_due(self.now)), stale=stale
            )

    @precondition(lambda self: self._with(lambda s: not s.ended))
    @rule(
        pick=PICK,
        priority=st.sampled_from([None, 1, 5]),
        due_in=st.sampled_from([None, -3_000, 3_000]),
        run_in=st.sampled_from([None, 0, 0, 1_500]),
        stale=st.booleans(),
    )
    def update(
        self, pick: int, priority: int | None, due_in: int | None, run_in: int | None, stale: bool
    ) -> None:
        due_ms = None if due_in is None else self.now + due_in
        run_at = None if run_in is None else self.now + run_in
        act = Act(
            job_id=self._choose(pick, lambda s: not s.ended),
            command=c.Update(priority=priority, due_ms=due_ms, run_at_ms=run_at),
            expected=lambda s: s.update(self.now, priority=priority, due_ms=due_ms, run_at=run_at),
        )
        self._do(act, stale=stale)

    @precondition(lambda self: self._with(lambda s: s.state is JobState.PENDING))
    @rule(pick=PICK, times=st.sampled_from([2, 23]), taken=st.booleans())
    def circle(self, pick: int, times: int, taken: bool) -> None:
        """A worker that takes a job and gives it back, over and over; ``taken``: till it is taken away."""
        if times > 2 and pick % 3:
            return
        job_id = self._choose(pick, lambda s: s.state is JobState.PENDING)
        for turn in range(times):
            self._do(self._claim_of(job_id, turn))
            shadow = self.shadows[job_id]
            if not shadow.held:
                break
            if taken and shadow.uncharged >= FREE:
                self._do(self._taking(job_id, c.Taken.UNDELIVERED, 2_000))
                self.now += 2_000
                self._do(Act(job_id=job_id, command=c.FallDue(), expected=lambda s: s.fall_due(self.now)))
            else:
                self._do(self._settlement(job_id, "release", shadow.runs[-1].token, b"a", delay=0))

    @precondition(lambda self: self._with(lambda s: s.state is JobState.PENDING))
    @rule(
        pick=PICK,
        dies=st.booleans(),
        delay=st.sampled_from([0, 700]),
        retried_in=st.sampled_from([None, 0, 900]),
    )
    def no_attempt_comes_to_an_end(self, pick: int, dies: bool, delay: int, retried_in: int | None) -> None:
        """Its holders die, alone or among many, or run out of time, to the end; then it is retried."""
        job_id = self._choose(pick, lambda s: s.state is JobState.PENDING)
        for turn in range(4):
            self._do(Act(job_id=job_id, command=c.FallDue(), expected=lambda s: s.fall_due(self.now)))
            if self.shadows[job_id].state is not JobState.PENDING:
                break
            self._do(self._claim_of(job_id, turn))
            if dies:
                self._expire_holder_of(job_id)
                self._do(self._loss(job_id, known=True, delay=delay))
            else:
                self._do(self._taking(job_id, c.Taken.TIMED_OUT, 2_000))
            self.now += max(0, self.shadows[job_id].ready_ms - self.now)
        shadow = self.shadows[job_id]
        if retried_in is not None and shadow.failed and not self._taken(shadow.order.unique):
            run_at = self.now + retried_in if retried_in else 0
            act = Act(
                job_id=job_id,
                command=c.Retry(run_at_ms=run_at),
                expected=lambda s: s.retry(self.now, run_at, b""),
            )
            self._do(act)

    @precondition(lambda self: self._with(lambda s: s.failed))
    @rule(
        pick=PICK,
        run_in=st.sampled_from([0, 0, -5_000, 1_500]),
        request=st.sampled_from([b"", b"first", b"second"]),
        stale=st.booleans(),
    )
    def retry_by_hand(self, pick: int, run_in: int, request: bytes, stale: bool) -> None:
        """Unless another job has its unique key by now."""
        job_id = self._choose(pick, lambda s: s.failed)
        run_at = self.now + run_in if run_in else 0
        act = Act(
            job_id=job_id,
            command=c.Retry(run_at_ms=run_at, digest=request),
            expected=lambda s: s.retry(self.now, run_at, request),
        )
        if self._taken(self.shadows[job_id].order.unique):
            self._retry_in_vain(act)
        else:
            self._do(act, stale=stale)

    @precondition(lambda self: self._with(lambda s: s.failed and s.order.unique))
    @rule(pick=PICK)
    def retry_after_another_job_took_the_unique_key(self, pick: int) -> None:
        job_id = self._choose(pick, lambda s: s.failed and bool(s.order.unique))
        rivals = [j for j in IDS if j != job_id and (j not in self.shadows or self.shadows[j].ended)]
        order = replace(self.shadows[job_id].order, run_in=0)
        if rivals and not self._taken(order.unique):
            if rivals[0] in self.shadows:
                self._delete(rivals[0])
            self._submit(rivals[0], order)
        if self._taken(order.unique):
            self._retry_in_vain(self._retrying(job_id, b""))

    def _retry_in_vain(self, act: Act) -> None:
        read = self.store.read(act.job_id)
        outcome = machine.decide(read.job, read.claim, act.command, self.now)
        if isinstance(outcome, machine.Decision):
            assert not self._commit(act, read, outcome), "one unfinished job per unique key"

    @rule(pick=PICK, request=st.sampled_from([b"", b"first"]))
    def retry_whatever_it_is(self, pick: int, request: bytes) -> None:
        job_id = IDS[pick % len(IDS)]
        if job_id in self.shadows and not self._taken(self.shadows[job_id].order.unique):
            self._do(self._retrying(job_id, request))

    @precondition(lambda self: self._with(lambda s: s.failed))
    @rule(pick=PICK, request=st.sampled_from([b"", b"first"]))
    def retry_and_die_and_retry_again(self, pick: int, request: bytes) -> None:
        """The answer to the first call came late, and its caller says it once more."""
        job_id = self._choose(pick, lambda s: s.failed)
        if not self._taken(self.shadows[job_id].order.unique):
            self._do(self._retrying(job_id, request))
            if self.shadows[job_id].state is JobState.PENDING:
                self._do(self._claim_of(job_id, pick))
                token = self.shadows[job_id].runs[-1].token
                self._do(self._settlement(job_id, "fail", token, b"a", delay=None, final=True))
            self._do(self._retrying(job_id, request))

    def _retrying(self, job_id: str, request: bytes) -> Act:
        return Act(
            job_id=job_id,
            command=c.Retry(digest=request),
            expected=lambda s: s.retry(self.now, 0, request),
        )

    @rule(pick=PICK)
    def repair(self, pick: int) -> None:
        """The same record again; every key is right already, and stays so."""
        job_id = IDS[pick % len(IDS)]
        if job_id in self.shadows:
            alive = not self.shadows[job_id].ended
            self._do(
                Act(job_id=job_id, command=c.Repair(), expected=lambda s: "done" if alive else "unchanged")
            )

    @rule(pick=PICK)
    def another_coordinator_reads(self, pick: int) -> None:
        """…and decides later."""
        job_id = IDS[pick % len(IDS)]
        if job_id in self.shadows:
            self.stale[job_id] = self.store.read(job_id)

    # -- what must hold ------------------------------------------------------------------------------------

    @invariant()
    def every_job_is_as_it_was_acknowledged(self) -> None:
        undoing = self._check_rollback_jobs()
        assert set(self.store.jobs) == set(self.shadows) | undoing, "a job was lost, or came from nowhere"
        owners = {s.order.unique: j for j, s in self.shadows.items() if s.order.unique and not s.ended}
        stored = {w.unique_key: k.job_id for w, k in self.store.keys.items() if w.slot is Slot.UNIQUE}
        assert owners == stored
        for job_id, shadow in self.shadows.items():
            self._check(job_id, shadow)
