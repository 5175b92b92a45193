"""Jobs that name locks and sessions that take them, over a store of one dict, as a Hypothesis state machine.

Claims are decided on what a coordinator has seen, which may be old, and committed in groups, whose compares
see the store before the whole group. The oracle counts who was told that he holds what, from the answers
alone; it never asks the core who owns. ``Bugs`` are put in to show that it would notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.core import commands as c
from coordinator.core.effects import Slot, Where, Write, effects
from coordinator.core.fencing import make_token
from coordinator.core.job import Claim, Job, JobLock, JobState, Terms
from coordinator.core.job_locks import entries_of
from coordinator.core.lock_order import LockEntry, LockMode, job_waiter, line_of
from coordinator.core.machine import Decision, decide
from coordinator.core.retry import RetryPolicy

NS, NAMES, IDS = "default", ("a", "b"), tuple(f"job-{n}" for n in range(6))
HOWS = ("complete", "fail", "release", "take", "cancel", "cancel-fail")
PICK = st.integers(0, 30)
LOCKS = st.builds(
    JobLock,
    name=st.sampled_from(NAMES),
    mode=st.sampled_from([LockMode.EXCLUSIVE, LockMode.EXCLUSIVE, LockMode.SHARED, LockMode.SEMAPHORE]),
    permits=st.just(2),
).map(lambda lock: replace(lock, permits=2 if lock.mode is LockMode.SEMAPHORE else 1))
WISHES = st.lists(LOCKS, min_size=1, max_size=2, unique_by=lambda lock: lock.name).map(tuple)


@dataclass(frozen=True, slots=True)
class Bugs:
    """What to do wrong: ``blind`` compares nothing, ``together`` adds to one lock twice in a group, ``keeps``
    is the command whose end gives back no locks."""

    blind: bool = False
    together: bool = False
    keeps: type | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What a coordinator has seen of the locks, at one revision."""

    revision: int
    entries: tuple[LockEntry, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A claim that was decided and not yet committed."""

    before: Job
    read: int
    after: Job
    claim: Claim
    known: int


@dataclass
class Store:
    """Records, claims, entries and sessions of one namespace, at growing revisions."""

    revision: int = 10
    jobs: dict[str, tuple[Job, int]] = field(default_factory=dict)
    claims: dict[str, tuple[Claim, int]] = field(default_factory=dict)
    entries: dict[tuple[str, str], LockEntry] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)

    def view(self) -> View:
        return View(self.revision, tuple(self.entries.values()))

    def apply(self, writes: Iterable[Write], after: Job, claim: Claim | None, revision: int) -> None:
        for where, put, _ in writes:
            self._write(where, put, after, claim, revision)

    def _write(self, where: Where, put: bool, after: Job, claim: Claim | None, revision: int) -> None:
        if where.slot is Slot.STATE:
            self.jobs[where.job_id] = (after, revision)
        elif where.slot is Slot.CLAIM and put and claim is not None:
            token = make_token(1, revision)
            self.claims[where.job_id] = (replace(claim, token=token), revision)
        elif where.slot is Slot.CLAIM:
            self.claims.pop(where.job_id, None)
        elif where.slot is Slot.LOCK and put and claim is not None:
            [entry] = [one for one in entries_of(after, claim, revision) if one.name == where.lock_name]
            self.entries[entry.name, entry.waiter] = entry
        elif where.slot is Slot.LOCK:
            self.entries.pop((where.lock_name, job_waiter(where.job_id)), None)


class JobLockWorld(RuleBasedStateMachine):
    """See the module. ``met`` counts over all runs: one that never gets somewhere proves nothing of it."""

    bugs: ClassVar[Bugs] = Bugs()
    met: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.views = [self.store.view(), self.store.view()]
        self.held: dict[str, tuple[str, tuple[JobLock, ...]]] = {}
        self.group: list[Attempt] = []
        self.now, self.numbers = 1_000_000, 0
        self.turn, self.ends = 0, 0

    # -- the world

    @initialize(wishes=st.lists(WISHES, min_size=len(IDS), max_size=len(IDS)), turn=PICK)
    def open(self, wishes: list[tuple[JobLock, ...]], turn: int) -> None:
        self.turn = turn
        for _ in range(3):
            self._new_session()
        for job_id, locks in zip(IDS, wishes, strict=True):
            retry = RetryPolicy(max_retries=1_000, max_lease_losses=1_000)
            terms = Terms(queue="q", type="t", submit_ms=self.now, locks=locks, retry=retry)
            outcome = decide(None, None, c.Submit(namespace=NS, job_id=job_id, terms=terms), self.now)
            assert isinstance(outcome, Decision)
            assert outcome.job is not None
            self.store.revision += 1
            self.store.jobs[job_id] = (outcome.job, self.store.revision)

    @rule(side=st.integers(0, 1))
    def a_coordinator_catches_up(self, side: int) -> None:
        self.views[side] = self.store.view()

    @rule(picks=st.lists(PICK, min_size=1, max_size=4, unique=True), side=st.integers(0, 1))
    def propose(self, picks: list[int], side: int) -> None:
        """Claims of waiting jobs whose locks seem free to this coordinator."""
        view = self.views[side]
        for pick in picks:
            waiting = [job for job, _ in self.store.jobs.values() if job.state is JobState.PENDING]
            if waiting:
                self._propose(waiting[pick % len(waiting)], view, pick)

    def _propose(self, job: Job, view: View, pick: int) -> None:
        session = sorted(self.store.sessions)[pick % len(self.store.sessions)]
        claim = Claim(session=session, attempt=job.attempt + 1, nonce=b"n", start_ms=self.now)
        for wish in entries_of(job, claim):
            if not line_of([one for one in view.entries if one.name == wish.name]).admits(wish):
                self.met["parked"] += 1
                return
        outcome = decide(job, None, c.ClaimIt(claim=claim), self.now)
        if isinstance(outcome, Decision) and outcome.job is not None:
            read = self.store.jobs[job.job_id][1]
            self.group.append(Attempt(job, read, outcome.job, claim, view.revision))

    @rule()
    def commit_the_group(self) -> None:
        """One Txn after the other, each of operations that add to different locks of different jobs."""
        while self.group:
            group, taken = list[Attempt](), set[str]()
            for attempt in list(self.group):
                names = {lock.name for lock in attempt.after.terms.locks}
                lanes = {attempt.after.job_id} | (set() if self.bugs.together else names)
                if not taken & lanes:
                    taken |= lanes
                    group.append(attempt)
                    self.group.remove(attempt)
            self._commit(group)

    def _commit(self, group: list[Attempt]) -> None:
        before = list(self.store.entries.values())
        winners = [attempt for attempt in group if self._wins(attempt, before)]
        self.store.revision += bool(winners)
        for attempt in winners:
            job = attempt.after
            self.store.apply(effects(attempt.before, job), job, attempt.claim, self.store.revision)
            self.held[job.job_id] = (attempt.claim.session, job.terms.locks)
        self.met["claimed"] += len(winners)
        self.met["lost"] += len(group) - len(winners)

    def _wins(self, attempt: Attempt, before: list[LockEntry]) -> bool:
        job_id = attempt.after.job_id
        names = {lock.name for lock in attempt.after.terms.locks}
        added = any(one.name in names and one.version > attempt.known for one in before)
        own = any(one.waiter == job_waiter(job_id) for one in before)
        return (
            self.store.jobs[job_id][1] == attempt.read
            and job_id not in self.store.claims
            and attempt.claim.session in self.store.sessions
            and (self.bugs.blind or not (added or own))
        )

    @rule(pick=PICK)
    def an_attempt_ends(self, pick: int) -> None:
        held = sorted(self.held)
        if not held:
            return
        # In turn, from a drawn start: no end is left to luck.
        self.ends += 1
        how = HOWS[(self.turn + self.ends) % len(HOWS)]
        job_id = held[pick % len(held)]
        claim, _ = self.store.claims[job_id]
        if how.startswith("cancel"):
            self._do(job_id, c.Cancel(token=claim.token))
        if how in ("complete", "cancel"):
            self._do(job_id, c.Complete(token=claim.token, digest=b"d"))
        elif how in ("fail", "cancel-fail"):
            self._do(job_id, c.Fail(token=claim.token, digest=b"d", retry_delay_ms=0))
        elif how == "release":
            self._do(job_id, c.Release(token=claim.token, digest=b"d"))
        else:
            self._do(job_id, c.TakeAway(token=claim.token, why=c.Taken.TIMED_OUT, hold_ms=10))
        del self.held[job_id]
        self.met[how] += 1

    def _do(self, job_id: str, command: c.Command) -> None:
        job, _ = self.store.jobs[job_id]
        held = self.store.claims.get(job_id)
        outcome = decide(job, held[0] if held is not None else None, command, self.now)
        assert isinstance(outcome, Decision), outcome
        assert outcome.job is not None
        writes = effects(job, outcome.job)
        if type(command) is self.bugs.keeps:
            writes = tuple(write for write in writes if write.where.slot is not Slot.LOCK)
        self.store.revision += 1
        self.store.apply(writes, outcome.job, None, self.store.revision)

    @rule(pick=PICK)
    def a_session_ends(self, pick: int) -> None:
        """Claims and entries go in one revision; then the losses are noticed."""
        session = sorted(self.store.sessions)[pick % len(self.store.sessions)]
        self.store.sessions.discard(session)
        self.store.revision += 1
        self.store.entries = {k: one for k, one in self.store.entries.items() if one.session != session}
        lost = [job_id for job_id, (claim, _) in self.store.claims.items() if claim.session == session]
        for job_id in lost:
            del self.store.claims[job_id]
            del self.held[job_id]
        self._new_session()
        for job_id in lost:
            self._do(job_id, c.Lose())
        self.met["lose"] += len(lost)

    @rule()
    def waiting_jobs_fall_due(self) -> None:
        self.now += 400_000
        for job_id, (job, _) in list(self.store.jobs.items()):
            if job.state is JobState.SCHEDULED:
                self._do(job_id, c.FallDue())

    @rule(pick=PICK, lock=LOCKS)
    def a_session_takes_a_lock_and_gives_it_back(self, pick: int, lock: JobLock) -> None:
        """It waits if it must; a waiting one keeps jobs that come later out of the line."""
        session = sorted(self.store.sessions)[pick % len(self.store.sessions)]
        mine = [key for key, one in self.store.entries.items() if one.session == session and not one.job_id]
        self.store.revision += 1
        if mine:
            del self.store.entries[mine[0]]
            return
        self.numbers += 1
        self.store.entries[lock.name, f"{session}-{self.numbers}"] = LockEntry(
            name=lock.name,
            waiter=f"{session}-{self.numbers}",
            session=session,
            mode=lock.mode,
            permits=lock.permits,
            revision=self.store.revision,
            version=self.store.revision,
        )

    def _new_session(self) -> None:
        self.numbers += 1
        self.store.sessions.add(f"{self.numbers:016x}")

    # -- what must hold

    @invariant()
    def no_two_runs_hold_what_they_may_not_hold_together(self) -> None:
        for name in NAMES:
            holds = [lock for _, locks in self.held.values() for lock in locks if lock.name == name]
            modes = {lock.mode for lock in holds}
            assert len(modes) <= 1, f"{name} is held in two modes"
            assert LockMode.EXCLUSIVE not in modes or len(holds) == 1, f"two hold {name}"
            assert LockMode.SEMAPHORE not in modes or len(holds) <= 2, f"{name} has two permits"

    @invariant()
    def a_run_has_all_its_locks_and_no_lock_outlives_its_run(self) -> None:
        wanted = {
            (lock.name, job_waiter(job_id)): session
            for job_id, (session, locks) in self.held.items()
            for lock in locks
        }
        there = {key: one.session for key, one in self.store.entries.items() if one.job_id}
        assert there == wanted

    @invariant()
    def a_run_owns_its_locks_under_the_token_of_its_claim(self) -> None:
        for (name, _), entry in self.store.entries.items():
            if entry.job_id:
                assert entry.revision == self.store.claims[entry.job_id][1]
                line = [one for one in self.store.entries.values() if one.name == name]
                assert all(
                    one.revision > entry.revision or one.mode is entry.mode is not LockMode.EXCLUSIVE
                    for one in line
                    if one is not entry
                ), "an earlier entry keeps it out"
