"""One look at one job for one caller: read it, and claim it if it is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from coordinator import failpoints
from coordinator.core.commands import ClaimIt
from coordinator.core.job import Claim, Job, JobState, claim_for
from coordinator.core.machine import Decision, Refusal, decide
from coordinator.errors import LeasekeeperError, Reason, RequestError, StorageError
from coordinator.ports import Clock, JobStore, Operation, Stored
from coordinator.services.abandoned import Abandoned
from coordinator.services.api import ClaimedJob
from coordinator.services.circuit_gate import CircuitGate
from coordinator.services.claiming import (
    Delivery,
    claim_operation,
    session_full,
    session_not_found,
)
from coordinator.services.commits import commit_each
from coordinator.services.holders import Holders
from coordinator.services.lock_gate import NO_LOCKS, LockGate
from coordinator.services.redelivery import Redelivery
from coordinator.services.storage_errors import refused
from coordinator.services.waiters import Pair
from coordinator.services.window import Entry, Window

__all__ = ["ClaimCall", "ClaimLook", "is_held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCall:
    """Who wants which job. ``nonce`` tells its claim from those of the session's other calls; ``deadline`` is
    monotonic seconds."""

    namespace: str
    session_id: str
    nonce: bytes
    job_id: str
    deadline: float

    def owns(self, claim: Claim | None) -> bool:
        """Whether this very call has made it."""
        return claim is not None and (claim.session, claim.nonce) == (self.session_id, self.nonce)


class ClaimLook:
    """Looks at jobs.

    Args:
        jobs: where jobs are.
        holders: how many claims a session has.
        delivery: hands over what was won.
        redelivery: claims of earlier calls.
        abandoned: commits whose caller is gone.
        circuits: what holds jobs back.
        clock: time.
        session_keys: claims of one session at most.
        commit_timeout: seconds that one commit may take.
        expired: called with (namespace, job id) for a waiting job whose time has run out; it must not block.
        locks: what is known of the locks that jobs name.
    """

    def __init__(
        self,
        jobs: JobStore,
        holders: Holders,
        delivery: Delivery,
        redelivery: Redelivery,
        abandoned: Abandoned,
        circuits: CircuitGate,
        clock: Clock,
        *,
        session_keys: int,
        commit_timeout: float,
        expired: Callable[[str, str], None],
        locks: LockGate = NO_LOCKS,
    ) -> None:
        self._jobs = jobs
        self._holders = holders
        self._delivery = delivery
        self._redelivery = redelivery
        self._abandoned = abandoned
        self._circuits = circuits
        self._clock = clock
        self._session_keys = session_keys
        self._commit_timeout = commit_timeout
        self._expired = expired
        self._locks = locks
        self.conflicts = 0

    async def look(self, call: ClaimCall) -> ClaimedJob | RequestError | None:
        """The claim; why not, as the store says; or None for «look again».

        Raises:
            RequestError: SESSION_NOT_FOUND, SESSION_FULL, ETCD_UNAVAILABLE, OUTCOME_UNKNOWN.
        """
        try:
            found = await self._jobs.read(
                call.namespace, call.job_id, deadline=call.deadline, spec=True, checkpoint=True
            )
        except StorageError as error:
            raise refused(error) from error
        if call.owns(found.claim):
            kept = await self._redelivery.keep([found], call.deadline)
            return kept[0] if kept else None
        decided = self._decide(call, found.stored, found.claim)
        if isinstance(decided, RequestError):
            return decided
        stored, decision, claim = decided
        job = stored.job
        keys = 1 + len(job.terms.locks)
        if self._holders.held_by(call.namespace, call.session_id) + keys > self._session_keys:
            raise session_full(self._session_keys)
        known: tuple[int, ...] = ()
        if job.terms.locks:
            refusal = await self._held_lock(call, job)
            if refusal is not None:
                return refusal
            known = self._locks.revisions(job)
        commit_by = min(call.deadline, self._clock.monotonic() + self._commit_timeout)
        operation = claim_operation(stored, decision, claim, commit_by, want_spec=True, lock_revisions=known)
        terms = job.terms
        pair = (call.namespace, terms.queue, terms.type)
        if pair in self._circuits.barred:
            return await self._as_probe(call, pair, job, operation, commit_by)
        return await self._commit(call, operation)

    async def _held_lock(self, call: ClaimCall, job: Job) -> RequestError | None:
        """Why a lock of the job keeps it from being claimed; the store is asked before anybody is told so."""
        if self._locks.refusal(job) is None:
            return None
        try:
            await self._locks.look(job, call.deadline)
        except StorageError as error:
            raise refused(error) from error
        return self._locks.refusal(job)

    async def _as_probe(
        self, call: ClaimCall, pair: Pair, job: Job, operation: Operation, commit_by: float
    ) -> ClaimedJob | RequestError | None:
        circuits = self._circuits
        probe = await circuits.take_slot(pair, job, commit_by) if circuits.may_probe(pair) else None
        if probe is None:
            return circuits.refusal(pair) if pair in circuits.barred else None
        outcome: ClaimedJob | RequestError | None = None
        try:
            outcome = await self._commit(call, operation)
        finally:
            if not isinstance(outcome, ClaimedJob):
                circuits.give_back(pair, probe)
        return outcome

    def _decide(
        self, call: ClaimCall, stored: Stored | None, held: Claim | None
    ) -> RequestError | tuple[Stored, Decision, Claim]:
        if stored is None:
            return RequestError(
                Reason.JOB_NOT_FOUND, "there is no such job", metadata={"job_id": call.job_id}
            )
        job, now_ms = stored.job, self._clock.now_ms()
        claim = claim_for(job, call.session_id, call.nonce, now_ms)
        outcome = decide(job, held, ClaimIt(claim=claim), now_ms)
        if isinstance(outcome, Decision):
            return stored, outcome, claim
        if not isinstance(outcome, Refusal):
            self._expired(call.namespace, job.job_id)
            return RequestError(
                Reason.NOT_CLAIMABLE, "its time in the queue is over", metadata={"job_id": job.job_id}
            )
        metadata = dict(outcome.metadata)
        retry_ms: int | None = None
        if outcome.reason is Reason.CLAIM_HELD:
            metadata["token"] = str(held.token) if held is not None else "0"
        elif outcome.reason is Reason.NOT_CLAIMABLE:
            retry_ms = max(1, job.ready_ms - now_ms)
        return RequestError(outcome.reason, outcome.message, metadata=metadata, retry_after_ms=retry_ms)

    async def _commit(self, call: ClaimCall, operation: Operation) -> ClaimedJob | RequestError | None:
        await failpoints.reached("claim.before-commit")
        pending = asyncio.ensure_future(commit_each(self._jobs, [operation]))
        assert operation.before is not None, "a claim has a record before it"
        job = operation.before.job
        if job.terms.locks:
            self._locks.begin(job)
            pending.add_done_callback(lambda _: self._locks.landed([job]))
        try:
            [result] = await asyncio.shield(pending)
        except asyncio.CancelledError:
            # The caller is gone, the commit is not: what it wins goes back at once. The job never left its
            # window, so nothing is to be put back there.
            entry = Entry(operation.before, None, 0.0)
            self._abandoned.later(pending, [(Window(1, complete=True), entry)])
            raise
        await failpoints.reached("claim.after-commit")
        if isinstance(result, LeasekeeperError):
            raise refused(result)
        if result.won or call.owns(result.claim):
            spec = result.spec if result.won else None
            return await self._delivery.deliver(call.namespace, result.stored, result.claim, spec, result)
        if result.session_gone:
            raise session_not_found(call.session_id)
        self.conflicts += 1
        self._locks.met(call.namespace, result)
        decided = self._decide(call, result.stored, result.claim)
        return decided if isinstance(decided, RequestError) else None


def is_held(call: ClaimCall, claim: Claim) -> RequestError:
    """What a caller is told of a claim that stands."""
    facts = {"job_id": call.job_id, "state": JobState.RUNNING.name, "holder": claim.session}
    return RequestError(Reason.CLAIM_HELD, "the job is held", metadata={**facts, "token": str(claim.token)})
