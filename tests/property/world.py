"""How the commands of the fleet are decided, committed and judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from hypothesis.stateful import RuleBasedStateMachine

from coordinator.core import commands as c
from coordinator.core import effects, invariants, machine, rollback
from coordinator.core.effects import Slot
from coordinator.core.job import AttemptOutcome, Claim, Job, JobState, Rollback, Terms
from coordinator.core.retry import RetryPolicy
from coordinator.etcd.codec import JobCodec
from tests.property.memory_store import NAMESPACE, MemoryStore, Read
from tests.property.shadow import FIRST_DELAY, FREE, LONGEST_DELAY, Order, Shadow

IDS = tuple(f"job-{n}" for n in range(7))
QUEUE, TYPE = "q", "t"
UNDO = Rollback(queue="undo", type="u", payload=b"undo")
ROUNDS = 4
CODEC = JobCodec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One command at one job, and what the shadow says of it."""

    job_id: str
    command: c.Command
    expected: Callable[[Shadow], str]
    claim: Claim | None = None


class World(RuleBasedStateMachine):
    """Store, shadows and clock, and one way to give a command.

    ``reached`` and ``answers`` count, over all runs of the process, the transitions committed and the
    answers that wrote nothing: a run that never gets somewhere proves nothing about it.
    """

    reached: ClassVar[Counter[tuple[JobState, type, JobState | None]]] = Counter()
    answers: ClassVar[Counter[tuple[type, str]]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.shadows: dict[str, Shadow] = {}
        self.highest: dict[str, int] = {}
        self.history: dict[str, Job] = {}
        self.stale: dict[str, Read] = {}
        self.unanswered: list[Act] = []
        self.deaths: Counter[str] = Counter()
        self.now = 1_000_000
        self.numbers = 0

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
                    if read.job is not None:
                        target = outcome.job.state if outcome.job is not None else None
                        self.reached[read.job.state, type(act.command), target] += 1
                    return self._judge(act, "done", outcome)
            elif not given:
                self.answers[type(act.command), _verdict(outcome)] += 1
                return self._judge(act, _verdict(outcome), outcome)
            given, read = False, self.store.read(act.job_id)
        raise AssertionError(f"no end of lost guards for {act.command}")

    def _commit(self, act: Act, read: Read, decision: machine.Decision) -> bool:
        before, after, child = read.job, decision.job, None
        enqueued = before and after and rollback.enqueue_rollback(before, after, read.revision)
        if enqueued:
            after, child = enqueued
        writes = effects.effects(before, after, big_result=bool(decision.big_result))
        if child is not None:
            writes += effects.effects(None, child)
        return self.store.commit(
            decision.guard,
            read,
            after,
            writes,
            job_id=act.job_id,
            token=getattr(act.command, "token", 0),
            claim=act.claim,
            child=child,
        )

    def _judge(self, act: Act, verdict: str, outcome: machine.Outcome) -> None:
        shadow = self.shadows.get(act.job_id)
        if shadow is None:
            assert verdict == "JOB_NOT_FOUND"
            return
        runs, failed = len(shadow.runs), shadow.failed
        assert act.expected(shadow) == verdict, f"{act.command}"
        self.deaths[act.job_id] += shadow.order.rollback and shadow.failed and not failed
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
            rollback=UNDO if order.rollback else None,
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
        taken = self._taken(order.unique)
        won = self._commit(act, read, outcome)
        assert won is not taken, "one unfinished job per unique key"
        if won:
            self.shadows[job_id] = Shadow.submitted(order, self.now, self.numbers)

    def _taken(self, unique: str) -> bool:
        """Whether an unfinished job has this unique key."""
        return any(unique and s.order.unique == unique and not s.ended for s in self.shadows.values())

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

    def _loss(self, job_id: str, *, known: bool, delay: int = 0) -> Act:
        token = self.shadows[job_id].runs[-1].token if known else 0
        return Act(
            job_id=job_id,
            command=c.Lose(token=token, delay_ms=delay),
            expected=lambda s: s.lose(token, self.now, delay),
        )

    def _taking(self, job_id: str, why: c.Taken, hold: int) -> Act:
        token = self.shadows[job_id].runs[-1].token
        return Act(
            job_id=job_id,
            command=c.TakeAway(token=token, why=why, hold_ms=hold),
            expected=lambda s: s.take_away(why.name, token, self.now, hold),
        )

    def _cancel(self, job_id: str) -> Act:
        claim = self.store.claims.get(job_id)
        token = claim.token if claim is not None else 0
        return Act(
            job_id=job_id,
            command=c.Cancel(reason="enough", token=token),
            expected=lambda s: s.cancel(token),
        )

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

    # -- what is compared ------------------------------------------------------------------------------------

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
            assert CODEC.decode(job.namespace, job_id, CODEC.encode(job)) == job, (
                "stored is not what was decided"
            )
            self._check_record(job, shadow)
        holder = (shadow.runs[-1].session, shadow.runs[-1].token) if shadow.held else None
        assert holder == ((claim.session, claim.token) if claim is not None else None)
        assert shadow.kinds() == {where.slot.value for where in present}
        assert len(present) == len({where.slot for where in present}), "two keys of one kind"
        assert [shadow.due_at()] == ([w.ms for w in present if w.slot is Slot.DUE] or [0])
        rank = (shadow.rank_ms(), shadow.counter)
        assert all(rank == tuple(w.rank) for w in present if w.slot is Slot.READY)
        order = shadow.order
        charged = shadow.failures + shadow.losses
        assert charged <= order.retries + order.losses + 1
        assert len(shadow.runs) - shadow.earlier_runs <= order.retries + order.losses + 1 + FREE
        kept = {w for w, k in self.store.keys.items() if k.job_id == job_id and k.retained}
        brief = shadow.state in (JobState.SUCCEEDED, JobState.CANCELLED)
        assert kept == (set(present) if brief else set())

    def _check_rollback_jobs(self) -> set[str]:
        """One for each time that a job failed for good; nobody has touched them. Answers their ids."""
        found = {job_id: job for job_id, job in self.store.jobs.items() if job_id not in IDS}
        of = Counter(job.terms.labels["leasekeeper.rollback-of"] for job in found.values())
        assert of == +self.deaths, "a rollback job was lost, or enqueued twice"
        for job_id, job in found.items():
            assert {where.slot.value for where in self.store.present(job_id)} == {"state", "job", "ready"}
            assert (job.state, job.attempt, job.terms.queue) == (JobState.PENDING, 0, UNDO.queue)
        for job_id, shadow in self.shadows.items():
            job = self.store.jobs[job_id]
            if shadow.failed and shadow.order.rollback:
                assert job.rollback_job in found
                assert found[job.rollback_job].terms.labels["leasekeeper.rollback-of"] == job_id
                assert found[job.rollback_job].terms.submit_ms == job.settle_ms
        return set(found)

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


def _verdict(outcome: machine.Outcome) -> str:
    if isinstance(outcome, machine.Refusal):
        return str(outcome.reason)
    if isinstance(outcome, machine.Replay):
        return "replay"
    return "unchanged" if isinstance(outcome, machine.Unchanged) else "done"
