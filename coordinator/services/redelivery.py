"""Hands out again what an earlier call claimed, to the call that repeats it because the answer was lost.

The earlier call is gone, and its coordinator, maybe another one, may be giving the claim back at this moment
(``services.abandoned``), for it was delivered to nobody that it knows of. Given back after this handed it
out, the job would run elsewhere while its holder trusts its claim for a TTL. Giving back compares the record
as the claim wrote it. So the record is written once more first: then giving back loses; or it was first, and
nothing is handed out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.core.copying import changed
from coordinator.core.effects import effects
from coordinator.core.fencing import split_token
from coordinator.core.job import Claim
from coordinator.core.machine import Guard
from coordinator.errors import CodecError, LeasekeeperError, StorageError
from coordinator.ports import Commit, JobStore, Operation, SessionStore, Snapshot, Stored
from coordinator.services.api import ClaimedJob
from coordinator.services.commits import commit_each
from coordinator.services.storage_errors import refused

__all__ = ["Redelivery"]


class Redelivery:
    """Claims of earlier calls.

    Args:
        jobs: where jobs are.
        sessions: which claims lie on a session's lease.
    """

    def __init__(self, jobs: JobStore, sessions: SessionStore) -> None:
        self._jobs = jobs
        self._sessions = sessions

    async def of_request(
        self, namespace: str, session_id: str, nonce: bytes, deadline: float
    ) -> list[ClaimedJob]:
        """What the call of this nonce claimed and the session still holds.

        Raises:
            RequestError: ETCD_UNAVAILABLE, OUTCOME_UNKNOWN (repeat once more).
        """
        try:
            claims = await self._sessions.claims_of(namespace, session_id, deadline=deadline)
            found = await asyncio.gather(
                *(
                    self._jobs.read(namespace, job_id, deadline=deadline, spec=True, checkpoint=True)
                    for job_id, claim in claims
                    if claim.nonce == nonce
                )
            )
        except (StorageError, CodecError) as error:
            raise refused(error) from error
        held = [one for one in found if one.claim is not None and one.claim.nonce == nonce]
        return await self.keep(held, deadline)

    async def keep(self, found: Sequence[Snapshot], deadline: float) -> list[ClaimedJob]:
        """Those of ``found``, each read with its claim, that stand and will not be given back unheard.

        Raises:
            RequestError: as `of_request`; for one of them is enough.
        """
        whole = [(one, one.stored, one.claim) for one in found]
        operations = [
            _written_again(stored, claim, deadline)
            for one, stored, claim in whole
            if stored is not None and claim is not None and _as_claimed(stored, claim)
        ]
        commits = iter(await commit_each(self._jobs, operations))
        kept: list[ClaimedJob] = []
        failure: LeasekeeperError | None = None
        for one, stored, claim in whole:
            if stored is None or claim is None:
                continue
            if _as_claimed(stored, claim):
                commit = next(commits)
                if not isinstance(commit, Commit):
                    failure = commit
                    continue
                if not commit.won and (commit.claim is None or commit.claim.token != claim.token):
                    continue  # it was given back, or lost
                stored = commit.stored or stored
            if one.spec is not None:
                kept.append(ClaimedJob(stored=stored, claim=claim, spec=one.spec, checkpoint=one.checkpoint))
        if failure is not None:
            raise refused(failure) from failure
        return kept


def _as_claimed(stored: Stored, claim: Claim) -> bool:
    """Whether nothing was written since the claim; else whoever would give it back unheard loses anyway."""
    return stored.revision == split_token(claim.token).revision


def _written_again(stored: Stored, claim: Claim, deadline: float) -> Operation:
    # With its token, which the record's revision no longer tells whoever finds the claim gone.
    job = stored.job
    after = changed(job, attempts=(*job.attempts[:-1], changed(job.attempts[-1], token=claim.token)))
    return Operation(
        guard=Guard.HELD,
        before=stored,
        after=after,
        writes=effects(job, after),
        deadline=deadline,
        token=claim.token,
    )
