"""A store of one dict that applies the core's writes at growing revisions and compares their guards.

It knows transactions, leases and revisions as etcd does, and nothing of jobs: guards are compared in the
words of ``Guard``, writes are applied as ``effects()`` lists them. Sessions end as etcd ends leases:
witness and claims vanish in one revision.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from coordinator.core.effects import Slot, Where, Write
from coordinator.core.fencing import make_token
from coordinator.core.job import Claim, Job
from coordinator.core.machine import Guard

NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class Read:
    """Record, its mod revision (0: none) and claim of one job at one revision."""

    job: Job | None
    revision: int
    claim: Claim | None


@dataclass(slots=True)
class Key:
    """What is known of one key."""

    created: int
    modified: int
    retained: bool = False
    job_id: str = ""


@dataclass(slots=True)
class MemoryStore:
    """Records, claims and keys of one namespace."""

    epoch: int = 1
    revision: int = 1
    jobs: dict[str, Job] = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    keys: dict[Where, Key] = field(default_factory=dict)

    def token(self) -> int:
        """The token of a claim committed at the present revision."""
        return make_token(self.epoch, self.revision)

    def read(self, job_id: str) -> Read:
        """One linearizable read."""
        key = self.keys.get(Where(Slot.STATE, NAMESPACE, job_id))
        return Read(self.jobs.get(job_id), key.modified if key else 0, self.claims.get(job_id))

    def commit(
        self,
        guard: Guard,
        read: Read,
        after: Job | None,
        writes: tuple[Write, ...],
        *,
        job_id: str,
        token: int = 0,
        claim: Claim | None = None,
        child: Job | None = None,
    ) -> bool:
        """Apply ``writes`` if ``guard`` holds against what is stored now; they may be a child's as well."""
        names = [_name(write.where) for write in writes]
        assert len(names) == len(set(names)), f"etcd refuses two writes of one key: {names}"
        if not self._holds(guard, read, after, job_id, token, claim):
            return False
        self.revision += 1
        for write in writes:
            name = _name(write.where)
            if not write.put:
                self.keys.pop(name, None)
                continue
            created = self.keys[name].created if name in self.keys else self.revision
            self.keys[name] = Key(created, self.revision, write.retained, write.where.job_id)
        if child is not None and Where(Slot.STATE, NAMESPACE, child.job_id) in self.keys:
            self.jobs[child.job_id] = child
        if any(w.where.slot is Slot.STATE and w.put and w.where.job_id == job_id for w in writes):
            assert after is not None
            self.jobs[job_id] = after
        elif after is None:
            self.jobs.pop(job_id, None)
        held = Where(Slot.CLAIM, NAMESPACE, job_id) in self.keys
        if not held:
            self.claims.pop(job_id, None)
        elif claim is not None:
            self.claims[job_id] = replace(claim, token=self.token())
        return True

    def save_checkpoint(self, job_id: str, token: int) -> bool:
        """Put the checkpoint if ``token`` is the claim's."""
        claim = self.claims.get(job_id)
        if claim is None or claim.token != token:
            return False
        self.revision += 1
        self.keys[Where(Slot.CHECKPOINT, NAMESPACE, job_id)] = Key(
            self.revision, self.revision, False, job_id
        )
        return True

    def expire(self, session: str) -> list[str]:
        """End the session's lease; returns the jobs whose claims went with it."""
        self.sessions.discard(session)
        lost = [job_id for job_id, claim in self.claims.items() if claim.session == session]
        self.revision += 1
        for job_id in lost:
            del self.claims[job_id]
            del self.keys[Where(Slot.CLAIM, NAMESPACE, job_id)]
        return lost

    def present(self, job_id: str) -> list[Where]:
        """Every key that belongs to the job, as the core names it."""
        return [
            where._replace(job_id=job_id) if where.slot is Slot.UNIQUE else where
            for where, key in self.keys.items()
            if key.job_id == job_id
        ]

    def _holds(
        self, guard: Guard, read: Read, after: Job | None, job_id: str, token: int, claim: Claim | None
    ) -> bool:
        now = self.read(job_id)
        as_read = now.revision == read.revision
        if guard is Guard.ABSENT:
            assert after is not None
            return now.job is None and self._unique_absent(after)
        if guard is Guard.STATE:
            return as_read
        if guard is Guard.REVIVE:
            assert after is not None
            return as_read and self._unique_absent(after)
        if guard is Guard.UNHELD:
            return as_read and now.claim is None
        if guard is Guard.SEEN:
            return as_read and now.claim == read.claim
        if guard is Guard.HELD:
            return as_read and now.claim is not None and now.claim.token == token
        assert guard is Guard.READY
        assert read.job is not None
        assert claim is not None
        ready = self.keys.get(_ready(read.job))
        same_revision = ready is not None and ready.modified == read.revision
        return as_read and same_revision and now.claim is None and claim.session in self.sessions

    def _unique_absent(self, job: Job) -> bool:
        key = job.terms.unique_key
        where = Where(Slot.UNIQUE, NAMESPACE, "", queue=job.terms.queue, unique_key=key)
        return not key or where not in self.keys


def _name(where: Where) -> Where:
    """The key itself: a unique key is one key, whichever job owns it."""
    return where._replace(job_id="") if where.slot is Slot.UNIQUE else where


def _ready(job: Job) -> Where:
    terms = job.terms
    return Where(Slot.READY, NAMESPACE, job.job_id, queue=terms.queue, type=terms.type, rank=job.rank)
