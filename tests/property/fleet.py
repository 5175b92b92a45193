"""A fleet of jobs under several sessions and two coordinators, as a Hypothesis state machine.

The oracle is ``shadow.py``: what holders, producers and operators were told, and what follows from it by the
promises. The store is ``memory_store.py``. Commands are steered to jobs that they can move (a claim to a
waiting job, a settlement to a held one), ends are followed by resubmissions, and cancellation is rare:
otherwise terminal states swallow most steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.core import commands as c
from coordinator.core import effects, invariants, machine
from coordinator.core.effects import Slot
from coordinator.core.job import AttemptOutcome, Claim, Job, JobState, Terms
from coordinator.core.retry import RetryPolicy
from tests.property.memory_store import NAMESPACE, MemoryStore, Read
from tests.property.shadow import FIRST_DELAY, FREE, LONGEST_DELAY, Order, Shadow

IDS = tuple(f"job-{n}" for n in range(7))
QUEUE, TYPE = "q", "t"
ROUNDS = 4

PICK = st.integers(0, 30)
DIGESTS = st.sampled_from([b"a", b"b"])
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
    total_timeout=st.sampled_from([0, 0, 40_000]),
    content=st.integers(0, 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One command at one job, and what the shadow says of it."""

    job_id: str
    command: c.Command
    expected: Callable[[Shadow], str]
    claim: Claim | None = None


class Fleet(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.shadows: dict[str, Shadow] = {}
        self.highest: dict[str, int] = {}
        self.history: dict[str, Job] = {}
        self.stale: dict[str, Read] = {}
        self.unanswered: list[Act] = []
        self.now = 1_000_000
        self.numbers = 0

    # -- the world -----------------------------------------------------------------------------------------

    @initialize(orders=st.lists(ORDERS, min_size=6, max_size=6))
    def open(self, orders: list[Order]) -> None:
        """Three sessions and six jobs."""
        for _ in range(3):
            self._new_session()
        for job_id, order in zip(IDS, orders, strict=False):
            self._submit(job_id, order)

    @rule(ms=st.sampled_from([1, 900, 1_500, 4_000, 9_000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(pick=PICK, order=ORDERS)
    def submit(self, pick: int, order: Order) -> None:
        """A new job, or one more try with an id that is taken."""
        self._submit(IDS[pick % len(IDS)], order)

    @precondition(lambda self: self._with(lambda s: s.ended))
    @rule(pick=PICK, order=ORDERS)
    def delete_and_resubmit(self, pick: int, order: Order) -> None:
        job_id = self._choose(pick, lambda s: s.ended)
        self._delete(job_id)
        self._submit(job_id, order)

    @precondition(lambda self: self._with(lambda s: s.state is JobState.PENDING))
    @rule(pick=PICK, session=PICK, stale=st.booleans())
    def claim(self, pick: int, session: int, stale: bool) -> None:
        job_id = self._choose(pick, lambda s: s.state is JobState.PENDING)
        self._do(self._claim_of(job_id, session), stale=stale)

    @precondition(lambda self: self._with(lambda s: s.state is JobState.PENDING))
    @rule(pick=PICK)
    def claim_for_a_session_that_has_ended(self, pick: int) -> None:
        """Its witness is gone, so no claim is put: nothing would ever take it away."""
        job_id = self._choose(pick, lambda s: s.state is JobState.PENDING)
        act = self._claim_of(job_id, 0)
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
        delay=st.sampled_from([None, 0, 700]),
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

    @precondition(lambda self: self.unanswered)
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

    @precondition(lambda self: self.store.sessions)
    @rule(pick=PICK)
    def session_expires(self, pick: int) -> None:
        """Witness and claims vanish in one revision; the process lives on and does not know."""
        sessions = sorted(self.store.sessions)
        for job_id in self.store.expire(sessions[pick % len(sessions)]):
            self.shadows[job_id].held = False
        self._new_session()

    @precondition(lambda self: self._with(lambda s: s.lost))
    @rule(pick=PICK, known=st.booleans(), stale=st.booleans())
    def loss_is_noticed(self, pick: int, known: bool, stale: bool) -> None:
        self._do(self._loss(self._choose(pick, lambda s: s.lost), known=known), stale=stale)

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
        if lost % 6 == 0:
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
    @rule(pick=PICK, how=HOW, big=st.booleans(), saves=st.booleans())
    def one_attempt_from_claim_to_settlement(self, pick: int, how: str, big: bool, saves: bool) -> None:
        job_id = self._choose(pick, lambda s: s.state is JobState.PENDING)
        self._do(self._claim_of(job_id, pick))
        if self.shadows[job_id].held:
            token = self.shadows[job_id].runs[-1].token
            if saves:
                assert self.store.save_checkpoint(job_id, token)
                self.shadows[job_id].checkpoint = True
            self._do(self._settlement(job_id, how, token, b"a", delay=0, big=big))

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
    @rule(pick=PICK, times=st.sampled_from([2, 9, 22]))
    def circle(self, pick: int, times: int) -> None:
        """A worker that takes a job and gives it back, over and over: it has an end."""
        job_id = self._choose(pick, lambda s: s.state is JobState.PENDING)
        for turn in range(times):
            self._do(self._claim_of(job_id, turn))
            if not self.shadows[job_id].held:
                break
            token = self.shadows[job_id].runs[-1].token
            self._do(self._settlement(job_id, "release", token, b"a", delay=0))

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
        assert set(self.store.jobs) == set(self.shadows), "a job was lost, or came from nowhere"
        owners = {s.order.unique: j for j, s in self.shadows.items() if s.order.unique and not s.ended}
        stored = {w.unique_key: k.job_id for w, k in self.store.keys.items() if w.slot is Slot.UNIQUE}
        assert owners == stored
        for job_id, shadow in self.shadows.items():
            self._check(job_id, shadow)

    def _check(self, job_id: str, shadow: Shadow) -> None:
        job, claim = self.store.jobs[job_id], self.store.claims.get(job_id)
        present = self.store.present(job_id)
        assert [] == invariants.check_job(job, claim)
        assert [] == invariants.check_keys(job, present)
        earlier = self.history.get(job_id)
        if earlier is not job:
            if earlier is not None:
                assert [] == invariants.check_history([earlier, job])
            self.history[job_id] = job
            self._check_record(job, shadow)
        holder = (shadow.runs[-1].session, shadow.runs[-1].token) if shadow.held else None
        assert holder == ((claim.session, claim.token) if claim is not None else None)
        assert shadow.kinds() == {where.slot.value for where in present}
        assert len(present) == len({where.slot for where in present}), "two keys of one kind"
        assert [shadow.due_at() or None] == ([w.ms for w in present if w.slot is Slot.DUE] or [None])
        rank = (shadow.rank_ms(), shadow.counter)
        assert all(rank == tuple(w.rank) for w in present if w.slot is Slot.READY)
        order = shadow.order
        charged = shadow.failures + shadow.losses
        assert charged <= order.retries + order.losses + 1
        assert len(shadow.runs) <= order.retries + order.losses + 1 + FREE
        kept = {w for w, k in self.store.keys.items() if k.job_id == job_id and k.retained}
        brief = shadow.state in (JobState.SUCCEEDED, JobState.CANCELLED)
        assert kept == (set(present) if brief else set())

    def _check_record(self, job: Job, shadow: Shadow) -> None:
        assert job.state is shadow.state
        assert (job.failures, job.lease_losses, job.uncharged) == (
            shadow.failures,
            shadow.losses,
            shadow.uncharged,
        )
        assert job.attempt == len(shadow.runs)
        assert job.cancel_requested == shadow.asked_to_stop
        assert job.terms.priority == shadow.priority
        if not shadow.ended and shadow.state is not JobState.RUNNING:
            assert job.ready_ms == shadow.ready_ms
            assert job.ready_ms >= shadow.hold_until, "may run before its old holder can have heard of it"
            assert bool(job.hold_ms) == shadow.on_hold
        remembered = [(a.number, a.session, a.token) for a in job.attempts]
        runs = [(r.number, r.session, r.stored_token) for r in shadow.runs]
        assert remembered == runs[-8:]

    # -- how it is done ------------------------------------------------------------------------------------

    def _do(self, act: Act, *, stale: bool = False, read: Read | None = None) -> None:
        """Decide on ``read`` (or an old or fresh one) and commit; on a lost guard read again, as services do.

        What an old read says is acted on only through a guard; an answer without a write takes a fresh read.
        """
        read = read or (self.stale.get(act.job_id) if stale else None)
        given = read is not None
        read = read or self.store.read(act.job_id)
        for _ in range(ROUNDS):
            outcome = machine.decide(read.job, read.claim, act.command, self.now)
            if isinstance(outcome, machine.Decision):
                if self._commit(act, read, outcome):
                    return self._judge(act, "done", outcome)
            elif not given:
                return self._judge(act, _verdict(outcome), outcome)
            given, read = False, self.store.read(act.job_id)
        raise AssertionError(f"no end of lost guards for {act.command}")

    def _commit(self, act: Act, read: Read, decision: machine.Decision) -> bool:
        writes = effects.effects(read.job, decision.job, big_result=bool(decision.big_result))
        return self.store.commit(
            decision.guard,
            read,
            decision.job,
            writes,
            job_id=act.job_id,
            token=getattr(act.command, "token", 0),
            claim=act.claim,
        )

    def _judge(self, act: Act, verdict: str, outcome: machine.Outcome) -> None:
        shadow = self.shadows.get(act.job_id)
        if shadow is None:
            assert verdict == "JOB_NOT_FOUND"
            return
        runs = len(shadow.runs)
        assert act.expected(shadow) == verdict, f"{act.command}"
        if len(shadow.runs) > runs:
            token = shadow.runs[-1].token
            assert token > self.highest.get(act.job_id, 0), "tokens only grow"
            self.highest[act.job_id] = token
        if isinstance(outcome, machine.Replay):
            past = outcome.attempt
            run = shadow.runs[past.number - 1]
            assert run.answer == (past.state_after, past.ready_ms_after)
            assert past.outcome in (AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED, AttemptOutcome.RELEASED)
        if isinstance(act.command, c.Complete) and verdict == "done":
            shadow.big_result = len(act.command.result) > 1024
            job = self.store.jobs[act.job_id]
            assert job.result_size == len(act.command.result)
            assert job.result == (b"" if shadow.big_result else act.command.result)

    def _submit(self, job_id: str, order: Order) -> None:
        self.numbers += 1
        digest = repr(order).encode()
        terms = Terms(
            queue=QUEUE,
            type=TYPE,
            priority=order.priority,
            submit_ms=self.now,
            due_ms=self.now + order.due_in if order.due_in else 0,
            counter=self.numbers,
            retry=RetryPolicy(
                max_retries=order.retries,
                max_lease_losses=order.losses,
                initial_ms=FIRST_DELAY,
                cap_ms=LONGEST_DELAY,
                jitter=0.0,
            ),
            queue_timeout_ms=order.queue_timeout,
            total_timeout_ms=order.total_timeout,
            unique_key=order.unique,
            digest=digest,
            request_digest=digest,
        )
        run_at = self.now + order.run_in if order.run_in else 0
        command = c.Submit(namespace=NAMESPACE, job_id=job_id, terms=terms, run_at_ms=run_at)
        read = self.store.read(job_id)
        outcome = machine.decide(read.job, read.claim, command, self.now)
        present = self.shadows.get(job_id)
        if present is not None:
            same = present.order == order
            assert _verdict(outcome) == ("unchanged" if same else "JOB_EXISTS")
            return
        assert isinstance(outcome, machine.Decision)
        act = Act(job_id=job_id, command=command, expected=lambda s: "done")
        rivals = [s for s in self.shadows.values() if order.unique and s.order.unique == order.unique]
        taken = any(not s.ended for s in rivals)
        won = self._commit(act, read, outcome)
        assert won is not taken, "one unfinished job per unique key"
        if won:
            self.shadows[job_id] = Shadow.submitted(order, self.now, self.numbers)

    def _delete(self, job_id: str) -> None:
        self._do(Act(job_id=job_id, command=c.Delete(), expected=lambda s: "done"))
        assert self.store.present(job_id) == []
        del self.shadows[job_id]
        self.history.pop(job_id, None)

    def _claim_of(self, job_id: str, pick: int) -> Act:
        sessions = sorted(self.store.sessions)
        name = sessions[pick % len(sessions)]
        job = self.store.jobs.get(job_id)
        claim = Claim(
            session=name,
            attempt=job.attempt + 1 if job else 1,
            nonce=b"n",
            start_ms=self.now,
            queue=QUEUE,
            type=TYPE,
        )
        return Act(
            job_id=job_id,
            command=c.ClaimIt(claim=claim),
            claim=claim,
            expected=lambda s: s.claim(name, self.store.token(), self.now),
        )

    def _settlement(
        self,
        job_id: str,
        how: str,
        token: int,
        digest: bytes,
        *,
        delay: int | None,
        final: bool = False,
        big: bool = False,
    ) -> Act:
        command: c.Command
        if how == "complete":
            command = c.Complete(token=token, digest=digest, result=b"r" * (2_000 if big else 3))
        elif how == "fail":
            command = c.Fail(token=token, digest=digest, retry_delay_ms=delay, no_retry=final)
        else:
            command = c.Release(token=token, digest=digest, delay_ms=delay or 0)
        return Act(
            job_id=job_id,
            command=command,
            expected=lambda s: s.settle(how, token, digest, self.now, delay=delay, final=final),
        )

    def _loss(self, job_id: str, *, known: bool) -> Act:
        token = self.shadows[job_id].runs[-1].token if known else 0
        return Act(job_id=job_id, command=c.Lose(token=token), expected=lambda s: s.lose(token, self.now))

    def _taking(self, job_id: str, why: c.Taken, hold: int) -> Act:
        token = self.shadows[job_id].runs[-1].token
        return Act(
            job_id=job_id,
            command=c.TakeAway(token=token, why=why, hold_ms=hold),
            expected=lambda s: s.take_away(why.name, token, self.now, hold),
        )

    def _cancel(self, job_id: str) -> Act:
        return Act(job_id=job_id, command=c.Cancel(reason="enough"), expected=lambda s: s.cancel())

    def _expire_holder_of(self, job_id: str) -> None:
        for lost in self.store.expire(self.shadows[job_id].runs[-1].session):
            self.shadows[lost].held = False
        self._new_session()

    def _new_session(self) -> None:
        self.numbers += 1
        self.store.sessions.add(f"session-{self.numbers:04d}")

    def _with(self, wanted: Callable[[Shadow], bool]) -> list[str]:
        return sorted(job_id for job_id, shadow in self.shadows.items() if wanted(shadow))

    def _choose(self, pick: int, wanted: Callable[[Shadow], bool]) -> str:
        candidates = self._with(wanted)
        return candidates[pick % len(candidates)]


def _verdict(outcome: machine.Outcome) -> str:
    if isinstance(outcome, machine.Refusal):
        return str(outcome.reason)
    if isinstance(outcome, machine.Replay):
        return "replay"
    return "unchanged" if isinstance(outcome, machine.Unchanged) else "done"
