"""Ends runs whose time is over although their session lives: run and total timeout, and the grace of a
cancellation. Tells of jobs that run for very long.

Times count from when this process first saw the claim, or the request to stop, on its monotonic clock: no
wall clock can end a run too early, and a new leader only gives more time. Processes that do not lead look
too, so that the next leader knows. Only what is told of jobs that run for very long goes by the time in the
claim: it ends nothing, and else no job would be told that runs longer than coordinators do.

The claim is taken away by its token, and the job waits one TTL of its session, so that the holder hears of
it first (promise P8). Silence of a session is no matter here, its lease ends by itself; heartbeat timeouts
are `take_away`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from coordinator import failpoints
from coordinator.core.commands import TakeAway, Taken
from coordinator.core.effects import Slot
from coordinator.core.job import Claim, Job, JobState
from coordinator.core.machine import Decision, decide
from coordinator.core.notice import Notice, NoticeKind
from coordinator.errors import StorageError
from coordinator.ports import (
    Clock,
    Commit,
    Entropy,
    JobStore,
    Meters,
    Notices,
    Operation,
    Session,
    SessionStore,
    Snapshot,
)
from coordinator.ports.upkeep import Upkeep
from coordinator.reconciler.report import Action, Report
from coordinator.reconciler.telling import end_of, notice_of
from coordinator.services.commits import commit_each, operation_of

__all__ = ["HeldClaims", "OverdueConfig", "OverduePass"]

_log = logging.getLogger(__name__)

_KINDS: Final[Mapping[Taken, str]] = {Taken.TIMED_OUT: "timed-out", Taken.CANCELLED: "cancelled-by-force"}
_Place = tuple[str, str]


class HeldClaims(Protocol):
    """What is known of claims, as the watch tells it; ``services.holders`` has it."""

    def claims(self) -> Iterable[tuple[str, str, Claim]]:
        """Namespace, job id and claim of all that are held."""

    def session(self, namespace: str, session_id: str) -> Session | None:
        """An open session, as far as the watch has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueConfig:
    """``cancel_grace_s``: how long a handler has to stop after a request. ``stuck_after_s``: how long a job
    may run, or its run timeout if that is longer, until operators are told. ``look_every_s``: how often a
    process that does not lead looks for requests to stop. ``batch``: claims taken together. ``timeout_s``:
    for one batch, and for a page of requests to stop.
    """

    cancel_grace_s: float = 30.0
    stuck_after_s: float = 600.0
    look_every_s: float = 5.0
    batch: int = 60
    timeout_s: float = 5.0


@dataclass(slots=True)
class _Sight:
    """A claim since it was first seen. ``ran_before_s``: how long it had stood then, by the time in it.
    ``asked_at``: when the request to stop was first seen, ``asked`` its revision.
    """

    claim: Claim
    since: float
    ran_before_s: float = 0.0
    asked: int = 0
    asked_at: float = 0.0
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class _Over:
    """A claim that is to end."""

    job_id: str
    claim: Claim
    why: Taken
    waited_ms: int


@dataclass(slots=True)
class _Round:
    """One run: what all its parts share."""

    namespace: str
    report: Report
    dry_run: bool
    as_leader: bool
    over: list[_Over] = field(default_factory=list)


class OverduePass:
    """Implements ``report.Pass``.

    Args:
        jobs: where jobs are.
        sessions: sessions that the watch has not brought.
        upkeep: requests to stop.
        held: claims that are held.
        clock: monotonic time.
        entropy: jitter of the backoff.
        notices: told of each claim that is taken, and of jobs that run for very long.
        meters: told what each run of a leader did.
        leads: whether this process leads the sweeps; another only looks, so that it knows since when.
        config: times.
    """

    def __init__(
        self,
        jobs: JobStore,
        sessions: SessionStore,
        upkeep: Upkeep,
        held: HeldClaims,
        clock: Clock,
        entropy: Entropy,
        *,
        notices: Notices,
        meters: Meters,
        leads: Callable[[], bool],
        config: OverdueConfig | None = None,
    ) -> None:
        self._jobs = jobs
        self._sessions = sessions
        self._upkeep = upkeep
        self._held = held
        self._clock = clock
        self._entropy = entropy
        self._notices = notices
        self._meters = meters
        self._leads = leads
        self._config = config or OverdueConfig()
        self._sights: dict[_Place, _Sight] = {}
        self._looked_at = float("-inf")

    @property
    def name(self) -> str:
        """See ``report.Pass``."""
        return "overdue"

    async def step(self) -> bool:
        """Look at every namespace, and act where this process leads; for a ``PassLoop``.

        Returns:
            False: the next step may wait for the timer.

        Raises:
            StorageError: as of ``run_once``; the other namespaces have had their turn.
        """
        failure: StorageError | None = None
        namespaces = sorted(self._look())
        if not self._leads():
            await self._look_for_requests(namespaces)
            return False
        for namespace in namespaces:
            if not self._leads():
                break
            began = self._clock.monotonic()
            try:
                report = await self._run(namespace, dry_run=False, as_leader=True)
            except StorageError as error:
                self._meters.pass_failed(self.name)
                failure = error
                continue
            seconds = self._clock.monotonic() - began
            self._meters.pass_done(self.name, seconds, report.counts, report.failed)
        if failure is not None:
            raise failure
        return False

    async def run_once(self, namespace: str, *, dry_run: bool = False) -> Report:
        """Look at every claim of the namespace that this process knows of, and end what is overdue.

        Raises:
            StorageError: requests to stop could not be read; nothing was done.
        """
        self._look()
        return await self._run(namespace, dry_run=dry_run, as_leader=False)

    # -- who is overdue

    def _look(self) -> set[str]:
        """Take in what is held now; the namespaces that it is in."""
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        sights: dict[_Place, _Sight] = {}
        for namespace, job_id, claim in self._held.claims():
            place = (namespace, job_id)
            known = self._sights.get(place)
            same = known is not None and known.claim.token == claim.token
            if known is None or not same:
                ran_before_ms = max(0, now_ms - claim.start_ms) if claim.start_ms else 0
                known = _Sight(claim, now, ran_before_s=ran_before_ms / 1000)
            sights[place] = known
        self._sights = sights
        return {namespace for namespace, _ in sights}

    async def _look_for_requests(self, namespaces: Sequence[str]) -> None:
        """As who does not lead: so that a grace does not begin anew with the next leader."""
        now = self._clock.monotonic()
        if now - self._looked_at < self._config.look_every_s:
            return
        self._looked_at = now
        for namespace in namespaces:
            await self._requests(namespace)

    async def _run(self, namespace: str, *, dry_run: bool, as_leader: bool) -> Report:
        run = _Round(namespace, Report(self.name), dry_run, as_leader)
        own = [(job_id, sight) for (ns, job_id), sight in self._sights.items() if ns == namespace]
        if not own:
            return run.report
        await self._requests(namespace)
        for job_id, sight in own:
            run.report.examined += 1
            over = self._over(job_id, sight)
            if over is not None:
                run.over.append(over)
        for start in range(0, len(run.over), self._config.batch):
            await self._take(run.over[start : start + self._config.batch], run)
        for job_id, sight in own:
            self._tell_if_stuck(job_id, sight, run)
        return run.report

    async def _requests(self, namespace: str) -> None:
        """Take in who is asked to stop."""
        walk = self._upkeep.walk(namespace, Slot.CANCEL)
        while True:  # as many pages as there are
            deadline = self._clock.monotonic() + self._config.timeout_s
            page = await walk.page(deadline=deadline)
            if page is None:
                return
            for seen in page:
                sight = self._sights.get((namespace, seen.where.job_id))
                if sight is not None and sight.asked != seen.created:
                    sight.asked, sight.asked_at = seen.created, self._clock.monotonic()

    def _over(self, job_id: str, sight: _Sight) -> _Over | None:
        now, claim = self._clock.monotonic(), sight.claim
        ran_ms = round((now - sight.since) * 1000)
        if sight.asked and now - sight.asked_at >= self._config.cancel_grace_s:
            return _Over(job_id, claim, Taken.CANCELLED, round((now - sight.asked_at) * 1000))
        if claim.run_timeout_ms and ran_ms >= claim.run_timeout_ms:
            return _Over(job_id, claim, Taken.TIMED_OUT, ran_ms)
        return None

    # -- ending it

    async def _take(self, batch: Sequence[_Over], run: _Round) -> None:
        deadline = self._clock.monotonic() + self._config.timeout_s
        try:
            found = await self._jobs.read_many(
                run.namespace, [over.job_id for over in batch], deadline=deadline
            )
            pending: list[tuple[_Over, Operation]] = []
            for over, snapshot in zip(batch, found, strict=True):
                operation = await self._operation(over, snapshot, run, deadline)
                if operation is not None:
                    pending.append((over, operation))
        except StorageError as error:
            _log.warning("claims that are overdue could not be read: %s", error)
            run.report.failed += len(batch)
            return
        if run.dry_run:
            for over, operation in pending:
                run.report.add(_action(over, operation))
            return
        await failpoints.reached("overdue.before-commit")
        results = await commit_each(self._jobs, [operation for _, operation in pending])
        await failpoints.reached("overdue.after-commit")
        for (over, operation), result in zip(pending, results, strict=True):
            if not isinstance(result, Commit):
                run.report.failed += 1
            elif result.won:
                run.report.add(_action(over, operation))
                self._tell(over, operation)
                self._sights.pop((run.namespace, over.job_id), None)
            # Else it has ended or changed since; if it stands, the next run finds it.

    async def _operation(
        self, over: _Over, found: Snapshot, run: _Round, deadline: float
    ) -> Operation | None:
        if found.stored is None or found.claim is None or found.claim.token != over.claim.token:
            return None
        session = self._held.session(run.namespace, over.claim.session)
        if session is None:
            session = await self._sessions.read(run.namespace, over.claim.session, deadline=deadline)
        if session is None:
            return None  # its lease ends, or ``repair`` frees the claim
        command = TakeAway(
            token=over.claim.token,
            why=over.why,
            hold_ms=session.ttl_ms,
            reason=_reason(over, found.stored.job),
            jitter_number=self._entropy.fraction(),
        )
        outcome = decide(found.stored.job, found.claim, command, self._clock.now_ms())
        if not isinstance(outcome, Decision):
            return None  # a stray request to stop ends no claim
        return operation_of(found.stored, outcome, deadline, token=over.claim.token, as_leader=run.as_leader)

    # -- telling

    def _tell(self, over: _Over, operation: Operation) -> None:
        before, after = _jobs(operation)
        self._notices.publish(
            notice_of(
                NoticeKind.TAKEN_AWAY,
                before,
                after,
                _reason(over, before),
                facts={"why": over.why.name.lower()},
                token=over.claim.token,
            )
        )
        end = end_of(before, after)
        if end is not None:
            self._notices.publish(end)

    def _tell_if_stuck(self, job_id: str, sight: _Sight, run: _Round) -> None:
        """Once for each claim; one that was taken away is gone from the sights."""
        claim = sight.claim
        ran_s = sight.ran_before_s + self._clock.monotonic() - sight.since
        limit_s = max(self._config.stuck_after_s, claim.run_timeout_ms / 1000)
        if sight.stuck or run.dry_run or ran_s < limit_s:
            return
        if self._sights.get((run.namespace, job_id)) is not sight:
            return
        sight.stuck = True
        self._notices.publish(
            Notice(
                kind=NoticeKind.STUCK,
                reason=f"RUNNING for longer than {limit_s:g} s",
                namespace=run.namespace,
                queue=claim.queue,
                type=claim.type,
                job_id=job_id,
                session_id=claim.session,
                attempt=claim.attempt,
                token=claim.token,
                state_before=JobState.RUNNING,
                state_after=JobState.RUNNING,
                facts={"running_s": str(round(ran_s))},
            )
        )


def _reason(over: _Over, job: Job) -> str:
    if over.why is Taken.CANCELLED:
        return f"cancelled by force: its handler did not stop in {over.waited_ms} ms"
    if job.terms.run_timeout_ms and over.claim.run_timeout_ms == job.terms.run_timeout_ms:
        return f"run timeout: it ran for {over.waited_ms} ms"
    return f"total timeout: its time ended {over.waited_ms} ms after its claim"


def _jobs(operation: Operation) -> tuple[Job, Job]:
    assert operation.before is not None, "only what is there is taken away"
    assert operation.after is not None, "the record stays"
    return operation.before.job, operation.after


def _action(over: _Over, operation: Operation) -> Action:
    before, after = _jobs(operation)
    return Action(
        kind=_KINDS[over.why],
        job_id=over.job_id,
        reason=_reason(over, before),
        state_before=before.state,
        state_after=after.state,
    )
