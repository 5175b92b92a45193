"""Hands waiting jobs to sessions: long polls by queue and type.

The index proposes, the Txn decides. A proposal that loses costs one failed nested compare. Nothing is
handed out that was not committed, and what was committed but cannot be delivered is given back at once,
uncharged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coordinator import failpoints
from coordinator.core.commands import ClaimIt
from coordinator.core.job import claim_for
from coordinator.core.machine import Decision, decide
from coordinator.errors import LeasekeeperError, Reason, RequestError
from coordinator.ports import (
    Clock,
    Commit,
    Entropy,
    JobStore,
    NamespaceFeeds,
    Operation,
    Present,
    SessionStore,
)
from coordinator.services.abandoned import Abandoned
from coordinator.services.api import ClaimedJob, ClaimQuery
from coordinator.services.arrivals import Arrivals
from coordinator.services.circuit_gate import ALL_CLOSED, CircuitGate
from coordinator.services.claim_by_id import ClaimById, OneClaim
from coordinator.services.claiming import (
    Delivery,
    claim_operation,
    require_session,
    session_full,
    session_not_found,
)
from coordinator.services.commits import commit_each
from coordinator.services.digests import claim_nonce
from coordinator.services.fencing import check_present
from coordinator.services.holders import Holders
from coordinator.services.index import Index
from coordinator.services.lock_gate import NO_LOCKS, LockGate
from coordinator.services.redelivery import Redelivery
from coordinator.services.storage_errors import refused
from coordinator.services.waiters import Pair, Waiter, Waiters
from coordinator.services.window import Entry, Window, job_bytes

__all__ = ["Dispatch", "DispatchConfig"]

_ROUNDS: Final = 1_000
"""Rounds of one call at most; each ends in a commit or a wait, so this is never met in practice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Limits of dispatch. Spans are seconds, sizes bytes."""

    session_keys: int = 500
    reply_bytes: int = 3 * 1024 * 1024
    checkpoint_reserve: int = 256 * 1024
    commit_timeout: float = 5.0
    candidates: int = 4


@dataclass(frozen=True, slots=True)
class _Proposal:
    window: Window
    entry: Entry
    operation: Operation


class Dispatch:
    """Claims for workers.

    Args:
        expired: called with (namespace, job id) for a waiting job whose time has run out; it must not block.
        circuits: what holds jobs back.
        locks: which jobs wait for a lock.
    """

    def __init__(
        self,
        jobs: JobStore,
        sessions: SessionStore,
        feeds: NamespaceFeeds,
        present: Present,
        index: Index,
        holders: Holders,
        waiters: Waiters,
        arrivals: Arrivals,
        abandoned: Abandoned,
        redelivery: Redelivery,
        delivery: Delivery,
        by_id: ClaimById,
        clock: Clock,
        entropy: Entropy,
        config: DispatchConfig,
        *,
        expired: Callable[[str, str], None],
        circuits: CircuitGate = ALL_CLOSED,
        locks: LockGate = NO_LOCKS,
    ) -> None:
        self._jobs = jobs
        self._sessions = sessions
        self._feeds = feeds
        self._present = present
        self._index = index
        self._holders = holders
        self._waiters = waiters
        self._arrivals = arrivals
        self._abandoned = abandoned
        self._redelivery = redelivery
        self._delivery = delivery
        self.by_id = by_id
        self._clock = clock
        self._entropy = entropy
        self._config = config
        self._expired = expired
        self._circuits = circuits
        self._locks = locks
        self._draining = False
        self.conflicts = 0

    def drain(self) -> None:
        """Answer every long poll with nothing and refuse new ones."""
        self._draining = True
        self.by_id.drain()
        self._waiters.wake_all()

    @property
    def waiting(self) -> int:
        """Long polls under way."""
        return len(self._waiters) + self.by_id.waiting

    async def claim_jobs(self, namespace: str, query: ClaimQuery, deadline: float) -> list[ClaimedJob]:
        """Up to ``query.max_jobs`` jobs; waits for the first, at most ``query.wait_ms``.

        Raises:
            RequestError: SESSION_NOT_FOUND, SESSION_FULL, DRAINING, NOT_READY, ETCD_UNAVAILABLE,
            OUTCOME_UNKNOWN.
        """
        await self._admit(namespace, deadline)
        nonce = claim_nonce(query.session_id, query.request_id)
        if query.repeat:
            before = await self._redelivery.of_request(namespace, query.session_id, nonce, deadline)
            if before or not query.wait_ms:
                return before
        pairs = tuple((namespace, queue, type_) for queue, type_ in query.queues)
        try:
            return await self._poll(namespace, query, pairs, nonce, deadline)
        finally:
            self._pass_on(pairs)

    async def _poll(
        self, namespace: str, query: ClaimQuery, pairs: tuple[Pair, ...], nonce: bytes, deadline: float
    ) -> list[ClaimedJob]:
        until = min(deadline, self._clock.monotonic() + query.wait_ms / 1000)
        place = self._waiters.number()
        known = self._holders.session(namespace, query.session_id) is not None
        for _ in range(_ROUNDS):
            if self._circuits.barred:
                probe = await self._probe(namespace, query, pairs, nonce, deadline)
                if probe:
                    return probe
            proposals = self._propose(namespace, query, pairs, nonce, deadline)
            if proposals:
                claimed = await self._commit(namespace, query.session_id, nonce, proposals)
                if claimed:
                    return claimed
                continue
            left = until - self._clock.monotonic()
            if left <= 0 or self._draining:
                break
            if not known:
                await require_session(self._sessions, namespace, query.session_id, deadline)
                known = True
                continue
            for pair in pairs:
                self._index.hungry(pair)
                if self._index.window(pair) and pair not in self._circuits.barred:
                    self._arrivals.look_again(pair)
            if not await self._wait(self._waiters.add(place, pairs), left):
                break
        return []

    def _pass_on(self, pairs: tuple[Pair, ...]) -> None:
        """Wake the next in each line that still has a job.

        A job wakes one waiter. Whatever keeps that one from taking it (its session has ended, the store
        refuses, its caller is gone, another type's job came first), the job must not sit beside others who
        wait. Each who is woken passes on as it leaves, so one wake a line is enough.
        """
        for pair in pairs:
            waits = self._waiters.waiting_for(pair) and self._index.window(pair)
            if waits and pair not in self._circuits.barred:
                self._waiters.wake_one(pair)

    async def claim_job(self, namespace: str, wanted: OneClaim, deadline: float) -> ClaimedJob:
        """One job by its id. See ``ClaimById.claim``."""
        return await self.by_id.claim(namespace, wanted, deadline)

    # -- one round

    def _propose(
        self, namespace: str, query: ClaimQuery, pairs: tuple[Pair, ...], nonce: bytes, deadline: float
    ) -> list[_Proposal]:
        room = self._room(namespace, query.session_id)
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        commit_by = min(deadline, now + self._config.commit_timeout)
        proposals: list[_Proposal] = []
        size, most = 0, self._config.reply_bytes
        if query.max_bytes:
            most = min(most, query.max_bytes)
        for window, entry in self._candidates(pairs, min(query.max_jobs, room), now):
            job = entry.stored.job
            size += job_bytes(job, self._config.checkpoint_reserve)
            if proposals and size > most:
                break
            if job.terms.locks:
                # Each is a key on the session's lease; and those before it may take the same locks.
                room -= len(job.terms.locks)
                if room <= len(proposals):
                    if not proposals:
                        raise session_full(self._config.session_keys)
                    break
                if not self._locks.admits((namespace, job.terms.queue, job.terms.type), window, entry):
                    continue
            proposal = self._proposal(window, entry, query.session_id, nonce, now_ms, commit_by)
            if proposal is not None:
                proposals.append(proposal)
        return proposals

    def _room(self, namespace: str, session_id: str) -> int:
        room = self._config.session_keys - self._holders.held_by(namespace, session_id)
        if room <= 0:
            raise session_full(self._config.session_keys)
        return room

    def _proposal(
        self, window: Window, entry: Entry, session_id: str, nonce: bytes, now_ms: int, commit_by: float
    ) -> _Proposal | None:
        """Take an entry out of its window; None: its time in the queue is over."""
        job = entry.stored.job
        window.take(entry)
        claim = claim_for(job, session_id, nonce, now_ms)
        outcome = decide(job, None, ClaimIt(claim=claim), now_ms)
        if not isinstance(outcome, Decision):
            window.drop(entry)
            self._expired(job.namespace, job.job_id)
            return None
        known: tuple[int, ...] = ()
        if job.terms.locks:
            known = self._locks.revisions(job)
            self._locks.begin(job)
        want_spec = entry.spec is None
        operation = claim_operation(
            entry.stored, outcome, claim, commit_by, want_spec=want_spec, lock_revisions=known
        )
        return _Proposal(window, entry, operation)

    async def _probe(
        self, namespace: str, query: ClaimQuery, pairs: tuple[Pair, ...], nonce: bytes, deadline: float
    ) -> list[ClaimedJob]:
        """One job of a circuit that wants a probe, before all others: else one that is busy with other types
        would never find out."""
        for pair in pairs:
            if not self._circuits.may_probe(pair):
                continue
            self._room(namespace, query.session_id)
            window = self._index.window(pair)
            waiting = self._locks.ready(pair, window, 1) if window is not None else ()
            if window is None or not waiting:
                continue
            [entry] = waiting
            commit_by = min(deadline, self._clock.monotonic() + self._config.commit_timeout)
            probe = await self._circuits.take_slot(pair, entry.stored.job, commit_by)
            if probe is None:
                continue
            claimed: list[ClaimedJob] = []
            try:
                now_ms = self._clock.now_ms()
                if entry.stored.job.terms.locks and not self._locks.admits(pair, window, entry):
                    continue
                proposal = self._proposal(window, entry, query.session_id, nonce, now_ms, commit_by)
                if proposal is not None:
                    claimed = await self._commit(namespace, query.session_id, nonce, [proposal])
            finally:
                if not claimed:
                    self._circuits.give_back(pair, probe)
            if claimed:
                return claimed
        return []

    def _candidates(self, pairs: tuple[Pair, ...], wanted: int, now: float) -> list[tuple[Window, Entry]]:
        """The best ``wanted`` jobs over all windows; with other coordinators about, first those that are
        ours."""
        alone = self._arrivals.alone
        depth = wanted if alone else wanted * self._config.candidates
        found: list[tuple[Window, Entry]] = []
        barred = self._circuits.barred
        for pair in pairs:
            window = self._index.window(pair)
            if window is not None and pair not in barred:
                found.extend((window, entry) for entry in self._locks.ready(pair, window, depth))
        if len(pairs) > 1:
            found.sort(key=lambda candidate: candidate[1].key)
        if alone:
            return found[:wanted]
        ours = [c for c in found if self._arrivals.is_ours(c[1].stored.job.job_id)][:wanted]
        short = wanted - len(ours)
        if short > 0:
            own_keys = {c[1].key for c in ours}
            old = [
                c
                for c in found
                if c[1].key not in own_keys and now - c[1].seen >= self._arrivals.steal_delay * 0.9
            ]
            # At random, so that two coordinators that are both short seldom reach for the same job.
            old.sort(key=lambda _: self._entropy.fraction())
            ours.extend(sorted(old[:short], key=lambda candidate: candidate[1].key))
        return ours

    async def _commit(
        self, namespace: str, session_id: str, nonce: bytes, proposals: list[_Proposal]
    ) -> list[ClaimedJob]:
        await failpoints.reached("claim.before-commit")
        pending = asyncio.ensure_future(commit_each(self._jobs, [p.operation for p in proposals]))
        locking = [job for job in (p.entry.stored.job for p in proposals) if job.terms.locks]
        if locking:
            pending.add_done_callback(lambda _: self._locks.landed(locking))
        try:
            results = await asyncio.shield(pending)
        except asyncio.CancelledError:
            # The caller is gone, the commits are not: whatever they win goes back at once.
            self._abandoned.later(pending, [(p.window, p.entry) for p in proposals])
            raise
        await failpoints.reached("claim.after-commit")
        claimed: list[ClaimedJob] = []
        failure: RequestError | None = None
        for proposal, result in zip(proposals, results, strict=True):
            entry = proposal.entry
            if isinstance(result, LeasekeeperError):
                proposal.window.give_back(entry)
                failure = refused(result)
            elif result.won:
                spec = entry.spec or result.spec
                won = await self._delivery.deliver(namespace, result.stored, result.claim, spec, result)
                if won is not None:
                    claimed.append(won)
            elif result.session_gone:
                proposal.window.give_back(entry)
                failure = session_not_found(session_id)
            elif result.claim is not None and (result.claim.session, result.claim.nonce) == (
                session_id,
                nonce,
            ):
                proposal.window.drop(entry)
                won = await self._delivery.deliver(namespace, result.stored, result.claim, None, result)
                if won is not None:
                    claimed.append(won)
            else:
                self.conflicts += 1
                if result.lines is not None:
                    self._locks.met(namespace, result)
                if result.lines is not None and _waits_as_before(proposal.operation, result):
                    proposal.window.give_back(entry)  # a lock of it is held: judge again
                else:
                    proposal.window.drop(entry)
        if not claimed and failure is not None:
            raise failure
        return claimed

    # -- around it

    async def _admit(self, namespace: str, deadline: float) -> None:
        if self._draining:
            raise RequestError(Reason.DRAINING, "this coordinator is stopping", retry_after_ms=100)
        check_present(self._present)
        await self._feeds.ensure(namespace, deadline=deadline)

    async def _wait(self, waiter: Waiter, seconds: float) -> bool:
        """Whether it was woken in time; woken and timed out in one turn of the loop, it was woken."""
        try:
            async with asyncio.timeout(seconds):
                await waiter.woken
        except TimeoutError:
            return waiter.woken.done() and not waiter.woken.cancelled()
        finally:
            self._waiters.remove(waiter)
        return True


def _waits_as_before(operation: Operation, commit: Commit) -> bool:
    """Whether a claim that lost met its job as it had been read."""
    before, stands = operation.before, commit.stored
    if before is None or stands is None:
        return False
    return stands.revision == before.revision and commit.claim is None
