"""What the services need from the outside, as protocols. ``coordinator/etcd`` implements the storage half.

Tokens are on the wire scale (``core.fencing``) everywhere above the etcd layer; ``revision`` is etcd's own
number and is only compared, never computed with. Deadlines are absolute, in seconds of ``Clock.monotonic``.

Storage calls raise ``coordinator.errors.StorageError``s: NotApplied (certain: nothing was written),
OutcomeUnknown (the write may stand), EtcdUnavailable (a read failed).
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.core.copying import quick
from coordinator.core.effects import Write
from coordinator.core.job import Claim, Job, JobState, Progress
from coordinator.core.machine import Guard
from coordinator.core.notice import Notice
from coordinator.core.rank import Rank

__all__ = [
    "Changes",
    "Checkpoint",
    "Clock",
    "Commit",
    "CommitObserver",
    "Confirmation",
    "Due",
    "Entropy",
    "JobPage",
    "JobStore",
    "KeptAlive",
    "Membership",
    "NamespaceFeeds",
    "Notices",
    "Operation",
    "PendingCommit",
    "Present",
    "ReadyPage",
    "Session",
    "SessionStore",
    "Snapshot",
    "Spec",
    "StorageGauge",
    "Stored",
]


class Clock(Protocol):
    """Time. Wall time is for records and for people; deadlines and spans use the monotonic clock."""

    def now_ms(self) -> int:
        """Unix milliseconds."""

    def monotonic(self) -> float:
        """Seconds from any origin, never going back."""

    async def sleep(self, seconds: float) -> None:
        """Sleep; a stepping clock wakes its sleepers when it is stepped."""


class Entropy(Protocol):
    """Randomness and order of arrival."""

    def fraction(self) -> float:
        """Uniform in [0, 1)."""

    def identifier(self) -> str:
        """A fresh id of 32 hex digits."""

    def counter(self) -> int:
        """A number that grows with each call within this process; ties between coordinators do not matter."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The part of a job that no transition rewrites."""

    payload: bytes
    content_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What an attempt saved for the next one. ``revision`` is that of its key as read."""

    attempt: int
    sequence: int
    data: bytes
    progress: Progress | None = None
    saved_ms: int = 0
    revision: int = 0


@quick
@dataclass(frozen=True, slots=True)
class Stored:
    """A record and the mod revision of its ``state`` key."""

    job: Job
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one linearizable read found of a job; parts that were not asked for are None."""

    stored: Stored | None
    claim: Claim | None = None
    spec: Spec | None = None
    checkpoint: Checkpoint | None = None
    result: bytes | None = None
    revision: int = 0


@dataclass(slots=True, kw_only=True)
class Operation:
    """One guarded transition to commit. Not frozen only because that doubles the price of making one.

    ``before`` is what the decision was based on, ``after`` what is to be (None: deleted), ``writes`` is
    ``effects(before.job, after)``. ``token`` is compared under Guard.HELD. ``claim`` is put by a claim;
    its session's witness is compared. ``want_spec`` and ``want_checkpoint`` read them in the same Txn if
    it wins.
    """

    guard: Guard
    before: Stored | None
    after: Job | None
    writes: tuple[Write, ...]
    deadline: float
    token: int = 0
    claim: Claim | None = None
    spec: Spec | None = None
    big_result: bytes = b""
    cancelled_by: str = ""
    want_spec: bool = False
    want_checkpoint: bool = False


@dataclass(slots=True, kw_only=True)
class Commit:
    """What became of an operation. Not frozen only because that doubles the price of making one.

    If it ``won``: ``stored`` is the record with its new revision (None if deleted), ``claim`` and ``token``
    the claim that it made, if it made one, ``spec`` and ``checkpoint`` what was asked for. If it lost:
    ``stored``, ``claim`` and ``unique_owner`` are what stands there instead; after an unknown outcome
    (``resent``) that may be our own first try, and the caller looks for its nonce, digest or token.
    ``session_gone``: the session's witness is not on its lease.
    """

    won: bool
    revision: int
    resent: bool = False
    stored: Stored | None = None
    claim: Claim | None = None
    token: int = 0
    spec: Spec | None = None
    checkpoint: Checkpoint | None = None
    unique_owner: str = ""
    session_gone: bool = False


@dataclass(frozen=True, slots=True)
class JobPage:
    """A page of a listing. ``cursor`` is opaque, empty at the end."""

    jobs: tuple[Stored, ...]
    cursor: str


@dataclass(frozen=True, slots=True)
class ReadyPage:
    """Waiting jobs in rank order; ``complete``: the range held no more than these.

    ``last``, of a page that is not complete, is the rank up to which it was read: beyond the last of ``jobs``
    where what follows cannot be decoded. None: nothing at all can be told.
    """

    jobs: tuple[Stored, ...]
    complete: bool
    last: Rank | None


@dataclass(frozen=True, slots=True)
class Due:
    """One ``due/`` key. ``hold_ms`` > 0: see ``Job.hold_ms``. ``revision`` is the key's."""

    job_id: str
    ms: int
    hold_ms: int
    revision: int


class PendingCommit(Protocol):
    """A commit under way; awaited at most once. An ``asyncio.Future`` is one."""

    def __await__(self) -> Generator[Any, Any, Commit]:
        """The outcome."""

    def cancel(self) -> object:
        """Nobody will wait for it: drop it if it was not sent, else let it go on unheard."""


class CommitObserver(Protocol):
    """Learns of own commits, synchronously, once per Txn and before any caller resumes."""

    def applied(self, operation: Operation, commit: Commit) -> None:
        """``operation`` won."""


class JobStore(Protocol):
    """Jobs in the store. Commits of many callers are folded into few Txns."""

    def commit(self, operation: Operation) -> PendingCommit:
        """Queue one operation; the awaitable ends by the operation's deadline.

        Raises (from the awaitable): NotApplied, OutcomeUnknown.
        """

    async def read(
        self,
        namespace: str,
        job_id: str,
        *,
        deadline: float,
        spec: bool = False,
        checkpoint: bool = False,
        result: bool = False,
    ) -> Snapshot:
        """State and claim, and what else is asked for, at one revision."""

    async def read_many(self, namespace: str, job_ids: Sequence[str], *, deadline: float) -> list[Snapshot]:
        """State and claim of several jobs."""

    async def list_jobs(
        self,
        namespace: str,
        *,
        cursor: str,
        limit: int,
        deadline: float,
        states: frozenset[JobState] | None = None,
    ) -> JobPage:
        """The next records, at most ``limit`` examined, in ranges that end tightly. Undecodable ones are
        left out and counted."""

    async def save_checkpoint(
        self, namespace: str, job_id: str, token: int, checkpoint: Checkpoint, *, deadline: float
    ) -> bool:
        """Put it unless a later sequence of this attempt lies there (False).

        Raises:
            RequestError: CLAIM_LOST, JOB_NOT_FOUND.
        """

    async def list_due(self, namespace: str, *, until_ms: int, limit: int, deadline: float) -> list[Due]:
        """Due keys up to ``until_ms``, earliest first."""

    async def delete_stray(self, namespace: str, due: Due, *, deadline: float) -> bool:
        """Delete a due key that its job does not have, if it is unchanged."""

    async def list_ready(
        self,
        namespace: str,
        queue: str,
        type_: str,
        *,
        after: Rank | None,
        until: Rank,
        limit: int,
        deadline: float,
    ) -> ReadyPage:
        """Waiting jobs with rank in (after, until], at most ``limit``."""

    async def count_ready(self, namespace: str, queue: str, type_: str, *, deadline: float) -> int:
        """How many wait; one counting range."""

    async def list_types(self, namespace: str, *, deadline: float) -> list[tuple[str, str]]:
        """(queue, type) pairs that ever had a job."""

    async def register_type(self, namespace: str, queue: str, type_: str, *, deadline: float) -> None:
        """Make sure that the pair is listed; cached."""

    async def list_claims(self, namespace: str, *, deadline: float) -> list[tuple[str, Claim]]:
        """Every claim of the namespace, in pages."""

    async def watch_states(
        self, namespace: str, *, after_revision: int, sink: StateSink, stop: Awaitable[None] | None = None
    ) -> None:
        """Feed ``sink`` with every change of a ``state`` key after ``after_revision`` (0: now) until
        cancelled.

        Raises:
            Compacted: that revision is gone.
        """


class StateSink(Protocol):
    """Where ``watch_states`` delivers, synchronously."""

    def started(self, revision: int) -> None:
        """The watch stands; changes after ``revision`` follow."""

    def changed(self, revision: int, job_id: str, stored: Stored | None) -> None:
        """One change; None: deleted or expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A worker process's presence. ``command`` is 0 none, 1 quiet, 2 terminate. ``revision`` is its
    witness's create revision."""

    namespace: str
    session_id: str
    identity: str
    sdk: str
    labels: Mapping[str, str]
    opened_ms: int
    ttl_ms: int
    epoch: int = 0
    command: int = 0
    request_digest: bytes = b""
    revision: int = 0


@dataclass(frozen=True, slots=True)
class KeptAlive:
    """A keepalive's answer: granted TTL (0: the lease is gone), and the raft term of the member that gave
    it."""

    ttl_ms: int
    raft_term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A linearizable read of a session and of the claims that it says it holds."""

    session: Session | None
    claims: Mapping[str, Claim]
    cancelled: frozenset[str]
    position: int
    """Revision of the read on the token scale."""
    raft_term: int


class SessionStore(Protocol):
    """Sessions: one lease each, and a witness key on it. The session id names the lease."""

    async def open(self, session: Session, *, deadline: float) -> Session:
        """Grant and put the witness; a repeat answers the session that is there.

        Raises:
            RequestError: REQUEST_ID_REUSED (another session's content under this id).
        """

    async def read(self, namespace: str, session_id: str, *, deadline: float) -> Session | None:
        """The session, None if it has ended."""

    async def keep_alive(self, session_id: str, *, deadline: float) -> KeptAlive:
        """Renew once. Raises OutcomeUnknown if no member answered in time."""

    async def confirm(
        self, namespace: str, session_id: str, job_ids: Sequence[str], *, deadline: float
    ) -> Confirmation:
        """Read session, claims and cancel keys at one revision (several flat reads for more than ~60
        jobs)."""

    async def claims_of(self, namespace: str, session_id: str, *, deadline: float) -> list[tuple[str, Claim]]:
        """Claims attached to the session's lease."""

    async def shut(self, namespace: str, session_id: str, *, deadline: float) -> None:
        """Delete the witness: what the session holds stays, nothing more is claimed for it. Repeatable.

        Raises:
            OutcomeUnknown: it may be open still.
        """

    async def close(self, namespace: str, session_id: str, *, deadline: float) -> None:
        """Revoke the lease; no error if it is gone."""

    async def list_sessions(self, namespace: str, *, deadline: float) -> list[Session]:
        """Every open session, in pages."""


class Changes(Protocol):
    """What the watch of a namespace saw, decoded, in the order of revisions per kind of key. All calls are
    synchronous.

    Own commits are reported here too; ``CommitObserver`` and this meet in the index, which drops what it
    knows.
    """

    async def relist(self, namespace: str, revision: int) -> None:
        """Start, or start again: forget, list at ``revision`` or later, and expect changes after
        ``revision``."""

    def ready_put(self, namespace: str, stored: Stored, *, created: bool) -> None:
        """A job waits; ``created``: the key was not there before."""

    def ready_deleted(
        self, namespace: str, queue: str, type_: str, rank: Rank, job_id: str, revision: int
    ) -> None:
        """It waits no more."""

    def claim_put(self, namespace: str, job_id: str, claim: Claim, revision: int) -> None:
        """A claim was made (or, by hand, overwritten)."""

    def claim_deleted(self, namespace: str, job_id: str, revision: int) -> None:
        """A claim has ended: settled, lost, or deleted by hand."""

    def session_put(self, session: Session, revision: int) -> None:
        """A session opened or changed."""

    def session_deleted(self, namespace: str, session_id: str, revision: int) -> None:
        """A session has ended."""

    def cancel_put(self, namespace: str, job_id: str, revision: int) -> None:
        """A running job is asked to stop."""

    def passed(self, namespace: str, kind: str, revision: int) -> None:
        """The watch of ``kind`` (ready, claim, session, cancel) has delivered everything up to
        ``revision``."""

    def freshness(self, namespace: str, fresh: bool) -> None:
        """Whether the watch is known to be alive."""


class NamespaceFeeds(Protocol):
    """Watches of namespaces; one set per namespace, whatever the number of callers."""

    async def ensure(self, namespace: str, *, deadline: float) -> None:
        """Make sure that the namespace is registered, listed and watched.

        Raises:
            RequestError: NOT_READY (listing is not done by the deadline), RATE_LIMITED (too many namespaces).
        """

    def namespaces(self) -> Sequence[str]:
        """Those that are watched."""


class Present(Protocol):
    """Where the store's history stands, as far as this process knows."""

    @property
    def epoch(self) -> int:
        """The epoch that every Txn compares."""

    def token(self) -> int:
        """Highest position seen, on the token scale."""

    async def refresh(self, *, deadline: float) -> int:
        """Ask the store, then as ``token``."""

    @property
    def regressed(self) -> bool:
        """The store was seen to go back: nothing is granted or settled until the epoch is bumped."""


class Membership(Protocol):
    """The coordinators that are alive."""

    @property
    def own_id(self) -> str:
        """This coordinator."""

    def members(self) -> Sequence[str]:
        """Ids, sorted, this one included."""


class StorageGauge(Protocol):
    """How full the store is, as of the last poll."""

    @property
    def accepts_submissions(self) -> bool:
        """False from 80 % of the quota in use or 95 % allocated."""


class Notices(Protocol):
    """Where notices go: log, metrics, streams, webhooks. Synchronous, never blocks, never raises."""

    def publish(self, notice: Notice) -> None:
        """Tell whoever listens."""
