"""What crosses the line between the core and the store: records as read, operations and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.core.copying import quick
from coordinator.core.effects import Usual, Write, effects, usual
from coordinator.core.follow_ups import Standing
from coordinator.core.job import Claim, Job, Progress
from coordinator.core.lock_order import LockEntry
from coordinator.core.machine import Guard
from coordinator.core.rank import Rank

__all__ = [
    "Checkpoint",
    "Commit",
    "Due",
    "JobPage",
    "Operation",
    "ReadyPage",
    "Snapshot",
    "Spec",
    "Stored",
]


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


class Operation:
    """One guarded transition to commit. Not frozen only because that doubles the price of making one.

    ``as_leader``: a sweep's; its Txn also compares that this process still leads the sweeps.

    ``before`` is what the decision was based on, ``after`` what is to be (None: deleted). ``writes`` are
    those of ``effects(before.job, after)`` unless they are given; they are listed when somebody asks, for a
    ``usual`` transition needs no list. ``token`` is
    compared under Guard.HELD. ``claim`` is put by a claim; its session's witness is compared. ``want_spec``
    and ``want_checkpoint`` read them in the same Txn if it wins. ``also`` are submissions of other jobs that
    are written if it wins. Under its guard alone, for their ids follow from what the guard compares; with
    ``guards_also`` it wins only if none of them is there and their unique keys are free, or are those that
    its own job gives up by it. ``lock_revisions``, of a claim: of each lock that its job names, up to where
    every entry is known.
    """

    __slots__ = (
        "_writes",
        "after",
        "also",
        "as_leader",
        "before",
        "big_result",
        "cancelled_by",
        "claim",
        "deadline",
        "guard",
        "guards_also",
        "lock_revisions",
        "spec",
        "token",
        "usual",
        "want_checkpoint",
        "want_spec",
    )

    def __init__(
        self,
        *,
        guard: Guard,
        before: Stored | None,
        after: Job | None,
        deadline: float,
        writes: tuple[Write, ...] | None = None,
        token: int = 0,
        claim: Claim | None = None,
        spec: Spec | None = None,
        big_result: bytes = b"",
        cancelled_by: str = "",
        want_spec: bool = False,
        want_checkpoint: bool = False,
        as_leader: bool = False,
        also: tuple[Operation, ...] = (),
        guards_also: bool = False,
        lock_revisions: tuple[int, ...] = (),
    ) -> None:
        self.guard = guard
        self.before = before
        self.after = after
        self._writes = writes
        self.deadline = deadline
        self.token = token
        self.claim = claim
        self.spec = spec
        self.big_result = big_result
        self.cancelled_by = cancelled_by
        self.want_spec = want_spec
        self.want_checkpoint = want_checkpoint
        self.as_leader = as_leader
        self.also = also
        self.guards_also = guards_also
        self.lock_revisions = lock_revisions
        self.usual: Usual | None = None
        if not as_leader and writes is None and not also:
            job = None if before is None else before.job
            self.usual = usual(job, after, big_result=bool(big_result))

    @property
    def writes(self) -> tuple[Write, ...]:
        """Every key that it puts or deletes, but for those of ``also``."""
        if self._writes is None:
            job = None if self.before is None else self.before.job
            self._writes = effects(job, self.after, big_result=bool(self.big_result))
        return self._writes


@dataclass(slots=True, kw_only=True)
class Commit:
    """What became of an operation. Not frozen only because that doubles the price of making one.

    If it ``won``: ``stored`` is the record with its new revision (None if deleted), ``claim`` and ``token``
    the claim that it made, if it made one, ``spec`` and ``checkpoint`` what was asked for. If it lost:
    ``stored``, ``claim`` and ``unique_owner`` are what stands there instead; after an unknown outcome
    (``resent``) that may be our own first try, and the caller looks for its nonce, digest or token.
    ``session_gone``: the session's witness is not on its lease. ``also``: what stands in the way of each
    job of an operation that guards them, in their order. ``lines``: of a claim that lost, the entries of each
    lock that its job names, as of ``revision``.
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
    also: tuple[Standing, ...] = ()
    lines: Mapping[str, tuple[LockEntry, ...]] | None = None


@dataclass(frozen=True, slots=True)
class JobPage:
    """A page of a listing. ``cursor`` is opaque, empty at the end; ``examined``: records looked at."""

    jobs: tuple[Stored, ...]
    cursor: str
    examined: int


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
